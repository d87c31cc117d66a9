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


def replies(
    awaited: Iterable[int],
    come: Callable[[], Iterable[tuple[int, Any]]],
    timeout: float,
    noun: str,
    work: bool = True,
    gone: Callable[[int], str] = lambda place: "",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[int, Any]]:
    """The replies of ``awaited``, as they come, or why there is none; meanwhile it is said for whom this waits.

    Args:
        come: the replies that have come; where there is none, it waits a little.
        timeout: seconds after the last reply until the others are given up.
        noun: for whom this waits. work: they train or evaluate.
        gone: why one will not reply; empty: it may.
        clock: gives seconds.
    """
    left, first = set(awaited), min(OF_WORK if work else FIRST_WORD, timeout / 2)
    since, word = clock(), first
    while left:
        before = len(left)
        for place, reply in come():
            if place in left:
                left.discard(place)
                yield place, reply
                since, word = clock(), first
        if len(left) < before:
            continue
        passed = clock() - since
        silent = Silent("absent", f"no answer within lowrank.timeout, {timeout:g} s")
        for place in [place for place in sorted(left) if passed >= timeout or gone(place)]:
            left.discard(place)
            yield place, Lost("absent", reason) if (reason := gone(place)) else silent
        if left and passed >= word:
            word = 2 * passed
            logger.warning(
                f"waiting for {noun}{'s' * (len(left) > 1)} {listed(left)}: no answer for {passed:.0f} s; for up to "
                f"{timeout - passed:.0f} s more, by lowrank.timeout = {timeout:g}"
            )


def listed(numbers: Collection[int], most: int = 5) -> str:
    """``numbers`` for a message, no more than ``most`` of them."""
    first = sorted(numbers)[:most]
    return ", ".join(map(str, first)) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
