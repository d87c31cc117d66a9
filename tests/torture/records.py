"""Damaged records of a search and a suite.

As in ``damage``, what has begun is damaged and begun again: it is refused with one line, and goes on once the file is
put back, or it ends with the same result.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import commands
from .bench import Bench, Ending, Outcome, by_command_line
from .child import Ended
from .damage import DAMAGES, put_back
from .shim import Mode, loaded

SHARD = 10


@contextlib.contextmanager
def _damaged(target: Path, draw: random.Random, others: list[Path]) -> Iterator[str]:
    """Damage a file, which is put back at the end; gives what was done, empty if nothing has changed."""
    damage, before = draw.choice(DAMAGES), target.read_bytes()
    others = [p for p in others if p.is_file() and p.read_bytes() != before]
    try:
        where = damage(target, draw, others)
        changed = not target.is_file() or target.read_bytes() != before
        yield f"{damage.__name__.lstrip('_')} of {target.name}{where}" if changed else ""
    finally:
        put_back(target, before)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw, command_line = random.Random(seed), by_command_line(seed)
    name = draw.choice(("search", "suite"))
    wanted = commands.reference(name, bench)
    with bench.place() as left:
        # Finished, or ended inside.
        inside = loaded() and not command_line and draw.random() < 0.5
        fault = (draw.randint(wanted["calls"] // 3, wanted["calls"]), Mode.EIO_ONCE) if inside else None
        first = commands.start(name, left, bench, fault=fault, command_line=command_line)
        if first.fault or (first.code and not inside):
            return [Outcome("failed", name, first.fault or first.err, name)]
        files, chosen = _files(left), _files(left / "results") if name == "suite" else [left / "study.db"]
        targets = [p for p in chosen if p.exists()] if draw.random() < 0.7 else files
        with _damaged(draw.choice(targets or files), draw, files) as done:
            what = f"{name}, {'ended inside' if first.code else 'finished'}: {done or 'nothing changed'}"
            again = commands.start(name, left, bench, again=True, command_line=command_line)
            if again.fault:
                return [Outcome("failed", what, again.fault, name)]
            if not again.code:
                return [_compared(name, left, wanted, what, "resumed", again)]
        last = commands.start(name, left, bench, again=True)
        if last.fault or last.code:
            reason = f"not to be mended: {last.fault or last.err}; before: {again.err}"
            return [Outcome("failed", what, reason, name)]
        return [_compared(name, left, wanted, what, "refused", again)]


def _compared(name: str, left: Path, wanted: dict[str, Any], what: str, ending: Ending, ended: Ended) -> Outcome:
    found = json.loads(json.dumps(commands.figures(name, left)))
    unlike = {k: v for k, v in wanted["figures"].items() if found.get(k) != v}
    if unlike:
        reason = f"another result without a word: {str(found)[:200]}, expected {str(wanted['figures'])[:200]}"
        return Outcome("failed", what, reason, name)
    return Outcome(ending, what, ended.err, name)
