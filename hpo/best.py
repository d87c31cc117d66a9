"""What a study found: its winner, confirmed on fresh seeds, what that cost, and the config file of it."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import optuna

from fs_lowrank import Config, UserError, __version__
from fs_lowrank.jobs.files import replacing
from fs_lowrank.versions import SCHEMA, check_schema

from .search import budget, draw_of, front, kind
from .settings import settings_of
from .space import decoded
from .storage import CONFIRM, load_study, open_storage, quiet
from .trial import one_test_set

_HEADER = "# hpo: "


def spread(values: list[float]) -> dict:
    """Mean, standard deviation (of a sample; None for one value) and the values."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": values,
    }


def confirmation(storage, study: optuna.Study, trial) -> dict | None:
    """The winner's metrics on fresh seeds; None before there are any."""
    trials = [
        t
        for t in load_study(storage, study.study_name + CONFIRM).get_trials(deepcopy=False)
        if t.user_attrs.get("of") == draw_of(trial)
    ]
    done = sorted((t for t in trials if kind(t) == "complete"), key=lambda t: t.user_attrs["seed"])
    if not done:
        return None
    names = sorted(n for n in done[0].user_attrs["metrics"] if n.startswith(("val_", "test_")))
    return {
        "seeds": [t.user_attrs["seed"] for t in done],
        "failed": [t.user_attrs.get("reason") for t in trials if kind(t) == "failed"],
        "open": sum(kind(t) in ("waiting", "running") for t in trials),
        "metrics": {n: spread([t.user_attrs["metrics"][n] for t in done]) for n in names},
        "budget": budget(trials),
    }


def summary(storage, name: str) -> dict:
    """Everything about a study as plain data: its trials by kind, its winners, its budget."""
    study = load_study(storage, name)
    settings, trials = settings_of(study), study.get_trials(deepcopy=False)
    counts: dict[str, int] = {}
    for trial in trials:
        counts[kind(trial)] = counts.get(kind(trial), 0) + 1
    winners = []
    for trial in front(study):
        winners.append(
            {
                "trial": trial.number,
                "point": decoded(trial.params),
                "values": dict(zip(settings.objectives, trial.values)),
                "metrics": trial.user_attrs.get("metrics", {}),
                "by_seed": trial.user_attrs.get("by_seed", {}),
                "confirmed": confirmation(storage, study, trial),
            }
        )
    return {
        "study": name,
        "objectives": list(settings.objectives),
        "sampler": settings.sampler,
        "pruner": settings.pruner,
        "rungs": list(settings.rungs),
        "seeds": settings.seeds,
        "space": settings.space,
        "config": settings.base.fingerprint(),
        "trials": counts,
        "points": len({draw_of(t) for t in trials}),
        "budget": budget(trials),
        "winners": winners,
        "failures": [
            {
                "trial": t.number,
                "kind": t.user_attrs.get("kind"),
                "reason": t.user_attrs.get("reason"),
                "point": decoded(t.params),
            }
            for t in trials
            if kind(t) in ("failed", "lost")
        ],
    }


def failures(study) -> list[tuple[str, str]]:
    """Kind (nan, memory, error, lost) and reason of each trial that failed and that no other attempt made good."""
    trials = study.get_trials(deepcopy=False)
    good = {draw_of(t) for t in trials if kind(t) in ("complete", "pruned")}
    return list(
        {
            draw_of(t): (t.user_attrs.get("kind", "error"), t.user_attrs.get("reason", ""))
            for t in trials
            if kind(t) in ("failed", "lost") and draw_of(t) not in good
        }.values()
    )


@dataclass(frozen=True)
class Point:
    """A trial with a value, which is the last one reported where it was pruned."""

    number: int
    point: dict
    value: float
    complete: bool
    values: tuple[float, ...]


def points_of(study) -> list[Point]:
    """Every trial with a value, and of a point that was promoted the longest trial only."""
    found: dict = {}
    for trial in study.get_trials(deepcopy=False):
        if kind(trial) not in ("complete", "pruned"):
            continue
        complete = kind(trial) == "complete"
        reported = trial.intermediate_values
        value = trial.values[0] if complete else reported[max(reported)] if reported else None
        if value is not None:
            found[trial.user_attrs.get("draw", trial.number)] = Point(
                trial.number, decoded(trial.params), value, complete, tuple(trial.values or ())
            )
    return list(found.values())


