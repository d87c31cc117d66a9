"""Errors for users: a message has the value, the expected values, and the remedy."""

from __future__ import annotations

import contextlib
import difflib
import logging
import shlex
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

#: the packages of this repository
_OURS = ("fs_lowrank", "benchmark", "hpo")
#: the folder of Python's own modules, and the names of folders of installed ones (there may be several)
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), {"site-packages", "dist-packages"}


class UserError(ValueError):
    """An error that the user can correct: a config value, a file, a missing download."""


class RunFailed(UserError):
    """A run with a valid configuration could not continue: a full disk, too few usable clients."""


class CannotContinue(UserError):
    """The files in a run's folder are damaged or of another run, so that this run has to start anew."""


class UnusableEngine(UserError):
    """An engine cannot be used. Attributes: ``reason``, and ``remedy``, the advice to the user."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.remedy = reason, remedy


class DamagedFile(UserError):
    """A file that a program wrote for others cannot be read; the message names file and remedy."""


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.55) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``choices``, or ``""`` if none is close or an abbreviation.

    Args:
        cutoff: the least similarity, 0 to 1 (``difflib.get_close_matches``).
    """
    by_lower, lowered = {str(choice).lower(): str(choice) for choice in choices}, str(name).lower()
    close = difflib.get_close_matches(lowered, list(by_lower), n=1, cutoff=cutoff)
    close = close or [c for c in by_lower if len(c) >= 3 and lowered.startswith(c)]
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def user_location(error: BaseException) -> str:
    """The file and line of the user's code, such as a method of their own, that raised ``error``; empty if none did.

    It is the innermost line of the traceback outside this package and installed ones. An error of another process has
    it as attribute ``place``.
    """
    location: str = getattr(error, "place", "")
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = Path(frame.f_code.co_filename), str(frame.f_globals.get("__name__", ""))
        installed = file.is_relative_to(_STANDARD) or _PACKAGES.intersection(file.parts)
        if module.split(".")[0] not in _OURS and file.is_file() and not installed:
            location = f"{file.name}, line {line}"
    return location


def described(error: BaseException, text: str | None = None) -> str:
    """The type of ``error`` and its text, or ``text``, and its line if code of the user raised it."""
    location = user_location(error)
    return f"{type(error).__name__}: {error if text is None else text}" + (f" ({location})" if location else "")


@contextlib.contextmanager
def user_errors(subject: str, remedy: str = "") -> Iterator[None]:
    """A context for running or reading a thing that the user supplies: a data set, a template, a file of weights.

    Args:
        subject: the thing, for the message, and the row that it gets. remedy: what the user can do.
    Raises:
        UserError: the thing raises an error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the user's code, or of a library that reads a file of the user's
        in_one_line = " ".join(str(error).split())
        raise UserError(f"{subject} raises {described(error, in_one_line)}{remedy and f'; {remedy}'}") from error


def counted(number: int, noun: str) -> str:
    """``1 client``, ``3 clients``: a number and a noun whose plural ends in s."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def between(values: Collection[int]) -> str:
    """``24 to 40``, the least and the greatest of whole numbers; ``32`` if all are equal."""
    return " to ".join(map(str, sorted({min(values), max(values)})))


def hint(*words: object) -> str:
    """``fs-lowrank WORDS``, quoted for a shell: a command in a message, ready to run."""
    return shlex.join(["fs-lowrank", *map(str, words)])


#: the logger of the numbers of rows read, which commands show at the start of every run
ROWS_LOGGER = "fs_lowrank.rows"


@cache
def say_once(message: str, level: int = logging.WARNING, logger: str = "fs_lowrank") -> None:
    """Log ``message`` once per process, by default as a warning."""
    logging.getLogger(logger).log(level, "%s", message)
