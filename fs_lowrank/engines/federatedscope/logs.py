"""Where the framework's log goes while a run of ours goes on."""

from __future__ import annotations

import logging
from pathlib import Path


class LogTo:
    """The framework's log in a file, and on the console only what is a warning."""

    def __init__(self, path: Path, verbose: int):
        self.path, self.verbose = path, verbose

    def __enter__(self):
        self.logger = logging.getLogger("federatedscope")
        self.before = self.logger.level, [(h, h.level) for h in self.logger.handlers]
        self.file = logging.FileHandler(self.path)
        self.file.setFormatter(logging.Formatter("%(asctime)s (%(module)s:%(lineno)d) %(levelname)s: %(message)s"))
        self.logger.setLevel(logging.INFO)
        for handler, _ in self.before[1]:
            handler.setLevel(logging.INFO if self.verbose > 1 else logging.WARNING)
        self.logger.addHandler(self.file)

    def __exit__(self, *_):
        self.logger.removeHandler(self.file)
        self.file.close()
        self.logger.setLevel(self.before[0])
        for handler, level in self.before[1]:
            handler.setLevel(level)
