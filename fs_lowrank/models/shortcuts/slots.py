"""One forward pass of several clients' models, which share the frozen base.

The rows of a batch are ordered by client, and each client has a slot. The base is computed over all rows at once. Only
the modules that hold tensors which differ between the clients (the matrices of LoRA, a head) compute slot by slot, with
the clients' tensors stacked to parameters of shape ``(slots, …)``. LoRA pairs of lower rank are filled up with zeros,
which changes neither results nor gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adapters import lora_scales
from ..names import all_tensors, tags
from .reads import instead
from .trials import Unfit


class Rows:
    """The slots of the rows of a batch.

    Args:
        counts: the number of rows of each slot.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        self.slots = [i for i, n in enumerate(counts) if n]
        self.counts = [counts[i] for i in self.slots]
        self.total, self.all, self.device = sum(counts), len(self.slots) == len(counts), device
        self.equal = len(set(self.counts)) == 1

    def select(self, stacked: Tensor) -> Tensor:
        """The tensors of the slots that have rows."""
        return stacked if self.all else stacked[self._index]

    @cached_property
    def _index(self) -> Tensor:
        return self._on_device(self.slots)

    @cached_property
    def by_row(self) -> Tensor:
        """The slot of each row, ``(total,)``."""
        return self._on_device(np.repeat(self.slots, self.counts))

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor]:
        """Rows such that each slot has the same number, filled up with its own, and the places of the rows in them."""
        longest = max(self.counts)
        places = np.concatenate([i * longest + np.arange(n) for i, n in enumerate(self.counts)])
        # Another slot's rows may be NaN, and so would the gradients be, in spite of their weight 0.
        rows = np.repeat(np.cumsum(self.counts) - self.counts, longest)
        rows[places] = np.arange(self.total)
        return self._on_device(rows), self._on_device(places)

    def _on_device(self, values: Sequence[int] | np.ndarray) -> Tensor:
        """``values`` on the device, which is not waited for."""
        return torch.as_tensor(values).to(self.device, non_blocking=True)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear`` with the slots' matrices ``(slots, out, in)``."""
        weight, bias = self.select(weight), None if bias is None else self.select(bias)
        if self.equal:
            return _products(x, weight, bias)
        if self.device.type == "cpu":
            biases = [None] * len(self.counts) if bias is None else bias.unbind()
            parts = zip(x.split(self.counts), weight.unbind(), biases)
            return torch.cat([F.linear(part, w, b) for part, w, b in parts])
        rows, places = self.filled
        return _products(x[rows], weight, bias)[places]


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(len(weight), -1, x.shape[-1])
    out = flat @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)
    return out.reshape(*x.shape[:-1], weight.shape[1])


