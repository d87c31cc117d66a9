"""The best round by validation data: chosen, kept while the run goes on, saved at its end, and shown."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

import fs_lowrank
from fs_lowrank import UserError, cli
from fs_lowrank.draw.panels import digits
from fs_lowrank.errors import RunFailed
from fs_lowrank.finished import evaluate_rows, load_run, read_rows
from fs_lowrank.rounds.evaluator import Evaluator
from fs_lowrank.runs.split import read_split
from tests.cases import break_step, killed_after

#: three clients and four rounds, of which the third is the best by validation data
FEW = {
    **{"federate.method": "fedavg", "federate.client_num": 3, "federate.total_round_num": 4},
    **{"train.local_update_steps": 3, "train.optimizer.lr": 0.01, "train.cache_frozen": "off"},
}


def files(folder):
    """All but the model card, which names the folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file() and p.name != "README.md"
    }


def test_it_stays_where_a_run_without_checkpoints_was_stopped_and_resumed(few, monkeypatch):
    config = few("run", {"federate.method": "fedlora", "lowrank.checkpoint_freq": 0, "train.optimizer.lr": 0.3})
    with monkeypatch.context() as patch:
        break_step(patch, "fedlora", 4)
        with pytest.raises(RunFailed, match="continue with resume=True"):
            fs_lowrank.run(config)
    for _ in range(2):
        result = fs_lowrank.run(config, resume=True)
        assert result.best["round"] < 4 and result.saved["adapter_best"].is_dir()


