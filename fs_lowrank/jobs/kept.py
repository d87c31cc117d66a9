"""What a process has loaded and will need again, such as a model before a method has changed it.

Inside ``keeping``, a value is made once for all that decides it. It is then written to memory that has no name on any
disk, and every use is a copy that is read from there: tensors are mapped, so that unchanged ones take memory once, for
all copies and for other processes that are told of them (``Keep.places``). A copy that is changed changes no other.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger("fs_lowrank")

Value = TypeVar("Value")

_current: Keep | None = None


class Keep:
    """Values by what decides them; the least recently used are dropped where they exceed the limit.

    Args:
        limit: bytes; None: a sixteenth of the machine's memory.
        given: the ``places`` of another process.
    """

    def __init__(self, limit: float | None = None, given: Mapping[str, str] | None = None):
        self.limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 16 if limit is None else limit
        #: key -> the file descriptor and the number of bytes, the least recently used first
        self.files: dict[str, tuple[int, int]] = {}
        self.given = dict(given or {})
        #: keys of values that cannot be kept
        self.refused: set[str] = set()

    @property
    def places(self) -> dict[str, str]:
        """Where other processes of the same user find the values while this one lives and keeps them."""
        return {key: f"/proc/{os.getpid()}/fd/{file}" for key, (file, _) in self.files.items()}

    def value(self, key: str, make: Callable[[], Value]) -> Value:
        """A copy of the value for ``key``, which ``make`` gives if it is not kept yet."""
        if key in self.given:
            try:
                return _read(self.given[key])
            except OSError as error:  # that process has ended, or is another user's
                logger.debug("%s is loaded anew: %s", key, error)
                del self.given[key]
        if key not in self.files:
            made = make()
            if key in self.refused or not self._write(key, made):
                self.refused.add(key)
                return made
            del made  # what is returned shares its memory with what is kept
        self.files[key] = self.files.pop(key)
        return _read(self.places[key])

    def _write(self, key: str, value: object) -> bool:
        """Keep ``value``; whether that was possible."""
        import torch

        if not hasattr(os, "memfd_create"):  # only Linux has it
            return False
        file = os.memfd_create("fs_lowrank")
        try:
            with _Limited(file, self.limit) as stream:
                torch.save(value, stream)
                size = stream.written
        except Exception as error:  # of a class that cannot be pickled, or too large
            logger.debug("%s is not kept: %s", key, error)
            os.close(file)
            return False
        self.files[key] = file, size
        while sum(size for _, size in self.files.values()) > self.limit:
            self._drop(next(iter(self.files)))
        return True

    def _drop(self, key: str) -> None:
        os.close(self.files.pop(key)[0])

    def close(self) -> None:
        """Drop everything; copies that are in use keep their memory."""
        for key in list(self.files):
            self._drop(key)


class _Limited(io.FileIO):
    """A file that refuses to become larger than ``limit`` bytes."""

    def __init__(self, file: int, limit: float):
        super().__init__(file, "w", closefd=False)
        self.limit, self.written = limit, 0

    def write(self, data: Any) -> int:
        self.written += memoryview(data).nbytes
        if self.written > self.limit:
            raise OSError(f"more than {self.limit:.0f} bytes")
        left = memoryview(data).cast("B")
        while left:
            left = left[super().write(left) :]
        return memoryview(data).nbytes


def _read(place: str) -> Any:
    import torch

    # What this user's own processes have written; mapped so that a write changes this process's copy alone.
    return torch.load(place, mmap=True, weights_only=False)


@contextmanager
def keeping(limit: float | None = None, given: Mapping[str, str] | None = None) -> Iterator[Keep]:
    """Within the block, ``kept`` keeps values; within a block of this kind, that one's are used.

    Args:
        limit, given: as for ``Keep``.
    """
    global _current
    if _current is not None:
        yield _current
        return
    _current = Keep(limit, given)
    try:
        yield _current
    finally:
        _current.close()
        _current = None


def kept(what: str, decides: Mapping[str, Any], make: Callable[[], Value]) -> Value:
    """What ``make`` gives; within ``keeping``, a copy of what it gave before for the same ``decides``.

    Args:
        what: kind of value. decides: all that decides it, as plain data.
    """
    if _current is None:
        return make()
    return _current.value(json.dumps([what, decides], sort_keys=True, default=str), make)
