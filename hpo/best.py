"""The results of a study: its winner, the winner's runs on fresh seeds, the cost, and the winner's config file."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from fs_lowrank import Config, UserError, __version__
from fs_lowrank.errors import hint
from fs_lowrank.jobs.files import cannot_read, from_json
from fs_lowrank.runs.chance import Chance
from fs_lowrank.runs.summary import for_people, human_bytes, shown_name
from fs_lowrank.versions import SCHEMA, check_schema

from .objectives import WATCHED, metric_of, one_test_set
from .search import budget, drawn, failure_text, failures, front, kind, reason_of
from .settings import settings_of, space_of
from .space import at_an_end, decoded
from .storage import CONFIRM, load_study, open_storage, quiet

_HEADER = "# hpo: "


def spread(values: list[float]) -> dict[str, Any]:
    """``mean``, ``std`` (with n - 1; None for one value) and the ``values``."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "values": values}


def spread_text(value: Mapping[str, Any], digits: int = 3) -> str:
    """What ``spread`` returns as ``mean ± std``."""
    return f"{value['mean']:.{digits}f}" + (f" ± {value['std']:.{digits}f}" if value["std"] is not None else "")


def confirmation(storage: BaseStorage, study: optuna.Study, winner: FrozenTrial) -> dict[str, Any] | None:
    """The metrics of a winner's config on fresh seeds; None before a seed is complete or has failed."""
    name = f"{study.study_name}{CONFIRM}{winner.number}"
    if name not in optuna.get_all_study_names(storage):
        return None
    trials = load_study(storage, name).get_trials(deepcopy=False)
    done = {t.params["seed"]: t.user_attrs["metrics"] for t in trials if kind(t) == "complete"}
    failed, measured = failures(trials), [done[seed] for seed in sorted(done)]
    if not done and not failed:
        return None
    names = sorted(n for n in (measured or [{}])[0] if n.startswith(("val_", "test_")))
    return {
        "seeds": sorted(done),
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
    said = [f"{key} {point[key]:g} is the {'largest' if end > 0 else 'smallest'}" for key, end in ends.items()]
    return f"{' and '.join(said)} that was tried, so a better value may lie beyond" if said else ""


def summary(storage: BaseStorage, name: str) -> dict[str, Any]:
    """A study as plain data: the number of its trials by kind, its winners, its budget, its failures."""
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
        "objectives": list(settings.objectives),
        "language": settings.base.is_language,
        "sampler": settings.sampler,
        "pruner": settings.pruner,
        "seeds": settings.seeds,
        "space": settings.space,
        "config": settings.base.fingerprint(),
        "trials": dict(Counter(map(kind, trials))),
        "points": drawn(trials),
        "budget": budget(trials),
        "winners": winners,
        "tried": sorted(points_of(study), key=json.dumps),
        "failed": [reason_of(t) for t in failed],
        "failures": [
            (t.number, failure_text(t), decoded(t.params)) for t in trials if kind(t) == "failed" or t in failed
        ],
    }


