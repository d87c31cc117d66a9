"""Files that other processes read.

A file is written beside its place and then renamed, so that a reader finds the old or the new one. JSON is read by
``read_json`` and ``from_json``; a damaged file raises a ``DamagedFile`` of one line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any

from ..errors import DamagedFile, RunFailed, UserError
from ..versions import check_schema

#: folders of open streams, which are written in place even if they lead to a file
_STREAMS = ("/dev", "/dev/fd", "/proc/self/fd")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_NO_ROOM, _NOT_ALLOWED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (errno.EACCES, errno.EPERM)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A path to write a file or a folder to, which replaces ``path`` when the block ends.

    If the block raises an error, ``path`` is unchanged, and the new file is removed.

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
        with contextlib.suppress(OSError):
            remove(aside)
        raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents; one that is missing is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed processes in ``folder``; nobody may be writing there."""
    for path in folder.glob(".*.writing"):
        remove(path)


def to_json(value: Any, **layout: Any) -> str:
    """``value`` as JSON; NaN and infinities, which JSON does not have, become null.

    Args:
        layout: ``indent``, ``separators`` and ``ensure_ascii``, as for ``json.dumps``.
    """

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: plain(item) for key, item in node.items()}
        if isinstance(node, (list, tuple)):
            return [plain(item) for item in node]
        return None if isinstance(node, float) and not math.isfinite(node) else node

    return json.dumps(plain(value), allow_nan=False, **layout)


_WORDS: dict[Any, str] = {dict: "a mapping", list: "a list"}


def from_json(text: str | bytes, kind: type | UnionType = dict) -> Any:
    """The content of a file, or of a line of one, that ``to_json`` wrote.

    Args:
        kind: the expected type: ``dict``, ``list`` or both.
    Raises:
        ValueError: invalid JSON, or another type; the message says which.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # among them one of decoding, or of JSON that is nested too deep
        raise ValueError(f"invalid JSON: {error}") from error
    if not isinstance(content, kind):
        text = json.dumps(content)
        excerpt = text if len(text) <= 60 else f"{text[:57]}…"
        raise ValueError(f"{excerpt} came, expected {_WORDS.get(kind, 'a mapping or a list')}")
    return content


#: of ``read_json``: a file that is missing is an error
_ERROR: Any = object()


def read_json(
    path: str | Path,
    kind: type | UnionType = dict,
    missing: Any = _ERROR,
    remedy: str = "restore the file",
) -> Any:
    """The content of a JSON file.

    Args:
        kind: as of ``from_json``.
        missing: is returned if there is no such file.
        remedy: for the message: what the user can do, or what happens without the file; may be empty.
    Raises:
        DamagedFile: it is missing, unreadable or not as expected. NewerSchema: as of ``check_schema``.
    """
    try:
        content = from_json(Path(path).read_bytes(), kind)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and missing is not _ERROR:
            return missing
        raise cannot_read(path, error, remedy) from error
    if isinstance(content, dict):
        check_schema(content, path)
    return content


def cannot_read(path: str | Path, error: Exception, remedy: str = "restore the file") -> DamagedFile:
    """The error to raise if a file that was written for others cannot be read; names file, reason and remedy."""
    message = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    return DamagedFile(f"{message}; {remedy}" if remedy else message)


def write_text(path: str | Path, text: str, durable: bool = True) -> None:
    """Write a text file atomically, in UTF-8; its folder is created.

    A link stays, and its target is replaced. A device or pipe, such as ``/dev/stdout``, is written in place.

    Raises:
        RunFailed: it cannot be written, for instance on a full disk; the file is unchanged.
    """
    write_bytes(path, text.encode(), durable)


def write_bytes(path: str | Path, content: bytes, durable: bool = True) -> None:
    """As ``write_text``, of bytes."""
    path = Path(path)
    with writing(path):
        if str(path.parent) in _STREAMS or path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(content)
        else:
            with replacing(os.path.realpath(path), durable) as aside:
                aside.write_bytes(content)


@contextlib.contextmanager
def replaced(path: Path, durable: bool = True) -> Iterator[Path]:
    """As ``replacing``; an error of writing is a ``RunFailed``, as of ``writing``."""
    with writing(path), replacing(path, durable) as aside:
        yield aside


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise ``cannot_write`` in place of errors of writing in the block, also those of libraries on a full disk."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # safetensors raises its own error if it cannot write, tokenizers a bare Exception.
        if isinstance(error, OSError) or _has_errno(error, (*_OF_THE_DISK, *_NO_ROOM, *_NOT_ALLOWED)):
            raise cannot_write(path, error) from error
        raise


def _has_errno(error: BaseException, numbers: Iterable[int]) -> bool:
    number, text = getattr(error, "errno", None), str(error).lower()
    if number is not None:
        return number in numbers
    return any(os.strerror(n).lower() in text for n in numbers)  # the error of safetensors is no OSError


def disk_error(error: BaseException) -> RunFailed | None:
    """The error to raise if the cause of an exception is a full, broken or read-only disk; None if it is not.

    Then no other file can be written either, so that commands with many jobs end, and continue when there is room.
    """
    cause: BaseException | None = error
    while cause is not None and not _has_errno(cause, _OF_THE_DISK):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    return error if isinstance(error, RunFailed) else cannot_write(getattr(cause, "filename", None) or "a file", cause)


def cannot_write(path: str | Path, error: BaseException) -> RunFailed:
    """The error to raise if a file cannot be written; names file and reason."""
    reason = getattr(error, "strerror", None) or error
    remedy = "make room" if _has_errno(error, _NO_ROOM) else "correct that"
    return RunFailed(f"{path} cannot be written: {reason}; {remedy}, and run again, a run with resume=True")
