"""Locks between the processes of one machine, through files. A lock is released when the process that holds it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def take(path: Path) -> FileLock | None:
    """Acquire the lock at ``path``, to be released by the caller; None if it is held. Its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0, thread_local=False)  # another thread may release it
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


@contextmanager
def exclusive(path: Path, stop: Callable[[], object] = lambda: False) -> Iterator[None]:
    """Hold the lock during the block; wait for it until ``stop`` returns something true.

    Raises:
        KeyboardInterrupt: ``stop`` did.
    """
    while (lock := take(path)) is None:
        if stop():
            raise KeyboardInterrupt
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()