def points_of(study: optuna.Study) -> list[dict[str, Any]]:
    """The points that have a value, each with that of its first objective as ``value``.

    Of a pruned trial it is the last one measured, not what it has reported, which may be the level of chance. A point
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


def choose(found: dict, trial: int | None = None, unconfirmed: bool = False, unlearned: bool = False) -> dict[str, Any]:
    """The winner of a ``summary`` to write.

    Args:
        found: what ``summary`` returns.
        trial: the number of a trial on the Pareto front.
        unconfirmed: also a winner that was not run on all of its fresh seeds.
        unlearned: also a winner at or below the majority class.

    Raises:
        UserError: there is no winner, there are several, or it was not run on fresh seeds, or has learned nothing.
    """
    winners, name = found["winners"], found["study"]
    if not winners:
        raise UserError(
            f"the study {name} has no complete trial yet ({_counts(found['trials'])}); continue the search with the "
            "command that began it"
        )
    fits: list[dict[str, Any]] = [w for w in winners if trial in (None, w["trial"])]
    if len(fits) != 1:
        numbers = ", ".join(str(w["trial"]) for w in winners)
        raise UserError(f"choose one of the trials on the Pareto front of {name} with --trial: {numbers}")
    winner, check = fits[0], fits[0]["confirmed"] or {"failed": [], "open": 1}
    if winner["nothing_learned"] and not unlearned:
        raise UserError(
            f"the best trial of {name}: {winner['nothing_learned']}; search other values, more rounds or more data, or "
            "write it as it is with --unlearned"
        )
    if check["failed"] and not unconfirmed:
        raise UserError(
            f"the best trial of {name} failed on {len(check['failed'])} of its fresh seeds: {check['failed'][0]}; run "
            "these again with --retry-failed, search safer values, or write it as it is with --unconfirmed"
        )
    if check["open"] and not unconfirmed:
        raise UserError(
            f"the best trial of {name} was not yet run on all of its fresh seeds; continue the search with the "
            "command that began it, or write it as it is with --unconfirmed"
        )
    return winner


def config_of(storage: BaseStorage, found: dict, winner: dict) -> Config:
    """The winner's config: the study's own with the values of the winner's point.

    If it stops early, it does so by the metric that has stopped its trials.
    """
    base = one_test_set(settings_of(load_study(storage, found["study"])).base)
    config = base.replace({**winner["point"], "outdir": f"runs/best/{found['study']}", "expname": ""})
    return config.replace({WATCHED: metric_of(found["objectives"])}) if config.early_stop.patience else config


def header(found: dict, winner: dict) -> str:
    """The comment at the top of a winner's config file; its last line holds the same as JSON."""
    language = found["language"]
    shown = ", ".join(f"{n} {v:.6g}" for n, v in for_people(winner["values"], language).items())
    lines = [
        f"# Found by `fs-lowrank hpo tune` (fs-lowrank {__version__}): study {found['study']}, "
        f"trial {winner['trial']}, {shown}",
        f"# at {', '.join(f'{k} = {v}' for k, v in winner['point'].items())}",
    ]
    check = winner["confirmed"]
    if check and check["seeds"]:
        lines.append(
            f"# on {len(check['seeds'])} fresh seeds ({check['seeds'][0]} to {check['seeds'][-1]}): "
            + ", ".join(f"{shown_name(n, language)} {spread_text(v, 4)}" for n, v in check["metrics"].items())
            + (f"; {len(check['failed'])} more failed" if check["failed"] else "")
        )
        lines.append(f"# cost of the fresh seeds: {budget_text(check['budget'])}")
    else:
        failed = f" ({len(check['failed'])} of these runs failed)" if check else ""
        lines.append(f"# NOT run on fresh seeds{failed}: the value is the search's own, and may be luck")
    lines += [f"# {winner[said]}" for said in ("nothing_learned", "at_end") if winner[said]]
    lines.append(f"# cost of the search: {budget_text(found['budget'])} ({_counts(found['trials'])})")
    plain = {"schema": SCHEMA} | {
        k: found[k] for k in ("study", "objectives", "sampler", "pruner", "seeds", "budget", "trials")
    }
    plain.update({k: winner[k] for k in ("trial", "point", "values", "confirmed")})
    return "\n".join([*lines, _HEADER + json.dumps(plain), ""])


def read_header(path: str | Path) -> dict[str, Any] | None:
    """What a config file says about the search that found it, with its ``budget``; None for any other config file.

    Raises:
        UserError: the file cannot be read, or what it says of the search is damaged.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        at_top = itertools.takewhile(lambda line: line.startswith("#"), lines)
        said = next((line for line in at_top if line.startswith(_HEADER)), None)
        header: dict[str, Any] | None = from_json(said.removeprefix(_HEADER)) if said else None
    except (OSError, ValueError) as error:
        raise cannot_read(path, error, f"write it again with: {hint('hpo', 'best')}") from error
    check_schema(header or {}, path)
    return header


def budget_text(cost: dict) -> str:
    """A budget in words."""
    return (
        f"{cost['trials']} trials, {cost['rounds']} rounds, {cost['client_steps']:,} client-steps, "
        f"{human_bytes(cost['uplink_bytes'])} up, {human_bytes(cost['downlink_bytes'])} down, "
        f"{cost['seconds']:.0f} s"
    )


def _counts(counts: dict) -> str:
    return ", ".join(f"{n} {k}" for k, n in sorted(counts.items())) or "none"
