"""The rows ``local`` and ``pooled`` of a comparison, and comparisons over seeds."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

import fs_lowrank
from fs_lowrank import RunFailed, UserError, api, baselines, cli
from fs_lowrank.data import load_raw
from fs_lowrank.draw.report import write_page
from fs_lowrank.runs.folder import claim
from fs_lowrank.runs.shown import read_runs
from fs_lowrank.runs.split import read_split


@pytest.fixture
def few(settings):
    federate = {"method": "fedlora", "client_num": 3, "total_round_num": 2}
    return {**settings, "federate": federate, "train": {**settings["train"], "local_update_steps": 2}}


@pytest.mark.slow
def test_with_one_client_the_method_and_both_rows_are_the_same_training(few):
    one = {**few, "federate": {**few["federate"], "client_num": 1}, "data": {**few["data"], "splitter": "iid"}}
    one["data"] = {k: v for k, v in one["data"].items() if k != "splitter_args"}
    results = fs_lowrank.compare(fs_lowrank.load_config(one), ["fedlora", "local", "pooled"])
    for name in ("local", "pooled"):
        assert results[name].final["test_acc"] == results["fedlora"].final["test_acc"]
        assert results[name].final["test_loss"] == pytest.approx(results["fedlora"].final["test_loss"], abs=1e-6)
        assert not any(results[name].bytes.values())


@pytest.mark.parametrize(
    "keys, alone",
    [
        ({"lowrank.clients": [{"clients": [2], "tok_len": 4}], "train.cache_frozen": "all"}, 0),
        ({"lowrank.personal": ["head"]}, 0),
        ({"train.cache_frozen": "all"}, 2),
    ],
    ids=["texts cut for one client", "own heads", "one client alone"],
)
def test_all_data_in_one_place_are_trained_as_without_a_setting_of_the_clients(few, no_curves, keys, alone):
    config = fs_lowrank.load_config(few).replace({"federate.client_idx_for_local_train": alone})
    row = baselines.run_row("pooled", baselines.row_config("pooled", config, Path(few["outdir"]) / "row"))
    compared = fs_lowrank.compare(config.replace({**keys, "outdir": few["outdir"] + "/all"}), ["fedlora", "pooled"])
    assert compared["pooled"].final["test_loss"] == pytest.approx(row.final["test_loss"], abs=1e-6)


def test_all_data_in_one_place_are_the_rows_that_the_splitter_meta_leaves(causal_settings, tmp_path):
    """RosettaAlpaca's smallest language is left out with that splitter, for the clients and for the row."""
    languages = ["C", "Go", "X86-64 Assembly"]
    rows = [{"instruction": f"it was {i}", "input": languages[i % 3], "output": "good"} for i in range(60)]
    (tmp_path / "rosetta_alpaca.json").write_text(json.dumps(rows))
    data = {"data.type": "rosetta_alpaca@llm", "data.root": str(tmp_path), "data.splitter": "meta"}
    config = fs_lowrank.load_config(causal_settings, {**data, "data.splitter_args": []})
    row = baselines.row_config("pooled", config, tmp_path / "row")
    assert row.federate.client_num == 1
    assert len(load_raw(config.data).train) == len(load_raw(row.data).train) == 40
    assert len(load_raw(row.replace({"data.splitter": "iid"}).data).train) == 60


def test_the_row_without_a_global_model_saves_none(few, no_curves, tmp_path):
    row = fs_lowrank.compare(fs_lowrank.load_config(few), ["fedlora", "Local"])["local"]
    for save in (row.save_adapter, row.save_model):
        with pytest.raises(UserError, match="a model for each client and saves none"):
            save(tmp_path / "saved")


