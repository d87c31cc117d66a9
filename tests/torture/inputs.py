"""Damaged inputs in other formats, and damaged records of a search, a suite and a distributed run.

As in ``damage``, what has begun is damaged and begun again: it is refused with one line, and goes on once the file is
put back or removed as the message says, or it ends with the same result.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import commands, peers
from .bench import Bench, Ending, Outcome, by_command_line
from .child import Ended, difference
from .damage import DAMAGES, half, put_back
from .shim import Mode, loaded
from .tiny import FORMATS, make_formats

SHARD = 10
#: kinds of case, by how often each is drawn
SORTS = ("formats", "formats", "formats", "search", "suite", "distributed")


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    sort = draw.choice([s for s in SORTS if s != "distributed" or not peers.usable()])
    if sort == "formats":
        return [_formats(draw, bench, by_command_line(seed))]
    if sort == "distributed":
        return [_distributed(draw, bench)]
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


# -- a distributed run ---------------------------------------------------------------------------------


def _distributed(draw: random.Random, bench: Bench) -> Outcome:
    """All processes are killed after some rounds, a file by which they know each other is damaged, and all go on."""
    seen = "distributed"
    reference, _ = peers.reference(bench, peers.QUIET)
    with bench.place() as outdir:
        source, ports = _half_distributed(bench)
        for path in source.parent.iterdir():
            if path.is_dir():
                shutil.copytree(path, outdir.with_name(path.name))
        tokens = [path for n in peers.HEALTHY for path in outdir.parent.rglob(f"token_{ports[n]}")]
        target = draw.choice([outdir / "clients.json", *tokens])
        with _damaged(target, draw, [*tokens, *_files(outdir)]) as done:
            what = f"a distributed run: {done or 'nothing changed'}"
            ended = _all(bench, outdir, ports)
            bad = next((e for e in ended.values() if e.fault), None)
            if bad:
                return Outcome("failed", what, bad.fault, seen)
            refused = next((e.err for e in ended.values() if e.code), "")
        if refused:
            for path in [p for p in outdir.parent.iterdir() if p.is_dir()]:
                shutil.rmtree(path)
                shutil.copytree(source.with_name(path.name), path)
            if "clients.json" in refused:  # it can be done without
                (outdir / "clients.json").unlink()
            again = _all(bench, outdir, ports)
            wrong = next((e.fault or e.err for e in again.values() if e.code), "")
            if wrong:
                return Outcome("failed", what, f"not to be mended: {wrong}; before: {refused}", seen)
        unlike = difference(outdir / "adapter", reference / "adapter")
        if unlike or peers.figures(outdir) != peers.figures(reference):
            reason = f"another result without an error: {unlike or 'other clients or losses in a round'}"
            return Outcome("failed", what, reason, seen)
        return Outcome("refused" if refused else "resumed", what, refused, seen)


def _half_distributed(bench: Bench) -> tuple[Path, dict[int, int]]:
    """The server's folder of a run that was killed after some rounds, and the ports, which are free now."""
    place = bench.folder / "halves" / "distributed"
    facts, folder = place / "ports.json", place / "run"
    if facts.exists():
        ports = {int(number): port for number, port in json.loads(facts.read_text()).items()}
        if all(map(_is_free, ports.values())):
            return folder, ports
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    ports = dict(zip((0, *peers.HEALTHY), peers.free_ports(3)))
    running = [peers.Beside(partial(peers.worker, bench, folder, peers.QUIET, n, ports, True)) for n in ports]
    until = time.monotonic() + 60.0
    try:
        while not (folder / "rounds.jsonl").exists() or (folder / "rounds.jsonl").read_text().count("\n") < 3:
            if time.monotonic() > until:
                raise RuntimeError("the distributed run did not reach round 3 in a minute")
            time.sleep(0.02)
    finally:
        for each in running:
            each.kill()
    facts.write_text(json.dumps(ports))
    return folder, ports


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_server(("127.0.0.1", port)).close()
        return True
    return False


def _all(bench: Bench, outdir: Path, ports: dict[int, int]) -> dict[int, Ended]:
    """Resume every process; when one has ended with an error, the others are stopped."""
    running = {n: peers.Beside(partial(peers.worker, bench, outdir, peers.QUIET, n, ports, True, True)) for n in ports}
    ended: dict[int, Ended] = {}
    while len(ended) < len(running):
        for number, each in running.items():
            if number not in ended and each.has_ended():
                ended[number] = each.result()
        if any(e.code for e in ended.values()):
            break
        time.sleep(0.02)
    for number in running.keys() - ended.keys():
        running[number].kill()
    return ended
