"""Redirects the framework's log during a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import say_once


class _File(logging.FileHandler):
    """A file that is given up at the first line that cannot be written, for example on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(error := sys.exception(), OSError):  # a wrong call of the logger
            return super().handleError(record)
        logging.getLogger("federatedscope").removeHandler(self)
        say_once(f"{self.baseFilename} cannot be written ({error}); the run goes on without it")


@contextmanager
def log_to(path: Path, verbose: int) -> Iterator[None]:
    """A context in which the framework's log is written to a file, and only warnings also go to the console.

    Args:
        path: the file, to which lines are appended.
        verbose: above 1, everything also goes to the console.
    """
    logger = logging.getLogger("federatedscope")
    level, handlers = logger.level, [(handler, handler.level) for handler in logger.handlers]
    file = _File(path)
    file.setFormatter(logging.Formatter("%(asctime)s (%(module)s:%(lineno)d) %(levelname)s: %(message)s"))
    logger.setLevel(logging.INFO)
    for handler, _ in handlers:
        handler.setLevel(logging.INFO if verbose > 1 else logging.WARNING)
    logger.addHandler(file)
    try:
        yield
    finally:
        logger.removeHandler(file)
        with suppress(OSError):  # on a full disk; it has been reported
            file.close()
        logger.setLevel(level)
        for handler, before in handlers:
            handler.setLevel(before)
