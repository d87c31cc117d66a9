"""Locks between the processes of one machine: a file that one of them holds; it is free again when that one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def take(path: Path) -> FileLock | None:
    """The lock at ``path``, to be released by the caller; None if another holds it. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the lock is ours for the block; it does not wait."""
    lock = take(path)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def exclusive(path: Path, stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Hold the lock for the block; wait for it, but no longer than until ``stop`` says so.

    Raises:
        KeyboardInterrupt: ``stop`` said so.
    """
    while (lock := take(path)) is None:
        if stop():
            raise KeyboardInterrupt
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()
