"""The results of a study as texts: its winner's config file and its cost. Nothing here needs Optuna."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fs_lowrank import UserError, __version__
from fs_lowrank.errors import hint
from fs_lowrank.jobs.files import cannot_read, from_json
from fs_lowrank.runs.summary import for_people, human_bytes, shown_name
from fs_lowrank.versions import SCHEMA, check_schema

_HEADER = "# hpo: "


def spread_text(value: Mapping[str, Any], digits: int = 3) -> str:
    """The result of ``spread`` as ``mean ± std``."""
    return f"{value['mean']:.{digits}f}" + (f" ± {value['std']:.{digits}f}" if value["std"] is not None else "")


def choose(study: dict, trial: int | None = None, unconfirmed: bool = False, unlearned: bool = False) -> dict[str, Any]:
    """The winner of a study to write.

    Args:
        study: its ``summary``.
        trial: the number of a trial on the Pareto front.
        unconfirmed: also a winner that was not run on all of its fresh seeds.
        unlearned: also a winner at or below the majority class.

    Raises:
        UserError: there is no winner, there are several, or it was not run on fresh seeds, or has learned nothing.
    """
    winners, name = study["winners"], study["study"]
    if not winners:
        raise UserError(
            f"the study {name} has no complete trial yet ({_counts(study['trials'])}); continue the search with the "
            "command that began it"
        )
    matches: list[dict[str, Any]] = [w for w in winners if trial in (None, w["trial"])]
    if len(matches) != 1:
        numbers = ", ".join(str(w["trial"]) for w in winners)
        raise UserError(f"choose one of the trials on the Pareto front of {name} with --trial: {numbers}")
    winner, check = matches[0], matches[0]["confirmed"] or {"failed": [], "open": 1}
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


def header(study: dict, winner: dict) -> str:
    """The comment at the top of a winner's config file; its last line holds the same data as JSON."""
    language = study["language"]
    scores = ", ".join(f"{n} {v:.6g}" for n, v in for_people(winner["values"], language).items())
    lines = [
        f"# Found by `fs-lowrank hpo tune` (fs-lowrank {__version__}): study {study['study']}, "
        f"trial {winner['trial']}, {scores}",
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
    lines += [f"# {winner[key]}" for key in ("nothing_learned", "at_end") if winner[key]]
    lines.append(f"# cost of the search: {budget_text(study['budget'])} ({_counts(study['trials'])})")
    data = {"schema": SCHEMA} | {
        k: study[k] for k in ("study", "objectives", "sampler", "pruner", "seeds", "budget", "trials")
    }
    data.update({k: winner[k] for k in ("trial", "point", "values", "confirmed")})
    return "\n".join([*lines, _HEADER + json.dumps(data), ""])


def read_header(path: str | Path) -> dict[str, Any] | None:
    """The header of a config file that a search has written, with its ``budget``; None for any other config file.

    Raises:
        UserError: the file cannot be read, or its header is damaged.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
        entry = next((line for line in comments if line.startswith(_HEADER)), None)
        header: dict[str, Any] | None = from_json(entry.removeprefix(_HEADER)) if entry else None
    except (OSError, ValueError) as error:
        raise cannot_read(path, error, f"write it again with: {hint('hpo', 'best')}") from error
    check_schema(header or {}, path)
    return header


def point_text(point: Mapping[str, Any]) -> str:
    """A point in one line, each key by its last part."""
    return ", ".join(f"{key.rpartition('.')[2]} {number_text(value)}" for key, value in point.items())


def number_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def budget_text(cost: dict) -> str:
    """A budget in words."""
    return (
        f"{cost['trials']} trials, {cost['rounds']} rounds, {cost['client_steps']:,} client-steps, "
        f"{human_bytes(cost['uplink_bytes'])} up, {human_bytes(cost['downlink_bytes'])} down, "
        f"{cost['seconds']:.0f} s"
    )


def _counts(counts: dict) -> str:
    return ", ".join(f"{n} {k}" for k, n in sorted(counts.items())) or "none"
