"""Errors as one line: those of ours, with the traceback in a file, and paths that cannot be any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fs_lowrank import RunFailed, UserError
from fs_lowrank.jobs.shell import message_of

#: what is said where Optuna is missing
NEEDS_OPTUNA = "error: hpo needs Optuna: pip install 'fs-lowrank[hpo]'"


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
        raise RunFailed(message_of(error, folder)) from error


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
