"""A study as plain data: its winners, their runs on fresh seeds, and the cost."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from fs_lowrank import Config
from fs_lowrank.runs.chance import Chance

from .objectives import WATCHED, metric_of, one_test_set
from .search import budget, failure_text, failures, front, kind, point_count, reason_of
from .settings import Settings, settings_of, space_of
from .space import at_an_end, decoded
from .storage import CONFIRM, load_study, open_storage, quiet


def spread(values: list[float]) -> dict[str, Any]:
    """``mean``, ``std`` (with n - 1; None for one value) and the ``values``."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "values": values}


def confirmation(storage: BaseStorage, study: optuna.Study, winner: FrozenTrial) -> dict[str, Any] | None:
    """The metrics of a winner's config on fresh seeds; None before a seed is complete or has failed."""
    name = f"{study.study_name}{CONFIRM}{winner.number}"
    if name not in optuna.get_all_study_names(storage):
        return None
    trials = load_study(storage, name).get_trials(deepcopy=False)
    by_seed = {t.params["seed"]: t.user_attrs["metrics"] for t in trials if kind(t) == "complete"}
    failed, measured = failures(trials), [by_seed[seed] for seed in sorted(by_seed)]
    if not by_seed and not failed:
        return None
    names = sorted(n for n in (measured or [{}])[0] if n.startswith(("val_", "test_")))
    return {
        "seeds": sorted(by_seed),
        "failed": [reason_of(t)[1] for t in failed],
        "open": sum(kind(t) in ("waiting", "running") for t in trials),
        "metrics": {n: spread([metrics[n] for metrics in measured]) for n in names},
        "budget": budget(trials),
    }


def _at_an_end(point: Mapping[str, Any], study: optuna.Study) -> str:
    """A sentence that names the listed keys of a winning point whose value is the smallest or the largest tried."""
    listed = {p.key: p.values for p in space_of(study).parameters if p.values}
    tried = [*points_of(study), *({key: v} for key, values in listed.items() for v in values)]
    ends = at_an_end({key: v for key, v in point.items() if key in listed}, tried, settings_of(study).base)
    sentences = [f"{key} {point[key]:g} is the {'largest' if end > 0 else 'smallest'}" for key, end in ends.items()]
    return f"{' and '.join(sentences)} that was tried, so a better value may lie beyond" if sentences else ""


def summary(storage: BaseStorage, name: str) -> dict[str, Any]:
    """A study as plain data: its settings, the number of its trials by kind, its winners, its budget, its failures."""
    study = load_study(storage, name)
    settings, trials = settings_of(study), study.get_trials(deepcopy=False)
    winners, failed = [], failures(trials)
    for trial in front(study):
        metrics, confirmed = trial.user_attrs.get("metrics", {}), confirmation(storage, study, trial)
        chance, fresh = trial.user_attrs.get("chance"), (confirmed or {"metrics": {}})["metrics"].get("val_acc", {})
        accuracies = {"val_acc": metrics.get("val_acc"), "val_acc on fresh seeds": fresh.get("mean")}
        winners.append(
            {
                "trial": trial.number,
                "point": decoded(trial.params),
                "values": dict(zip(settings.objectives, trial.values)),
                "metrics": metrics,
                "by_seed": trial.user_attrs.get("by_seed", {}),
                "confirmed": confirmed,
                "chance": chance,
                "nothing_learned": Chance(**chance).verdict(accuracies) if chance else "",
                "at_end": _at_an_end(decoded(trial.params), study),
            }
        )
    return {
        "study": name,
        **settings.to_dict(),
        "language": settings.base.is_language,
        "trials": dict(Counter(map(kind, trials))),
        "points": point_count(trials),
        "budget": budget(trials),
        "winners": winners,
        "tried": sorted(points_of(study), key=json.dumps),
        "failed": [reason_of(t) for t in failed],
        "failures": [
            (t.number, failure_text(t), decoded(t.params)) for t in trials if kind(t) == "failed" or t in failed
        ],
    }


def points_of(study: optuna.Study) -> list[dict[str, Any]]:
    """The points that have a value, each with the value of its first objective as ``value``.

    For a pruned trial this is the last value measured, not the reported one, which may be the level of chance. A point
    that was tried again counts once, by its last trial.
    """
    first, points = settings_of(study).objectives[0], dict[str, dict[str, Any]]()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        point, metrics = decoded(trial.params), trial.user_attrs.get("metrics", {})
        if first in metrics:
            points[json.dumps(point)] = {**point, "value": metrics[first]}
    return list(points.values())


@quiet()
def results(where: str | Path, name: str) -> dict[str, Any]:
    """The results of a search as plain data.

    Args:
        where: the storage, as ``Search.where``.
        name: the study, as in ``Ended.studies``.

    Returns:
        ``winners``: the best trial, or the Pareto front, each with its ``point`` and ``values``, and with a sentence in
        ``nothing_learned`` if its accuracy is at or below the majority class, and in ``at_end`` if a value is the first
        or last of its grid; empty if no trial is complete.
        ``tried``: every point with its ``value``. ``failed``: kind (nan, memory, error, lost) and reason of each point
        of which every attempt failed. ``objectives``, ``budget``, ``trials`` and more: see ``summary``.

    Raises:
        UserError: there is no such storage.
    """
    return summary(open_storage(where), name)


def config_of(study: dict, winner: dict) -> Config:
    """The winner's config: the study's own with the values of the winner's point.

    If it stops early, it goes by the metric that has stopped its trials.
    """
    base = one_test_set(Settings.from_dict(study).base)
    config = base.replace({**winner["point"], "outdir": f"runs/best/{study['study']}", "expname": ""})
    return config.replace({WATCHED: metric_of(study["objectives"])}) if config.early_stop.patience else config
