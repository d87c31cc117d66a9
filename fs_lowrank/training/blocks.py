"""A cohort's batch divided into blocks of samples of similar length, so that less padding is computed.

The gradients of the blocks add up to that of the whole batch, and dropout has the masks that each client draws alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..models.adapters import layer_stack
from ..models.machine import input_device
from ..models.shortcuts.masks import Masks
from ..models.shortcuts.trials import Unfit

#: by device: the cost of a further block in each layer, in multiplications (calls) and in tokens (small matrices).
#: Measured on a processor, where it is 80 and 40 tokens at widths 384 and 768; of a GPU only its order is known
_OVERHEAD = {"cpu": (1e8, 24.0), "cuda": (1e10, 256.0)}
#: the largest number of blocks of ``auto``
_MAX_BLOCKS = 8


def overhead(model: nn.Module) -> float:
    """The cost of a further block for ``train.blocks: auto``, in tokens; infinite for a model without layers."""
    stack = layer_stack(model)
    if stack is None:
        return float("inf")
    weights = sum(p.numel() for p in stack[1][-1].parameters())
    device = input_device(model).type
    work, tokens = _OVERHEAD.get(device, _OVERHEAD["cuda"])
    return tokens + work / max(weights, 1)


def divide(lengths: np.ndarray, overhead: float, number: int = 0) -> list[np.ndarray]:
    """The positions in ``lengths`` of the samples of each block, such that blocks cost least.

    A block costs its number of samples times its longest, and ``overhead``, in tokens.

    Args:
        number: of blocks; 0: as many as cost least. There are no more blocks than different lengths.
    """
    sides, counts = np.unique(lengths, return_counts=True)
    limit = min(number or _MAX_BLOCKS, len(sides))
    padding = len(lengths) * sides[-1] - lengths.sum()
    if limit == 1 or not number and padding <= overhead:
        return [np.arange(len(lengths))]
    ends = np.concatenate([[0], np.cumsum(counts)])
    # costs[i, j]: of one block of the samples from length number i to length number j
    costs = np.where(np.tri(len(sides), dtype=bool).T, (ends[1:] - ends[:-1, None]) * sides, np.inf)
    best, first = [costs[0]], [np.zeros(len(sides), dtype=int)]
    while len(best) < limit:
        choices = np.concatenate([[np.inf], best[-1][:-1]])[:, None] + costs
        least = choices.min(0)
        if not number and least[-1] + overhead >= best[-1][-1]:
            break  # a further block saves no more than the one before it, as the costs are a Monge array
        best.append(least)
        first.append(choices.argmin(0))
    order, parts, last = np.argsort(lengths, kind="stable"), [], len(sides)
    for k in reversed(range(len(best))):
        start = int(first[k][last - 1])
        parts.append(order[ends[start] : ends[last]])
        last = start
    return parts


#: the axes over positions of the values that dropout is applied to, ``(samples, …)``, by their number of axes
_POSITION_AXES: dict[int, tuple[int, ...]] = {2: (), 3: (1,), 4: (2, 3)}


class ClientMasks:
    """Dropout of a batch with samples of several clients, each of which draws the masks that it would draw alone.

    Args:
        lengths: of each client's samples, in the order of the batch. generators: of the clients.
    """

    def __init__(self, lengths: Sequence[np.ndarray], generators: Sequence[torch.Generator]):
        self.clients, self.lengths = list(zip(lengths, generators)), np.concatenate(lengths)
        #: the masks of the whole batch, which the first of its blocks draws
        self.full_masks: list[Tensor] = []

    def masks(self, part: np.ndarray) -> Masks:
        """A context for the samples ``part``.

        It raises ``Unfit`` where dropout is applied to values whose rows are not the samples.
        """
        longest, rows, calls = int(self.lengths[part].max()), torch.from_numpy(part), itertools.count()

        def mask(values: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
            axes = _POSITION_AXES.get(len(shape))
            if axes is None or shape[0] != len(part) or any(shape[axis] != longest for axis in axes):
                raise Unfit(f"dropout of values of shape {tuple(shape)} is not drawn sample by sample")
            if (call := next(calls)) == len(self.full_masks):
                self.full_masks.append(self._draw(shape, axes, values, p))
            selected = self.full_masks[call][rows.to(values.device, non_blocking=True)]
            for axis in axes:
                selected = selected.narrow(axis, 0, longest)
            return selected

        return Masks(mask, longest)

    def _draw(self, shape: tuple[int, ...], axes: tuple[int, ...], values: Tensor, p: float) -> Tensor:
        sides = [len(self.lengths), *(int(self.lengths.max()) if i in axes else n for i, n in enumerate(shape) if i)]
        full, start = values.new_zeros(sides, dtype=torch.bool), 0
        for sizes, generator in self.clients:
            block = full[start : start + len(sizes)]
            for axis in axes:
                block = block.narrow(axis, 0, int(sizes.max()))
            block.copy_(values.new_empty(block.shape, dtype=torch.bool).bernoulli_(1 - p, generator=generator))
            start += len(sizes)
        return full
