"""One trial: runs the config at a point with ``fs_lowrank.run``, reports every round, prunes, and counts the cost."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

import fs_lowrank
from fs_lowrank import Config, UserError
from fs_lowrank.jobs.files import disk_error
from fs_lowrank.jobs.locks import exclusive
from fs_lowrank.jobs.shell import in_one_line, write_traceback
from fs_lowrank.methods import revisions
from fs_lowrank.rounds.workspace import method_of
from fs_lowrank.runs.chance import Chance
from fs_lowrank.runs.checkpoint import saved_rounds
from fs_lowrank.runs.records import flat_metrics, read_records
from fs_lowrank.runs.split import read_data_json, read_split
from fs_lowrank.training import steps_taken

from .objectives import WATCHED, metric_of, one_test_set
from .settings import Settings

_BYTES = ("uplink_bytes", "downlink_bytes")


def explained(error: BaseException) -> tuple[str, str]:
    """The kind of an error of a run (``interrupted``, ``disk``, ``nan``, ``memory`` or ``error``), and the reason."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "the search was stopped"
    if disk := disk_error(error):
        return "disk", str(disk)
    text = str(error) if isinstance(error, UserError) else in_one_line(error)
    if isinstance(error, MemoryError) or re.search("out ?of ?memory|can't allocate", text, re.IGNORECASE):
        return "memory", text
    return "nan" if re.search(r"(?<![\w.])(nans?|inf|not finite)(?![\w.])", text, re.IGNORECASE) else "error", text


