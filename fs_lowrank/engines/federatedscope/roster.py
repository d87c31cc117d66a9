"""The clients that a distributed server knows: who they are, where they listen, and how long it waits for them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ...errors import RunFailed, UserError
from ...jobs.files import replacing
from .messages import Request

#: the least that the server waits for a client, in seconds, where ``lowrank.timeout`` is not less
_LEAST = 1.0


@dataclass
class Member:
    """A client.

    Attributes:
        process: drawn by its process; a restart has another one.
        joined: whether it has joined this process of the server.
        missed: how often in a row it has not answered in time.
        deadline: when the server stops to wait for its answer, by ``time.monotonic``.
    """

    number: int
    address: str
    token: str
    process: str
    samples: int
    joined: bool = False
    missed: int = 0
    deadline: float = 0.0


class Roster:
    """The members by number, in a file that a resumed server reads.

    Args:
        path: of the file; only the user may read it, because it has the clients' tokens.
        timeout: seconds that the server waits for a client that has answered so far.
        resume: take over the members that the file names.
    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, path: Path, timeout: float, resume: bool):
        self.path, self.timeout = path, timeout
        self.members: dict[int, Member] = {}
        if resume and path.exists():
            try:
                saved = TypeAdapter(list[Member]).validate_json(path.read_text(encoding="utf-8"))
            except (ValidationError, OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"{path}, the clients of the run to resume, cannot be read: {str(error).splitlines()[0]}; "
                    "remove it, and start the clients again"
                ) from None
            self.members = {member.number: member for member in saved}

    def add(self, number: int, request: Request) -> Member:
        """``number`` has joined with ``request``; it takes the place of any process before it."""
        member = Member(number, str(request.address), request.token, request.process, request.samples, joined=True)
        self.members[number] = member
        saved = [dataclasses.asdict(m) | {"joined": False, "missed": 0, "deadline": 0.0} for m in self.members.values()]
        write_private(self.path, json.dumps(saved, indent=1))
        return member

    def with_token(self, token: str) -> Member | None:
        """The member that has this token."""
        return next((m for m in self.members.values() if secrets.compare_digest(m.token, token)), None)

    def patience(self, number: int) -> float:
        """Seconds to wait for an answer: half as long for each time that none has come."""
        least = min(self.timeout, _LEAST)
        return max(self.timeout / 2 ** min(self.members[number].missed, 60), least)

    def asked(self, number: int) -> None:
        """The member is asked for an answer now."""
        self.members[number].deadline = time.monotonic() + self.patience(number)

    def overdue(self, number: int) -> bool:
        """Whether the member was asked longer ago than the server waits."""
        return time.monotonic() > self.members[number].deadline

    def missed(self, number: int) -> str:
        """The member has not answered in time; why it is left out."""
        shown = f"no answer within lowrank.timeout, {self.timeout:g} s"
        if self.members[number].missed:
            shown = (
                f"no answer within {self.patience(number):g} s; lowrank.timeout is {self.timeout:g} s, but this client "
                f"has not answered {self.members[number].missed} times in a row"
            )
        self.members[number].missed += 1
        return shown


def write_private(path: Path, text: str) -> None:
    """Write a text file whole that only the user may read.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        with replacing(path) as aside:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror or error}") from error


def own_token(path: Path) -> str:
    """The token of a client, in a file at ``path``, so that a restart of the same command is the same client."""
    with contextlib.suppress(FileNotFoundError):
        token = path.read_text(encoding="utf-8", errors="replace").strip()
        if len(token) == 32 and set(token) <= set("0123456789abcdef"):
            return token
    token = secrets.token_hex(16)
    write_private(path, token)
    return token
