"""The studies in a storage: which trial is next, the trials of dead workers, and what the trials cost.

Every trial has the user attribute ``draw``, the number of its point. A trial that was interrupted or lost with its
worker is queued again under the same draw, and so is a trial that a rung promotes to more rounds. All of them run in
the folder of their config, so that they continue from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from fs_lowrank import Config, UserError
from fs_lowrank.data import load_raw
from fs_lowrank.data.stored import StoredFrame
from fs_lowrank.jobs.locks import exclusive
from fs_lowrank.methods import revisions
from fs_lowrank.runs.chance import Chance
from fs_lowrank.versions import SCHEMA

from .objectives import OBJECTIVES
from .settings import META, Settings, make_sampler, settings_of
from .space import decoded, encode
from .storage import CONFIRM, set_attribute, trial_of

#: seconds between a worker's signs of life, and without one until a worker on another machine is considered dead
BEAT, STALE = 30.0, 600.0
#: how often a trial is started again after its worker died
RETRIES = 2
#: the user attribute with ``revisions``: of a study's base config, and of the config of each trial that ran
REVISIONS = "fs_lowrank_revisions"
#: the attribute of a study that holds what ``data_of`` gave when it was started
DATA = "fs_lowrank_data"
#: what is added up over trials
BUDGET = ("rounds", "client_steps", "uplink_bytes", "downlink_bytes", "seconds")


# -- the study ------------------------------------------------------------------------------------------


def create(storage: optuna.storages.BaseStorage, name: str, settings: Settings) -> optuna.Study:
    """Create the study of that name, or continue it.

    Raises:
        UserError: the study was started with another space, config or setting, or with methods that have since changed.
    """
    directions = [OBJECTIVES[n] for n in settings.objectives]
    if name not in optuna.get_all_study_names(storage):
        try:
            optuna.create_study(study_name=name, storage=storage, directions=directions)
        except optuna.exceptions.DuplicatedStudyError:
            time.sleep(1)  # another machine is creating it
    study = optuna.load_study(study_name=name, storage=storage)
    attributes = study.user_attrs.keys()
    if META not in attributes and attributes <= {REVISIONS, "schema"} and not study.get_trials(deepcopy=False):
        # It is new, or the process that made it was ended, by a full disk perhaps, before it had written this.
        if changed := revisions(settings.base):
            study.set_user_attr(REVISIONS, changed)
        study.set_user_attr("schema", SCHEMA)
        study.set_metric_names(list(settings.objectives))
        study.set_user_attr(META, settings.to_dict())
    optuna.create_study(study_name=name + CONFIRM, storage=storage, directions=directions[:1], load_if_exists=True)
    then = settings_of(study)
    if keys := _different(then.space, settings.to_dict()["space"]):
        raise UserError(
            f"the study {name} searches another space (differs in {', '.join(keys)}); "
            "one study has one space: name another study"
        )
    keys = _different(then.base.decisive(), settings.base.decisive())
    options = [f.name for f in dataclasses.fields(Settings) if f.name not in ("config", "space")]
    keys += [o for o in options if getattr(then, o) != getattr(settings, o)]
    if keys:
        raise UserError(f"the study {name} was started with another {', '.join(keys)}; name another study")
    _check_revisions(study, settings)
    return study


def _different(old: Mapping, new: Mapping) -> list[str]:
    return sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))


def _check_revisions(study: optuna.Study, settings: Settings) -> None:
    """Compare the revisions of every point that has run, and of the base config, with today's.

    Raises:
        UserError: a method computed something else then, so its figures cannot be compared with new ones.
    """
    of_study, base = study.user_attrs.get(REVISIONS, {}), settings.base
    ran = {  # draw -> the revisions then, and the point; trials of older versions have no revisions of their own
        draw_of(t): (t.user_attrs.get(REVISIONS, of_study), decoded(t.params))
        for t in study.get_trials(deepcopy=False)
        if t.params and kind(t) in ("complete", "pruned", "interrupted", "lost")
    }
    for then, point in [(of_study, {}), *ran.values()]:
        if then != (now := revisions(base.replace(point))):
            raise UserError(
                f"the study {study.study_name} was started with another revision of "
                f"{', '.join(_different(then, now))}, which computed something else (see CHANGELOG.md); "
                "name another study"
            )


def data_of(config: Config) -> str:
    """A hash of the rows that the config reads, before they are split; it is the same for every seed and machine.

    The texts of arrow data stay on disk and are left out. Empty if the data cannot be read, which the trials report.
    """
    try:
        raw = load_raw(config.data, origin=config.source, task=config.model.task)
    except UserError:
        return ""
    parts = {name: getattr(raw, name) for name in ("train", "validation", "test")}
    stored = {name: part.kept.reset_index() for name, part in parts.items() if isinstance(part, StoredFrame)}
    # The fingerprint of arrow data is by the times of files, which differ between machines.
    return dataclasses.replace(raw, **stored, fingerprint="").fingerprint if stored else raw.fingerprint


def check_data(study: optuna.Study, found: str) -> None:
    """Keep what ``data_of`` has found with the study, or compare it with what is kept.

    Raises:
        UserError: the data are others than those that the trials so far have used.
    """
    then = study.user_attrs.get(DATA)
    if found and not then:
        study.set_user_attr(DATA, found)
    elif found and found != then:
        raise UserError(
            f"the study {study.study_name} was started with other data than are now at data.type = "
            f"{settings_of(study).base.data.type!r}, so new values cannot be compared with its own; put the data "
            "back, or name another study"
        )


def enqueue_grid(study: optuna.Study, points: Sequence[Mapping[str, Any]]) -> None:
    """Queue every point of the grid that was not queued before."""
    queued = {t.user_attrs.get("draw") for t in study.get_trials(deepcopy=False)}
    for draw, point in enumerate(points):
        if draw not in queued:
            study.enqueue_trial({k: encode(v) for k, v in point.items()}, user_attrs={"draw": draw})


# -- trials ---------------------------------------------------------------------------------------------


def worker_identity() -> dict[str, str | int]:
    """This process: ``host``, ``pid``, and ``born``, the time of its start."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}


