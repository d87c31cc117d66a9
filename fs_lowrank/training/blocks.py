"""A batch divided into blocks of samples of similar length, so that less padding is computed.

The losses of the blocks are weighted so that their gradients add up to that of the whole batch, and dropout has the
masks that it would have there. Before a model's batches are divided, that is tried on a few samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import say_once
from ..models.adapters import layer_stack
from ..models.checkpointing import recomputes
from ..models.kinds import is_encoder_decoder, unwrapped
from ..models.machine import input_device, rounding
from ..models.shortcuts.masks import Masks, comparable, draw, draws
from ..models.shortcuts.slots import Apart
from ..models.shortcuts.trials import differing, failure

#: by device: what a further block costs in each layer, in multiplications (calls) and in tokens (small matrices).
#: Measured on a processor, where it is 80 and 40 tokens at widths 384 and 768; of a GPU only its order is known
_OVERHEAD = {"cpu": (1e8, 24.0), "cuda": (1e10, 256.0)}
#: ``auto`` makes so many blocks at most
_MOST = 8
#: by model, whether its batches may be divided
_USABLE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def overhead(model: nn.Module) -> float:
    """What ``train.blocks: auto`` takes a further block to cost, in tokens."""
    stack = layer_stack(model)
    if (
        stack is None
        or is_encoder_decoder(model)
        or getattr(getattr(model, "config", None), "output_router_logits", False)
    ):
        return float("inf")  # the routers' loss of a batch is not the sum over its blocks
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


class Blocks:
    """Divides batches as ``train.blocks`` says.

    Args:
        number: of blocks; 0: as many as cost least.
    """

    def __init__(self, model: nn.Module, number: int):
        self.model, self.number, self.overhead, self.drops = model, number, overhead(model), draws(model)
        #: no batch is divided; what is computed again would draw again
        self.whole = number == 1 or self.overhead == float("inf") or self.drops and recomputes(model)

    def parts(self, examples, indices: np.ndarray) -> list[np.ndarray]:
        """The positions of each block in the batch ``indices``."""
        whole = [np.arange(len(indices))]
        if self.whole:
            return whole
        parts = divide(examples.lengths[indices], self.overhead, self.number)
        return parts if len(parts) > 1 and self._usable(examples, indices) else whole

    def of(self, examples, indices: np.ndarray) -> list[tuple[np.ndarray, float, Callable[[], Masks] | None]]:
        """Of the batch ``indices`` each block's samples, its share of the loss, and a context for its forward pass."""
        parts = self.parts(examples, indices)
        if len(parts) == 1:
            return [(indices, 1.0, None)]
        # The mean is over the losses of the batch.
        weights = [int(examples.losses(indices[part]).sum()) for part in parts]
        masks = self._masks(examples.lengths[indices], parts)
        return [(indices[p], w / sum(weights), m) for p, w, m in zip(parts, weights, masks) if w]

    def _masks(self, lengths: np.ndarray, parts: list[np.ndarray]) -> list[Callable[[], Masks] | None]:
        drawn: list[Tensor] = []
        return [masks_of(lengths, part, drawn) if self.drops else None for part in parts]

    def _usable(self, examples, indices: np.ndarray) -> bool:
        """Whether blocks give what the batch gives: tried once for each model, as it trains, with some of ``indices``.

        If not, a warning says so once.
        """
        if self.model not in _USABLE:
            order = indices[np.argsort(examples.lengths[indices], kind="stable")]
            try:
                wrong = self._differs(examples, order[[0, 1, -2, -1]] if len(order) > 3 else order)
            except Exception as error:
                wrong = failure(error)
            _USABLE[self.model] = not wrong
            if wrong:
                say_once(f"train.blocks: a batch of {type(unwrapped(self.model)).__name__} is not divided ({wrong})")
        return _USABLE[self.model]

    @torch.no_grad()
    def _differs(self, examples, indices: np.ndarray) -> str:
        """How results of ``indices``, which are sorted by length, differ as two blocks; ``""`` if they are equal."""
        device, lengths = input_device(self.model), examples.lengths[indices]
        parts = divide(lengths, 0.0, 2)[::-1]  # the shorter ones first

        def results(parts: list[np.ndarray], masks: list[Callable[[], Masks] | None]) -> tuple[Tensor, Tensor]:
            found = []
            with comparable():
                for part, mask in zip(parts, masks):
                    batch = {k: v.to(device) for k, v in examples.batch(indices[part]).items() if k != "labels"}
                    with mask() if mask else nullcontext():
                        logits = self.model(**batch).logits
                    found.append(logits[batch["attention_mask"].bool()] if logits.ndim == 3 else logits)
                return torch.cat(found).float(), torch.rand((), device=device)

        whole, number = results([np.arange(len(indices))], [None])
        ours, again = results(parts, self._masks(lengths, parts))
        if number != again:
            return "its blocks draw other random numbers"
        return differing("logits", whole, ours, rounding(self.model))


