"""Redirects the framework's log during a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def log_to(path: Path, verbose: int) -> Iterator[None]:
    """A context in which the framework's log is written to a file, and only warnings also go to the console.

    Args:
        path: the file, to which lines are appended.
        verbose: above 1, everything also goes to the console.
    """
    logger = logging.getLogger("federatedscope")
    level, handlers = logger.level, [(handler, handler.level) for handler in logger.handlers]
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s (%(module)s:%(lineno)d) %(levelname)s: %(message)s"))
    logger.setLevel(logging.INFO)
    for handler, _ in handlers:
        handler.setLevel(logging.INFO if verbose > 1 else logging.WARNING)
    logger.addHandler(file)
    try:
        yield
    finally:
        logger.removeHandler(file)
        with suppress(OSError):  # on a full disk; the run goes on without it
            file.close()
        logger.setLevel(level)
        for handler, before in handlers:
            handler.setLevel(before)