@pytest.mark.slow
def test_rows_have_the_same_data_and_nothing_to_send(few, no_curves):
    few = {**few, "federate": {**few["federate"], "sample_client_num": 2}}
    results = fs_lowrank.compare(fs_lowrank.load_config(few), ["rolora", "local", "pooled"])
    assert list(results) == ["rolora", "local", "pooled"]
    outdir = Path(few["outdir"])
    data = {n: read_split(outdir / n) for n in ("rolora", "pooled")}
    assert data["rolora"]["test"] == data["pooled"]["test"]
    rows = sorted(row for client in data["rolora"]["clients"] for row in client["rows"])
    assert rows == sorted(data["pooled"]["clients"][0]["rows"])
    assert (
        json.loads((outdir / "comparison.json").read_text())["pooled"]["settings"]["train"]["local_update_steps"] == 4
    )
    assert results["local"].facts["clients"] == results["rolora"].facts["clients"]
    alone = json.loads((outdir / "local" / "local.json").read_text())
    assert alone["rounds_of_a_client"] == 2  # 2 rounds of 2 of 3 clients, rounded up
    scores = [client["test"]["acc"] for client in alone["clients"]]
    assert len(scores) == 3 and results["local"].final["test_acc"] == pytest.approx(sum(scores) / 3)
    assert results["local"].final["client_test_acc_mean"] == pytest.approx(
        sum(client["client_test"]["acc"] for client in alone["clients"]) / 3
    )


def test_all_data_in_one_place_train_as_long_as_the_clients_do(few, tmp_path, caplog):
    def pooled(*clients):
        keys = {"lowrank.clients": list(clients)}
        return baselines.row_config("pooled", fs_lowrank.load_config(few, keys), tmp_path / "pooled")

    assert pooled().train.local_update_steps == 3 * 2
    own = pooled({"clients": 1, "local_update_steps": 8, "lr": 0.5}, {"clients": 2, "batch_size": 3})
    assert own.train.local_update_steps == 8 + 2 + 2 and not own.lowrank.clients
    assert "pooled: batch_size, lr of single clients (lowrank.clients) do not apply to it" in caplog.text
    epochs = pooled({"clients": "1-3", "batch_or_epoch": "epoch", "local_update_steps": 4})
    assert (epochs.train.batch_or_epoch, epochs.train.local_update_steps) == ("epoch", 4)
    with pytest.raises(UserError, match="pooled: some clients train epochs and others steps"):
        pooled({"clients": 1, "batch_or_epoch": "epoch"})


@pytest.mark.more
def test_relora_is_fedloru_of_one_client_with_all_data(few, tmp_path):
    keys = {"federate.total_round_num": 2, "lowrank.tau": 1}
    config = fs_lowrank.load_config(few, {"outdir": str(tmp_path / "both")})
    compared = fs_lowrank.compare(config, ["fedloru", "relora"], overrides=keys)
    row = fs_lowrank.load_config(tmp_path / "both" / "relora" / "config.yaml")
    assert (row.federate.method, row.federate.client_num, row.lowrank.params["tau"]) == ("fedloru", 1, 1)
    assert not any(compared["relora"].bytes.values())
    alone = fs_lowrank.run(row.replace({"outdir": str(tmp_path / "alone")}))
    wanted = dict(alone.model.named_parameters())
    for name, tensor in compared["relora"].model.named_parameters():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-6, rtol=1e-5)
    assert compared["relora"].base_changed, "every round adds the pair to the base"


def test_what_a_row_cannot_follow_is_said_or_refused_before_anything_trains(few, caplog, monkeypatch):
    keys = {"federate.make_global_eval": False, "early_stop.patience": 2, "lowrank.max_samples": 3}
    keys["eval.best_res_update_round_wise_key"] = "client_test_acc"
    config = fs_lowrank.load_config(few, keys)
    for name in baselines.ROWS:
        row = baselines.row_config(name, config, Path(few["outdir"]) / name)
        assert row.early_stop.patience == 0 and row.lowrank.max_samples > 1000
        assert f"{name}: early_stop does not apply to it; it trains all its rounds" in caplog.text
    watching = fs_lowrank.load_config(few, {"early_stop.patience": 2})
    assert baselines.row_config("pooled", watching, few["outdir"]).early_stop.patience == 2
    mixed = fs_lowrank.load_config(few, {"lowrank.clients": [{"clients": 1, "batch_or_epoch": "epoch"}]})
    monkeypatch.setattr(api, "run", lambda *given, **more: pytest.fail("a method was run"))
    with pytest.raises(UserError, match="leave the row out"):
        fs_lowrank.compare(mixed, ["fedlora", "pooled"])


