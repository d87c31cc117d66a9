"""Builds, loads and arms a library that replaces the calls of the C library on a disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


class Mode(IntEnum):
    """The fault at the n-th call that writes, renames, creates, removes or syncs below a folder."""

    #: calls are counted
    COUNT = 0
    #: the process is killed instead of the call
    KILL_BEFORE = 1
    #: the process is killed after the call; after half of it, if it is a write
    KILL_AFTER = 2
    #: the call fails with EIO, as on a bad disk; later ones succeed
    EIO_ONCE = 3
    #: the disk is full: half of a write succeeds, then no call that needs space
    FULL = 4
    #: half of a write succeeds, which is not an error; all other calls succeed completely
    SHORT = 5


def preload() -> Path | None:
    """The path of the library, which is built first; None if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"fs-lowrank-torture-{os.getuid()}-{digest}.so"
    if not library.exists():
        aside = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", str(aside), str(SOURCE), "-ldl"], check=True, timeout=60
        )
        aside.replace(library)
    return library


def loaded() -> bool:
    """Whether the library is loaded in this process."""
    return hasattr(ctypes.CDLL(None), "torture_arm")


def arm(folder: Path, n: int = 0, mode: Mode = Mode.COUNT) -> None:
    """Let ``mode`` occur at the ``n``-th call from now on below ``folder`` and paths that begin with it."""
    ctypes.CDLL(None).torture_arm(os.fsencode(folder), ctypes.c_long(n), int(mode))


def count() -> int:
    """The number of calls since ``arm``."""
    counted = ctypes.CDLL(None).torture_count
    counted.restype = ctypes.c_long
    return int(counted())


def armed_environment(folder: Path, n: int, mode: Mode) -> dict[str, str]:
    """Environment variables with which a new process is armed from its start."""
    library = preload()
    if library is None:
        raise RuntimeError("there is no compiler to build the shim with")
    return {"LD_PRELOAD": str(library), "TORTURE_ARM": f"{n} {int(mode)} {folder}"}
