"""How long the server waits for its clients, and what it says meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..rounds.transport import Lost

logger = logging.getLogger("fs_lowrank")

#: seconds without a reply after which the server says whom it waits for: processes that only have to introduce
#: themselves, and those that train or evaluate; half of the timeout at most; each further word comes when the wait has
#: doubled
FIRST_WORD, OF_WORK = 5.0, 30.0


@dataclass(frozen=True)
class Silent(Lost):
    """There was no answer within ``lowrank.timeout``."""


class Waiting:
    """A wait that ends ``timeout`` seconds after the last reply.

    Args:
        noun: for whom. work: they train or evaluate.
        clock: gives seconds.
    """

    def __init__(self, timeout: float, noun: str, work: bool, clock: Callable[[], float] = time.monotonic):
        self.timeout, self.noun, self.clock = timeout, noun, clock
        self._first = min(OF_WORK if work else FIRST_WORD, timeout / 2)
        self.heard()

    def heard(self) -> None:
        """A reply has come: the wait begins anew."""
        self._since, self._next = self.clock(), self._first

    @property
    def over(self) -> bool:
        return self.clock() >= self._since + self.timeout

    def word(self, awaited: Collection[int]) -> str:
        """What is to be said now of ``awaited``; empty: nothing."""
        passed = self.clock() - self._since
        if passed < self._next or passed >= self.timeout:
            return ""
        self._next = 2 * passed
        return (
            f"waiting for {self.noun}{'s' * (len(awaited) > 1)} {listed(awaited)}: no answer for {passed:.0f} s; for "
            f"up to {self.timeout - passed:.0f} s more, by lowrank.timeout = {self.timeout:g}"
        )

    def replies(
        self,
        awaited: Collection[int],
        come: Callable[[], Iterable[tuple[int, Any]]],
        gone: Callable[[int], str] = lambda place: "",
    ) -> Iterator[tuple[int, Any]]:
        """The replies of ``awaited``, as they come, or why there is none; meanwhile it is said for whom this waits.

        Args:
            come: the replies that have come since the last call; where there is none, it waits a little.
            gone: why one will not reply; empty: it may.
        """
        left = set(awaited)
        while left:
            came = False
            for place, reply in come():
                came = True
                if place in left:
                    left.discard(place)
                    yield place, reply
                    self.heard()
            if came:
                continue
            silent = Silent("absent", f"no answer within lowrank.timeout, {self.timeout:g} s")
            for place in [place for place in sorted(left) if self.over or gone(place)]:
                left.discard(place)
                yield place, Lost("absent", reason) if (reason := gone(place)) else silent
            if word := self.word(left):
                logger.warning("%s", word)


def listed(numbers: Collection[int], most: int = 5) -> str:
    """``numbers`` for a message, no more than ``most`` of them."""
    first = sorted(numbers)[:most]
    return ", ".join(map(str, first)) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