@pytest.fixture
def second_diverges(monkeypatch):
    """The training of client 2, alone, ends with a weight that is not finite."""
    train = baselines.train_client

    def diverging(model, *rest, owner, **more):
        trained = train(model, *rest, owner=owner, **more)
        if owner == "client 2":
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = torch.nan
        return trained

    monkeypatch.setattr(baselines, "train_client", diverging)


def strict(path):
    """A JSON file, in which NaN and Infinity are errors."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{path} has {name}"))


@pytest.mark.slow
def test_a_client_that_diverges_alone_is_left_out_and_named(few, no_curves, second_diverges, caplog, tmp_path):
    few = {**few, "outdir": str(tmp_path / "a"), "eval": {"split": ["test"], "client_scores": True}}
    result = fs_lowrank.compare(fs_lowrank.load_config(few), ["fedlora", "local"])["local"]
    (record,) = result.history
    assert record["clients"] == [1, 3] and [f["client"] for f in record["failed"]] == [2]
    assert "diverged" in record["failed"][0]["reason"] and "client 2 is left out" in caplog.text
    assert list(result.clients_frame()["failed"]) == [0, 1, 0]
    assert all(math.isfinite(value) for value in result.final.values())
    for name in ("local.json", "summary.json", "data.json"):
        strict(result.outdir / name)
    scores = [client["test"]["acc"] for client in strict(result.outdir / "local.json")["clients"]]
    assert len(scores) == 2 and result.final["test_acc"] == pytest.approx(sum(scores) / 2)


def test_the_row_local_says_that_it_trains_in_one_process_and_tells_training_from_evaluation(
    few, no_curves, caplog, tmp_path
):
    config = fs_lowrank.load_config(few, {"federate.process_num": 2})
    row = baselines.row_config("local", config, tmp_path / "local")
    assert "local: federate.process_num does not apply to it" in caplog.text
    seconds = baselines.run_row("local", row).history[0]["seconds"]
    assert seconds["training"] > 0 and seconds["evaluation"] > 0 and seconds["aggregation"] == 0


@pytest.mark.more
def test_if_every_client_diverges_that_is_said(few, tmp_path):
    few["train"] = {**few["train"], "optimizer": {"type": "SGD", "lr": 1e30}}
    row = baselines.row_config("local", fs_lowrank.load_config(few), tmp_path / "local")
    with pytest.raises(RunFailed, match="its training diverged: .* is not finite, of client 1 and all others; lower"):
        baselines.run_row("local", row)
    assert not (tmp_path / "local" / "summary.json").exists()


@pytest.mark.slow
def test_the_row_local_is_a_run_for_the_page_and_for_what_chance_reaches(few, no_curves, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(few))
    compare = ["compare", "--cfg", str(tmp_path / "run.yaml"), "--methods", "rolora,local,pooled"]
    slow = ["train.optimizer.lr", "1e-9"]
    assert cli.main([*compare, *slow]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "local: nothing was learned" in out and out.count("round   2/2") == 3
    shown = {run.name: run for run in read_runs([few["outdir"]])}
    assert list(shown) == ["rolora", "local", "pooled"] and all(run.ended for run in shown.values())
    page = write_page(list(shown.values()), tmp_path / "report.html").read_text(encoding="utf-8")
    assert "rolora, local and pooled: not above the most frequent class" in page
    before = (Path(few["outdir"]) / "comparison.json").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "train_client", None)  # no client is trained again
        assert cli.main([*compare, "--resume", *slow]) == 0
    final = [
        json.loads(text)["local"]["final"] for text in (before, (Path(few["outdir"]) / "comparison.json").read_text())
    ]
    assert final[0] == final[1] and "test_acc" in final[0]
    assert cli.main([*compare, "--resume", *slow, "federate.total_round_num", "3"]) == 0
    assert json.loads((Path(few["outdir"]) / "local" / "local.json").read_text())["rounds_of_a_client"] == 3
    assert cli.main([*compare, *slow]) == 2 and "holds a run already" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.parametrize("content", ["{", "null", "[" * 100_000], ids=lambda text: text[:4])
def test_a_row_whose_summary_is_damaged_is_trained_again(few, no_curves, tmp_path, content, caplog):
    row = baselines.row_config("local", fs_lowrank.load_config(few), tmp_path / "local")
    first = baselines.run_row("local", row)
    path = tmp_path / "local" / "summary.json"
    kept = path.read_text()
    path.write_text(content)
    again = baselines.run_row("local", row, resume=True)
    assert f"{path} cannot be read: " in caplog.text and "; the row is trained again" in caplog.text
    assert again.final == first.final and path.read_text() == kept


@pytest.mark.slow
def test_seeds_give_the_mean_and_the_spread_of_single_runs(few, tmp_path, capsys, no_curves):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(few))
    slow = {"federate.total_round_num": 1, "train.optimizer.lr": 1e-9}
    arguments = ["--methods", "fedlora,local", "--seeds", "4,5", *(str(word) for pair in slow.items() for word in pair)]
    few = {**few, "outdir": str(tmp_path / "several")}
    assert cli.main(["compare", "--cfg", str(tmp_path / "run.yaml"), *arguments, "outdir", few["outdir"]]) == 0
    out, err = capsys.readouterr()
    assert "more than once" not in out + err
    kept = json.loads((Path(few["outdir"]) / "seeds.json").read_text())
    assert all(f"{name}, seed {seed}: nothing was learned" in out for name in ("fedlora", "local") for seed in (4, 5))
    changes = {**slow, "seed": 5, "outdir": str(tmp_path / "alone")}
    single = fs_lowrank.run(fs_lowrank.load_config(few, changes))
    losses = kept["values"]["fedlora"]["test_loss"]
    assert kept["seeds"] == [4, 5] and losses[1] == single.final["test_loss"] != losses[0]
    spread = abs(losses[0] - losses[1]) / 2**0.5
    assert f"{sum(losses) / 2:.3f} ± {spread:.3f}" in out
    folder = Path(few["outdir"])
    assert (folder / "curves.png").exists() and (folder / "seeds.tex").exists()
    assert f"{sum(losses) / 2:.3f} ± {spread:.3f}" in (folder / "seeds.csv").read_text()


def test_a_row_leaves_out_what_makes_no_sense_for_it(few):
    """A robust mean needs more clients than a row has, and a row needs no processes."""
    from fs_lowrank.baselines import row_config

    keys = {"lowrank.robust": "trimmed_mean", "lowrank.robust_malicious": 1, "federate.process_num": 2}
    config = fs_lowrank.load_config(few, keys)
    for name in ("local", "pooled"):
        row = row_config(name, config, "x")
        assert row.lowrank.robust == "none" and row.federate.process_num == 1
    norm = fs_lowrank.load_config(few, {"lowrank.robust": "norm_bound", "lowrank.robust_norm": 2.0})
    assert row_config("pooled", norm, "x").lowrank.robust_norm == 0


@pytest.mark.parametrize("name", ["local", "pooled"])
def test_a_row_whose_folder_another_run_writes_to(few, tmp_path, name):
    config = baselines.row_config(name, fs_lowrank.load_config(few), tmp_path / name)
    with claim(tmp_path / name), pytest.raises(RunFailed, match=f"another run is writing into {tmp_path / name}"):
        baselines.run_row(name, config)
    assert [path.name for path in (tmp_path / name).iterdir()] == [".lock"]
