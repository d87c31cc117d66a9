"""One search over one storage: which trial comes next, what became of dead workers, what it cost.

Every trial carries ``draw``, the number of its point. A trial that was interrupted or lost with its worker is
put in the queue again under the same draw, and so is one that a rung promotes to more rounds; all of them run in
the folder of their config, so that they go on from its checkpoint.
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

from fs_lowrank import UserError
from fs_lowrank.jobs.locks import exclusive
from fs_lowrank.methods import revisions
from fs_lowrank.versions import SCHEMA

from .settings import META, OBJECTIVES, Settings, make_sampler, settings_of
from .space import encode
from .storage import CONFIRM, set_attribute, trial_of

#: seconds between signs of life, and without one until a worker of another machine counts as dead
BEAT, STALE = 30.0, 600.0
#: how often a trial is begun again that its worker did not survive
RETRIES = 2
#: where a study keeps ``revisions`` of its config
REVISIONS = "fs_lowrank_revisions"
BUDGET = ("rounds", "client_steps", "uplink_bytes", "downlink_bytes", "seconds")


# -- the study ------------------------------------------------------------------------------------------


def create(storage, name: str, settings: Settings) -> optuna.Study:
    """The study of that name, made or continued.

    Raises:
        UserError: there is one that was started with another space, config or setting.
    """
    directions = [OBJECTIVES[n] for n in settings.objectives]
    if name not in optuna.get_all_study_names(storage):
        try:
            study = optuna.create_study(study_name=name, storage=storage, directions=directions)
            if found := revisions(settings.base):
                study.set_user_attr(REVISIONS, found)
            study.set_user_attr("schema", SCHEMA)
            study.set_user_attr(META, settings.to_dict())
            optuna.create_study(study_name=name + CONFIRM, storage=storage, directions=directions[:1])
            study.set_metric_names(list(settings.objectives))
        except optuna.exceptions.DuplicatedStudyError:
            time.sleep(1)  # another machine is making it
    study = optuna.load_study(study_name=name, storage=storage)
    # A search that was killed between the two leaves the first alone.
    optuna.create_study(study_name=name + CONFIRM, storage=storage, directions=directions[:1], load_if_exists=True)
    then = settings_of(study)
    if then.space != settings.to_dict()["space"]:
        keys = sorted(
            k
            for k in then.space.keys() | settings.space.keys()
            if then.space.get(k) != settings.to_dict()["space"].get(k)
        )
        raise UserError(
            f"the study {name} searches another space (differs in {', '.join(keys)}); "
            "one study has one space: name another with --study"
        )
    old, new = then.base.decisive(), settings.base.decisive()
    keys = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    keys += [
        "--" + f.name.replace("_", "-")
        for f in dataclasses.fields(Settings)
        if f.name not in ("config", "space") and getattr(then, f.name) != getattr(settings, f.name)
    ]
    if study.user_attrs.get(REVISIONS, {}) != revisions(settings.base):
        keys.append("revision of its method, which computed something else (see CHANGELOG.md)")
    if keys:
        raise UserError(f"the study {name} was started with another {', '.join(keys)}; name another with --study")
    return study


def enqueue_grid(study: optuna.Study, points: Sequence[Mapping[str, Any]]) -> None:
    """Queue every point of the grid that was not queued before."""
    there = {t.user_attrs.get("draw") for t in study.get_trials(deepcopy=False)}
    for draw, point in enumerate(points):
        if draw not in there:
            study.enqueue_trial({k: encode(v) for k, v in point.items()}, user_attrs={"draw": draw})


# -- trials ---------------------------------------------------------------------------------------------


def worker_identity() -> dict:
    return {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}


def _born(pid: int) -> str:
    """When a process started, which tells it from a later one of the same number; empty if there is none."""
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
    """Whether the worker of a running trial is gone: by its process on this machine, by its silence elsewhere."""
    worker = trial.user_attrs.get("worker")
    if worker and worker["host"] == socket.gethostname():
        return _born(worker["pid"]) != worker["born"]
    began = trial.datetime_start.timestamp() if trial.datetime_start else now
    return now - trial.user_attrs.get("beat", began) > (stale if worker else 60)


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """The same point again; it goes on from its checkpoint."""
    kept = {k: v for k, v in trial.user_attrs.items() if k in ("draw", "rung", "of", "seed")}
    kept.setdefault("draw", trial.number)
    kept["retry"] = trial.user_attrs.get("retry", 0) + (trial.user_attrs.get("kind") == "lost")
    study.enqueue_trial(trial.params or trial.system_attrs.get("fixed_params", {}), user_attrs=kept)


def fail(study: optuna.Study, trial: FrozenTrial, kind: str, reason: str) -> None:
    """End a trial as failed, with its reason; nothing happens if it has ended."""
    set_attribute(study, trial, "kind", kind)
    set_attribute(study, trial, "reason", reason)
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def reap(study: optuna.Study, say=lambda text: None) -> int:
    """Recognise the running trials of dead workers, and queue them again; returns how many there were."""
    found = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if not is_dead(trial, time.time()):
            continue
        tries = trial.user_attrs.get("retry", 0)
        again = tries < RETRIES
        try:
            fail(study, trial, "lost", "its worker died" + ("" if again else f", {tries + 1} times in all"))
        except (ValueError, RuntimeError):
            continue  # another machine was first
        found += 1
        if again:
            trial.user_attrs["kind"] = "lost"
            requeue(study, trial)
        say(
            f"{study.study_name} #{trial.number}: its worker died; "
            f"{'queued again' if again else 'given up after ' + str(tries + 1) + ' times'}"
        )
    return found


def kind(trial: FrozenTrial) -> str:
    """``complete``, ``pruned``, ``running``, ``waiting``, ``failed``, ``interrupted``, ``lost`` or ``surplus``."""
    if trial.state == TrialState.FAIL:
        found = trial.user_attrs.get("kind", "error")
        return found if found in ("interrupted", "lost", "surplus") else "failed"
    return {
        TrialState.COMPLETE: "complete",
        TrialState.PRUNED: "pruned",
        TrialState.RUNNING: "running",
        TrialState.WAITING: "waiting",
    }[trial.state]


def draw_of(trial: FrozenTrial) -> int:
    return trial.user_attrs.get("draw", trial.number)


def budget(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """What the trials cost, the pruned, failed and interrupted ones included."""
    total = dict.fromkeys(BUDGET, 0)
    for trial in trials:
        for key, value in trial.user_attrs.get("budget", {}).items():
            total[key] += value
    started = [t for t in trials if t.state != TrialState.WAITING and kind(t) != "surplus"]
    return {"trials": len(started), **total}


@dataclass
class Queue:
    """Which trial of a study is next.

    Args:
        wanted: points to try in all. limit: client-steps after which no trial starts.
    """

    study: optuna.Study
    settings: Settings
    wanted: int
    folder: Path
    limit: float | None = None
    say: Any = field(default=lambda text: None)

    def next(self, stop=lambda: False) -> optuna.Trial | str:
        """A trial to run; or ``wait``: others still run; or ``done``."""
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
        # Workers of several machines have no common lock: what one of them took in the same moment is dropped.
        before = [t for t in self.study.get_trials(deepcopy=False) if t.number < trial.number]
        attrs = trial.user_attrs
        if "draw" not in attrs:
            surplus = self.settings.sampler == "grid" or len({draw_of(t) for t in before}) >= self.wanted
        else:
            mine = attrs["draw"], attrs.get("rung", 0), attrs.get("retry", 0)
            surplus = any(
                (t.user_attrs.get("draw"), t.user_attrs.get("rung", 0), t.user_attrs.get("retry", 0)) == mine
                and kind(t) in ("running", "complete", "pruned")
                for t in before
            )
        if surplus:
            fail(self.study, trial_of(self.study, trial.number), "surplus", "another worker has this point")
            return None
        if "draw" not in attrs:
            trial.set_user_attr("draw", trial.number)
        return trial

    def _promote(self, trials: Sequence[FrozenTrial]) -> bool:
        """Queue the best of the highest rung that is complete for the next one; False if there are none."""
        rungs, sign = self.settings.rungs, -1 if OBJECTIVES[self.settings.objectives[0]] == "maximize" else 1
        planned, promoted = None, False
        for rung in range(len(rungs) - 1):
            there = [t for t in trials if t.user_attrs.get("rung", 0) == rung]
            done = {draw_of(t): t for t in there if kind(t) in ("pruned", "complete") and "value" in t.user_attrs}
            ended = {draw_of(t) for t in there if kind(t) in ("pruned", "complete", "failed")}
            ended |= {draw_of(t) for t in there if kind(t) == "lost" and t.user_attrs.get("retry", 0) >= RETRIES}
            draws = {draw_of(t) for t in there if kind(t) != "surplus"} if planned is None else planned
            if draws - ended or not done:
                break
            best = sorted(done, key=lambda d: (sign * done[d].user_attrs["value"], d))
            planned = set(best[: max(1, len(best) * rungs[rung] // rungs[rung + 1])])
            above = {draw_of(t) for t in trials if t.user_attrs.get("rung", 0) == rung + 1}
            for draw in sorted(planned - above):
                self.study.enqueue_trial(done[draw].params, user_attrs={"draw": draw, "rung": rung + 1})
                promoted = True
            if promoted:
                return True
        return False


def front(study: optuna.Study) -> list[FrozenTrial]:
    """The best trial, or with several objectives the Pareto front, by the first of them."""
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
