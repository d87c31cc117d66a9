"""A worker: runs trials of the studies until none is left. Optuna gives the trials out and ends those of the dead."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial

from fs_lowrank import RunFailed, UserError
from fs_lowrank.jobs.crew import stop_signals
from fs_lowrank.jobs.kept import keeping
from fs_lowrank.jobs.shell import INTERRUPTED, OK

from .objectives import OBJECTIVES
from .search import (
    budget,
    drawn,
    enqueue,
    failure_text,
    fresh_seeds,
    front,
    kind,
    number_text,
    point_text,
    reason_of,
)
from .settings import make_pruner, make_sampler, settings_of, space_of
from .space import decoded
from .storage import AGAIN, load_study, open_storage, quiet, storage_errors
from .trial import Failed, Runner

#: the difference between the first fresh seed and the config's seed
FRESH = 1000
#: seconds between two looks at the trials of other workers
PAUSE = 0.5


@quiet()
def work(
    where: str,
    wanted: Mapping[str, int],
    folder: str | Path,
    *,
    confirm: int = 3,
    limit: float | None = None,
    overrides: Mapping | None = None,
    alone: bool = True,
    stopping: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print,
) -> None:
    """Run trials until the studies are done, or ``stopping`` is True.

    Args:
        where: the storage.
        wanted: number of points of each study, which must exist.
        folder: of all studies; each has a folder of its own name in it.
        confirm: number of fresh seeds for each winner.
        limit: client-steps after which no trial of a study starts.
        overrides: config keys of this worker's device.
        alone: there is no other worker. Several draw other points each, and not the same ones in each search.
        stopping: called often; True ends the running trial and the worker.
        say: prints a line.

    Raises:
        UserError: the storage failed.
    """
    # All trials start from the same model, and most from the same data.
    with storage_errors(where), keeping():
        storage = open_storage(where)
        studies = [load_study(storage, name) for name in wanted]
        searches = [
            _Search(storage, s, Runner(settings_of(s), Path(folder, s.study_name), stopping, overrides), say)
            for s in studies
        ]
        while not stopping():
            # The study whose trials took the least time is next, so that all studies share a time limit.
            for search in sorted(searches, key=_Search.spent):
                state = search.step(wanted[search.study.study_name], confirm, limit, 0 if alone else os.getpid())
                if state == "ran":
                    break
            else:
                if not any(search.waits for search in searches):
                    return
                time.sleep(PAUSE)


class _Search:
    """One study, as a worker goes through it.

    Attributes:
        waits: whether trials of other workers still run.
    """

    def __init__(self, storage: RDBStorage, study: optuna.Study, runner: Runner, say: Callable[[str], None]):
        self.storage, self.study, self.runner, self.say = storage, study, runner, say
        self.settings, self.space = runner.settings, space_of(self.study)
        self.study.pruner = make_pruner(self.settings)
        self.seconds, self.waits, self._seen = 0.0, False, set[int]()

    def spent(self) -> float:
        """Seconds of the study's trials so far, of all workers, and of this worker's on fresh seeds."""
        return budget(self.study.get_trials(deepcopy=False))["seconds"] + self.seconds

    def step(self, wanted: int, confirm: int, limit: float | None, salt: int) -> str:
        """Run one trial if there is one: ``ran``, else ``wait`` or ``done``."""
        trials = self.study.get_trials(deepcopy=False)
        spent = limit is not None and budget(trials)["client_steps"] >= limit
        state = "done" if spent else self._next(self.study, wanted, self._point, salt)
        if state != "done" or not confirm:
            return state
        for winner in front(self.study):
            study = fresh_seeds(self.study, self.storage, winner)
            first = self.settings.base.seed + FRESH
            enqueue(study, [{"seed": seed} for seed in range(first, first + confirm)])
            point, began = decoded(winner.params), time.perf_counter()
            state = self._next(study, 0, lambda trial, point=point: self._seed(trial, point), salt)
            self.seconds += time.perf_counter() - began
            if state != "done":
                return state
        return "done"

    def _next(self, study: optuna.Study, wanted: int, objective: Callable, salt: int) -> str:
        optuna.storages.fail_stale_trials(study)
        trials = study.get_trials(deepcopy=False)
        kinds = [kind(t) for t in trials]
        running = {t._trial_id for t in trials if kind(t) == "running"}
        # Optuna waits for ever for a trial whose worker died before its first heartbeat, so each is given one.
        for unseen in running - self._seen:
            self.storage.record_heartbeat(unseen)
        self._seen |= running
        self.waits = bool(running)
        draws = self.settings.sampler != "grid" and study is self.study and drawn(trials) < wanted
        if "waiting" not in kinds and not draws:
            return "wait" if self.waits else "done"
        seed = (self.settings.sampler_seed * 1_000_003 + len(trials) + 7919 * salt) % 2**32
        study.sampler = make_sampler(self.settings, wanted, seed)

        def queued(trial: optuna.Trial) -> float | list[float]:
            if not (draws or trial.params or trial.user_attrs.get("queued")):  # another worker has taken the last one
                trial.set_user_attr("kind", "surplus")
                raise optuna.TrialPruned
            return objective(trial)

        study.optimize(queued, n_trials=1, catch=(Failed,), callbacks=[self._ended])
        self._hopeless(study)
        return "ran"

    def _point(self, trial: optuna.Trial) -> list[float]:
        """Optuna's objective: the values of a point that its sampler has drawn, or that was queued."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Optuna wants no text "json:…" as a choice
            point = self.space.suggest(trial, self.settings.base)
        metrics = self.runner.run(trial, point)
        return [metrics[name] for name in self.settings.objectives]

    def _seed(self, trial: optuna.Trial, point: Mapping) -> float:
        """Optuna's objective of a winner's fresh seeds: its first objective."""
        seed = trial.suggest_int("seed", 0, 2**31 - 1)
        base = self.settings.base
        test = "test" in base.eval.split or base.data.splits[2] > 0
        return self.runner.run(trial, point, report=False, seeds=[seed], test=test)[self.runner.metric]

    def _ended(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Say how a trial has ended; one that was interrupted is queued again.

        Raises:
            RunFailed: the disk is full or broken.
        """
        how, label = kind(trial), f"{study.study_name} #{trial.number} ({point_text(decoded(trial.params))})"
        if how == "interrupted":
            AGAIN(study, trial)
            if trial.user_attrs["kind"] == "disk":
                raise RunFailed(trial.user_attrs["reason"])
            self.say(f"{label}: interrupted; it continues when the search does")
        elif how == "failed":
            self.say(f"{label}: {''.join(failure_text(trial))}")
        elif how != "surplus":
            names = self.settings.objectives
            if study is not self.study:
                names = (*names, *(n for n in trial.user_attrs["metrics"] if n.replace("test_", "val_") in OBJECTIVES))
            shown = "  ".join(f"{n} {number_text(v)}" for n, v in trial.user_attrs["metrics"].items() if n in names)
            self.say(f"{label}:{' pruned,' * (how == 'pruned')} {shown}")

    def _hopeless(self, study: optuna.Study) -> None:
        """End the search if at least three trials ended and all of them failed with the same error."""
        ended = [t for t in study.get_trials(deepcopy=False) if kind(t) in ("failed", "complete", "pruned")]
        if len(ended) >= 3 and len({reason_of(t) for t in ended}) == 1 and reason_of(ended[0])[0] == "error":
            raise UserError(
                f"{study.study_name}: all {len(ended)} trials failed in the same way: {reason_of(ended[0])[1]}; "
                "correct that, and continue with retry_failed=True"
            )


def main(options: dict) -> int:
    """Run ``work`` with ``options``, which are plain data, as a process of ``run_workers``; returns the exit code."""
    with stop_signals() as stopped, suppress(KeyboardInterrupt):
        work(**options, stopping=lambda: bool(stopped), say=lambda text: print(text, flush=True))
        return INTERRUPTED if stopped else OK
    return INTERRUPTED