def trial_config(base: Config, point: Mapping, metric: str, folder: Path, seed: int, test: bool = False) -> Config:
    """The config of one run of a trial; the name of its folder has everything that decides its result."""
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
    labels = [f"{name.replace(' ', '-')}-{revision}" for name, revision in sorted(revisions(config).items())]
    return config.replace(outdir=str(folder / "_".join([config.fingerprint(), *labels])))


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The records of a run up to its last checkpoint, from which it continues."""
    saved = saved_rounds(folder / "checkpoint")
    return read_records(folder / "rounds.jsonl", up_to=max(saved)) if saved else []


def client_steps(config: Config, history: Sequence[Mapping[str, Any]]) -> int:
    """The total number of local steps, in all phases, of the clients whose updates counted in these rounds."""
    method, turns = method_of(config), [(r["round"], c, config.of_client(c)) for r in history for c in r["clients"]]
    epochs = any(settings.train.batch_or_epoch == "epoch" for *_, settings in turns)
    sizes = read_split(config.outdir)["sizes"].tolist() if epochs else None
    return sum(steps_taken(sizes[c - 1] if sizes else 0, method.phases(t, c), settings) for t, c, settings in turns)


@dataclass
class Job:
    """A trial for a process to run, with all that the process needs.

    Attributes:
        settings: of the study.
        folder: of the study; each run has a folder of its own in its ``trials``.
        trial: Optuna's, with its study and storage.
        point: the values of the searched keys.
        seed: one of a winner's fresh seeds, for which the test data are evaluated after the last round; None: the seeds
            over which the study averages, of which the first one's evaluations are reported to the trial.
        overrides: config keys of the process's device.
    """

    settings: Settings
    folder: Path
    trial: optuna.Trial
    point: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def run(self, stopping: Callable[[], object] = lambda: False) -> tuple[TrialState, list[float] | None]:
        """Run the config at the point for each seed; returns how the trial ends, with its values if it is complete.

        The trial's attributes have its metrics and cost; of a failed one the kind and the reason, and the file with the
        traceback of an error that no user can cause.

        Args:
            stopping: called often; True ends the run.
        """
        self.stopping, self.metric, trial = stopping, metric_of(self.settings.objectives), self.trial
        self.base = self.settings.base.replace(self.overrides)
        self.began, self.cost = time.perf_counter(), Counter(dict.fromkeys(("rounds", "client_steps", *_BYTES), 0))
        seeds = [self.base.seed + i for i in range(self.settings.seeds)] if self.seed is None else [self.seed]
        by_seed, pruned = dict[str, list[float]](), False
        trial.set_user_attr("kind", "")  # of the trial that this one repeats
        trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
        self._spend()
        try:
            for seed in seeds:
                metrics, pruned = self._run_seed(seed, self.seed is None and seed == seeds[0])
                for name, value in metrics.items():
                    by_seed.setdefault(name, []).append(value)
                if pruned:
                    break
        except (Exception, KeyboardInterrupt) as error:
            kind, reason = explained(error)
            if kind == "error" and not isinstance(error, UserError):
                trial.set_user_attr("traceback", str(write_traceback(error, self.folder)))
            trial.set_user_attr("kind", kind)
            trial.set_user_attr("reason", reason)
            return TrialState.FAIL, None
        finally:
            self._spend()
        means = {n: statistics.fmean(v) for n, v in by_seed.items()}
        trial.set_user_attr("metrics", means)
        trial.set_user_attr("by_seed", by_seed)
        if pruned:
            return TrialState.PRUNED, None
        return TrialState.COMPLETE, [
            means[n] for n in (self.settings.objectives if self.seed is None else (self.metric,))
        ]

    def _run_seed(self, seed: int, reports: bool) -> tuple[dict[str, float], bool]:
        """The metrics of one run, and whether it is pruned; it continues an earlier one in its folder."""
        config = trial_config(self.base, self.point, self.metric, self.folder / "trials", seed, self.seed is not None)
        folder, rounds = Path(config.outdir), config.federate.total_round_num
        with exclusive(folder.parent / f"{folder.name}.lock", self.stopping):
            history, pruned = history_of(folder), False
            for record in list(history):  # of a run that continues: the pruner sees all its rounds
                if pruned := self.prunes(record, folder, reports):
                    history = history[: record["round"]]
                    break
            if len(history) < rounds and not pruned:
                pruned = self._train(config, history, reports)
        last = next((r["metrics"] for r in reversed(history) if "val" in r["metrics"]), None)
        metrics = flat_metrics(last or {})
        if self.metric not in metrics:
            raise UserError(f"the run gives no {self.metric}, but {', '.join(sorted(metrics)) or 'nothing'}")
        metrics.update(client_steps=client_steps(config, history), rounds=len(history))
        return metrics | {k: sum(r[k] for r in history) for k in _BYTES}, pruned

    def _train(self, config: Config, history: list[dict[str, Any]], reports: bool) -> bool:
        """Run to the end, or until the trial is pruned, which it returns; new records are appended to ``history``."""
        pruned = False

        def on_client(*_: object) -> None:
            if self.stopping():
                raise KeyboardInterrupt

        def on_round(record: dict[str, Any]) -> bool:
            nonlocal pruned
            history.append(record)
            self._spend({"rounds": 1, "client_steps": client_steps(config, [record]), **{k: record[k] for k in _BYTES}})
            pruned = self.prunes(record, Path(config.outdir), reports)
            if record["round"] < config.federate.total_round_num and not pruned:
                on_client()
            return pruned

        try:
            callbacks = {"on_round": on_round, "on_client": on_client}
            fs_lowrank.run(config, self.settings.engine, resume="auto", progress=False, **callbacks)
        finally:
            for name in ("adapter", "model"):  # large, and not needed: a run of the winner's config writes its own
                shutil.rmtree(Path(config.outdir) / name, ignore_errors=True)
        return pruned

    def prunes(self, record: dict[str, Any], folder: Path, reports: bool = True) -> bool:
        """Report a round's metric to the trial; returns whether it is to be pruned."""
        trial, metrics = self.trial, record["metrics"].get("val", {})
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise UserError(f"val_{name} is {value} after round {record['round']}")
        name = metric_of(self.settings.objectives).removeprefix("val_")
        if not reports or name not in metrics:
            return False
        if "chance" not in trial.user_attrs and (chance := Chance.of_data(read_data_json(folder))):
            trial.set_user_attr("chance", asdict(chance))
        if len(self.settings.objectives) > 1:
            return False
        stored = trial.user_attrs.get("chance") if self.settings.pruner != "none" else None
        trial.report(Chance(**stored).reported(name, metrics) if stored else metrics[name], record["round"])
        # A run that is complete stays so.
        return record["round"] < self.settings.base.federate.total_round_num and trial.should_prune()

    def _spend(self, costs: Mapping[str, int] | None = None) -> None:
        """Store the cost of the trial, with ``costs``; after every round, so that a killed trial is counted too."""
        self.cost.update(costs or {})
        seconds = round(time.perf_counter() - self.began, 2)
        self.trial.set_user_attr("budget", {**self.cost, "seconds": seconds})