@quiet()
def results(where: str, name: str) -> dict:
    """Everything that a search found, as plain data.

    Args:
        where: the storage, as ``Search.where``. name: the study, as in ``Ended.studies``.
    Returns:
        ``winners``: the best trial, or the Pareto front, each with its ``point`` and ``values``; empty if none was
        completed. ``tried``: every point with its ``value``. ``failed``: kind (nan, memory, error, lost) and reason of
        each trial that failed and that no other attempt made good. ``objectives``, ``budget``, ``trials`` and more.
    Raises:
        UserError: there is no such storage.
    """
    storage = open_storage(where)
    study = load_study(storage, name)
    tried = sorted(({**p.point, "value": p.value} for p in points_of(study)), key=json.dumps)
    return {**summary(storage, name), "tried": tried, "failed": failures(study)}


def choose(found: dict, trial: int | None = None, unconfirmed: bool = False) -> dict:
    """The winner to report.

    Raises:
        UserError: there is none, several, or it was not run on fresh seeds.
    """
    winners, name = found["winners"], found["study"]
    if not winners:
        raise UserError(
            f"the study {name} has no complete trial yet ({_counts(found['trials'])}); "
            "let `python -m hpo tune` go on, or see `python -m hpo status`"
        )
    if trial is not None:
        there = [w for w in winners if w["trial"] == trial]
        if not there:
            raise UserError(
                f"--trial {trial} is not on the front of {name}; there are: "
                f"{', '.join(str(w['trial']) for w in winners)}"
            )
        winners = there
    if len(winners) > 1:
        raise UserError(
            f"the study {name} has {len(winners)} trials on its Pareto front; choose one with --trial: "
            f"{', '.join(str(w['trial']) for w in winners)}"
        )
    check = winners[0]["confirmed"]
    if not unconfirmed and (check is None or check["open"]):
        raise UserError(
            f"the best trial of {name} was not yet run on all of its fresh seeds, so it may be luck; let "
            "`python -m hpo tune` finish, or write it as it is with --unconfirmed"
        )
    return winners[0]


def config_of(storage, found: dict, winner: dict) -> Config:
    """The config of the winner: the study's own with the winner's values."""
    base = one_test_set(settings_of(load_study(storage, found["study"])).base)
    return base.replace({**winner["point"], "outdir": f"runs/best/{found['study']}", "expname": ""})


def header(found: dict, winner: dict) -> str:
    """The comment above a winner's config; its last line is the same as JSON."""
    shown = ", ".join(f"{n} {v:.6g}" for n, v in winner["values"].items())
    lines = [
        f"# Found by `python -m hpo tune` (fs-lowrank {__version__}): study {found['study']}, "
        f"trial {winner['trial']}, {shown}",
        f"# at {', '.join(f'{k} = {v}' for k, v in winner['point'].items())}",
    ]
    check = winner["confirmed"]
    if check:
        parts = [
            f"{n} {v['mean']:.4f}" + (f" ± {v['std']:.4f}" if v["std"] is not None else "")
            for n, v in check["metrics"].items()
        ]
        lines.append(
            f"# on {len(check['seeds'])} fresh seeds ({check['seeds'][0]} to {check['seeds'][-1]}): "
            f"{', '.join(parts)}" + (f"; {len(check['failed'])} more failed" if check["failed"] else "")
        )
        lines.append(f"# cost of the fresh seeds: {budget_text(check['budget'])}")
    else:
        lines.append("# NOT run on fresh seeds: the value is that of the search, and may be luck")
    lines.append(f"# cost of the search: {budget_text(found['budget'])} ({_counts(found['trials'])})")
    plain = {"schema": SCHEMA} | {
        k: found[k] for k in ("study", "objectives", "sampler", "pruner", "rungs", "seeds", "budget", "trials")
    }
    plain.update({k: winner[k] for k in ("trial", "point", "values", "confirmed")})
    return "\n".join([*lines, _HEADER + json.dumps(plain), ""])


def write(path: str | Path, config: Config, text: str) -> Path:
    """The config as a file, below its header.

    Raises:
        UserError: it cannot be written.
    """
    path = Path(path)
    try:
        with replacing(path) as aside:
            config.dump(aside)
            aside.write_text(text + aside.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def read_header(path: str | Path) -> dict | None:
    """What a config file says of the search that found it, with ``budget``; None for any other config file."""
    for line in io.StringIO(Path(path).read_text(encoding="utf-8")):
        if line.startswith(_HEADER):
            found = json.loads(line.removeprefix(_HEADER))
            check_schema(found, path)
            return found
        if not line.startswith("#"):
            break
    return None


def budget_text(cost: dict) -> str:
    """A budget in words."""
    from fs_lowrank.runs.summary import human_bytes

    return (
        f"{cost['trials']} trials, {cost['rounds']} rounds, {cost['client_steps']:,} client-steps, "
        f"{human_bytes(cost['uplink_bytes'])} up, {human_bytes(cost['downlink_bytes'])} down, "
        f"{cost['seconds']:.0f} s"
    )


def _counts(counts: dict) -> str:
    return ", ".join(f"{n} {k}" for k, n in sorted(counts.items())) or "none"
