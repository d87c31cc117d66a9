"""What the trials of shortcuts share: a shortcut is compared with the plain way on a few samples before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor, nn


def rows_to_try(lengths: np.ndarray, most: int) -> np.ndarray:
    """The rows of a trial: the first sample of each length, then the others, ``most`` at most."""
    _, first = np.unique(lengths, return_index=True)
    return np.concatenate([first, np.setdiff1d(np.arange(len(lengths)), first)])[:most]


def differing(what: str, plain: Tensor, ours: Tensor, eps: float) -> str:
    """How two tensors of equal shape differ beyond rounding, in words; ``""`` if they do not.

    Args:
        what: the tensors are. eps: the relative rounding error (``machine.rounding``), which grows from layer to layer.
    """
    difference, scale = float((plain - ours).abs().max()), float(plain.abs().max())
    equal = difference <= max(1e-4, 8 * eps) * scale  # not of NaN
    return "" if equal else f"{what} up to {scale:.2g} differ by {difference:.2g}"


def failure(error: Exception) -> str:
    """An error of a model's code, which may raise any for inputs that it does not expect, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """A context after which each module is in training or evaluation mode as before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was
