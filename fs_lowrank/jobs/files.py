"""Atomic writes: a file is written beside its place and then renamed, so that a reader finds the old or the new one."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RunFailed

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A path to write a file or a folder to, which replaces ``path`` when the block ends.

    If the block raises an error, ``path`` is unchanged, and what the block wrote is removed.

    Args:
        durable: wait until it is on the disk, so that it survives a power failure.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        yield aside
        if durable:
            for file in (*aside.rglob("*"), aside):
                sync(file)
        if aside.is_dir() and path.is_dir():
            shutil.rmtree(path)  # os.replace replaces only an empty folder
        os.replace(aside, path)
        if durable:
            sync(path.parent)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what processes that were killed while they wrote left in ``folder``; nobody may be writing there."""
    for path in folder.glob(".*.writing"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def to_json(value: Any, **layout: Any) -> str:
    """``value`` as JSON; NaN and infinities, which JSON does not have, become null.

    Args:
        layout: ``indent`` and ``separators``, as for ``json.dumps``.
    """

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: plain(item) for key, item in part.items()}
        if isinstance(part, (list, tuple)):
            return [plain(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(plain(value), allow_nan=False, **layout)


def write_text(path: str | Path, text: str, durable: bool = True) -> None:
    """Write a text file atomically, in UTF-8; its folder is created.

    Raises:
        RunFailed: it cannot be written, for instance on a full disk; the file is unchanged.
    """
    try:
        with replacing(path, durable) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be written: {error.strerror or error}; make room or write elsewhere, and give the same "
            "command again"
        ) from error


def disk_error(error: BaseException) -> RunFailed | None:
    """The error to raise if the cause of an exception is a full, broken or read-only disk; None if it is not.

    Nothing else can be written then either, so that what runs many jobs ends, and goes on when there is room.
    """
    cause: BaseException | None = error
    while cause is not None:
        said = str(cause).lower()  # that of safetensors is no OSError
        if getattr(cause, "errno", None) in _OF_THE_DISK or any(os.strerror(n).lower() in said for n in _OF_THE_DISK):
            break
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if isinstance(error, RunFailed):
        return error
    path, reason = getattr(cause, "filename", None) or "a file", getattr(cause, "strerror", None) or cause
    return RunFailed(f"{path} cannot be written: {reason}; make room, and give the same command again")


def cannot_write(path: str | Path, error: Exception) -> RunFailed:
    """The error to raise if a file of a run cannot be written; names file and reason."""
    reason = getattr(error, "strerror", None) or error
    return RunFailed(f"{path} cannot be written: {reason}; make room, and run again with --resume")
