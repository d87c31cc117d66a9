"""What belongs to the whole process, and an engine's libraries change when they are imported or run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def settings_kept() -> Iterator[None]:
    """After the block, these are as they were before it: the environment, the root logger, how NumPy prints, cuDNN."""
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
