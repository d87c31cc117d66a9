"""The runs of a winner on fresh seeds: which of them count, are still to come, or are run again."""

from __future__ import annotations

import pytest

import fs_lowrank
import hpo
from fs_lowrank import UserError
from hpo import best, cli, read_header
from hpo import search as core
from hpo.search import kind
from hpo.storage import CONFIRM, load_study, open_storage, quiet, trial_of
from hpo.tune import _retry_failed
from hpo.worker import FRESH, _Search

POINTS = {"train.optimizer.lr": {"grid": [1e-3, 1e-2]}}


@pytest.fixture
def searched(search, monkeypatch):
    """``searched(**options)`` is a finished search without fresh seeds, in which the larger rate is the better one and
    costs more; returns its storage, its options, and the study of fresh seeds.
    """

    def run(config, *args, on_round, **kwargs):
        rate = config.train.optimizer.lr
        metrics = {"val": {"acc": 0.8 + rate, "loss": 0.5}}
        on_round(
            {"round": 2, "clients": [1], "uplink_bytes": round(1e4 * rate), "downlink_bytes": 1, "metrics": metrics}
        )

    monkeypatch.setattr(fs_lowrank, "run", run)

    def searched(**more):
        options, _, _ = search(POINTS, **more)
        storage = open_storage(options.where)
        return storage, options, load_study(storage, "s" + CONFIRM)

    return searched


def queue(checks, seed, of=1):
    checks.enqueue_trial({}, user_attrs={"of": of, "seed": seed, "draw": seed})


def end(checks, how, value=0.9, **attrs):
    """Take the trial that waits the longest, and end it."""
    with quiet():
        trial = checks.ask()
    for name, attr in attrs.items():
        trial.set_user_attr(name, attr)
    if how == "complete":
        trial.set_user_attr("metrics", {"val_acc": value})
        checks.tell(trial, value)
    else:
        core.fail(checks, trial_of(checks, trial.number), how, "it went wrong")


def confirmed(storage):
    (winner,) = best.summary(storage, "s")["winners"]
    return winner["confirmed"]


def test_a_winner_whose_worker_died_on_a_fresh_seed_for_the_last_time_is_refused(searched, tmp_path, capsys):
    storage, options, checks = searched()
    for seed, how in ((1000, "complete"), (1001, "lost"), (1002, "lost")):
        queue(checks, seed)
        end(checks, how, retry=core.RETRIES)
    assert confirmed(storage)["seeds"] == [1000] and len(confirmed(storage)["failed"]) == 2
    with pytest.raises(UserError, match="failed on 2 of its fresh seeds: it went wrong; run these again with --retry-"):
        best.choose(best.summary(storage, "s"))
    _retry_failed(checks)
    assert [t.user_attrs["seed"] for t in checks.trials if kind(t) == "waiting"] == [1001, 1002]


@pytest.mark.parametrize("how", ["interrupted", "lost"])
def test_a_run_that_is_not_queued_again_yet_is_still_to_come(searched, how):
    storage, _, checks = searched()
    for seed, ended in ((1000, "complete"), (1001, how)):
        queue(checks, seed)
        end(checks, ended)
    assert confirmed(storage)["open"] == 1 and not confirmed(storage)["failed"]
    with pytest.raises(UserError, match="was not yet run on all of its fresh seeds"):
        best.choose(best.summary(storage, "s"))


def test_a_winner_that_failed_on_every_fresh_seed_is_refused_for_that(searched, tmp_path, capsys):
    storage, options, checks = searched()
    for seed in (1000, 1001):
        queue(checks, seed)
        end(checks, "error")
    where, out = ["--dir", str(options.folder)], tmp_path / "best.yaml"
    assert cli.main(["best", *where, "--out", str(out)]) == 2 and not out.exists()
    shown = capsys.readouterr()
    assert "failed on 2 of its fresh seeds: it went wrong" in shown.err and "2 failed" in shown.out
    assert cli.main(["best", *where, "--out", str(out), "--unconfirmed"]) == 0
    assert "NOT run on fresh seeds (2 of these runs failed)" in out.read_text()
    assert read_header(out)["confirmed"]["seeds"] == []


def test_a_failure_is_forgotten_when_the_seed_was_run_again(searched):
    storage, _, checks = searched()
    for seed, how in ((1000, "complete"), (1001, "error"), (1002, "complete")):
        queue(checks, seed)
        end(checks, how)
    _retry_failed(checks)
    assert confirmed(storage)["open"] == 1 and not confirmed(storage)["failed"], "it waits"
    end(checks, "complete")
    assert confirmed(storage)["seeds"] == [1000, 1001, 1002] and not confirmed(storage)["failed"]
    assert best.choose(best.summary(storage, "s"))["trial"] == 1


def test_a_failed_seed_of_one_winner_is_run_again_where_another_winner_has_it(searched):
    _, _, checks = searched(objectives=("val_acc", "uplink_bytes"))
    for of, how in ((0, "complete"), (1, "error")):
        queue(checks, 1000, of)
        end(checks, how)
    _retry_failed(checks)
    assert [t.user_attrs["of"] for t in checks.trials if kind(t) == "waiting"] == [1]


def test_a_seed_that_two_machines_have_run_counts_once(searched):
    storage, _, checks = searched()
    for seed, value in ((1000, 0.7), (1001, 0.9), (1000, 0.7), (1001, 0.9)):
        queue(checks, seed)
        end(checks, "complete", value)
    assert confirmed(storage)["seeds"] == [1000, 1001]
    assert confirmed(storage)["metrics"]["val_acc"]["values"] == [0.7, 0.9]


def test_a_seed_that_two_machines_have_queued_is_run_by_one(searched, config):
    """Machines with folders of their own share no lock, so that both may queue every seed."""
    storage, options, checks = searched()
    for _ in range(2):
        for seed in (config.seed + FRESH, config.seed + FRESH + 1):
            queue(checks, seed)
    machines = [
        _Search(storage, "s", options.folder / name / "s", 2, 2, None, None, lambda: False, print) for name in "ab"
    ]
    ran = []
    for machine in machines:
        machine._check = lambda trial: ran.append(trial.user_attrs["seed"])  # and it goes on
    with quiet():
        states = [machine._confirm() for _ in range(2) for machine in machines]
    assert ran == [config.seed + FRESH, config.seed + FRESH + 1] and states == ["ran", "ran", "wait", "wait"]
    assert [kind(t) for t in checks.trials] == ["running", "running", "surplus", "surplus"]
    assert hpo.results(options.where, "s")["winners"][0]["confirmed"] is None
