"""Damaged files: a run is stopped after its second round, a file that it reads is damaged, and it is resumed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from .bench import Bench, Outcome, by_command_line, variants
from .child import fork
from .tiny import FORMATS, settings

SHARD = 25


def half(run: str, bench: Bench) -> Path:
    """The folder of ``run`` after its process has ended in round 2 of 3."""
    place = bench.folder / "halves" / run.replace(" ", "_")
    folder = place / "run"
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)

        def work() -> None:
            import fs_lowrank

            config = fs_lowrank.load_config(settings(bench.inputs, folder, run))
            fs_lowrank.run(config, on_round=lambda record: record["round"] == 2 and os._exit(0))

        ended = fork(work, place / "printed.out")
        if ended.code or not (folder / "checkpoint" / "round_000002").is_dir():
            raise RuntimeError(f"the run {run!r} did not reach round 2: {ended.err or ended.out}")
        (place / "ready").touch()
    return folder


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    run = draw.choice([*variants(), *FORMATS])
    with bench.place() as outdir:
        source, other = half(run, bench), half(draw.choice(variants()), bench)
        for path in source.parent.glob("run*"):  # with the folders beside it that belong to the run
            shutil.copytree(path, outdir.with_name(path.name))
        target = draw.choice(_groups(run, bench, outdir, draw))
        damages = [d for d in DAMAGES if target.suffix != ".png" or d is not _flip]
        damage, before = draw.choice(damages), target.read_bytes()
        place = target.relative_to(bench.folder) if target.is_relative_to(bench.inputs) else target.name
        what = f"{run}: {damage.__name__.lstrip('_')} of {place}"
        seen = "input" if target.is_relative_to(bench.inputs) else "output"
        try:
            what += damage(target, draw, _others(target, other, bench))
            if target.is_file() and target.read_bytes() == before:
                return [Outcome("valid", what, "nothing changed", seen)]
            ended = bench.start(run, outdir, resume=True, command_line=by_command_line(seed))
            stopped = ended.code == 1 and not ended.fault  # the message says what to repair
            if not stopped:
                if target == outdir / "answers.jsonl" and not ended.code:
                    # A line that cannot be read is left out with a warning; nothing is computed from it.
                    put_back(target, (bench.reference(run).folder / target.name).read_bytes())
                if target.name == "checksums.json" and not target.exists():
                    put_back(target, before)  # without it nothing is compared, as with folders of earlier versions
                outcome = bench.judge(run, outdir, ended, what, resumed=True, seen=seen, former=source)
        finally:
            put_back(target, before)
        if stopped or (outcome.ending == "refused" and seed % 5 == 0):  # the file is restored, and the run continues
            again = bench.start(run, outdir, resume=True)
            mended = bench.judge(run, outdir, again, what, resumed=True, seen=seen, former=source)
            if mended.ending != "resumed":
                return [Outcome("failed", what, f"not to be mended: {mended.reason}; before: {ended.err}", seen)]
            outcome = mended if stopped else outcome
        return [outcome]


def _groups(run: str, bench: Bench, outdir: Path, draw: random.Random) -> list[Path]:
    """Groups of files: in the folder of the run, in the folders beside it, and its inputs."""
    tree = settings(bench.inputs, outdir, run)
    model, data = tree["model"]["type"].partition("@")[0], tree["data"].get("root", tree["data"]["type"])
    checkpoint = _files(outdir / "checkpoint")
    groups = [
        checkpoint,
        checkpoint,
        [p for p in _files(outdir) if p not in checkpoint],
        [p for folder in outdir.parent.glob(f"{outdir.name}.*") for p in _files(folder)],
        *(_files(Path(place)) for place in (model, data)),
    ]
    return draw.choice([group for group in groups if group])


def _files(path: Path) -> list[Path]:
    """The files there that a run reads: not its pictures, nor states that a killed process has left."""
    if path.is_file():
        return [path]
    found = (p for p in path.rglob("*") if p.is_file() and p.parent.name != ".states")
    return sorted(p for p in found if p.name not in ("clients.png", "clients.pdf"))


def _others(target: Path, other: Path, bench: Bench) -> list[Path]:
    """Files that could be mistaken for ``target``: those in its folder, and those with its name in the run ``other``
    and the inputs.
    """
    near = [p for p in target.parent.iterdir() if p.is_file() and p != target]
    far = [p for folder in (other.parent, bench.pristine) for p in folder.rglob(target.name)]
    content = target.read_bytes()
    return [p for p in (*sorted(near), *sorted(far)) if p.is_file() and p.read_bytes() != content]


def put_back(target: Path, content: bytes) -> None:
    """Write ``target`` as it was, whatever stands in its place."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


# -- kinds of damage: each changes the file, and returns where ---------------------------------------------

Damage = Callable[[Path, random.Random, list[Path]], str]


def _flip(path: Path, draw: random.Random, others: list[Path]) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return _append(path, draw, others)
    at, bit = draw.randrange(len(content)), draw.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f", bit {bit} of byte {at}"


def _cut(path: Path, draw: random.Random, others: list[Path]) -> str:
    size = path.stat().st_size
    left = draw.choice((0, draw.randrange(size) if size else 0, max(size - 1, 0)))
    os.truncate(path, left)
    return f" from {size} to {left} bytes"


def _append(path: Path, draw: random.Random, others: list[Path]) -> str:
    extra = draw.choice((b"\0" * 64, b"}", b"\xff\xfe", b"null\n", path.read_bytes()[:1000]))
    with path.open("ab") as file:
        file.write(extra)
    return f" of {extra[:8]!r}"


def _zeros(path: Path, draw: random.Random, others: list[Path]) -> str:
    """Zeros in place of a page that was not written to the disk."""
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content)) if content else 0
    end = min(start + draw.choice((8, 512, 4096)), len(content))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    return f", bytes {start} to {end}"


def _swap(path: Path, draw: random.Random, others: list[Path]) -> str:
    if not others:
        return _cut(path, draw, others)
    other = draw.choice(others)
    path.write_bytes(other.read_bytes())
    return f" for {other.parent.name}/{other.name}"


def _nonsense(path: Path, draw: random.Random, others: list[Path]) -> str:
    """What a JSON reader may not expect."""
    content = draw.choice(
        (b"null", b"[]", b"5", b'{"round": 2}', b"\xff{}", b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500)
    )
    path.write_bytes(content)
    return f", {content[:12]!r}"


def _delete(path: Path, draw: random.Random, others: list[Path]) -> str:
    path.unlink()
    return ""


def _folder(path: Path, draw: random.Random, others: list[Path]) -> str:
    path.unlink()
    path.mkdir()
    return " in its place"


def _loop(path: Path, draw: random.Random, others: list[Path]) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return " of links to itself"


DAMAGES: tuple[Damage, ...] = (
    _flip,
    _flip,
    _cut,
    _cut,
    _append,
    _zeros,
    _nonsense,
    _swap,
    _swap,
    _delete,
    _folder,
    _loop,
)
