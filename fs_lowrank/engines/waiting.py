"""How long the server waits for its clients, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

#: seconds without a reply after which the server says whom it waits for: processes that only have to introduce
#: themselves, and those that train or evaluate; each further word comes when the wait has doubled
FIRST_WORD, OF_WORK = 5.0, 30.0


class Waiting:
    """A wait that ends ``timeout`` seconds after the last reply.

    Args:
        noun: for whom. work: they train or evaluate.
        clock: gives seconds.
    """

    def __init__(self, timeout: float, noun: str, work: bool, clock: Callable[[], float] = time.monotonic):
        self.timeout, self.noun, self.clock = timeout, noun, clock
        self._first = OF_WORK if work else FIRST_WORD
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


def listed(numbers: Collection[int], most: int = 5) -> str:
    """``numbers`` for a message, no more than ``most`` of them."""
    first = sorted(numbers)[:most]
    return ", ".join(map(str, first)) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
