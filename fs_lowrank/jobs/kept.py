"""What a process has loaded and needs again, such as a model before a method has changed it.

Within ``keeping``, a value is made once for all that decides it, and every use is a copy of its own.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")

_current: Keep | None = None


class Keep:
    """Values by what decides them; the least recently used are dropped where they exceed the limit.

    Attributes:
        limit: bytes, a sixteenth of the machine's memory.
    """

    def __init__(self) -> None:
        self.limit: float = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 16
        #: key -> the value, which nobody changes, and its bytes; the least recently used first
        self.values: dict[str, tuple[Any, int]] = {}

    def value(
        self, key: str, make: Callable[[], Value], copy: Callable[[Value], Value], size: Callable[[Value], int]
    ) -> Value:
        """A copy of the value for ``key``, which ``make`` gives if it is not kept yet."""
        if key not in self.values:
            made = make()
            room = self.limit - size(made)
            if room < 0:
                return made
            while sum(taken for _, taken in self.values.values()) > room:
                del self.values[next(iter(self.values))]
            self.values[key] = made, size(made)
        else:
            gc.collect()  # frees what the run before has left, whose model and the hooks on it refer to each other
        self.values[key] = self.values.pop(key)
        kept: Value = self.values[key][0]
        return copy(kept)


@contextmanager
def keeping() -> Iterator[Keep]:
    """Within the block, ``kept`` keeps values. In a block inside another, the outer one's values are used."""
    global _current
    outer = _current
    _current = outer or Keep()
    try:
        yield _current
    finally:
        _current = outer


def kept(
    what: str,
    decides: Callable[[], Mapping[str, Any] | None],
    make: Callable[[], Value],
    copy: Callable[[Value], Value] = lambda value: value,
    size: Callable[[Value], int] = lambda value: 0,
) -> Value:
    """What ``make`` gives; within ``keeping``, a copy of what it gave before where the same decides it.

    Args:
        what: the kind of value. decides: gives all that decides it, as plain data; None: not known, so it is not kept.
        copy: of a value that its user may change. size: of a value, in bytes.
    """
    known = None if _current is None else decides()
    if _current is None or known is None:
        return make()
    return _current.value(json.dumps([what, known], sort_keys=True, default=str), make, copy, size)