def _born(pid: int) -> str:
    """When a process started, which tells it from a later process with the same number; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except OSError:
            pass
        return "unknown"


def is_dead(trial: FrozenTrial, now: float, stale: float = STALE) -> bool:
    """Whether the worker of a running trial is dead: by its process on this machine, by its silence on another."""
    worker = trial.user_attrs.get("worker")
    if worker and worker["host"] == socket.gethostname():
        return _born(worker["pid"]) != worker["born"]
    began = trial.datetime_start.timestamp() if trial.datetime_start else now
    return now - trial.user_attrs.get("beat", began) > (stale if worker else 60)


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the same point again; it continues from its checkpoint."""
    kept = {k: v for k, v in trial.user_attrs.items() if k in ("draw", "rung", "of", "seed")}
    kept.setdefault("draw", trial.number)
    kept["retry"] = trial.user_attrs.get("retry", 0) + (trial.user_attrs.get("kind") == "lost")
    study.enqueue_trial(trial.params or trial.system_attrs.get("fixed_params", {}), user_attrs=kept)


def fail(study: optuna.Study, trial: FrozenTrial, kind: str, reason: str) -> None:
    """End a trial as failed, with its reason. A trial that has ended already stays as it is."""
    set_attribute(study, trial, "kind", kind)
    set_attribute(study, trial, "reason", reason)
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def reap(study: optuna.Study, say=lambda text: None) -> int:
    """End the running trials of dead workers and queue them again, and so those that ended without being queued again.

    Returns:
        How many trials of dead workers there were.
    """
    count = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if not is_dead(trial, time.time()):
            continue
        tries = trial.user_attrs.get("retry", 0)
        again = tries < RETRIES
        try:
            fail(study, trial, "lost", "its worker died" + ("" if again else f", {tries + 1} times in all"))
        except (ValueError, RuntimeError):
            continue  # another machine ended it first
        count += 1
        if again:
            trial.user_attrs["kind"] = "lost"
            requeue(study, trial)
        say(
            f"{study.study_name} #{trial.number}: its worker died; "
            f"{'queued again' if again else 'given up after ' + str(tries + 1) + ' times'}"
        )
    for trial in _forgotten(study.get_trials(deepcopy=False)):
        requeue(study, trial)
        say(f"{study.study_name} #{trial.number}: it was {kind(trial)}, and had not been queued again; it is now")
    return count


