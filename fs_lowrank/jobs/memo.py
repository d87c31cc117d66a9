"""Loaded values that a process needs again, such as a model before a method has changed it.

Within ``memoizing``, a value is made once for equal inputs, and every use is a copy of its own.
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


def memoized(
    kind: str,
    decides: Callable[[], Mapping[str, Any] | None],
    make: Callable[[], Value],
    copy: Callable[[Value], Value] = lambda value: value,
    size: Callable[[Value], int] = lambda value: 0,
) -> Value:
    """The value of ``make``; within ``memoizing``, a copy of the earlier value for equal inputs.

    If the values exceed ``LIMIT``, the least recently used are removed.

    Args:
        kind: of the value. decides: gives all inputs as plain data; None: unknown, and the value is not stored.
        copy: of a value that its user may change. size: of a value, in bytes.
    """
    inputs = None if _current is None else decides()
    if _current is None or inputs is None:
        return make()
    key = json.dumps([kind, inputs], sort_keys=True, default=str)
    if key in _current:
        gc.collect()  # frees the model of the run before: it and the hooks on it refer to each other
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
    return copy(value)