#: gives dropout's mask of a batch, 0 or not: from its shape, the sides that go over positions, the values, and p
Drawing = Callable[[list[int], tuple[int, ...], Tensor, float], Tensor]
#: by the number of sides of what dropout is applied to, ``(samples, …)``, those that go over positions
_ALONG: dict[int, tuple[int, ...]] = {2: (), 3: (1,), 4: (2, 3)}


def _drawn(sides: list[int], along: tuple[int, ...], values: Tensor, p: float) -> Tensor:
    return draw(tuple(sides), values, p).bool()


def drawn_by_each(lengths: Sequence[np.ndarray], generators: Sequence[torch.Generator]) -> Drawing:
    """Dropout of a batch with samples of several clients, each of which draws what it would draw alone.

    Args:
        lengths: of each client's samples, in the order of the batch. generators: of the clients.
    """

    def drawing(sides: list[int], along: tuple[int, ...], values: Tensor, p: float) -> Tensor:
        whole, first = values.new_zeros(sides, dtype=torch.bool), 0
        for own, generator in zip(lengths, generators):
            place = whole[first : first + len(own)]
            for axis in along:
                place = place.narrow(axis, 0, int(own.max()))
            place.copy_(values.new_empty(place.shape).bernoulli_(1 - p, generator=generator))
            first += len(own)
        return whole

    return drawing


def masks_of(
    lengths: np.ndarray, part: np.ndarray, drawn: list[Tensor], each: Drawing | None = None
) -> Callable[[], Masks]:
    """Dropout of the samples ``part`` of a batch of samples of ``lengths``, with the masks of the batch.

    Args:
        drawn: where the first block leaves the masks for the others.
        each: draws the masks client by client. The context then raises ``Apart`` where dropout is applied to values
            whose rows are not the samples; without it, dropout draws these masks itself.
    """
    longest, longest_here = int(lengths.max()), int(lengths[part].max())
    rows = torch.from_numpy(part)

    def context() -> Masks:
        calls = itertools.count()

        def mask(values: Tensor, p: float) -> Tensor | None:
            sides, along = list(values.shape), _ALONG.get(values.ndim)
            if along is None or sides[0] != len(part) or any(sides[axis] != longest_here for axis in along):
                if each is None:
                    return None
                raise Apart(f"dropout of values of shape {tuple(sides)} is not drawn sample by sample")
            sides[0] = len(lengths)
            for axis in along:
                sides[axis] = longest
            call = next(calls)
            if call == len(drawn):
                drawn.append((each or _drawn)(sides, along, values, p))
            mine = drawn[call][rows.to(values.device, non_blocking=True)]
            for axis in along:
                mine = mine.narrow(axis, 0, longest_here)
            return mine.to(values.dtype) / (1 - p)

        return Masks(mask, longest_here)

    return context
