"""Damaged inputs in other formats, and damaged records of a search, a suite and a distributed run.

As in ``damage``, what has begun is damaged and begun again: it is refused with one line, and goes on once the file is
put back or removed as the message says, or it ends with the same result.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import commands
from .bench import Bench, Ending, Outcome, by_command_line
from .child import Ended
from .damage import DAMAGES, half, put_back
from .shim import Mode, loaded
from .tiny import FORMATS, make_formats

SHARD = 10
#: kinds of case, by how often each is drawn
SORTS = ("formats", "formats", "formats", "search", "suite")


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    sort = draw.choice(SORTS)
    if sort == "formats":
        return [_formats(draw, bench, by_command_line(seed))]
    return [_records(sort, draw, bench, by_command_line(seed))]


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


# -- data in other formats -----------------------------------------------------------------------------


def _formats(draw: random.Random, bench: Bench, command_line: bool) -> Outcome:
    if not (bench.pristine / "formats").exists():
        make_formats(bench.pristine)
        bench.restore_inputs()
    run = draw.choice([*FORMATS])
    place = bench.inputs / "formats" / {"images": "idx", "folder": "saved"}.get(run.split()[-1], f"reviews.{run[10:]}")
    source = half(run, bench)
    with bench.place() as outdir:
        for path in source.parent.glob("run*"):
            shutil.copytree(path, outdir.with_name(path.name))
        rows = [outdir / name for name in ("rows.npz", "data.json")]
        target = draw.choice([*([place] if place.is_file() else _files(place)) * 2, *(p for p in rows if p.exists())])
        with _damaged(target, draw, _files(bench.inputs / "formats")) as done:
            what = f"{run}: {done or 'nothing changed'}"
            if not done:
                return Outcome("valid", what, "", run)
            ended = bench.start(run, outdir, resume=True, command_line=command_line)
        if ended.fault or not ended.code:
            return bench.judge(run, outdir, ended, what, resumed=True, seen=run, former=source)
        again = bench.start(run, outdir, resume=True)
        mended = bench.judge(run, outdir, again, what, resumed=True, seen=run, former=source)
        if mended.ending != "resumed":
            return Outcome("failed", what, f"not to be mended: {mended.reason}; before: {ended.err}", run)
        return Outcome("refused", what, ended.err, run)


# -- a search and a suite ------------------------------------------------------------------------------


def _records(name: str, draw: random.Random, bench: Bench, command_line: bool) -> Outcome:
    wanted = commands.reference(name, bench)
    with bench.place() as left:
        # Finished, or ended inside.
        inside = loaded() and not command_line and draw.random() < 0.5
        fault = (draw.randint(wanted["calls"] // 3, wanted["calls"]), Mode.EIO_ONCE) if inside else None
        first = commands.start(name, left, bench, fault=fault, command_line=command_line)
        if first.fault or (first.code and not inside):
            return Outcome("failed", name, first.fault or first.err, name)
        files, chosen = _files(left), _files(left / "results") if name == "suite" else [left / "study.db"]
        targets = [p for p in chosen if p.exists()] if draw.random() < 0.7 else files
        with _damaged(draw.choice(targets or files), draw, files) as done:
            what = f"{name}, {'ended inside' if first.code else 'finished'}: {done or 'nothing changed'}"
            again = commands.start(name, left, bench, again=True, command_line=command_line)
            if again.fault:
                return Outcome("failed", what, again.fault, name)
            if not again.code:
                return _compared(name, left, wanted, what, "resumed", again)
        last = commands.start(name, left, bench, again=True)
        if last.fault or last.code:
            reason = f"not to be mended: {last.fault or last.err}; before: {again.err}"
            return Outcome("failed", what, reason, name)
        return _compared(name, left, wanted, what, "refused", again)


def _compared(name: str, left: Path, wanted: dict[str, Any], what: str, ending: Ending, ended: Ended) -> Outcome:
    found = json.loads(json.dumps(commands.figures(name, left)))
    unlike = {k: v for k, v in wanted["figures"].items() if found.get(k) != v}
    if unlike:
        reason = f"another result without a word: {str(found)[:200]}, expected {str(wanted['figures'])[:200]}"
        return Outcome("failed", what, reason, name)
    return Outcome(ending, what, ended.err, name)
