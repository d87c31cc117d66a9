"""A study in Optuna's storage: its creation, its trials by kind, and their cost.

A trial that was interrupted, or lost with its worker, is queued again by Optuna's retry callback. Its run has a folder
named after its configuration, so it continues from the checkpoint there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from fs_lowrank import Config, UserError
from fs_lowrank.declared import methods
from fs_lowrank.versions import SCHEMA

from .objectives import OBJECTIVES
from .settings import META, Settings, settings_of
from .space import encode
from .storage import AGAIN, CONFIRM

#: the attribute of a study with the revisions of its methods
REVISIONS = "fs_lowrank_revisions"
#: the attribute of a study with the result of ``data_of`` at its start
DATA = "fs_lowrank_data"
#: the costs that are added up over trials
BUDGET = ("rounds", "client_steps", "uplink_bytes", "downlink_bytes", "seconds")


def create(storage: BaseStorage, name: str, settings: Settings, data: str = "") -> optuna.Study:
    """Create the study of that name, or continue it.

    Args:
        data: a hash of the data that it searches with (``data_of``); empty if it is not known.

    Raises:
        UserError: the study was started with another space, config or option, other data, or methods that have since
            changed.
    """
    directions = [OBJECTIVES[n] for n in settings.objectives]
    study = optuna.create_study(study_name=name, storage=storage, directions=directions, load_if_exists=True)
    if META not in study.user_attrs and not study.get_trials(deepcopy=False):
        study.set_metric_names(list(settings.objectives))
        attributes = {REVISIONS: _revisions(settings), DATA: data, "schema": SCHEMA, META: settings.to_dict()}
        for key, value in attributes.items():
            study.set_user_attr(key, value)
    original, stored = settings_of(study), study.user_attrs
    old = {"data": data and stored.get(DATA), **_named(stored.get(REVISIONS, {})), **original.decisive()}
    new = {"data": stored.get(DATA) and data, **_named(_revisions(settings)), **settings.decisive()}
    if changed := [label for label in {**old, **new} if old.get(label) != new.get(label)]:
        raise UserError(
            f"the study {name} was started with another {', '.join(changed)}, so new values cannot be compared with "
            "its own; name another study"
        )
    return study


def _named(revisions: Mapping[str, int]) -> dict[str, int]:
    return {f"revision of {name}": number for name, number in revisions.items()}


def _revisions(settings: Settings) -> dict[str, int]:
    """The revisions above 1 of the methods and server optimizers of the base config, and of the searched values."""
    revisions, base = methods().revisions, settings.base
    numbers = dict(revisions(base))
    listed = [(k, v) for k, kinds in settings.space.items() for kind in ("grid", "choice") for v in kinds.get(kind, ())]
    for key, value in listed:
        with suppress(UserError):  # a value that is valid only beside others
            numbers |= revisions(base.replace({key: value}))
    return numbers


def data_of(config: Config) -> str:
    """A hash of the rows that the config reads, before they are split; it is the same for every seed and machine.

    Empty if the data cannot be read, which the trials report.
    """
    from fs_lowrank.data import load_raw

    try:
        return load_raw(config.data, origin=config.source, task=config.model.task).fingerprint
    except UserError:
        return ""


def enqueue(study: optuna.Study, points: Sequence[Mapping[str, Any]]) -> None:
    """Queue each point that the study does not have yet."""
    for point in points:
        study.enqueue_trial({key: encode(value) for key, value in point.items()}, skip_if_exists=True)


def retry_failed(study: optuna.Study) -> None:
    """Queue each point once more if all its trials have failed."""
    for trial in failures(study.get_trials(deepcopy=False)):
        AGAIN(study, trial)


def fresh_seeds(study: optuna.Study, storage: BaseStorage, trial: FrozenTrial) -> optuna.Study:
    """The study of the runs of a winner on fresh seeds; made if there is none."""
    name, direction = f"{study.study_name}{CONFIRM}{trial.number}", OBJECTIVES[settings_of(study).objectives[0]]
    return optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)


# -- trials ---------------------------------------------------------------------------------------------


def kind(trial: FrozenTrial) -> str:
    """``complete``, ``pruned``, ``running``, ``waiting``, ``failed``, ``interrupted`` or ``lost``."""
    if trial.state != TrialState.FAIL:
        return trial.state.name.lower()
    stored = str(trial.user_attrs.get("kind") or "lost")
    return {"disk": "interrupted"}.get(stored, stored if stored in ("interrupted", "lost") else "failed")


def reason_of(trial: FrozenTrial) -> tuple[str, str]:
    """Why a trial has failed: ``nan``, ``memory``, ``error`` or ``lost``, and a sentence."""
    return trial.user_attrs.get("kind") or "lost", trial.user_attrs.get("reason", "its worker died")


def failure_text(trial: FrozenTrial) -> str:
    """How a trial has failed, and after an unexpected error the file to report."""
    report = trial.user_attrs.get("traceback")
    return "failed ({}): {}".format(*reason_of(trial)) + (f"; please report it with {report}" if report else "")


def point_count(trials: Sequence[FrozenTrial]) -> int:
    """The number of points of a study: its trials without repetitions of another trial."""
    return sum("failed_trial" not in t.system_attrs for t in trials)


def failures(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have failed, or were lost, and that no other trial repeats."""
    repeated = {number for t in trials for number in t.system_attrs.get("retry_history", ())}
    return [t for t in trials if kind(t) in ("failed", "lost") and t.number not in repeated]


def budget(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """The cost of the trials, including pruned, failed and interrupted ones."""
    started = [t for t in trials if kind(t) != "waiting"]
    spent = [t.user_attrs.get("budget", {}) for t in started]
    return {"trials": len(started), **{key: sum(cost.get(key, 0) for cost in spent) for key in BUDGET}}


def front(study: optuna.Study) -> list[FrozenTrial]:
    """The best trial; with several objectives the Pareto front, ordered by the first objective."""
    objectives = settings_of(study).objectives
    signs = [-1 if OBJECTIVES[n] == "maximize" else 1 for n in objectives]
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    best = complete if len(signs) == 1 else study.best_trials
    ordered = sorted(best, key=lambda t: ([s * v for s, v in zip(signs, t.values)], _loss(t), t.number))
    if len(signs) == 1:
        return ordered[:1]
    return list({tuple(t.values): t for t in reversed(ordered)}.values())[::-1]


def _loss(trial: FrozenTrial) -> float:
    """The validation loss, which orders trials with equal objectives."""
    return float(trial.user_attrs.get("metrics", {}).get("val_loss", 0.0))
