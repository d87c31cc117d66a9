"""A worker: runs trials of the studies until none is left."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import optuna
from optuna.trial import TrialState

from fs_lowrank import RunFailed, UserError
from fs_lowrank.jobs.crew import stop_signals
from fs_lowrank.jobs.kept import keeping
from fs_lowrank.jobs.locks import exclusive
from fs_lowrank.jobs.shell import INTERRUPTED, OK

from .errors import reported
from .objectives import OBJECTIVES
from .search import Queue, budget, draw_of, fail, front, kind, reap, requeue, taken, trials_before, worker_identity
from .settings import make_pruner, settings_of, space_of
from .space import decoded
from .storage import CONFIRM, load_study, open_storage, quiet, storage_errors, trial_of
from .trial import Failed, Runner, Stopped

#: the difference between the first fresh seed and the config's seed
FRESH = 1000


@quiet()
def work(
    where: str,
    names: list[str],
    folder: Path,
    *,
    wanted: Mapping[str, int],
    confirm: int = 3,
    limit: float | None = None,
    overrides: Mapping | None = None,
    stopping: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print,
) -> None:
    """Run trials until the studies are done, or ``stopping`` is True.

    Args:
        where: the storage.
        names: the studies, which must exist.
        folder: of all studies; each has a folder of its own name in it.
        wanted: number of points of each study.
        confirm: number of fresh seeds for each winner.
        limit: client-steps after which no trial of a study starts.
        overrides: config keys of this worker's device.
        stopping: called often; True ends the running trial and the worker.
        say: prints a line.

    Raises:
        UserError: the storage failed.
    """
    # All trials start from the same model, and most from the same data.
    with reported(folder), storage_errors(where), keeping():
        storage = open_storage(where)
        searches = [_Search(storage, n, folder / n, wanted[n], confirm, limit, overrides, stopping, say) for n in names]
        while not stopping():
            states = []
            # The study whose trials took the least time is next, so that all studies share a time limit.
            for search in sorted(searches, key=_Search.spent):
                states.append(search.step())
                if states[-1] == "ran":
                    break
            if all(state == "done" for state in states):
                return
            if states[-1] != "ran":
                time.sleep(0.2)


class _Search:
    """One study, as a worker goes through it."""

    def __init__(self, storage, name, folder, wanted, confirm, limit, overrides, stopping, say):
        self.study = load_study(storage, name)
        self.checks = load_study(storage, name + CONFIRM)
        settings = settings_of(self.study)
        self.study.pruner = make_pruner(settings)
        self.settings, self.space, self.base = settings, space_of(self.study), settings.base
        self.confirm, self.stopping, self.say, self.folder = confirm, stopping, say, folder
        self.runner = Runner(settings, folder, stopping, say, overrides)
        self.queue = Queue(self.study, settings, wanted, folder, limit, say)

    def spent(self) -> tuple[float, int]:
        """Seconds of the study's trials so far, those on fresh seeds included; and how many of its trials run."""
        trials = [t for study in (self.study, self.checks) for t in study.get_trials(deepcopy=False)]
        return budget(trials)["seconds"], sum(kind(t) == "running" for t in trials)

    def step(self) -> str:
        """Run one trial; returns ``ran``, ``wait`` or ``done``."""
        trial = self.queue.next(self.stopping)
        if trial == "done":
            return self._confirm()
        if trial == "wait":
            return "wait"
        self._trial(trial)
        return "ran"

    def _trial(self, trial: optuna.Trial) -> None:
        rungs, rung = self.settings.rungs, trial.user_attrs.get("rung", 0)
        target = rungs[rung] if rungs else None
        final = not rungs or rung == len(rungs) - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Optuna wants no text "json:…" as a choice
            point = self.space.suggest(trial, self.base)
        label = self._label(trial, point)
        self._guarded(
            self.study,
            trial,
            label,
            lambda: self._finish(trial, label, self.runner.run(trial, point, target=target, report=True), final),
        )

    def _finish(self, trial, label, outcome, final) -> None:
        names, metrics = self.settings.objectives, outcome.metrics
        trial.set_user_attr("metrics", metrics)
        trial.set_user_attr("by_seed", outcome.by_seed)
        values = [metrics[n] for n in names]
        if not outcome.pruned:
            trial.set_user_attr("value", values[0])
        complete = final and not outcome.pruned
        shown = "  ".join(f"{n} {_number(v)}" for n, v in zip(names, values))
        self._tell(
            self.study, trial, values if complete else None, TrialState.COMPLETE if complete else TrialState.PRUNED
        )
        how = "" if complete else " pruned," if outcome.pruned else " at this rung,"
        self.say(f"{label}:{how} {shown} after {outcome.rounds} rounds")

    def _tell(self, study, trial, values, state) -> None:
        if study.tell(trial.number, values, state=state, skip_if_finished=True).state != state:
            self.say(
                f"{study.study_name} #{trial.number}: another worker took this one for dead and ended the trial; "
                "its result is left out"
            )

    def _guarded(self, study, trial, label, run) -> None:
        frozen = lambda: trial_of(study, trial.number)  # noqa: E731
        try:
            run()
        except Stopped:
            fail(study, frozen(), "interrupted", "the search was stopped")
            requeue(study, frozen())
            self.say(f"{label}: interrupted; it continues when the search does")
        except Failed as failure:
            fail(study, frozen(), failure.kind, str(failure))
            path = frozen().user_attrs.get("traceback")
            report = f"; please report it with {path}" if path else ""
            self.say(f"{label}: failed ({failure.kind}): {failure}{report}")
            self._hopeless(study)
        except RunFailed as error:  # the disk, and so no failure of this point
            fail(study, frozen(), "interrupted", str(error))
            requeue(study, frozen())
            raise

    def _hopeless(self, study) -> None:
        """End the search if at least three trials ended and all of them failed with the same error."""
        ended = [t for t in study.get_trials(deepcopy=False) if kind(t) in ("failed", "complete", "pruned")]
        reasons = {(t.user_attrs.get("kind"), t.user_attrs.get("reason")) for t in ended}
        if len(ended) >= 3 and len(reasons) == 1 and next(iter(reasons))[0] == "error":
            raise UserError(
                f"{study.study_name}: all {len(ended)} trials failed in the same way: "
                f"{next(iter(reasons))[1]}; correct that, and continue with retry_failed=True"
            )

    def _label(self, trial, point) -> str:
        at = ", ".join(f"{k.rpartition('.')[2]} {_number(v)}" for k, v in point.items())
        again = " again" if trial.user_attrs.get("retry") else ""
        return f"{self.study.study_name} #{trial.number} ({at}){again}"

    # -- fresh seeds for the winner ----------------------------------------------------------------------

    def _confirm(self) -> str:
        winners = front(self.study)
        if not self.confirm or not winners:
            return "done"
        with exclusive(self.folder / "queue.lock", self.stopping):
            reap(self.checks, self.say)
            trials = self.checks.get_trials(deepcopy=False)
            first = self.base.seed + FRESH
            for winner in winners:
                there = {t.user_attrs.get("seed") for t in trials if t.user_attrs.get("of") == draw_of(winner)}
                for seed in range(first, first + self.confirm):
                    if seed not in there:
                        self.checks.enqueue_trial({}, user_attrs={"of": draw_of(winner), "seed": seed, "draw": seed})
            trials = self.checks.get_trials(deepcopy=False)
            kinds = [kind(t) for t in trials]
            if "waiting" not in kinds:
                return "wait" if "running" in kinds else "done"
            trial = self.checks.ask()
            trial.set_user_attr("worker", worker_identity())
        if "of" not in trial.user_attrs or taken(trial, trials_before(self.checks, trial)):
            fail(self.checks, trial_of(self.checks, trial.number), "surplus", "another worker runs this")
            return "wait"
        self._check(trial)
        return "ran"

    def _check(self, trial) -> None:
        of, seed = trial.user_attrs["of"], trial.user_attrs["seed"]
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        winner = next(t for t in complete if draw_of(t) == of)
        point = decoded(winner.params)
        test = has_test(self.base)
        label = f"{self._label(winner, point)}, seed {seed}"

        def run() -> None:
            outcome = self.runner.run(trial, point, report=False, seeds=[seed], test=test)
            trial.set_user_attr("metrics", outcome.metrics)
            self._tell(self.checks, trial, outcome.metrics[self.runner.metric], TrialState.COMPLETE)
            shown = "  ".join(
                f"{n} {_number(v)}"
                for n, v in outcome.metrics.items()
                if n.startswith(("val", "test")) and OBJECTIVES.get(n.replace("test", "val"))
            )
            self.say(f"{label}: {shown}")

        self._guarded(self.checks, trial, label, run)


def has_test(base) -> bool:
    """Whether there are test data for the runs on fresh seeds."""
    return "test" in base.eval.split or base.data.splits[2] > 0


def _number(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(options: dict) -> int:
    """Run ``work`` with ``options``, which are plain data, as a process of a ``Crew``; returns the exit code."""
    with stop_signals() as stopped:
        try:
            folder = Path(options.pop("folder"))
            work(**options, folder=folder, stopping=lambda: bool(stopped), say=lambda text: print(text, flush=True))
        except KeyboardInterrupt:
            return INTERRUPTED
    return INTERRUPTED if stopped else OK
