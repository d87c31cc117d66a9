"""How long the server waits for nodes, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

#: seconds without a reply after which the server says whom it waits for: nodes that only have to introduce themselves,
#: and nodes that train or evaluate; each further word comes when the wait has doubled
FIRST_WORD = {"call": 5.0}
OF_WORK = 30.0
#: nodes that are named in a word
NAMED = 5


class Waiting:
    """A wait that ends ``timeout`` seconds after the last reply.

    Args:
        kind: what the nodes were asked for (``server.KINDS``).
        clock: gives seconds.
    """

    def __init__(self, timeout: float, kind: str, clock: Callable[[], float] = time.monotonic):
        self.timeout, self.clock = timeout, clock
        self._first = FIRST_WORD.get(kind, OF_WORK)
        self.heard()

    def heard(self) -> None:
        """A reply has come: the wait begins anew."""
        self._since, self._next = self.clock(), self._first

    @property
    def over(self) -> bool:
        return self.clock() >= self._since + self.timeout

    def word(self, nodes: Iterable[int]) -> str:
        """What is to be said now of ``nodes``, for which the server waits; empty: nothing."""
        passed = self.clock() - self._since
        if passed < self._next or passed >= self.timeout:
            return ""
        self._next = 2 * passed
        listed = sorted(nodes)
        shown = ", ".join(map(str, listed[:NAMED])) + (f" and {len(listed) - NAMED} more" if listed[NAMED:] else "")
        return (
            f"waiting for node{'s' * (len(listed) > 1)} {shown}: no answer for {passed:.0f} s; for up to "
            f"{self.timeout - passed:.0f} s more, by lowrank.timeout = {self.timeout:g}"
        )
