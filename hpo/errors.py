"""Errors as one line: those of ours, with the traceback in a file, and paths that cannot be any."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fs_lowrank import RunFailed, UserError
from fs_lowrank.jobs.files import write_text


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Turn an error of ours during the block into one line that names a file in ``folder`` with the traceback.

    Raises:
        RunFailed: in place of any error but a ``UserError``, and from that error.
    """
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        raise RunFailed(f"{error_line(error)}; please report it with {write_traceback(error, folder)}") from error


def error_line(error: BaseException) -> str:
    """The type and the text of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def write_traceback(error: BaseException, folder: Path) -> Path:
    """Write the traceback of an error into a file of ``folder``; returns its path."""
    path = folder / f"error_{os.getpid()}_{time.time_ns()}.txt"
    write_text(path, "".join(traceback.format_exception(error)))
    return path


def file_exists(path: Path, option: str) -> bool:
    """Whether there is something at a path that a user gave as ``option``.

    Raises:
        UserError: it cannot be a path: too long, or with NUL in it.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {str(path)[:80]!r}: {getattr(error, 'strerror', None) or error}") from None
    return True
