"""Loaded values that a process needs again, such as tokenized data.

Within ``memoizing``, a value is made once for equal inputs.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")

#: bytes of all values together: a sixteenth of the machine's memory
LIMIT = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 16
#: key of the inputs -> the value, which nobody changes, and its bytes; the least recently used first
Values = dict[str, tuple[Any, int]]
_current: Values | None = None


@contextmanager
def memoizing() -> Iterator[Values]:
    """Within the block, ``memoized`` keeps values. In a block inside another, the outer one's values are used."""
    global _current
    outer = _current
    _current = {} if outer is None else outer
    try:
        yield _current
    finally:
        _current = outer


def free_last_run() -> None:
    """Within ``memoizing``, free the model of the run before, since it and the hooks on it refer to each other."""
    if _current is not None:
        gc.collect()


def memoized(
    decides: Callable[[], Mapping[str, Any] | None], make: Callable[[], Value], size: Callable[[Value], int]
) -> Value:
    """The value of ``make``; within ``memoizing``, the earlier value for equal inputs.

    If the values exceed ``LIMIT``, the least recently used are removed.

    Args:
        decides: gives all inputs as plain data; None: unknown, and the value is not stored. size: of a value, in bytes.
    """
    if _current is None:
        return make()
    if (inputs := decides()) is None:
        return make()
    key = json.dumps(inputs, sort_keys=True, default=str)
    if key in _current:
        _current[key] = _current.pop(key)
    else:
        fresh = make()
        room = LIMIT - size(fresh)
        if room < 0:
            return fresh
        while sum(used for _, used in _current.values()) > room:
            del _current[next(iter(_current))]
        _current[key] = fresh, size(fresh)
    value: Value = _current[key][0]
    return value
