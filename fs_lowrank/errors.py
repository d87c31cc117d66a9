"""Errors for users: their messages say what was given, what was expected, and what to do."""

from __future__ import annotations

import contextlib
import difflib
import logging
import shlex
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

#: the packages of this repository
_OURS = ("fs_lowrank", "benchmark", "hpo")
#: where Python's own modules are, and the names of folders of installed ones, of which there may be several
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), {"site-packages", "dist-packages"}


class UserError(ValueError):
    """An error that the user can correct: a config value, a file, a missing download."""


class RunFailed(UserError):
    """A run with a valid configuration could not continue: a full disk, too few usable clients."""


class CannotContinue(UserError):
    """What a run left in its folder is damaged or of another run, so that this one has to start anew."""


class DamagedFile(UserError):
    """A file that a program wrote for others to read cannot be read; the message names it, and says what to do."""


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.55) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``choices``, or ``""`` if none is close or an abbreviation.

    Args:
        cutoff: how much alike they have to be, 0 to 1 (``difflib.get_close_matches``).
    """
    by_lower, given = {str(choice).lower(): str(choice) for choice in choices}, str(name).lower()
    close = difflib.get_close_matches(given, list(by_lower), n=1, cutoff=cutoff)
    close = close or [c for c in by_lower if len(c) >= 3 and given.startswith(c)]
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def own_place(error: BaseException) -> str:
    """Where ``error`` was raised in code of the user, such as a method of their own; empty if it was not.

    That is the innermost line of its traceback that is neither of this package nor of an installed one. An error of
    another process brings its ``place`` along.
    """
    place: str = getattr(error, "place", "")
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = Path(frame.f_code.co_filename), str(frame.f_globals.get("__name__", ""))
        installed = file.is_relative_to(_STANDARD) or _PACKAGES.intersection(file.parts)
        if module.split(".")[0] not in _OURS and file.is_file() and not installed:
            place = f"{file.name}, line {line}"
    return place


def described(error: BaseException, text: str | None = None) -> str:
    """The type of ``error`` and its text, or ``text``, and where it was raised if that is code of the user."""
    place = own_place(error)
    return f"{type(error).__name__}: {error if text is None else text}" + (f" ({place})" if place else "")


@contextlib.contextmanager
def users_own(what: str, remedy: str = "") -> Iterator[None]:
    """A context for what a user supplies and this package runs or reads: a data set, a template, a file of weights.

    Args:
        what: it is, for the message, and with which row it is run. remedy: what the user can do.
    Raises:
        UserError: whatever it raises.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the user's code, or of a library that reads a file of the user's
        in_one_line = " ".join(str(error).split())
        raise UserError(f"{what} raises {described(error, in_one_line)}{remedy and f'; {remedy}'}") from error


def counted(number: int, noun: str) -> str:
    """``1 client``, ``3 clients``: a number and a noun whose plural ends in s."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def hint(*words: object) -> str:
    """``fs-lowrank WORDS``, quoted for a shell: a command that a message offers, which runs as it stands."""
    return shlex.join(["fs-lowrank", *map(str, words)])


#: the logger of what was read of the data, which commands show at the start of every run
ROWS_LOGGER = "fs_lowrank.rows"


@cache
def say_once(message: str, level: int = logging.WARNING, logger: str = "fs_lowrank") -> None:
    """Log ``message``, as a warning unless it is said otherwise, once per process."""
    logging.getLogger(logger).log(level, "%s", message)
