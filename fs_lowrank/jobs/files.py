"""Files written whole: beside their place first and then renamed into it, so that a reader finds the old or the new."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RunFailed


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A path to write a file or a folder to; when the block ends, it takes the place of ``path``.

    If anything is raised, what was at ``path`` is as it was, and what the block wrote is removed.

    Args:
        durable: wait until it is on the disk, so that it outlives a power failure too.
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
            shutil.rmtree(path)  # a folder takes the place of an empty one only
        os.replace(aside, path)
        if durable:
            sync(path.parent)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def to_json(value: Any, **layout: Any) -> str:
    """``value`` as JSON. NaN and infinities, for which JSON has no word, are null.

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
    """Write a text file whole, in UTF-8; its folder is made.

    Raises:
        RunFailed: it cannot be written, because of a full disk perhaps; what was there is as it was.
    """
    try:
        with replacing(path, durable) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be written: {error.strerror or error}; make room or write elsewhere, and give the same "
            "command again"
        ) from error
