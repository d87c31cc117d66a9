"""Every use of randomness derives a separate seed from the run's seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for ``purpose``, independent of every other purpose and of the order of use.

    Because no stream is shared, a run that resumes at round ``t`` draws the same numbers as an uninterrupted one.
    """
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def preserving_generators() -> Iterator[None]:
    """After the block, the global generators of Python, NumPy and torch are as they were before it."""
    import random

    import numpy as np

    python, array = random.getstate(), np.random.get_state()
    try:
        with _preserving_torch():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Within the block torch draws from ``seed`` on all devices; after it, its generators are as they were before."""
    import torch

    with _preserving_torch():
        torch.manual_seed(seed)
        yield


@contextmanager
def _preserving_torch() -> Iterator[None]:
    import torch

    # Reading the state of a GPU's generator would start CUDA in a process that does not use it.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        yield
