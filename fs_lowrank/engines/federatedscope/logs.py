"""Redirects the framework's log during a run."""

from __future__ import annotations

import logging
from pathlib import Path


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
        self.file = logging.FileHandler(self.path)
        self.file.setFormatter(logging.Formatter("%(asctime)s (%(module)s:%(lineno)d) %(levelname)s: %(message)s"))
        self.logger.setLevel(logging.INFO)
        for handler, _ in self.handler_levels:
            handler.setLevel(logging.INFO if self.verbose > 1 else logging.WARNING)
        self.logger.addHandler(self.file)

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.file)
        self.file.close()
        self.logger.setLevel(self.level)
        for handler, level in self.handler_levels:
            handler.setLevel(level)
