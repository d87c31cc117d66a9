"""How long the server waits for its clients, and its warnings meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..rounds.transport import Lost

logger = logging.getLogger("fs_lowrank")

#: seconds without a reply until a warning says for whom the server waits: for processes that only have to introduce
#: themselves, and for training or evaluation; half of the timeout at most; the next comes when the wait has doubled
FIRST_WARNING, WORK_WARNING = 5.0, 30.0


@dataclass(frozen=True)
class Silent(Lost):
    """There was no answer within ``lowrank.timeout``."""


def replies(
    awaited: Iterable[int],
    arrivals: Callable[[], Iterable[tuple[int, Any]]],
    timeout: float,
    noun: str,
    work: bool = True,
    lost: Callable[[int], str] = lambda peer: "",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[int, Any]]:
    """The replies of ``awaited``, as they come, or why there is none; warnings say for whom this waits.

    Args:
        arrivals: the replies that have come; where there is none, it waits a little.
        timeout: seconds after the last reply until the others are given up.
        noun: for whom this waits. work: they train or evaluate.
        lost: the reason why a peer will not reply; empty: it may.
        clock: gives seconds.
    """
    peers, first = set(awaited), min(WORK_WARNING if work else FIRST_WARNING, timeout / 2)
    last, warn_at = clock(), first
    while peers:
        before = len(peers)
        for peer, reply in arrivals():
            if peer in peers:
                peers.discard(peer)
                yield peer, reply
                last, warn_at = clock(), first
        if len(peers) < before:
            continue
        passed = clock() - last
        silent = Silent("absent", f"no answer within lowrank.timeout, {timeout:g} s")
        for peer in [peer for peer in sorted(peers) if passed >= timeout or lost(peer)]:
            peers.discard(peer)
            yield peer, Lost("absent", reason) if (reason := lost(peer)) else silent
        if peers and passed >= warn_at:
            warn_at = 2 * passed
            logger.warning(
                f"waiting for {noun}{'s' * (len(peers) > 1)} {listed(peers)}: no answer for {passed:.0f} s; for up to "
                f"{timeout - passed:.0f} s more, by lowrank.timeout = {timeout:g}"
            )


def listed(numbers: Collection[int], limit: int = 5) -> str:
    """``numbers`` for a message, no more than ``limit`` of them."""
    first = sorted(numbers)[:limit]
    return ", ".join(map(str, first)) + (f" and {len(numbers) - limit} more" if len(numbers) > limit else "")