def _forgotten(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The interrupted and lost trials after which nothing waits, runs or has ended: the process that was to queue them
    again was ended before it had, or its line was cut off the journal.
    """
    last: dict[tuple, FrozenTrial] = {}
    settled = set()
    for trial in trials:
        run = run_of(trial)
        if kind(trial) in ("complete", "pruned", "running", "waiting"):
            settled.add(run)
        if kind(trial) != "surplus":
            last[run] = trial
    return [
        trial
        for run, trial in last.items()
        if run not in settled and kind(trial) in ("interrupted", "lost") and not given_up(trial)
    ]


def kind(trial: FrozenTrial) -> str:
    """``complete``, ``pruned``, ``running``, ``waiting``, ``failed``, ``interrupted``, ``lost`` or ``surplus``."""
    if trial.state == TrialState.FAIL:
        reason = str(trial.user_attrs.get("kind", "error"))
        return reason if reason in ("interrupted", "lost", "surplus") else "failed"
    return trial.state.name.lower()


def given_up(trial: FrozenTrial) -> bool:
    """Whether the trial was lost with its worker for the last time."""
    return kind(trial) == "lost" and trial.user_attrs.get("retry", 0) >= RETRIES


def draw_of(trial: FrozenTrial | optuna.Trial) -> int:
    """The number of the trial's point."""
    return trial.user_attrs.get("draw", trial.number)


def run_of(trial: FrozenTrial | optuna.Trial) -> tuple:
    """What a trial runs, which is the same for a trial that repeats it: its point and rung, or its winner and seed."""
    attrs = trial.user_attrs
    return draw_of(trial), attrs.get("rung", 0), attrs.get("of"), attrs.get("seed")


def trials_before(study: optuna.Study, trial: optuna.Trial) -> list[FrozenTrial]:
    """The trials of a study with lower numbers than ``trial``."""
    return [t for t in study.get_trials(deepcopy=False) if t.number < trial.number]


def taken(trial: optuna.Trial, before: Sequence[FrozenTrial]) -> bool:
    """Whether one of the trials ``before`` runs, or has run, the same.

    Workers on several machines share no lock, so that two of them may queue a run, or take it, at the same time.
    """
    return any(run_of(t) == run_of(trial) and kind(t) in ("running", "complete", "pruned") for t in before)


def budget(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """What the trials cost, including those that were pruned, failed or interrupted."""
    total = dict.fromkeys(BUDGET, 0)
    for trial in trials:
        for key, value in trial.user_attrs.get("budget", {}).items():
            total[key] += value
    started = [t for t in trials if t.state != TrialState.WAITING and kind(t) != "surplus"]
    return {"trials": len(started), **total}


def value_on_rung(trial: FrozenTrial, objective: str) -> float:
    """The value of a trial on a rung; where its accuracy is not above chance, that of chance, as for a pruner."""
    value, chance, name = trial.user_attrs["value"], trial.user_attrs.get("chance"), objective.removeprefix("val_")
    if chance is None or name not in ("acc", "f1", "matthews"):
        return value
    return Chance(**chance).reported(name, {"acc": trial.user_attrs["metrics"]["val_acc"], name: value})


@dataclass
class Queue:
    """Decides which trial of a study is next.

    Args:
        wanted: number of points to try in total. folder: of the study; its lock is held while a trial is chosen.
        limit: client-steps after which no trial starts.
    """

    study: optuna.Study
    settings: Settings
    wanted: int
    folder: Path
    limit: float | None = None
    say: Any = field(default=lambda text: None)

    def next(self, stop=lambda: False) -> optuna.Trial | str:
        """A trial to run; ``wait`` while trials of other workers run; or ``done``."""
        with exclusive(self.folder / "queue.lock", stop):
            reap(self.study, self.say)
            trials = self.study.get_trials(deepcopy=False)
            if self.limit is not None and budget(trials)["client_steps"] >= self.limit:
                return "done"
            states = [kind(t) for t in trials]
            running = "running" in states
            if "waiting" not in states:
                fresh = len({draw_of(t) for t in trials}) < self.wanted and self.settings.sampler != "grid"
                if not fresh and not self._promote(trials):
                    return "wait" if running else "done"
            trial = self._ask(trials)
        return trial if trial is not None else "wait"

    def _ask(self, trials: Sequence[FrozenTrial]) -> optuna.Trial | None:
        drawn = len({draw_of(t) for t in trials})
        self.study.sampler = make_sampler(self.settings, self.wanted, drawn)
        trial = self.study.ask()
        trial.set_user_attr("worker", worker_identity())
        trial.set_user_attr("beat", time.time())
        before, new = trials_before(self.study, trial), "draw" not in trial.user_attrs
        full = new and (self.settings.sampler == "grid" or len({draw_of(t) for t in before}) >= self.wanted)
        if full or taken(trial, before):
            fail(self.study, trial_of(self.study, trial.number), "surplus", "another worker runs this point")
            return None
        if new:
            trial.set_user_attr("draw", trial.number)
        return trial

    def _promote(self, trials: Sequence[FrozenTrial]) -> bool:
        """Queue the best points of the highest rung that is complete for the next rung; False if there are none.

        Where the last of them has an accuracy of chance, so do others that are as good, and all of them go on.
        """
        rungs, sign = self.settings.rungs, -1 if OBJECTIVES[self.settings.objectives[0]] == "maximize" else 1
        planned, promoted = None, False
        for rung in range(len(rungs) - 1):
            on_rung = [t for t in trials if t.user_attrs.get("rung", 0) == rung]
            done = {draw_of(t): t for t in on_rung if kind(t) in ("pruned", "complete") and "value" in t.user_attrs}
            ended = {draw_of(t) for t in on_rung if kind(t) in ("pruned", "complete", "failed") or given_up(t)}
            draws = {draw_of(t) for t in on_rung if kind(t) != "surplus"} if planned is None else planned
            if draws - ended or not done:
                break
            score = {d: sign * value_on_rung(t, self.settings.objectives[0]) for d, t in done.items()}
            best = sorted(done, key=lambda d: (score[d], d))
            last = best[max(1, len(best) * rungs[rung] // rungs[rung + 1]) - 1]
            planned = set(best[: best.index(last) + 1])
            if score[last] != sign * done[last].user_attrs["value"]:  # it has learned nothing, as others have
                planned = {d for d in done if score[d] <= score[last]}
            above = {draw_of(t) for t in trials if t.user_attrs.get("rung", 0) == rung + 1}
            for draw in sorted(planned - above):
                self.study.enqueue_trial(done[draw].params, user_attrs={"draw": draw, "rung": rung + 1})
                promoted = True
            if promoted:
                return True
        return False


def front(study: optuna.Study) -> list[FrozenTrial]:
    """The best trial; with several objectives the Pareto front, ordered by the first objective."""
    complete = [t for t in study.get_trials(deepcopy=False) if t.state == TrialState.COMPLETE and t.values]
    signs = [-1 if OBJECTIVES[n] == "maximize" else 1 for n in settings_of(study).objectives]
    cost = {t.number: tuple(s * v for s, v in zip(signs, t.values)) for t in complete}
    ordered = sorted(complete, key=lambda t: (cost[t.number], t.number))
    if len(signs) == 1:
        return ordered[:1]
    kept: list[FrozenTrial] = []
    for trial in ordered:
        mine = cost[trial.number]
        if not any(all(a <= b for a, b in zip(cost[k.number], mine)) for k in kept):
            kept.append(trial)
    return kept
