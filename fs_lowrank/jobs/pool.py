"""Processes that receive their work item by item, over a connection each; one that falls silent is noticed.

While a process works it sends empty messages, so that the limit is on its silence, not on the length of its work.

The pools of the libraries do not serve here. In ``concurrent.futures`` and in loky the death of one process breaks the
executor: every item that is in work or waits is lost, and with the other processes what they have loaded.
``multiprocessing.Pool``, and torch's, which is derived from it, replaces the process and never says that its item is
lost, so that whoever waits for that waits forever; ``torch.multiprocessing.spawn`` ends all others. None of them has a
limit on the silence of a process, lets the caller say which process is to do an item (a client's frozen states are in
one of them), or ends a process that works when the one that started it is killed: an executor's stay for good. Items
travel by pickle there; here they are bytes that are never unpickled. What the libraries have and this has not: tensors
in shared memory (a message is copied), and Windows.
"""

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
    """A process of a pool. It handles one item at a time and answers each; an answer is not empty.

    Args:
        target, options: as for ``Process``.
        timeout: seconds that sending or receiving a message may take, and that the process may be silent.

    Attributes:
        waiting: items that have not been sent yet.
        idle: whether the process waits for an item.
        since: when it was last sent or heard of, on the monotonic clock.
    """

    def __init__(self, target: str, timeout: float, **options: Any):
        super().__init__(target, timeout=timeout, beat=min(timeout / 4, 5.0), **options)
        #: what it has sent and ``receive`` has not returned; None: it is gone
        self._heard: list[bytes | None] = []
        self.waiting: deque[Any] = deque()
        self.idle, self.since, self.timeout = True, 0.0, timeout

    def encode(self, item: Any) -> bytes:
        """An item as it is sent."""
        data: bytes = item
        return data

    def decode(self, data: bytes) -> Any:
        """The item in what was received."""
        return data

    def send(self, item: Any) -> None:
        """Send an item now."""
        self.idle, self.since = False, time.monotonic()
        try:
            self.connection.send_bytes(self.encode(item))
        except OSError:
            logger.debug("%s is gone or stuck", self)  # the next ``receive`` or ``silent`` reports it

    def next(self) -> Any | None:
        """Send the first waiting item if the process is idle; returns the item, or None."""
        if not (self.idle and self.waiting):
            return None
        item = self.waiting.popleft()
        self.send(item)
        return item

    def hears(self) -> bool:
        """Read one message of the process; whether it was an item or its end, and not only a sign of life."""
        try:
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            self._heard.append(None)
            return True
        self.since = time.monotonic()
        if data:
            self._heard.append(data)
        return bool(data)

    def receive(self) -> Any | None:
        """The item that it has sent; None if the process is gone, and then it is ended. Waits while it lives."""
        while not self._heard and not self.hears():
            pass
        data = self._heard.pop(0)
        if data is None:
            self.end()
            return None
        return self.decode(data)

    @property
    def news(self) -> bool:
        """Whether an item or its end has been read, and not been received yet."""
        return bool(self._heard)

    @property
    def silent(self) -> bool:
        """Whether it works and has not been heard of for longer than ``timeout``."""
        return not (self.idle or self.news) and time.monotonic() - self.since > self.timeout


class Pool:
    """A group of members."""

    def __init__(self) -> None:
        self.members: list[Any] = []

    @property
    def idle(self) -> bool:
        """Whether no member works or has an item waiting."""
        return all(member.idle and not member.waiting for member in self.members)

    def heard(self, seconds: float) -> Sequence[Any]:
        """The working members that have sent an item or are gone; waits for the first, ``seconds`` at most."""
        self._read(0 if any(member.news for member in self.members) else seconds)
        return [member for member in self.members if member.news and not member.idle]

    def _read(self, seconds: float) -> None:
        """Read one message of each working member that has sent some and has no news; wait for the first."""
        by_connection = {member.connection: member for member in self.members if not (member.idle or member.news)}
        for connection in wait(list(by_connection), timeout=seconds):
            by_connection[connection].hears()

    def silent(self) -> Any | None:
        """A member that works and has been silent for longer than its ``timeout``; None if there is none.

        What members have sent while nobody listened is read first.
        """
        self._read(0)
        return next((member for member in self.members if member.silent), None)

    def dismiss(self) -> None:
        """Close the connections, which makes every member end, and wait ten seconds for each."""
        for member in self.members:
            member.connection.close()
        for member in self.members:
            member.ends_within(10.0)

    def end(self) -> None:
        """End every member, even one that is working."""
        for member in self.members:
            member.connection.close()
        for member in self.members:
            member.end()
