"""Processes that are handed their work piece by piece, over a connection each, with a bound on silence."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from .process import Process

logger = logging.getLogger("fs_lowrank")


class Member(Process):
    """A process of a pool. It does one item after the other and says when it is done with each.

    So neither side ever writes while the other does.

    Args:
        target: as for ``Process``, like the further ``options``.
        timeout: seconds that a message may take to go in or out, and that the process may take for an item.
    """

    def __init__(self, target: str, timeout: float, **options: Any):
        super().__init__(target, timeout=timeout, **options)
        #: items that have not been sent yet
        self.waiting: deque[Any] = deque()
        #: whether it waits for the next; since when it works, by the monotonic clock
        self.idle, self.since, self.timeout = True, 0.0, timeout

    def encode(self, item: Any) -> bytes:
        """An item as it travels."""
        data: bytes = item
        return data

    def decode(self, data: bytes) -> Any:
        """What has travelled, as an item."""
        return data

    def send(self, item: Any) -> None:
        """Hand it an item now."""
        self.idle, self.since = False, time.monotonic()
        try:
            self.connection.send_bytes(self.encode(item))
        except OSError:
            logger.debug("%s is gone or stuck", self)  # which the next look at the connection finds and reports

    def next(self) -> Any | None:
        """Send the first item that waits, if the process does too; returns what was sent."""
        if not (self.idle and self.waiting):
            return None
        item = self.waiting.popleft()
        self.send(item)
        return item

    def receive(self) -> Any | None:
        """What it has sent; None if it is gone, and then it is ended for good."""
        try:
            return self.decode(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.end()
            return None

    @property
    def silent(self) -> bool:
        """Whether it has worked on one item for longer than the bound."""
        return not self.idle and time.monotonic() - self.since > self.timeout


class Pool:
    """The members, and what they say."""

    def __init__(self) -> None:
        self.members: list[Any] = []

    @property
    def idle(self) -> bool:
        """Whether no member works and none has anything left to do."""
        return all(member.idle and not member.waiting for member in self.members)

    def heard(self, seconds: float) -> Sequence[Any]:
        """The members at work that have something to say, or are gone; waits for the first, ``seconds`` at most."""
        by_connection = {member.connection: member for member in self.members if not member.idle}
        return [by_connection[c] for c in wait(list(by_connection), timeout=seconds)]

    def silent(self) -> Any | None:
        """A member that has been at work for longer than the bound."""
        return next((member for member in self.members if member.silent), None)

    def dismiss(self) -> None:
        """Close the connections, so that every member ends by itself; wait for them a while."""
        for member in self.members:
            member.connection.close()
        for member in self.members:
            member.ends_within(10.0)

    def end(self) -> None:
        """End every member, whatever it does."""
        for member in self.members:
            member.connection.close()
        for member in self.members:
            member.end()
