"""Trials of shortcuts: a shortcut is compared with the plain way on a few samples before it is used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

if TYPE_CHECKING:
    from ...data import Examples, ImageExamples


class Unfit(Exception):
    """A shortcut is of no use to a model or to clients; the message says why."""


#: number of samples in a trial
TRIED = 4


def rows_to_try(lengths: np.ndarray, limit: int = TRIED) -> np.ndarray:
    """The rows of a trial, ``limit`` at most: samples of lengths from the shortest to the longest, then others."""
    _, first = np.unique(lengths, return_index=True)
    first = first[np.linspace(0, len(first) - 1, min(len(first), limit)).round().astype(int)]
    return np.concatenate([first, np.setdiff1d(np.arange(len(lengths)), first)])[:limit]


def samples_to_try(splits: Sequence[Examples | ImageExamples]) -> Examples | None:
    """The samples of a trial, of lengths from the shortest to the longest in any of ``splits``; None of images."""
    from ...data import Examples  # here, since a list of the methods needs no data

    texts = [examples for examples in splits if isinstance(examples, Examples)]
    if not texts:
        return None
    rows = rows_to_try(np.concatenate([examples.lengths for examples in texts]))
    ends = np.cumsum([len(examples) for examples in texts])
    return Examples.together(
        (texts[i], np.array([row - ends[i] + len(texts[i])]))
        for row, i in zip(rows, np.searchsorted(ends, rows, side="right"))
    )


def differing(label: str, plain: Tensor, ours: Tensor, eps: float, least: float = 1e-4) -> str:
    """How two tensors of equal shape differ beyond rounding, in words; ``""`` if they do not.

    Args:
        label: of the tensors. eps: the relative rounding error (``machine.rounding``), which grows from layer to layer.
        least: the relative difference that counts at least.
    """
    difference, scale = float((plain - ours).abs().max()), float(plain.abs().max())
    equal = difference <= max(least, 8 * eps) * scale  # not of NaN
    return "" if equal else f"{label} up to {scale:.2g} differ by {difference:.2g}"


def failure(error: Exception) -> str:
    """An error of a model's code, which may raise any for inputs that it does not expect, in one line."""
    return str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def with_gradients(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """A context in which only the parameters ``names`` have gradients."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    try:
        yield
    finally:
        for parameter, was in before.items():
            parameter.requires_grad_(was)


@contextmanager
def preserving_modes(model: nn.Module) -> Iterator[None]:
    """A context after which each module is in training or evaluation mode as before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was
