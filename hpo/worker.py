"""The trials of a search: which is next, and how each has ended. Optuna stores them, and ends trials of dead commands.

The command asks Optuna for a trial, a process runs it and reports its rounds, and the command tells Optuna its end.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from fs_lowrank import RunFailed
from fs_lowrank.jobs.files import to_json, write_text
from fs_lowrank.jobs.workers import ON_ITS_GPU, PAUSE, stop_signals
from fs_lowrank.versions import SCHEMA

from . import storage as stored
from .best import number_text, point_text
from .objectives import OBJECTIVES, SUMMARY
from .search import budget, enqueue, failure_text, fresh_seeds, front, kind, point_count
from .settings import Search, make_pruner, make_sampler, settings_of, space_of
from .space import decoded
from .storage import AGAIN, CONFIRM, RETRY, load_study
from .summary import summary
from .trial import Job

#: the difference between the first fresh seed and the config's seed
FRESH = 1000


class Searches:
    """The studies of a search, as ``jobs.workers.hand_out`` has them run.

    Args:
        storage: the storage of the studies.
        wanted: number of points of each study.
        options: of the search; each study has a folder of its own name in its ``folder``.
        say: prints a line.
    """

    def __init__(
        self, storage: RDBStorage, wanted: Mapping[str, int], options: Search, say: Callable[..., Any] = print
    ):
        self.storage, self.wanted, self.options, self.say = storage, wanted, options, say
        self.folder = Path(options.folder)
        device = {"device": int(options.gpus[0])} if options.gpus and not options.workers else {}
        #: config keys of the processes' devices
        self.overrides = ON_ITS_GPU | device if options.gpus else {}
        self.studies = {name: load_study(storage, name) for name in wanted}
        self.settings = {name: settings_of(study) for name, study in self.studies.items()}
        #: the studies without a trial that waits or runs
        self.done: set[str] = set()
        #: trials that run for this command, and all that were seen to run, by their numbers in the storage
        self.running, self._seen = set[int](), set[int]()
        #: number of trials that have ended
        self.ended = sum(t.state.is_finished() for s in self.studies.values() for t in s.get_trials(deepcopy=False))
        for name in wanted:
            self._write_summary(name)

    @property
    def remaining(self) -> int:
        return len(self.studies) - len(self.done)

    def claim(self) -> Job | None:
        """The next trial, from the study that took the least time so far, so that all share a time limit."""
        spent = {name: budget(study.get_trials(deepcopy=False)) for name, study in self.studies.items()}
        for name in sorted(spent, key=lambda name: spent[name]["seconds"]):
            if name not in self.done and (job := self._next(name, spent[name]["client_steps"])):
                self._write_summary(name)
                return job
        return None

    def _write_summary(self, name: str) -> None:
        """Write the file of ``hpo status``, since Optuna takes seconds until it has opened its storage."""
        content = {"schema": SCHEMA, **summary(self.storage, name)}
        write_text(self.folder / name / SUMMARY, to_json(content), durable=False)

    def _next(self, name: str, steps: float) -> Job | None:
        """The next trial of a study, or of a winner of it on a fresh seed."""
        study, settings, folder = self.studies[name], self.settings[name], self.folder / name
        base, limit, count = settings.base, self.options.limit, self.options.confirm
        if (limit is None or steps < limit) and (trial := self._ask(study, settings, self.wanted[name])):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # Optuna wants no text "json:…" as a choice
                point = space_of(study).suggest(trial, base)
            return Job(settings, folder, trial, point, overrides=self.overrides)
        running = _is_running(study)
        for winner in front(study) if count and not running else ():
            fresh, first = fresh_seeds(study, self.storage, winner), base.seed + FRESH
            enqueue(fresh, [{"seed": seed} for seed in range(first, first + count)])
            if trial := self._ask(fresh, settings):
                seed = trial.suggest_int("seed", first, first + count - 1)
                return Job(settings, folder, trial, decoded(winner.params), seed, self.overrides)
            running = running or _is_running(fresh)
        if not running:
            self.done.add(name)
        return None

    def _ask(self, study: optuna.Study, settings: Any, wanted: int = 0) -> optuna.Trial | None:
        """A trial that waits in the queue, or that the sampler draws; None if there is none now."""
        optuna.storages.fail_stale_trials(study)
        trials = study.get_trials(deepcopy=False)
        # Optuna waits for ever for a trial whose command died before its first heartbeat, so each gets one.
        for unseen in {t._trial_id for t in trials if t.state == TrialState.RUNNING} - self._seen:
            self._beat(unseen)
        draws = wanted and settings.sampler != "grid" and point_count(trials) < wanted
        if not draws and all(t.state != TrialState.WAITING for t in trials):
            return None
        study.sampler = make_sampler(settings, wanted, (settings.sampler_seed * 1_000_003 + len(trials)) % 2**32)
        study.pruner = make_pruner(settings)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Heartbeat of storage", UserWarning)  # _beat gives it
            trial = study.ask()
        self._beat(trial._trial_id)
        self.running.add(trial._trial_id)
        return trial

    def _beat(self, trial: int) -> None:
        self.storage.record_heartbeat(trial)
        self._seen.add(trial)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """During the block the trials that run for this command have a heartbeat, and no other command repeats them."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(stored.HEARTBEAT):
                with suppress(Exception):  # the command itself meets a storage that cannot be reached
                    for trial in tuple(self.running):
                        self.storage.record_heartbeat(trial)

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def finish(self, job: Job, result: Any) -> None:
        """Tell Optuna how a trial has ended; one that was interrupted or lost is queued again.

        Args:
            result: of ``Job.run``; None: its process died; empty: it was stopped.
        Raises:
            RunFailed: the disk is full or broken.
        """
        number, study = job.trial._trial_id, job.trial.study
        self.running.discard(number)
        if not result:
            self.storage.set_trial_user_attr(number, "kind", "lost" if result is None else "interrupted")
        state, values = result or (TrialState.FAIL, None)
        trial = study.tell(job.trial, values, state, skip_if_finished=True)
        self._write_summary(study.study_name.partition(CONFIRM)[0])
        outcome, label = kind(trial), f"{study.study_name} #{trial.number} ({point_text(decoded(trial.params))})"
        self.ended += outcome not in ("interrupted", "lost")
        if outcome == "interrupted":
            AGAIN(study, trial)
            if trial.user_attrs["kind"] == "disk":
                raise RunFailed(trial.user_attrs["reason"])
            self.say(f"{label}: interrupted; it continues when the search does")
        elif outcome == "lost":
            RETRY(study, trial)
        elif outcome == "failed":
            self.say(f"{label}: {failure_text(trial)}")
        else:
            names = job.settings.objectives
            if job.seed is not None:
                names = (*names, *(n for n in trial.user_attrs["metrics"] if n.replace("test_", "val_") in OBJECTIVES))
            scores = "  ".join(f"{n} {number_text(v)}" for n, v in trial.user_attrs["metrics"].items() if n in names)
            self.say(f"{label}:{' pruned,' * (outcome == 'pruned')} {scores}")


def _is_running(study: optuna.Study) -> bool:
    return any(t.state == TrialState.RUNNING for t in study.get_trials(deepcopy=False))


def work(job: Job) -> Any:
    """Run a trial in a process of the search's; a signal ends it after a client."""
    with stop_signals() as stopped:
        return job.run(lambda: stopped)


def in_this_process(board: Searches, stop: Callable[[], str]) -> None:
    """As ``jobs.workers.hand_out``, without further processes."""
    while board.remaining and not stop():
        if job := board.claim():
            board.finish(job, job.run(stop))
        elif board.remaining:
            time.sleep(PAUSE)
