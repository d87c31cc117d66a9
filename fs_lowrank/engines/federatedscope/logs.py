"""Redirects the framework's log during a run, and names the file that could not be written."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
from pathlib import Path


def name_file(error: OSError) -> bool:
    """Give ``error`` the name of the file that was being written, which that of a write lacks; whether it was found."""
    if error.filename is not None:
        return False
    opened = (
        getattr(value, "name", None)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in frame.f_locals.values()
        if isinstance(value, io.IOBase)
    )
    error.filename = next((name for name in opened if isinstance(name, str) and Path(name).exists()), None)
    return error.filename is not None


class _LogFile(logging.FileHandler):
    """A log without which the run goes on, on a full disk for instance."""

    said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.said:
            self.said = True
            reason = error.strerror or error
            logging.getLogger("fs_lowrank").warning(
                "%s cannot be written: %s; the run goes on without it", self.baseFilename, reason
            )


class LogTo:
    """A context in which the framework's log is written to a file, and only warnings also go to the console.

    Args:
        path: the file, to which lines are appended.
        verbose: above 1, everything also goes to the console.
    """

    def __init__(self, path: Path, verbose: int):
        self.path, self.verbose = path, verbose

    def __enter__(self) -> None:
        self.logger = logging.getLogger("federatedscope")
        self.level, self.handler_levels = self.logger.level, [(h, h.level) for h in self.logger.handlers]
        self.file = _LogFile(self.path)
        self.file.setFormatter(logging.Formatter("%(asctime)s (%(module)s:%(lineno)d) %(levelname)s: %(message)s"))
        self.logger.setLevel(logging.INFO)
        for handler, _ in self.handler_levels:
            handler.setLevel(logging.INFO if self.verbose > 1 else logging.WARNING)
        self.logger.addHandler(self.file)

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.file)
        with contextlib.suppress(OSError):  # of what it has reported
            self.file.close()
        self.logger.setLevel(self.level)
        for handler, level in self.handler_levels:
            handler.setLevel(level)
