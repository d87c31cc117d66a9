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

#: by device: what a further block costs in each layer, in multiplications (calls) and in tokens (small matrices).
#: Measured on a processor, where it is 80 and 40 tokens at widths 384 and 768; of a GPU only its order is known
_OVERHEAD = {"cpu": (1e8, 24.0), "cuda": (1e10, 256.0)}
#: ``auto`` makes so many blocks at most
_MOST = 8


def overhead(model: nn.Module) -> float:
    """What ``train.blocks: auto`` takes a further block to cost, in tokens; infinite for a model without layers."""
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
    most = min(number or _MOST, len(sides))
    padding = len(lengths) * sides[-1] - lengths.sum()
    if most == 1 or not number and padding <= overhead:
        return [np.arange(len(lengths))]
    ends = np.concatenate([[0], np.cumsum(counts)])
    # costs[i, j]: of one block of the samples from length number i to length number j
    costs = np.where(np.tri(len(sides), dtype=bool).T, (ends[1:] - ends[:-1, None]) * sides, np.inf)
    best, first = [costs[0]], [np.zeros(len(sides), dtype=int)]
    while len(best) < most:
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


#: by the number of sides of what dropout is applied to, ``(samples, …)``, those that go over positions
_ALONG: dict[int, tuple[int, ...]] = {2: (), 3: (1,), 4: (2, 3)}


class ClientMasks:
    """Dropout of a batch with samples of several clients, each of which draws what it would draw alone.

    Args:
        lengths: of each client's samples, in the order of the batch. generators: of the clients.
    """

    def __init__(self, lengths: Sequence[np.ndarray], generators: Sequence[torch.Generator]):
        self.clients, self.lengths = list(zip(lengths, generators)), np.concatenate(lengths)
        #: the masks of the whole batch, which the first of its blocks draws
        self.drawn: list[Tensor] = []

    def of(self, part: np.ndarray) -> Masks:
        """A context for the samples ``part``.

        It raises ``Unfit`` where dropout is applied to values whose rows are not the samples.
        """
        longest, rows, calls = int(self.lengths[part].max()), torch.from_numpy(part), itertools.count()

        def mask(values: Tensor, p: float) -> Tensor:
            sides, along = list(values.shape), _ALONG.get(values.ndim)
            if along is None or sides[0] != len(part) or any(sides[axis] != longest for axis in along):
                raise Unfit(f"dropout of values of shape {tuple(sides)} is not drawn sample by sample")
            if (call := next(calls)) == len(self.drawn):
                self.drawn.append(self._draw(sides, along, values, p))
            mine = self.drawn[call][rows.to(values.device, non_blocking=True)]
            for axis in along:
                mine = mine.narrow(axis, 0, longest)
            return mine.to(values.dtype) / (1 - p)

        return Masks(mask, longest)

    def _draw(self, sides: list[int], along: tuple[int, ...], values: Tensor, p: float) -> Tensor:
        sides = [len(self.lengths), *(int(self.lengths.max()) if i in along else n for i, n in enumerate(sides) if i)]
        whole, first = values.new_zeros(sides, dtype=torch.bool), 0
        for own, generator in self.clients:
            place = whole[first : first + len(own)]
            for axis in along:
                place = place.narrow(axis, 0, int(own.max()))
            place.copy_(values.new_empty(place.shape).bernoulli_(1 - p, generator=generator))
            first += len(own)
        return whole
