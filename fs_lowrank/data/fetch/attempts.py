"""What the registries share: several attempts with a word on each, and a client program that is run."""

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
WAIT_SECONDS = 1.0  # before the first retry; doubled for each further one
CLIENT_SECONDS = 600  # for npm and apt-get, which bring their own limits for each connection


class Missing(Exception):
    """The address answers that there is no such thing; trying again is of no use."""


def retrying(what: str, action: Callable[[], Result], progress: Say) -> Result:
    """The result of ``action``, which is tried again after an error of the network that may pass.

    Args:
        what: named in every message.

    Raises:
        UserError: refused, or failed ``ATTEMPTS`` times.
        Missing: the server answers that there is no such thing.
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
            reason = _reason(error)
        if attempt < ATTEMPTS:
            wait = WAIT_SECONDS * 2 ** (attempt - 1)
            progress(f"{what}: {reason}; trying again in {wait:g} s ({attempt} of {ATTEMPTS} attempts failed)")
            time.sleep(wait)
    raise UserError(
        f"{what}: failed {ATTEMPTS} times, the last time with: {reason}; check the network, "
        "or name a mirror that can be reached with PIP_INDEX_URL"
    )


def _reason(error: BaseException) -> str:
    """The innermost message: requests wraps urllib3's error, which wraps the socket's."""
    while isinstance(inner := getattr(error, "reason", None) or (error.args and error.args[0]), BaseException):
        error = inner
    return inner if inner and isinstance(inner, str) else str(error) or type(error).__name__


def client_download(
    item: Item, folder: Path, command: list[str], pattern: str, progress: Say, absent: str, unknown: dict[str, str]
) -> Path:
    """The file ``pattern`` that a package manager's own client writes into ``folder``.

    Args:
        command: the program and its arguments.
        absent: the error where the program is not installed.
        unknown: words of its output -> the error that they mean, after which trying again is of no use.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UserError(absent)
    name = Path(program).name

    def download() -> Path:
        try:
            done = subprocess.run(
                [program, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{name} gave no answer in {CLIENT_SECONDS} s") from error
        found = sorted(folder.glob(pattern))
        if done.returncode or not found:
            said = ((done.stderr or done.stdout).strip().splitlines() or ["nothing"])[-1]
            for words, meaning in unknown.items():
                if words in said:
                    raise UserError(meaning)
            raise ConnectionError(f"{name} {command[1]} ended with status {done.returncode} and said: {said}")
        return found[0]

    return retrying(item.filename or item.package, download, progress)
