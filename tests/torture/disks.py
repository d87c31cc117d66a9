"""Full disks: the run writes to a file system in memory that is too small, and is resumed when there is space."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from pathlib import Path

from .bench import Bench, Outcome, by_command_line, variants

SHARD = 10
_CLONE_NEWNS, _MS_REMOUNT, _MS_PRIVATE, _MS_REC, _MNT_DETACH = 0x00020000, 32, 1 << 18, 1 << 14, 2


def usable() -> str:
    """Why this kind cannot run here; empty if it can. Afterwards, mounts are visible to this process only."""
    try:
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    except OSError as error:
        return f"a file system of a given size cannot be mounted: {error.strerror}"
    return ""


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    run = draw.choice(variants())
    pages = draw.randint(2, 120)
    what = f"{run}: a disk of {4 * pages} KiB"
    disk = bench.folder / f"disk-{os.getpid()}"
    disk.mkdir(exist_ok=True)
    _call("mount", b"torture", bytes(disk), b"tmpfs", 0, f"size={4 * pages}k".encode())
    try:
        outdir = disk / "run"
        with bench.place() as path:
            beside = path.parent  # the configuration and the output are not on the full disk
            first = bench.start(run, outdir, beside=beside, command_line=by_command_line(seed))
            if first.fault:
                return [Outcome("failed", what, first.fault)]
            if not first.code:
                return [bench.judge(run, outdir, first, what, resumed=False)]
            _call("mount", b"torture", bytes(disk), b"tmpfs", _MS_REMOUNT, b"size=64m")
            last = bench.start(run, outdir, resume=True, beside=beside)
            outcome = bench.judge(run, outdir, last, what, resumed=True)
            if outcome.ending == "refused":
                return [Outcome("failed", what, f"refused to go on: {outcome.reason}; before: {first.err}")]
            return [outcome]
    finally:
        tidy(disk)


def tidy(disk: Path) -> None:
    """Take the file system away, of a case that was ended as well."""
    with contextlib.suppress(OSError):  # nothing is mounted there
        _call("umount2", bytes(disk), _MNT_DETACH)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 on success."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
