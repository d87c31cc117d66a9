"""One trial: runs the config at a point with ``fs_lowrank.run``, reports every round, prunes, and counts the cost."""

from __future__ import annotations

import math
import os
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna

import fs_lowrank
from fs_lowrank import Config, UserError
from fs_lowrank.jobs.files import disk_error
from fs_lowrank.jobs.locks import exclusive
from fs_lowrank.jobs.shell import in_one_line, write_traceback
from fs_lowrank.methods import revisions
from fs_lowrank.rounds.site import method_of
from fs_lowrank.runs.chance import Chance
from fs_lowrank.runs.checkpoint import saved_rounds
from fs_lowrank.runs.records import flat_metrics, read_records
from fs_lowrank.runs.split import read_split
from fs_lowrank.training import steps_taken

from .objectives import WATCHED, metric_of, one_test_set
from .settings import Settings

_BYTES = ("uplink_bytes", "downlink_bytes")


class Failed(Exception):
    """The trial has no value; ``kind`` is ``nan``, ``memory``, ``error``, ``interrupted`` or ``disk``."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def explain(error: BaseException) -> Failed:
    """The exception of a run as a kind of failure and a reason."""
    text = str(error) if isinstance(error, UserError) else in_one_line(error)
    low = text.lower()
    if isinstance(error, MemoryError) or "out of memory" in low or "outofmemory" in low or "can't allocate" in low:
        return Failed("memory", text)
    if any(word in low.replace(",", " ").replace(":", " ").split() for word in ("nan", "inf", "nans")):
        return Failed("nan", text)
    return Failed("error", text)


def trial_config(base: Config, point: Mapping, metric: str, folder: Path, seed: int, test: bool = False) -> Config:
    """The config of one run of a trial, in a folder that is named after all that decides its result."""
    changes = {
        **point,
        "seed": seed,
        "expname": "",
        "eval.split": ["val", "test"] if test else ["val"],
        WATCHED: metric,
        "lowrank.checkpoint_freq": 1,  # wherever a trial ends, it can be continued or repeated from there
        "lowrank.keep_checkpoints": 1,
        "lowrank.save_merged": False,
        "lowrank.pictures": False,
        "eval.save_best": False,
    }
    if not test:  # neither is an objective, and both may use the test data
        changes |= {"eval.client_scores": False, "eval.generate.freq": 0}
    config = one_test_set(base).replace(changes)
    if test and not config.early_stop.patience:
        config = config.replace({"eval.freq": 0})  # after the last round only: the test data are evaluated once
    changed = [f"{name.replace(' ', '-')}-{revision}" for name, revision in sorted(revisions(config).items())]
    return config.replace(outdir=str(folder / "_".join([config.fingerprint(), *changed])))


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The records of a run up to its last checkpoint, from which it continues."""
    saved = saved_rounds(folder / "checkpoint")
    return read_records(folder / "rounds.jsonl", up_to=max(saved)) if saved else []