class Slots:
    """The stacked tensors of several clients, and the forward pass with them.

    Args:
        held: for each client its tensors by name; tensors that are equal for all are left to the model.
        scales: for each client PEFT's scale of each of its pairs, ``adapters.lora_scales``.
        trained: tags of the trained tensors, which are stacked in any case.

    Raises:
        Unfit: a module computes with tensors that differ, and there is no slot-wise form for it.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Sequence[Mapping[str, Tensor]],
        scales: Sequence[Mapping[str, float]],
        trained: Collection[str],
    ):
        #: the rows of the current batch, on a device
        self._rows: Callable[[torch.device], Rows] | None = None
        names = [n for n, first in held[0].items() if first.numel() or any(h[n].numel() for h in held)]
        names = [n for n in names if tags(n) & set(trained) or not all(_same(held[0][n], h[n]) for h in held[1:])]
        if reason := unslotted(model, names):
            raise Unfit(reason)
        self.modules = {path: model.get_submodule(path) for path in sorted({n.rpartition(".")[0] for n in names})}
        parameters, model_scales = all_tensors(model), lora_scales(model)
        self._shapes = [{n: tensors[n].shape for n in tensors} for tensors in held]
        #: name -> the clients' tensors, ``(slots, …)``
        self.stacked: dict[str, nn.Parameter] = {}
        for name in parameters:
            if name.rpartition(".")[0] in self.modules:
                copies = [h.get(name, parameters[name].detach()) for h in held]
                self.stacked[name] = nn.Parameter(_stack(name, copies), requires_grad=False)
        #: a pair's second module -> the clients' scales ÷ that of the model, which PEFT applies, ``(slots, 1, 1)``
        self.factors: dict[str, Tensor] = {}
        for path in self.modules:
            ratios = [s[path] / model_scales[path] for s in scales] if path in model_scales else []
            if any(r != 1 for r in ratios):
                weight = self.stacked[f"{path}.weight"]
                self.factors[path] = weight.new_tensor(ratios).view(-1, 1, 1)

    def trainable(self, wanted: Collection[str]) -> list[nn.Parameter]:
        """Freeze all but the tensors with one of the tags ``wanted``, which are returned."""
        for name, parameter in self.stacked.items():
            parameter.requires_grad_(bool(tags(name) & set(wanted)))
            parameter.grad = None
        return [p for p in self.stacked.values() if p.requires_grad]

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """The tensors of one client, not copied, in its shapes."""
        return {
            n: p.detach()[slot][tuple(map(slice, self._shapes[slot].get(n, p.shape[1:])))]
            for n, p in self.stacked.items()
        }

    def put(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors of one client."""
        for name, target in self.tensors(slot).items():
            target.copy_(tensors[name])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which the modules compute slot by slot within ``rows``, and as ever outside it."""
        with contextlib.ExitStack() as stack:
            for path, module in self.modules.items():
                stack.enter_context(instead(module, self._forward(path, module)))
            yield

    @contextlib.contextmanager
    def rows(self, counts: Sequence[int]) -> Iterator[None]:
        """A context for one forward pass of a batch with ``counts`` rows of each slot, in their order."""
        self._rows = cache(partial(Rows, counts))
        try:
            yield
        finally:
            self._rows = None

    def _forward(self, path: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
        weight, bias = (self.stacked.get(f"{path}.{part}") for part in ("weight", "bias"))
        compute = _KINDS[type(module)]

        def forward(x: Tensor) -> Tensor:
            if self._rows is None:
                return type(module).forward(module, x)
            rows = self._rows(x.device)
            if x.ndim < 2 or len(x) != rows.total:
                raise Unfit(f"{path} is computed for {len(x)} rows of a batch of {rows.total}")
            factor = self.factors.get(path)
            scaled = weight if factor is None or weight is None else weight * factor
            return compute(module, rows, x, scaled, bias)

        return forward


def _linear(module: Any, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.linear(x, weight, bias)


def _layer_norm(module: Any, rows: Rows, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    ones = (1,) * (x.ndim - 1 - len(module.normalized_shape))
    for stacked, combine in ((weight, torch.mul), (bias, torch.add)):
        if stacked is not None:
            out = combine(out, stacked[rows.by_row].view(rows.total, *ones, *module.normalized_shape))
    return out


#: the types of modules that have a slot-wise form; their subclasses may compute something else
_KINDS: dict[type, Callable[..., Tensor]] = {nn.Linear: _linear, nn.LayerNorm: _layer_norm}


def unslotted(model: nn.Module, names: Collection[str]) -> str:
    """Why one of the tensors ``names`` is of a module without a slot-wise form; empty if none is."""
    for name in names:
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        if type(module) not in _KINDS or part not in ("weight", "bias"):
            return f"{name} is a tensor of {type(module).__name__}, which is not computed for several clients"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _stack(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors in one; LoRA pairs of lower rank are filled up with zeros."""
    if len({t.shape for t in tensors}) == 1:
        return torch.stack(list(tensors))
    if not {"lora_A", "lora_B"} & set(name.split(".")):
        raise Unfit(f"{name} has another shape at each client")
    stacked = tensors[0].new_zeros(len(tensors), *(max(sides) for sides in zip(*(t.shape for t in tensors))))
    for slot, tensor in zip(stacked, tensors):
        slot[tuple(map(slice, tensor.shape))] = tensor
    return stacked
