"""Damaged files.

A run is stopped after its second round, a file that it reads is damaged, and it is resumed. Of every third seed, a run
or a comparison has ended, and ``evaluate``, ``predict``, ``report`` or ``compare --resume`` reads it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from .bench import COMMAND_LINE, Bench, Outcome, variants
from .child import Ended, fork
from .tiny import RUNS, settings

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
    if seed % 3 == 2:
        return [_of_ended(draw, bench)]
    run = draw.choice(variants())
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
            ended = bench.start(run, outdir, resume=True, command_line=seed % COMMAND_LINE == 0)
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


def _of_ended(draw: random.Random, bench: Bench) -> Outcome:
    """A command about what has ended, of which one file is damaged.

    What an ended run left is compared with its checksums, except by ``compare --resume``. Where there are none, and a
    damaged file is still one of its kind, such as a base or data, the command may have another result, which counts as
    valid; a file that is cut off, empty or gone may not change a score.
    """
    command = draw.choice(("evaluate", "predict", "report", "compare"))
    run = draw.choice(
        [name for name in variants() if command in ("report", "compare") or name not in variants("vision")]
    )
    kind = RUNS[run].get("kind", "encoder")
    source = bench.reference(run).folder if command != "compare" else _compared(kind, bench)
    wanted = bench.folder / "wanted" / f"{command} {run if command != 'compare' else kind}".replace(" ", "_")
    if not wanted.exists():
        with bench.place() as outdir:
            shutil.copytree(source, outdir)
            ended, found = _told(command, kind, outdir, bench)
        if ended.code or not found:
            raise RuntimeError(f"{command} of {run!r} fails by itself: {ended.err or ended.out}")
        wanted.parent.mkdir(exist_ok=True)
        wanted.write_text(found, encoding="utf-8")
    with bench.place() as outdir:
        shutil.copytree(source, outdir)
        target = draw.choice(_read_by(command, kind, outdir, bench, draw))
        damage, before = draw.choice(DAMAGES), target.read_bytes()
        place = target.relative_to(bench.folder if target.is_relative_to(bench.inputs) else outdir)
        what = f"{command} of {run if command != 'compare' else kind}: {damage.__name__.lstrip('_')} of {place}"
        try:
            what += damage(target, draw, _others(target, half(draw.choice(variants()), bench), bench))
            ended, found = _told(command, kind, outdir, bench)
        finally:
            put_back(target, before)
        if ended.fault:
            return Outcome("failed", what, ended.fault, command)
        if ended.code:
            named = [part for part in (*place.parts, target.parent.name) if len(part) > 2]
            # Of data, a base or a tokenizer that has changed it says which of them, and of which run.
            named += [f"the {what} is not what the run in" for what in ("data", "model", "tokenizer")]
            if not any(part in ended.err for part in named):
                return Outcome("failed", what, f"names no file: {ended.err}", command)
            return Outcome("refused", what, ended.err, command)
        if found == wanted.read_text(encoding="utf-8"):
            return Outcome("resumed" if command == "compare" else "same", what, seen=command)
        if _compared_by(command, target, outdir):
            return Outcome("failed", what, f"another result, and the run has a checksum: {ended.out[-300:]}", command)
        if damage in (_flip, _zeros, _append, _swap) or target.suffix == ".jsonl":
            return Outcome("valid", what, f"another result: {ended.out[-300:]}", command)
        return Outcome("failed", what, f"another result without an error: {ended.out[-300:]}", command)


def _compared_by(command: str, target: Path, outdir: Path) -> bool:
    """Whether the command compares ``target`` with a checksum."""
    sums = outdir / "checksums.json"
    if command == "compare" or target == sums or not sums.exists() or not target.is_relative_to(outdir):
        return False
    return target.relative_to(outdir).as_posix() in json.loads(sums.read_text(encoding="utf-8"))


def _compared(kind: str, bench: Bench) -> Path:
    """The folder of a comparison that has ended."""
    folder = bench.folder / "compared" / kind
    if not (folder / "run" / "comparison.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ended, _ = _told("compare", kind, folder / "run", bench)
        if ended.code:
            raise RuntimeError(f"the comparison of {kind} fails by itself: {ended.err or ended.out}")
    return folder / "run"


def _told(command: str, kind: str, outdir: Path, bench: Bench) -> tuple[Ended, str]:
    """How the command about ``outdir`` ended, and what it found out, without what differs from one call to the next."""
    beside, data = outdir.parent, bench.inputs / {"causal": "instructions.jsonl"}.get(kind, "reviews.csv")
    out = beside / {"evaluate": "scores.json", "predict": f"predicted{data.suffix}"}.get(command, "report.html")
    out.unlink(missing_ok=True)
    if command == "compare":
        config, out = beside / "config.yaml", outdir / "comparison.json"
        keys: dict[str, Any] = {
            "federate.method": "fedlora",
            "federate.total_round_num": 1,
            "lowrank.pictures": False,
            "kind": kind,
        }
        config.write_text(yaml.safe_dump(settings(bench.inputs, outdir, **keys)), encoding="utf-8")
        argv = ["compare", "--cfg", str(config), "--methods", "fedlora,local,pooled", "--resume"]
    elif command == "report":
        argv = ["report", str(outdir), "--out", str(out)]
    else:
        argv = [command, str(outdir), "--data", str(data), "--json" if command == "evaluate" else "--out", str(out)]

    def work() -> int:
        from fs_lowrank import cli

        return cli.main(argv)

    ended = fork(work, beside / "printed.out")
    if ended.code or not out.is_file():
        return ended, ""
    text = out.read_text(encoding="utf-8").replace(str(outdir), "RUN")
    if command != "compare":
        return ended, text
    return ended, json.dumps({name: of["final"] for name, of in json.loads(text).items()}, sort_keys=True)


def _read_by(command: str, kind: str, outdir: Path, bench: Bench, draw: random.Random) -> list[Path]:
    """A group of the files that the command reads."""
    written = _files(outdir)
    if command != "compare":  # which goes on from checkpoints and what is kept of the best round
        written = [path for path in written if path.parent == outdir or path.parent.parent == outdir]
    top = [path for path in written if path.suffix in (".json", ".jsonl", ".yaml", ".npz")]
    if command == "report":
        return [path for path in top if path.parent == outdir]
    inputs = [
        path
        for name in {"causal": ("causal",), "vision": ("images",)}.get(kind, ("encoder",))
        for path in _files(bench.inputs / name)
    ]
    weights = [path for path in written if path.suffix == ".safetensors" or "adapter" in path.parent.name]
    return draw.choice([group for group in (top, top, weights, inputs) if group])


def _groups(run: str, bench: Bench, outdir: Path, draw: random.Random) -> list[Path]:
    """Groups of files: in the folder of the run, in the folders beside it, and its inputs."""
    kind = RUNS[run].get("kind", "encoder")
    inputs = {
        "encoder": ["encoder", "reviews.csv"],
        "causal": ["causal", "instructions.jsonl"],
        "vision": ["images"],
    }[kind]
    checkpoint = _files(outdir / "checkpoint")
    groups = [
        checkpoint,
        checkpoint,
        [p for p in _files(outdir) if p not in checkpoint],
        [p for folder in outdir.parent.glob(f"{outdir.name}.*") for p in _files(folder)],
        *(_files(bench.inputs / name) for name in inputs),
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