def test_a_process_that_is_killed_while_it_removes_a_round_that_is_not_needed(few, monkeypatch):
    config = few("run", {"federate.method": "fedlora"})
    # Every round is the best one so far.
    monkeypatch.setattr(Evaluator, "best", lambda self, history: list(history)[-1])
    remove, removed = shutil.rmtree, []

    def killed(folder, **options):
        if "best/" in str(folder) and not removed.append(folder):
            next(Path(folder).rglob("*.safetensors")).unlink()
            raise KeyboardInterrupt
        remove(folder, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        fs_lowrank.run(config)
    assert removed and fs_lowrank.run(config, resume=True).saved["adapter_best"].is_dir()


ACCURACY = {"federate.method": "fedlora", "eval.best_res_update_round_wise_key": "val_acc", "federate.client_num": 5}


@pytest.mark.more
@pytest.mark.parametrize("kind, keys", [("model", {}), ("adapter", {**ACCURACY, "lowrank.save_merged": True})])
def test_it_is_what_a_run_that_ends_there_saves(few, kind, keys):
    result = fs_lowrank.run(few("whole", keys))
    round, by, values = result.best["round"], result.best["by"], [r["metrics"]["val"] for r in result.history]
    metric = by.removeprefix("val_")
    found = [v[metric] if metric == "loss" else -v[metric] for v in values]
    assert round == found.index(min(found)) + 1 < 4
    record = result.history[round - 1]["metrics"]
    assert result.best == {
        "round": round,
        "by": by,
        **{f"{split}_{name}": value for split, of in record.items() for name, value in of.items()},
    }
    ended = fs_lowrank.run(few("ended", {**keys, "federate.total_round_num": round}))
    for name in {kind, "model"}:
        assert files(result.saved[f"{name}_best"]) == files(ended.saved[name]) != files(result.saved[name])
    assert json.loads((result.outdir / "summary.json").read_text())["best"] == result.best
    card, last = ((result.saved[name] / "README.md").read_text() for name in (f"{kind}_best", kind))
    assert (
        f"| round | {round}, the best by {by} |" in card and f"| test_acc | {digits(result.best['test_acc'])} " in card
    )
    assert f'"{result.outdir}/{kind}_best"' in card
    assert "| round | 4, the last |" in last and "## Figures of the last round" in last
    assert (
        "| rounds | 4 |" in last
        and "| rounds | up to 4 |" in card
        and f"| test_loss | {digits(result.final['test_loss'])} |" in last
    )


@pytest.mark.more
def test_the_card_of_a_run_that_ended_between_two_evaluations(few):
    """It has the figures of an earlier round, and says so; a step has the samples of all its batches."""
    keys = {"eval.freq": 2, "grad.grad_accum_count": 3, "train.local_update_steps": 2, "dataloader.batch_size": 4}
    result = fs_lowrank.run(few("ended", {**ACCURACY, **keys}), on_round=lambda record: record["round"] == 3)
    card = (result.saved["adapter"] / "README.md").read_text()
    assert "| round | 3, the last |" in card and "| rounds | 3 |" in card
    assert "## Figures of round 2, the last that was evaluated" in card and "| 2 steps of 12 samples a round, " in card


@pytest.mark.more
@pytest.mark.parametrize("kind, keys", [("model", {}), ("adapter", ACCURACY)])
def test_what_comes_after_the_run_takes_either(few, kind, keys, reviews_csv, tmp_path, capsys):
    """``evaluate`` and ``predict`` take the last round's unless they are asked for the best, and say so."""
    result = fs_lowrank.run(few("whole", keys))
    rows = read_split(result.outdir)["test"]["rows"]
    pd.read_csv(reviews_csv).iloc[rows].to_csv(tmp_path / "test.csv", index=False)
    last, best = (load_run(result.outdir, best=b) for b in (False, True))
    for run, figures in ((last, result.final), (best, result.best)):
        scores = evaluate_rows(run, read_rows(run, tmp_path / "test.csv"))
        assert scores["loss"] == pytest.approx(figures["test_loss"], abs=1e-6) and scores["acc"] == figures["test_acc"]
    chosen = f"round {result.best['round']}, the best by {result.best['by']}"
    assert last.which == f"{result.outdir / kind}, of round 4, the last; {kind}_best is of {chosen}"
    assert best.which == f"{result.outdir / kind}_best, of {chosen}"
    commands = ["evaluate", "--table", str(tmp_path / "t.tex")], ["predict", "--out", str(tmp_path / "p.csv")]
    for command, *options in commands:
        given = [command, str(result.outdir), "--data", str(tmp_path / "test.csv"), *options, "--best"]
        assert cli.main(given) == 0 and f"{kind}_best, of {chosen}" in capsys.readouterr().out.replace("\n", "")
    assert f"acc & {result.best['test_acc']:.4f}" in (tmp_path / "t.tex").read_text() and (tmp_path / "t.csv").exists()
    shutil.rmtree(result.saved[f"{kind}_best"])
    assert cli.main(["evaluate", str(result.outdir), "--data", str(tmp_path / "test.csv"), "--best"]) == 2
    assert "eval.save_best was off; without --best" in capsys.readouterr().err
    (result.outdir / "checksums.json").unlink()
    (result.outdir / "summary.json").write_text(json.dumps({**last.summary, "best": {}}))
    with pytest.raises(UserError, match="it evaluated no validation data"):
        load_run(result.outdir, best=True)


@pytest.mark.more
def test_killed_and_resumed(few):
    """Killed after the best round and before a checkpoint of it; and with it in a checkpoint."""
    whole = fs_lowrank.run(few("whole"))
    assert whole.best["round"] == 3
    # Checkpoints of rounds 2 and 4, or of 3 and 4: what each needs is kept.
    for freq, needed in ((2, ["round_000002", "round_000003"]), (1, ["round_000003"])):
        config = few(f"parts{freq}", {"lowrank.checkpoint_freq": freq})
        killed_after(config, 3)
        # As a process leaves it that is killed while it saves.
        (Path(config.outdir) / "best" / "round_000003" / ".model.1.writing").mkdir(exist_ok=True)
        resumed = fs_lowrank.run(config, resume=True)
        assert resumed.best == whole.best
        assert files(resumed.saved["model_best"]) == files(whole.saved["model_best"])
        assert sorted(p.name for p in (resumed.outdir / "best").iterdir()) == needed


@pytest.mark.slow
def test_a_run_that_goes_back_keeps_the_best_of_before(few):
    """It is resumed from the checkpoint of round 2, and ends there: what was best in round 3 is not of this run."""
    config = few("back", {"lowrank.checkpoint_freq": 2})
    killed_after(config, 3)
    back = fs_lowrank.run(config.replace({"federate.total_round_num": 2}), resume=True)
    ended = fs_lowrank.run(few("ended", {"federate.total_round_num": 2}))
    assert back.best == ended.best
    assert files(back.saved["model_best"]) == files(ended.saved["model_best"])
    # Resumed once more, and further: its best is what it was, although adapter_best had been made of it already.
    again = fs_lowrank.run(config, resume=True)
    assert again.best["round"] == 3


@pytest.mark.more
def test_a_best_round_that_was_not_kept_is_named(few, caplog):
    config = few("older")
    killed_after(config, 3)
    shutil.rmtree(Path(config.outdir) / "best")
    result = fs_lowrank.run(config, resume=True)
    assert result.best["round"] == 3 and "model_best" not in result.saved
    assert "round 3 was the best by val_loss, but the run did not save it" in caplog.text


@pytest.mark.more
def test_off_or_nothing_to_choose_by(few):
    result = fs_lowrank.run(few("off", {"eval.save_best": False, "federate.total_round_num": 1}))
    assert not {"best", "model_best"} & {p.name for p in result.outdir.iterdir()} and result.best["round"] == 1
    result = fs_lowrank.run(few("test", {"eval.split": ["test"], "federate.total_round_num": 1}))
    assert not {"best", "model_best"} & {p.name for p in result.outdir.iterdir()} and result.best == {}
    keys = {"lowrank.checkpoint_freq": 0, "federate.total_round_num": 1}
    result = fs_lowrank.run(few("not resumed", keys))
    assert "model_best" in result.saved and not (result.outdir / "best").exists()


@pytest.mark.parametrize(
    "keys", [{"data.splits": [0.8, 0.0, 0.2]}, {"eval.split": ["test"]}, {"federate.make_global_eval": False}]
)
def test_it_is_refused_where_no_validation_data_are_evaluated(few, keys):
    with pytest.raises(UserError, match="eval.save_best = True: .*none are evaluated; give data.splits a share"):
        fs_lowrank.run(few("refused", {**keys, "eval.save_best": True}))
    assert not list(Path(few("refused").outdir).glob("*.jsonl"))


@pytest.mark.parametrize("key, best", [("val_loss", 1), ("test_loss", 1), ("client_test_acc_mean", 2), ("test_acc", 2)])
def test_test_data_never_decide(few, key, best):
    config = few("x", {"eval.best_res_update_round_wise_key": key})
    history = [
        {"round": 1, "metrics": {"val": {"loss": 0.5, "acc": 0.5}, "test": {"loss": 9.0, "acc": 0.1}}},
        {"round": 2, "metrics": {"val": {"loss": 0.6, "acc": 0.7}, "test": {"loss": 0.1, "acc": 0.9}}},
        {"round": 3, "metrics": {}},
        {"round": 4, "metrics": {"val": {"loss": math.nan, "acc": math.nan}, "test": {"loss": 0.0, "acc": 1.0}}},
        {"round": 5, "metrics": {"val": {"loss": 0.5, "acc": 0.7}, "test": {"loss": 0.0, "acc": 1.0}}},
    ]
    evaluator = Evaluator(SimpleNamespace(config=config))
    assert evaluator.best(history)["round"] == best
    assert evaluator.best(history[2:4]) is None


@pytest.mark.slow
def test_the_tables_show_the_last_and_the_best_round(few, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(few("one").to_dict()))
    assert cli.main(["run", "--cfg", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    best = json.loads((tmp_path / "one" / "summary.json").read_text())["best"]
    assert "│ best round │ 3 │" in out and f"│ test loss of it │ {best['test_loss']:.3f} │" in out
    assert f"the same after the best round, 3: {tmp_path / 'one' / 'model_best'}" in out
    keys = ["outdir", str(tmp_path / "two"), "federate.total_round_num", "2"]
    assert cli.main(["compare", "--cfg", str(path), "--methods", "fedavg,rolora", *keys]) == 0
    assert "best round" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "two" / "comparison.json").read_text())["rolora"]["best"]["by"] == "val_loss"
