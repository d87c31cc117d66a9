"""Searches in which nothing is learned, time is short, or something fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpo
from fs_lowrank import RunFailed
from fs_lowrank.runs.split import read_split
from hpo import cli, read_header
from hpo import trial as trial_module
from hpo.search import kind
from hpo.storage import load_study, open_storage
from hpo.worker import Searches, in_this_process

pytestmark = pytest.mark.usefixtures("no_curves")


@pytest.mark.more
def test_a_winner_at_the_majority_class_is_named_and_not_written_without_a_flag(search, runs, tmp_path, capsys):
    runs(lambda *_: 0.63)  # 0.6 and two standard errors of 0.049
    options, _, _ = search(confirm=1)
    (winner,) = hpo.results(options.where, "s")["winners"]
    said = (
        "val_acc 0.630, val_acc on fresh seeds 0.630, while always predicting the majority class gives "
        "0.600 ± 0.098 (two standard errors)"
    )
    assert winner["nothing_learned"] == f"nothing was learned that would show: {said}"
    where = ["--dir", str(options.folder)]
    assert (
        cli.main(["status", *where]) == 0
        and f"s #0: nothing was learned that would show: {said}" in capsys.readouterr().out
    )
    out = tmp_path / "best.yaml"
    assert cli.main(["best", *where, "--out", str(out)]) == 2 and not out.exists()
    assert said in (error := capsys.readouterr().err) and "--unlearned" in error
    assert cli.main(["best", *where, "--out", str(out), "--unlearned"]) == 0
    assert f"# nothing was learned that would show: {said}" in out.read_text() and read_header(out)["trial"] == 0


@pytest.mark.more
def test_equal_accuracies_are_told_apart_by_the_loss(search, runs):
    rates = {"train.optimizer.lr": {"grid": [1e-3, 1e-2, 1e-1]}}
    runs(lambda *_: 0.76, loss=lambda config: abs(config.train.optimizer.lr - 1e-2))
    options, _, _ = search(rates)
    assert hpo.results(options.where, "s")["winners"][0]["point"] == {"train.optimizer.lr": 1e-2}


@pytest.mark.more
def test_a_winner_at_the_end_of_its_grid_is_named(search, runs, tmp_path, capsys):
    runs(lambda config, _: 0.76 + config.train.optimizer.lr)
    options, _, _ = search(confirm=1)
    said = "train.optimizer.lr 0.01 is the largest that was tried, so a better value may lie beyond"
    assert hpo.results(options.where, "s")["winners"][0]["at_end"] == said
    where = ["--dir", str(options.folder)]
    assert cli.main(["status", *where]) == 0 and f"s #1: {said}" in capsys.readouterr().out
    assert cli.main(["best", *where, "--out", str(tmp_path / "best.yaml")]) == 0
    assert f"# {said}" in (tmp_path / "best.yaml").read_text()
    search({"train.optimizer.lr": {"choice": [1e-4, 1e-2]}}, name="choice", trials=2, sampler="grid")
    assert "0.01 is the largest" in hpo.results(options.where, "choice")["winners"][0]["at_end"]
    search({"train.optimizer.lr": {"loguniform": [1e-3, 1e-2]}}, name="range", trials=1)
    # a range has no end: its bounds are not tried; and no rank is below 1
    runs(lambda config, _: 0.76 - config.adapter.r / 100)
    search({"llm.adapter.args.0.r": {"grid": [1, 2]}}, name="ranks")
    for name in ("range", "ranks"):
        assert hpo.results(options.where, name)["winners"][0]["at_end"] == ""


@pytest.mark.more
def test_a_real_run_reports_the_classes_of_its_validation_data(search):
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}})
    (trial,) = load_study(open_storage(options.where), "s").trials
    (data,) = (read_split(p.parent) for p in options.folder.glob("s/trials/*/data.json"))
    counts = list(data["validation"]["labels"].values())
    assert sum(counts) == len(data["validation"]["rows"]) and len(counts) == 2
    assert trial.user_attrs["chance"]["share"] == max(counts) / sum(counts)


@pytest.mark.slow
def test_the_methods_of_a_search_share_a_time_limit(search, runs, monkeypatch):
    now, costs = [0.0], {"fedlora": 10.0, "rolora": 3.0, "ffa_lora": 1.0}
    monkeypatch.setattr(trial_module, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0))

    def accuracy(config, round):
        now[0] += costs[config.federate.method]
        return 0.9

    runs(accuracy)
    rates = {"train.optimizer.lr": {"uniform": [1e-3, 1e-1]}, "studies": {"federate.method": list(costs)}}
    options, ended, _ = search(rates, sampler="random", pruner="none", trials=100, timeout=1e-6)
    wanted = dict.fromkeys(ended.studies, 100)
    storage = open_storage(options.where)
    in_this_process(Searches(storage, wanted, options), lambda: "time is up" * (now[0] > 90))
    spent = [hpo.results(options.where, name)["budget"]["seconds"] for name in ended.studies]
    assert sum(spent) == pytest.approx(now[0]) and max(spent) - min(spent) <= 10
    counts = [len(load_study(storage, name).get_trials(states=None)) for name in ended.studies]
    assert all(count > 2 for count in counts)


@pytest.mark.more
def test_an_internal_error_in_a_trial_is_one_line_that_names_a_file(search, runs, capsys):
    def accuracy(config, round):
        if config.train.optimizer.lr == 1e-3:
            raise ZeroDivisionError("division\nby zero")
        return 0.9

    runs(accuracy)
    options, ended, lines = search()
    assert ended.how == "done"
    (line,) = [line for line in lines if "failed (error)" in line]
    reason, _, path = line.partition("; please report it with ")
    assert reason.endswith("ZeroDivisionError: division by zero")
    assert "Traceback" in Path(path).read_text() and Path(path).parent == options.folder / "s"
    assert cli.main(["status", "--dir", str(options.folder)]) == 0 and path in capsys.readouterr().out


@pytest.mark.more
def test_an_internal_error_in_a_command_is_one_line_that_names_a_file(search, monkeypatch, capsys):
    options, _, _ = search(timeout=1e-6)
    monkeypatch.setattr("hpo.summary.summary", lambda *args: 1 / 0)
    assert cli.main(["best", "--dir", str(options.folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ZeroDivisionError") and error.count("\n") == 1
    (path,) = options.folder.glob("traceback-*.txt")
    assert str(path) in error and "Traceback" in path.read_text()
    assert cli.main(["best", "--dir", str(options.folder), "--debug"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_ends_the_search_and_the_same_search_continues(search, runs, wrapped):
    full = [True]

    def accuracy(config, round):
        if full[0]:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "summary.json")
            raise RunFailed("summary.json cannot be written: No space left on device") from error if wrapped else error
        return 0.9

    runs(accuracy)
    for _ in range(4):  # more often than the trial of a dead worker is repeated
        with pytest.raises(RunFailed, match="summary.json cannot be written: No space left on device"):
            search()
    full[0] = False
    options, ended, _ = search()
    kinds = [kind(t) for t in load_study(open_storage(options.where), "s").trials]
    assert ended.how == "done" and kinds.count("complete") == 2 and "failed" not in kinds
