"""Shared by all registries: retries with progress messages, and downloads by a client program."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import requests

from fs_lowrank.data.fetch.items import Item
from fs_lowrank.errors import UserError

Say = Callable[[str], None]
Result = TypeVar("Result")

ATTEMPTS = 3
WAIT_SECONDS = 1.0  # before the first retry; doubled for each further retry
CLIENT_SECONDS = 300  # for one run of npm or apt-get
WORD_SECONDS = 5.0  # between two lines of progress


class Missing(Exception):
    """The server answers that the file does not exist, so there is no retry."""


def retrying(what: str, action: Callable[[], Result], progress: Say) -> Result:
    """The result of ``action``, retried after temporary network errors.

    Args:
        what: named in every message.

    Raises:
        UserError: the request was refused, or failed ``ATTEMPTS`` times.
        Missing: the server answers that the file does not exist.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except requests.HTTPError as error:
            code = error.response.status_code
            if code in (404, 410):
                raise Missing(f"{what}: not found") from error
            if code < 500 and code not in (408, 429):
                raise UserError(f"{what}: refused with HTTP status {code} {error.response.reason}") from error
            reason = f"HTTP status {code}"
        except (requests.RequestException, TimeoutError, ConnectionError) as error:
            reason = reason_of(error)
        if attempt < ATTEMPTS:
            wait = WAIT_SECONDS * 2 ** (attempt - 1)
            progress(f"{what}: {reason}; trying again in {wait:g} s ({attempt} of {ATTEMPTS} attempts failed)")
            time.sleep(wait)
    raise UserError(
        f"{what}: failed {ATTEMPTS} times, the last time with: {reason}; check the network, "
        "or name a mirror that can be reached with PIP_INDEX_URL"
    )


def reason_of(error: BaseException) -> str:
    """The innermost message: requests wraps urllib3's error, which wraps the socket's."""
    while isinstance(inner := getattr(error, "reason", None) or (error.args and error.args[0]), BaseException):
        error = inner
    return inner if inner and isinstance(inner, str) else str(error) or type(error).__name__


def client_download(
    item: Item, folder: Path, command: list[str], pattern: str, progress: Say, absent: str, unknown: dict[str, str]
) -> Path:
    """Run the client of a package manager, which writes the file ``pattern`` to ``folder``; returns its path.

    Args:
        command: the program and its arguments.
        absent: the error message if the program is not installed.
        unknown: text in its output -> the error message for it; there is no retry then.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UserError(absent)
    name = Path(program).name

    def download() -> Path:
        progress(f"{item.package}: running {name} {command[1]}, at most {CLIENT_SECONDS:g} s")
        try:
            process = subprocess.run(
                [program, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{item.package}: {name} {command[1]} did not end within {CLIENT_SECONDS:g} s; check the network"
            ) from error
        files = sorted(folder.glob(pattern))
        if process.returncode or not files:
            message = ((process.stderr or process.stdout).strip().splitlines() or ["nothing"])[-1]
            for words, meaning in unknown.items():
                if words in message:
                    raise UserError(meaning)
            raise ConnectionError(f"{name} {command[1]} ended with status {process.returncode} and said: {message}")
        return files[0]

    return retrying(item.filename or item.package, download, progress)
