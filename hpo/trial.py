"""One trial: runs the config at a point with ``fs_lowrank.run``, reports every round, prunes, and counts the cost."""

from __future__ import annotations

import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

from .search import BEAT, REVISIONS
from .settings import Settings

#: the key of the metric that stops a run early
WATCHED = "eval.best_res_update_round_wise_key"


class Stopped(Exception):
    """The search was told to stop; the trial continues when the search does."""


class Failed(Exception):
    """The trial has no value; ``kind`` is ``nan``, ``memory`` or ``error``."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass
class Outcome:
    """The result of a trial: its metrics by name (means over its seeds), and whether it was pruned."""

    metrics: dict[str, float] = field(default_factory=dict)
    by_seed: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0
    pruned: bool = False


def explain(error: BaseException) -> Failed:
    """The exception of a run as a kind of failure and a reason."""
    text = str(error) if isinstance(error, UserError) else in_one_line(error)
    low = text.lower()
    if isinstance(error, MemoryError) or "out of memory" in low or "outofmemory" in low or "can't allocate" in low:
        return Failed("memory", text)
    if any(word in low.replace(",", " ").replace(":", " ").split() for word in ("nan", "inf", "nans")):
        return Failed("nan", text)
    return Failed("error", text)


def one_test_set(base: Config) -> Config:
    """``base`` with one test set for all seeds (``lowrank.test_seed``), if the test set is split off the training rows.

    With a test set by seed, rows that the search has chosen by would be in the test sets of the fresh seeds.
    """
    cut = base.data.splits[2] and base.lowrank.test_seed < 0
    return base.replace({"lowrank.test_seed": base.seed}) if cut else base


def metric_of(objectives: Sequence[str]) -> str:
    """The first objective on validation data, by which a trial is pruned and its run stops early."""
    return next(name for name in objectives if name.startswith("val"))


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
        say: prints a line.
        overrides: config keys of this worker's device.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        stopping: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda text: None,
        overrides: Mapping | None = None,
    ):
        self.settings, self.folder, self.stopping, self.say = settings, folder, stopping, say
        self.base = settings.base.replace(overrides or {})
        self.metric = metric_of(settings.objectives)

    def run(
        self,
        trial: optuna.Trial,
        point: Mapping,
        *,
        target: int | None = None,
        report: bool = True,
        seeds: list[int] | None = None,
        test: bool = False,
    ) -> Outcome:
        """Run the config at ``point`` for ``target`` rounds (default: all), once for each of ``seeds``.

        Args:
            report: report each evaluation of the first seed's run to the trial, and let the pruner stop it.
            seeds: default: as many as the study averages, from the config's own on.
            test: evaluate the test data after the last round.

        Raises:
            Stopped: ``stopping`` returned True.
            Failed: the trial has no value. The traceback of an error that no user can cause is in the file that the
                trial's attribute ``traceback`` names.
            RunFailed: the disk is full or broken.
        """
        seeds = seeds or [self.settings.base.seed + i for i in range(self.settings.seeds)]
        cost = _Cost(trial)
        outcome = Outcome()
        stop_beating = _beat(trial)
        try:
            for index, seed in enumerate(seeds):
                self._one(trial, point, seed, target, report and index == 0, test, cost, outcome)
                if outcome.pruned:
                    break
        except (Stopped, Failed):
            raise
        except KeyboardInterrupt:
            raise Stopped from None
        except Exception as error:
            if disk := disk_error(error):
                raise disk from error
            failure = explain(error)
            if failure.kind == "error" and not isinstance(error, UserError):
                trial.set_user_attr("traceback", str(write_traceback(error, self.folder)))
            raise failure from error
        finally:
            stop_beating()
            cost.save()
        outcome.metrics = {n: statistics.fmean(v) for n, v in outcome.by_seed.items()}
        return outcome

    def _one(self, trial, point, seed, target, report, test, cost, outcome) -> None:
        config = trial_config(self.base, point, self.metric, self.folder / "trials", seed, test)
        if changed := revisions(config):
            trial.set_user_attr(REVISIONS, changed)
        folder = Path(config.outdir)
        target = min(target or config.federate.total_round_num, config.federate.total_round_num)
        with exclusive(folder.parent / f"{folder.name}.lock", self.stopping):
            history = history_of(folder)[:target]
            for record in history:  # of a run that continues: the pruner sees all its rounds
                if self._see(trial, record, report, folder):
                    outcome.pruned, target = True, record["round"]
                    break
            history = history[:target]
            if len(history) < target and not outcome.pruned:
                history = self._train(trial, config, history, target, report, cost, outcome)
        last = next((r["metrics"] for r in reversed(history) if "val" in r["metrics"]), None)
        if last is None:
            raise Failed(
                "error",
                "the run evaluated no validation data; give data.splits a share for them, and set "
                "federate.make_global_eval True",
            )
        metrics = flat_metrics(last)
        steps = _Steps(config)
        metrics.update(
            client_steps=sum(map(steps, history)),
            rounds=len(history),
            **{k: sum(r[k] for r in history) for k in ("uplink_bytes", "downlink_bytes")},
        )
        if self.metric not in metrics:
            raise Failed("error", f"the run gives no {self.metric}, but {', '.join(sorted(metrics))}")
        outcome.rounds = len(history)
        for name, value in metrics.items():
            outcome.by_seed.setdefault(name, []).append(value)

    def _train(self, trial, config, history, target, report, cost, outcome) -> list[dict[str, Any]]:
        history, steps = list(history), _Steps(config)

        def on_client(*_) -> None:
            if self.stopping():
                raise Stopped

        def on_round(record: dict) -> bool:
            history.append(record)
            cost.add(record, steps(record))
            if self._see(trial, record, report, Path(config.outdir)):
                outcome.pruned = True
            if self.stopping() and record["round"] < target and not outcome.pruned:
                raise Stopped
            return outcome.pruned or record["round"] >= target

        try:
            callbacks = {"on_round": on_round, "on_client": on_client}
            fs_lowrank.run(config, self.settings.engine, resume="auto", progress=False, **callbacks)
        finally:
            for name in ("adapter", "model"):  # large, and not needed: a run of the winner's config writes its own
                shutil.rmtree(Path(config.outdir) / name, ignore_errors=True)
        return history

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
        if self.settings.pruner == "none":
            trial.report(metrics[name], record["round"])
            return False
        known = trial.user_attrs.get("chance")
        reported = Chance(**known).reported(name, metrics) if known else metrics[name]
        trial.report(reported, record["round"])
        if reported != metrics[name]:  # for pictures, which show what was measured
            measured = trial.user_attrs.get("measured", {})
            trial.set_user_attr("measured", {**measured, str(record["round"]): metrics[name]})
        prune = trial.should_prune()
        return prune and record["round"] < self.base.federate.total_round_num  # a run that is complete stays so


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
        self.total = dict.fromkeys(("rounds", "client_steps", "uplink_bytes", "downlink_bytes"), 0)

    def add(self, record: dict, steps: int) -> None:
        self.total["rounds"] += 1
        self.total["client_steps"] += steps
        self.total["uplink_bytes"] += record["uplink_bytes"]
        self.total["downlink_bytes"] += record["downlink_bytes"]
        self.save()

    def save(self) -> None:
        seconds = round(time.perf_counter() - self.started, 2)
        self.trial.set_user_attr("budget", {**self.total, "seconds": seconds})


def _beat(trial: optuna.Trial) -> Callable[[], None]:
    """Store a sign of life every ``BEAT`` seconds until the returned function is called."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            try:
                trial.set_user_attr("beat", time.time())
            except Exception:  # the storage failed; the trial's own writes report it
                continue

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(timeout=5)

    return stop
