"""Searches on a tiny model: grids, pruning, rungs, failures, stopping, dead workers, confirmation, files."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from pathlib import Path

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

import fs_lowrank.cli
from fs_lowrank import UserError, load_config
from fs_lowrank.jobs import progress
from fs_lowrank.methods import get_method_class
from fs_lowrank.methods.server_optimizer import ServerOptimizer
from hpo import cli, plots, read_header, results, summary
from hpo import search as core
from hpo.objectives import OBJECTIVES, parse_objectives
from hpo.search import kind
from hpo.settings import Settings
from hpo.storage import CONFIRM, load_study, open_storage, quiet
from hpo.trial import one_test_set, trial_config
from hpo.worker import FRESH

pytestmark = pytest.mark.usefixtures("no_curves")


def studies(options, name="s"):
    store = open_storage(options.where)
    return store, load_study(store, name)


def trials(options, name="s"):
    return studies(options, name)[1].get_trials(deepcopy=False)


def test_grid_runs_each_point_once_confirms_the_winner_and_writes_it(search, config, tmp_path, capsys):
    options, ended, _ = search(confirm=2)
    assert ended.how == "done"
    found = trials(options)
    assert sorted(t.params["train.optimizer.lr"] for t in found) == [1e-3, 1e-2]
    assert all(t.state == TrialState.COMPLETE for t in found)
    steps = [t.user_attrs["budget"] for t in found]
    assert [s["client_steps"] for s in steps] == [8, 8] and [s["rounds"] for s in steps] == [2, 2]
    assert all(s["uplink_bytes"] > 0 and s["seconds"] > 0 for s in steps)
    # no trial used the test data; the confirmation did, once for each of its own seeds
    for folder in (options.folder / "s" / "trials").glob("*/"):
        text = (folder / "rounds.jsonl").read_text().splitlines()
        looked = ["test" in line.split('"metrics": ')[1].split('"uplink')[0] for line in text]
        assert looked in ([False, False], [False, True])
    # and they were the same test data, on which no trial had trained or been selected
    runs = [load_config(folder / "config.yaml") for folder in (options.folder / "s" / "trials").glob("*/")]
    assert len({run.seed for run in runs}) == 3 and {run.lowrank.test_seed for run in runs} == {config.seed}
    assert len(runs) == 4 and config.data.splits[2] > 0
    official = config.replace({"data.splits": [0.9, 0.1, 0.0]})
    assert one_test_set(official) == official
    of = f"s{CONFIRM}{core.front(studies(options)[1])[0].number}"
    checks = trials(options, of)
    assert sorted(t.params["seed"] for t in checks) == [config.seed + FRESH, config.seed + FRESH + 1]
    assert all("test_acc" in t.user_attrs["metrics"] for t in checks)

    search(confirm=2)  # the same command again finds nothing to do
    assert len(trials(options)) == 2 and len(trials(options, of)) == 2

    table = tmp_path / "status.csv"
    assert cli.main(["status", "--dir", str(options.folder), "--table", str(table)]) == 0
    assert "study,trials,best" in table.read_text() and "2 complete" in table.with_suffix(".tex").read_text()

    out = tmp_path / "best.yaml"
    assert cli.main(["best", "--dir", str(options.folder), "--out", str(out), "--unlearned"]) == 0
    written, head = load_config(out), read_header(out)
    winner = core.front(studies(options)[1])[0]
    assert written.train.optimizer.lr == winner.params["train.optimizer.lr"] == head["point"]["train.optimizer.lr"]
    changed = {
        "train.optimizer.lr": written.train.optimizer.lr,
        "outdir": written.outdir,
        "lowrank.test_seed": config.seed,
    }
    assert written == config.replace(changed)
    assert head["study"] == "s" and head["trial"] == winner.number and head["values"]["val_acc"] == winner.value
    assert head["budget"]["client_steps"] == 16 and head["budget"]["trials"] == 2
    assert head["confirmed"]["metrics"]["val_acc"]["std"] is not None and head["confirmed"]["budget"]["rounds"] == 4
    ran = tmp_path / "ran"
    assert fs_lowrank.cli.main(["run", "--cfg", str(out), "outdir", str(ran)]) == 0, "unchanged, by the command"
    assert json.loads((ran / "summary.json").read_text())["final"]["val_acc"] == winner.value

    assert cli.main(["plot", "--dir", str(options.folder)]) == 0
    for name in ("history.png", "slices-s.png", "rounds-s.png"):
        assert (options.folder / "plots" / name).stat().st_size > 1000
    assert (options.folder / "plots" / "trials.csv").read_text().count(",COMPLETE,") == 2
    capsys.readouterr()
    assert cli.main(["status", "--dir", str(options.folder)]) == 0
    written = capsys.readouterr().out
    assert cli.main(["status", "--storage", options.where]) == 0, "Optuna's storage says the same"
    assert "2 complete" in written and written == capsys.readouterr().out


@pytest.mark.slow
def test_a_worker_tokenizes_the_data_once(search, monkeypatch):
    from fs_lowrank.data import build as data

    calls, make = [], data._build
    monkeypatch.setattr(data, "_build", lambda *given: calls.append(given) or make(*given))
    _, ended, _ = search()
    assert ended.how == "done" and len(calls) == 1


#: the run stops after round 2 of 4
STOPS = {"early_stop.patience": 1, "early_stop.delta": 0.5, "federate.total_round_num": 4}


@pytest.mark.more
@pytest.mark.parametrize("keys", [{"lowrank.checkpoint_freq": 0}, {"lowrank.checkpoint_freq": 3, **STOPS}])
def test_a_point_that_was_tried_before_is_not_trained_again(search, config, keys):
    """Also where the config asks for no checkpoint by then."""
    base = config.replace(keys)
    options, _, _ = search({"train.optimizer.lr": {"choice": [1e-3]}}, base, sampler="random", trials=2)
    first, second = trials(options)
    assert [kind(first), kind(second)] == ["complete", "complete"] and first.user_attrs["budget"]["rounds"] == 2
    assert second.user_attrs["budget"]["rounds"] == 0 and first.value == second.value


@pytest.mark.more
def test_the_winner_stops_early_on_fresh_seeds_as_in_its_trial(search, config, tmp_path):
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-3]}}, config.replace(STOPS), confirm=1)
    rounds = [len(path.read_text().splitlines()) for path in options.folder.glob("s/trials/*/rounds.jsonl")]
    assert rounds == [2, 2]
    out = tmp_path / "best.yaml"
    assert cli.main(["best", "--dir", str(options.folder), "--out", str(out), "--unlearned"]) == 0
    written = load_config(out)
    assert written.early_stop.patience == 1 and written.eval.best_res_update_round_wise_key == "val_acc"


def test_trials_do_not_evaluate_clients_on_test_data_or_answer_prompts(config):
    base = config.replace({"eval.client_scores": True, "eval.generate.freq": 1})
    trial, fresh = (trial_config(base, {}, "val_acc", Path("runs"), 0, test) for test in (False, True))
    assert trial.eval.split == ["val"] and not trial.eval.client_scores and trial.eval.generate.freq == 0
    assert fresh.eval.client_scores and fresh.eval.generate.freq == 1


@pytest.mark.slow
def test_a_pruned_trial_ends_at_once_and_its_cost_counts(search, monkeypatch):
    class Never(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1

    monkeypatch.setattr("hpo.worker.make_pruner", lambda settings: Never())
    space = {"train.optimizer.lr": {"loguniform": [1e-3, 1e-1]}}
    options, _, lines = search(space, sampler="random", pruner="median", trials=2)
    first, second = trials(options)
    assert first.state == TrialState.COMPLETE and list(first.intermediate_values) == [1, 2]
    assert second.state == TrialState.PRUNED and list(second.intermediate_values) == [1]
    assert second.user_attrs["budget"]["client_steps"] == 4
    assert summary.summary(*[studies(options)[0], "s"])["budget"]["client_steps"] == 12
    assert "pruned" in lines[-1]


@pytest.mark.more
def test_of_a_grid_the_first_points_are_tried(search):
    options, ended, _ = search(timeout=1e-6, trials=1)
    assert ended.how == "timeout" and len(trials(options)) == 1
    options, _, _ = search(timeout=1e-6)
    rates = [t.system_attrs["fixed_params"]["train.optimizer.lr"] for t in trials(options)]
    assert rates == [1e-3, 1e-2]


@pytest.mark.more
def test_random_points_continue_after_an_interruption(search):
    space = {"train.optimizer.lr": {"loguniform": [1e-3, 1e-1]}}
    options, _, _ = search(space, sampler="random", trials=1, pruner="none")
    search(space, sampler="random", trials=2, pruner="none")
    rates = [t.params["train.optimizer.lr"] for t in trials(options)]
    assert len(set(rates)) == 2


@pytest.mark.more
def test_a_failed_trial_is_recorded_with_its_reason_and_the_search_continues(search, monkeypatch, capsys):
    real = fs_lowrank.run

    def run(config, *args, **kwargs):
        if config.train.optimizer.lr == 1e-3:
            raise MemoryError("CUDA out of memory")
        if config.train.optimizer.lr == 1e-2:
            record = {"round": 1, "clients": [1], "uplink_bytes": 1, "downlink_bytes": 1}
            kwargs["on_round"]({**record, "metrics": {"val": {"acc": 0.5, "loss": float("nan")}}})
        return real(config, *args, **kwargs)

    monkeypatch.setattr(fs_lowrank, "run", run)
    options, ended, _ = search({"train.optimizer.lr": {"grid": [1e-3, 1e-2, 5e-2]}})
    found = {t.params["train.optimizer.lr"]: t for t in trials(options)}
    assert [kind(found[r]) for r in (1e-3, 1e-2, 5e-2)] == ["failed", "failed", "complete"]
    assert found[1e-3].user_attrs["kind"] == "memory" and "out of memory" in found[1e-3].user_attrs["reason"]
    assert found[1e-2].user_attrs["kind"] == "nan"
    assert "val_loss is nan after round 1" in found[1e-2].user_attrs["reason"]
    assert found[1e-2].user_attrs["budget"]["rounds"] == 1
    cli.main(["status", "--dir", str(options.folder)])
    assert "failed (memory)" in capsys.readouterr().out.replace("\n", "")
    monkeypatch.setattr(fs_lowrank, "run", real)
    search({"train.optimizer.lr": {"grid": [1e-3, 1e-2, 5e-2]}}, retry_failed=True)
    assert sum(kind(t) == "complete" for t in trials(options)) == 3


@pytest.mark.slow
def test_a_point_that_gives_an_invalid_config_is_a_failed_trial(search, config):
    """Each value alone is valid; two clients of three, sampled from one, are not."""
    space = {"federate.client_num": {"choice": [1, 3]}, "train.optimizer.lr": {"uniform": [1e-3, 1e-2]}}
    base = config.replace({"federate.sample_client_num": 1})
    both = {**space, "federate.sample_client_num": {"choice": [1, 3]}}
    options, ended, _ = search(both, base, sampler="random", trials=8, pruner="none")
    kinds = {kind(t) for t in trials(options)}
    failed = [t for t in trials(options) if kind(t) == "failed"]
    assert ended.how == "done" and kinds == {"complete", "failed"}
    assert all(t.params["federate.sample_client_num"] > t.params["federate.client_num"] for t in failed)


@pytest.mark.more
def test_after_ctrl_c_the_same_search_continues_the_trial_from_its_checkpoint(search, monkeypatch):
    real, rounds = fs_lowrank.run, []

    def run(config, *args, on_round, **kwargs):
        def seen(record):
            rounds.append(record["round"])
            if len(rounds) == 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            return on_round(record)

        return real(config, *args, on_round=seen, **kwargs)

    monkeypatch.setattr(fs_lowrank, "run", run)
    options, ended, _ = search()
    assert ended.how == "interrupted"
    assert [kind(t) for t in trials(options)] == ["interrupted", "waiting", "waiting"]
    options, ended, _ = search()
    assert ended.how == "done" and sorted(rounds) == [1, 1, 2, 2]
    found = trials(options)
    assert sum(t.user_attrs.get("budget", {}).get("rounds", 0) for t in found) == 4
    assert sorted(t.params["train.optimizer.lr"] for t in found if kind(t) == "complete") == [1e-3, 1e-2]


@pytest.mark.more
def test_a_trial_of_a_dead_worker_is_repeated_twice_at_most(search, monkeypatch):
    monkeypatch.setattr("hpo.storage.GRACE", 1)
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}}, timeout=1e-6)
    for attempt in range(3):
        store, study = studies(options)
        with quiet():
            trial = study.ask()
            trial.suggest_categorical("train.optimizer.lr", [1e-2])
            store.record_heartbeat(trial._trial_id)
            time.sleep(2.1)
            optuna.storages.fail_stale_trials(study)
        kinds = [kind(t) for t in trials(options)]
        assert kinds == ["lost"] * (attempt + 1) + ["waiting"] * (attempt < 2)
    assert [how for how, _ in results(options.where, "s")["failed"]] == ["lost"]
    options, ended, _ = search({"train.optimizer.lr": {"grid": [1e-2]}}, retry_failed=True)
    assert ended.how == "done" and kind(trials(options)[-1]) == "complete"


@pytest.mark.more
def test_a_trial_whose_worker_died_before_its_first_heartbeat_is_run(search, monkeypatch):
    monkeypatch.setattr("hpo.storage.GRACE", 1)
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}}, timeout=1e-6)
    with quiet():
        studies(options)[1].ask()
    options, ended, _ = search({"train.optimizer.lr": {"grid": [1e-2]}}, timeout=60)
    assert ended.how == "done" and [kind(t) for t in trials(options)] == ["lost", "complete"]


@pytest.mark.slow
def test_pareto_front_of_accuracy_and_bytes(search, tmp_path, capsys):
    space = {"llm.adapter.args.0.r": {"grid": [1, 4]}, "train.optimizer.lr": {"grid": [1e-2]}}
    options, _, _ = search(space, objectives=("val_acc", "uplink_bytes"), confirm=1)
    store, study = studies(options)
    found = {t.params["llm.adapter.args.0.r"]: t for t in study.trials}
    assert found[1].values[1] < found[4].values[1]
    front = core.front(study)
    assert found[1].number in [t.number for t in front]
    values = [t.values for t in front]
    assert values == sorted(values, key=lambda v: -v[0]) and [v[1] for v in values] == sorted(
        (v[1] for v in values), reverse=True
    )
    plots.draw(store, ["s"], tmp_path / "plots")
    lines = (tmp_path / "plots" / "trials.csv").read_text().splitlines()
    assert lines[0].startswith("study,number,state") and len(lines) == 1 + len(study.trials)
    assert (tmp_path / "plots" / "pareto-s.png").exists()
    for winner in front:
        assert [kind(t) for t in trials(options, f"s{CONFIRM}{winner.number}")] == ["complete"]
    out = str(tmp_path / "best.yaml")
    arguments = ["best", "--dir", str(options.folder), "--out", out, "--trial", str(found[1].number), "--unlearned"]
    assert cli.main(arguments) == 0
    assert load_config(out).adapter.r == 1


@pytest.mark.slow
def test_a_study_for_each_method_and_one_history_of_both(search, config, tmp_path):
    space = {
        "train.optimizer.lr": {"grid": [1e-2]},
        "studies": {"federate.method": ["fedlora", "rolora"]},
        "lowrank.mix": {"grid": [1.0, 0.5], "when": {"federate.method": "rolora"}},
    }
    options, ended, _ = search(space)
    assert ended.studies == ["s.fedlora", "s.rolora"]
    assert [len(trials(options, n)) for n in ended.studies] == [1, 2]
    made = {path.name for path in plots.draw(open_storage(options.where), ended.studies, tmp_path / "plots")}
    of_each = {f"{kind}-{name}.png" for kind in ("rounds", "slices") for name in ended.studies}
    assert made == {"history.png", "trials.csv", *of_each}


@pytest.mark.slow
def test_each_method_that_is_searched_decides_about_adapters_for_itself(search, config):
    """As with ``run``: ``llm.adapter.use`` is not given, so FisherMerge trains all weights beside FedLoRA."""
    options, _, _ = search({"federate.method": {"grid": ["fedlora", "fisher_merge"]}})
    runs = [load_config(folder / "config.yaml") for folder in (options.folder / "s" / "trials").glob("*/")]
    assert {(c.federate.method, c.llm.adapter.use) for c in runs} == {("fedlora", True), ("fisher_merge", False)}


@pytest.mark.parametrize("method", ["fedavg", "fedlora"])
@pytest.mark.parametrize("use", [None, True])
def test_a_study_keeps_the_config_that_it_was_given(use, method):
    """``fedavg`` trains all weights, also if the file says that its own method uses adapters."""
    given = {} if use is None else {"llm.adapter.use": use}
    base = load_config({"federate.method": "fedlora", "federate.client_num": 3, **given})
    base = base.replace({"federate.method": method})
    kept = load_config(Settings.stored_config(base))
    assert kept == base and (kept.federate.method, kept.llm.adapter.use) == (method, base.llm.adapter.use)


def test_a_study_without_adapters_can_keep_a_method_with_them():
    base = load_config({"federate.method": "fedavg", "federate.client_num": 3, "llm.adapter.use": False})
    base = base.replace({"federate.method": "fedlora"})
    assert load_config(Settings.stored_config(base)) == base and base.llm.adapter.use is True


@pytest.mark.more
def test_seeds_are_averaged(search, config):
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}}, seeds=2)
    (trial,) = trials(options)
    by_seed = trial.user_attrs["by_seed"]["val_acc"]
    assert len(by_seed) == 2 and trial.value == sum(by_seed) / 2 and trial.user_attrs["budget"]["client_steps"] == 16


@pytest.mark.skipif(
    "FS_LOWRANK_TEST_DATABASE" not in os.environ,
    reason="FS_LOWRANK_TEST_DATABASE names no database, such as postgresql://user@server/empty",
)
def test_a_search_is_stored_and_continued_on_a_database_server(search):
    options = {"storage": os.environ["FS_LOWRANK_TEST_DATABASE"], "name": f"test_{uuid.uuid4()}"}
    space = {"train.optimizer.lr": {"loguniform": [1e-3, 1e-1]}}
    search(space, trials=1, **options)
    again, _, _ = search(space, trials=3, **options)
    assert [t.state for t in trials(again, options["name"])] == [TrialState.COMPLETE] * 3
    optuna.delete_study(study_name=options["name"], storage=options["storage"])


@pytest.mark.more
def test_client_steps_of_epochs_in_two_phases(search, config):
    """63 training reviews over 3 clients: 21 each, 3 batches of 8; 2 clients a round, 2 rounds."""
    keys = {"federate.method": "pfedloru", "train.batch_or_epoch": "epoch", "train.local_update_steps": 1}
    base = config.replace({**keys, "lowrank.personal_steps": 2})
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}}, base)
    assert trials(options)[0].user_attrs["budget"]["client_steps"] == 2 * 2 * (3 + 2 * 3)


# -- wrong input ------------------------------------------------------------------------------------------


@pytest.mark.more
def test_two_spaces_configs_or_settings_in_one_study(search, config, monkeypatch):
    search(timeout=1e-6)
    for change, message in (
        ({"space": {"train.optimizer.lr": {"grid": [1e-3]}}}, "another space"),
        ({"base": config.replace({"dataloader.batch_size": 4})}, "another dataloader.batch_size"),
        ({"sampler": "random"}, "another sampler"),
        ({"seeds": 2}, "another seeds"),
    ):
        with pytest.raises(UserError, match=message):
            search(**{"timeout": 1e-6, **change})
    monkeypatch.setattr(get_method_class("fedlora"), "revision", 2)
    with pytest.raises(UserError, match="another revision of fedlora, so"):
        search(timeout=1e-6)
    search(timeout=1e-6, name="anew")
    search(timeout=1e-6, name="anew")


@pytest.mark.more
def test_a_study_is_not_continued_with_other_data(search, config, tmp_path):
    data = tmp_path / "own.csv"
    rows = Path(config.data.type).read_text().splitlines(keepends=True)
    data.write_text("".join(rows))
    base = config.replace({"data.type": str(data)})
    options, _, _ = search(base=base, timeout=1e-6)
    data.write_text("".join(rows[:-5]))
    with pytest.raises(UserError, match="the study s was started with another data, so"):
        search(base=base)
    assert all(kind(t) == "waiting" for t in trials(options))
    search(base=base, timeout=1e-6, name="anew")
    data.write_text("".join(rows))
    _, ended, _ = search(base=base, timeout=1e-6)
    assert ended.studies == ["s"]


@pytest.mark.more
def test_arrow_data_are_compared_by_what_is_read_into_memory(config, tmp_path):
    rows = pd.read_csv(config.data.type)
    other = rows.assign(label=rows.label[::-1].to_numpy())
    found = []
    for name, changed in (("a", rows), ("copy", rows), ("fewer", rows[:-5]), ("labels", other)):
        changed.to_parquet(tmp_path / f"{name}.parquet")
        found.append(core.data_of(config.replace({"data.type": str(tmp_path / f"{name}.parquet")})))
    assert found[0] == found[1] and len({*found}) == 3 and all(found)


@pytest.mark.slow
def test_a_revision_of_any_point_that_ran_is_compared(search, config, monkeypatch):
    """The base config has no server optimizer; one of the two points has the one whose revision changed."""
    base = config.replace({"fedopt.use": True, "fedopt.optimizer.type": "SGD"})
    space = {"fedopt.optimizer.type": {"grid": ["SGD", "Adagrad"]}}
    monkeypatch.setattr(ServerOptimizer, "revisions", {})
    options, _, _ = search(space, base)
    monkeypatch.undo()
    with pytest.raises(UserError, match="another revision of server Adagrad, so"):
        search(space, base)
    # A new study in the same folder does not continue the run of the old one.
    again, _, _ = search(space, base, storage=str(options.folder / "new.log"))
    rounds = {t.params["fedopt.optimizer.type"]: t.user_attrs["budget"]["rounds"] for t in trials(again)}
    assert rounds == {"SGD": 0, "Adagrad": 2}
    search(space, base, storage=str(options.folder / "new.log"))


@pytest.mark.more
def test_options_that_do_not_fit(search, config):
    rates = {"train.optimizer.lr": {"loguniform": [1e-3, 1e-1]}}
    for change, message in (
        ({"space": rates, "sampler": "grid"}, "which a grid cannot list"),
        ({"space": rates, "sampler": "cmaes"}, "two or more ranges"),
        ({"space": rates, "pruner": "median", "objectives": ("val_acc", "uplink_bytes")}, "needs one objective"),
        ({"space": rates, "pruner": "median", "base": config.replace({"eval.freq": 0})}, "or set eval.freq 1"),
        ({"base": config.replace({"data.splits": [0.8, 0.0, 0.2]})}, "needs validation data"),
        ({"base": config.replace({"federate.make_global_eval": False})}, "set federate.make_global_eval True"),
        ({"name": "a/b"}, "study 'a/b'"),
        ({"space": {**rates, "studies": {"federate.method": ["rolorra"]}}}, "did you mean"),
        ({"space": {**rates, "studies": {"data.type": ["a/r.csv", "a_r.csv"]}}}, "give a study the name s.a_r.csv"),
    ):
        with pytest.raises(UserError, match=message):
            search(**change)


def test_objectives():
    assert parse_objectives("val_acc, uplink_bytes") == ("val_acc", "uplink_bytes")
    assert parse_objectives("val_f1") == ("val_f1",) and OBJECTIVES["val_pearson"] == "maximize"
    for text, message in (
        ("test_acc", "search by val_acc"),
        ("val_ac", "did you mean 'val_acc'"),
        ("uplink_bytes", "expected val_acc"),
    ):
        with pytest.raises(UserError, match=message):
            parse_objectives(text)


@pytest.mark.more
def test_best_refuses_a_winner_that_was_not_confirmed(search, tmp_path, capsys):
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}})
    arguments = ["best", "--dir", str(options.folder), "--out", str(tmp_path / "best.yaml"), "--unlearned"]
    assert cli.main(arguments) == 2 and "fresh seeds" in capsys.readouterr().err
    assert cli.main([*arguments, "--unconfirmed"]) == 0
    assert "NOT run on fresh seeds" in (tmp_path / "best.yaml").read_text()
    assert cli.main(["best", "--dir", str(options.folder), "--study", "t"]) == 2
    assert "there are: s" in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_in_worker_processes(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SOON", 0)
    monkeypatch.setattr(progress, "LOG_EVERY", 0.0)
    (tmp_path / "space.yaml").write_text("train.optimizer.lr: {grid: [1e-3, 1e-2]}")
    config.dump(tmp_path / "run.yaml")
    files = ["--cfg", tmp_path / "run.yaml", "--space", tmp_path / "space.yaml", "--dir", tmp_path / "hpo"]
    arguments = ["tune", *map(str, files), *"--workers 2 --confirm 1 federate.method rolora".split()]
    assert cli.main(arguments) == 0
    store = open_storage(tmp_path / "hpo" / "study.db")
    found = summary.summary(store, "run-space")
    assert found["trials"] == {"complete": 2} and found["winners"][0]["confirmed"]["open"] == 0
    assert cli.main([*arguments, "--workers", "0", "--timeout", "0.001", "--study", "t"]) == 0
    said = capsys.readouterr()
    assert "continue with" in said.out and {"trials: 0 of 3, ? left", "trials: 3 of 3, 00:00 left"} <= {
        *said.err.split("\n")
    }


@pytest.mark.more
@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes"])
def test_samplers_search_two_ranges(search, runs, sampler):
    runs(lambda config, t: 1 - abs(config.train.optimizer.lr - 0.02) - abs(config.train.local_update_steps - 5) / 100)
    space = {"train.optimizer.lr": {"loguniform": [1e-3, 1e-1]}, "train.local_update_steps": {"int": [2, 9]}}
    options, _, _ = search(space, sampler=sampler, trials=12)
    found = trials(options)
    assert len(found) == 12 and all(kind(t) in ("complete", "pruned") for t in found)
    assert len({tuple(t.params.values()) for t in found}) == 12
