"""Settings of the whole process that an engine's libraries change when they are imported or run."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def preserving_start_method() -> Iterator[None]:
    """After the block, the way to start processes is still to be chosen if it was before it.

    The first bar of tqdm, also one that is not shown, makes a lock for processes and thereby chooses it; a later
    ``multiprocessing.set_start_method`` would fail.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        if before is None:
            multiprocessing.set_start_method(None, force=True)


@contextmanager
def preserving_settings() -> Iterator[None]:
    """Restores after the block: the environment, the root logger, how NumPy prints, cuDNN."""
    import torch

    environment, root, cudnn = dict(os.environ), logging.getLogger(), torch.backends.cudnn.deterministic
    level, handlers = root.level, list(root.handlers)
    try:
        with np.printoptions():
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        root.setLevel(level)
        root.handlers[:] = handlers
        torch.backends.cudnn.deterministic = cudnn