class Runner:
    """Runs the trials of one study.

    Args:
        settings: of the study.
        folder: of the study; each run has a folder of its own in its ``trials``.
        stopping: called often; True ends the running trial.
        overrides: config keys of this worker's device.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        stopping: Callable[[], bool] = lambda: False,
        overrides: Mapping | None = None,
    ):
        self.settings, self.folder, self.stopping = settings, folder, stopping
        self.base = settings.base.replace(overrides or {})
        self.metric = metric_of(settings.objectives)

    def run(
        self,
        trial: optuna.Trial,
        point: Mapping,
        *,
        report: bool = True,
        seeds: list[int] | None = None,
        test: bool = False,
    ) -> dict[str, float]:
        """Run the config at ``point``, once for each of ``seeds``; returns the means of its metrics by name.

        Args:
            report: report each evaluation of the first seed's run to the trial, and let the pruner stop it.
            seeds: default: as many as the study averages, from the config's own on.
            test: evaluate the test data after the last round.

        Raises:
            Failed: the trial has no value, or ``stopping`` returned True, or the disk is full or broken. The trial's
                attributes have the kind and the reason, and the file with the traceback of an error that no user can
                cause.
            optuna.TrialPruned: the pruner has stopped it.
        """
        seeds = seeds or [self.settings.base.seed + i for i in range(self.settings.seeds)]
        cost, by_seed, pruned = _Cost(trial), dict[str, list[float]](), False
        trial.set_user_attr("kind", "")  # of the trial that this one repeats
        trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
        try:
            for seed in seeds:
                metrics, pruned = self._one(trial, point, seed, report and seed == seeds[0], test, cost)
                for name, value in metrics.items():
                    by_seed.setdefault(name, []).append(value)
                if pruned:
                    break
        except (Exception, KeyboardInterrupt) as error:
            raise self._failure(trial, error) from error
        finally:
            cost.save()
        means = {n: statistics.fmean(v) for n, v in by_seed.items()}
        trial.set_user_attr("metrics", means)
        trial.set_user_attr("by_seed", by_seed)
        if pruned:
            raise optuna.TrialPruned
        return means

    def _failure(self, trial: optuna.Trial, error: BaseException) -> Failed:
        """The error to raise for one of a run; the trial keeps its kind and reason."""
        disk = disk_error(error) if isinstance(error, Exception) else None
        if disk:
            failure = Failed("disk", str(disk))
        elif isinstance(error, KeyboardInterrupt):
            failure = Failed("interrupted", "the search was stopped")
        else:
            failure = error if isinstance(error, Failed) else explain(error)
        trial.set_user_attr("kind", failure.kind)
        trial.set_user_attr("reason", str(failure))
        if failure.kind == "error" and not isinstance(error, (UserError, Failed)):
            trial.set_user_attr("traceback", str(write_traceback(error, self.folder)))
        return failure

    def _one(self, trial, point, seed, report, test, cost) -> tuple[dict[str, float], bool]:
        """The metrics of one run, and whether it is pruned; it continues an earlier one in its folder."""
        config = trial_config(self.base, point, self.metric, self.folder / "trials", seed, test)
        folder, rounds = Path(config.outdir), config.federate.total_round_num
        with exclusive(folder.parent / f"{folder.name}.lock", self.stopping):
            history, pruned = history_of(folder), False
            for record in list(history):  # of a run that continues: the pruner sees all its rounds
                if pruned := self._see(trial, record, report, folder):
                    history = history[: record["round"]]
                    break
            if len(history) < rounds and not pruned:
                pruned = self._train(trial, config, history, report, cost)
        last = next((r["metrics"] for r in reversed(history) if "val" in r["metrics"]), None)
        metrics = flat_metrics(last or {})
        if self.metric not in metrics:
            raise Failed("error", f"the run gives no {self.metric}, but {', '.join(sorted(metrics)) or 'nothing'}")
        steps = _Steps(config)
        metrics.update(
            client_steps=sum(map(steps, history)),
            rounds=len(history),
            **{k: sum(r[k] for r in history) for k in _BYTES},
        )
        return metrics, pruned

    def _train(self, trial, config, history, report, cost) -> bool:
        """Run to the end, or until the trial is pruned, which it returns; new records are appended to ``history``."""
        steps, rounds, pruned = _Steps(config), config.federate.total_round_num, False

        def on_client(*_) -> None:
            if self.stopping():
                raise KeyboardInterrupt

        def on_round(record: dict) -> bool:
            nonlocal pruned
            history.append(record)
            cost.add(record, steps(record))
            pruned = self._see(trial, record, report, Path(config.outdir))
            if self.stopping() and record["round"] < rounds and not pruned:
                raise KeyboardInterrupt
            return pruned

        try:
            callbacks = {"on_round": on_round, "on_client": on_client}
            fs_lowrank.run(config, self.settings.engine, resume="auto", progress=False, **callbacks)
        finally:
            for name in ("adapter", "model"):  # large, and not needed: a run of the winner's config writes its own
                shutil.rmtree(Path(config.outdir) / name, ignore_errors=True)
        return pruned

    def _see(self, trial: optuna.Trial, record: dict, report: bool, folder: Path) -> bool:
        """Report a round's metric; returns whether the trial is to be pruned."""
        metrics = record["metrics"].get("val", {})
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise Failed("nan", f"val_{name} is {value} after round {record['round']}")
        name = self.metric.removeprefix("val_")
        if not report or name not in metrics:
            return False
        if "chance" not in trial.user_attrs and (chance := Chance.of_run(folder)):
            trial.set_user_attr("chance", chance.to_dict())
        if len(self.settings.objectives) > 1:
            return False
        prunes, known = self.settings.rungs or self.settings.pruner != "none", trial.user_attrs.get("chance")
        trial.report(Chance(**known).reported(name, metrics) if known and prunes else metrics[name], record["round"])
        # A run that is complete stays so.
        return record["round"] < self.base.federate.total_round_num and trial.should_prune()


class _Steps:
    """The total number of local steps, in all phases, of the clients whose updates counted in a round."""

    def __init__(self, config: Config):
        self.config, self.method = config, method_of(config)
        self.sizes: list[int] | None = None

    def __call__(self, record: dict) -> int:
        steps = 0
        for client in record["clients"]:
            config, phases = self.config.of_client(client), self.method.phases(record["round"], client)
            if self.sizes is None and config.train.batch_or_epoch == "epoch":
                self.sizes = read_split(Path(self.config.outdir))["sizes"].tolist()
            steps += steps_taken(self.sizes[client - 1] if self.sizes else 0, phases, config)
        return steps


class _Cost:
    """The cost of a trial, stored after every round, so that a killed trial is counted too."""

    def __init__(self, trial: optuna.Trial):
        self.trial, self.started = trial, time.perf_counter()
        self.total = Counter(dict.fromkeys(("rounds", "client_steps", *_BYTES), 0))
        self.save()

    def add(self, record: dict, steps: int) -> None:
        self.total.update({"rounds": 1, "client_steps": steps, **{k: record[k] for k in _BYTES}})
        self.save()

    def save(self) -> None:
        seconds = round(time.perf_counter() - self.started, 2)
        self.trial.set_user_attr("budget", {**self.total, "seconds": seconds})
