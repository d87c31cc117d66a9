"""Layers that compute a convolution and its adapter as one convolution.

PEFT convolves twice, with ``W`` and with the adapter. However, a ``k×k`` convolution to ``r`` channels followed by a
``1×1`` convolution is one convolution with the product of their kernels, and convolution is linear in the kernel:

    W * x + s B * (A * x) = (W + s B A) * x

so the sum is computed once per step and applied once. The result is equal up to rounding, gradients reach ``A`` and
``B`` through the product, and names, saving and merging remain PEFT's. If the rank is small and the image is small, the
two thin convolutions cost less than the product; each layer chooses by counting operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft.tuners.loha.layer import Conv2d as LoHaConv2d
from peft.tuners.lokr.layer import Conv2d as LoKrConv2d
from peft.tuners.lora.layer import Conv2d as LoRAConv2d
from torch import Tensor, nn
from torch.func import functional_call

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer as _Base
else:
    _Base = object  # with PEFT's own base class, the class of its layers could not be replaced

#: cost of moving one number through memory, in multiplications
_TRAFFIC = 40


class _Composed(_Base):
    """Base of the layers: one convolution with the sum of the kernels if that is possible and cheaper.

    A layer defines ``_full_weight(x)``, the sum of the kernels of base and active adapters; None: PEFT computes it.
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        adapts = not (args or kwargs or self.disable_adapters or self.merged)
        weight = self._full_weight(x) if adapts else None
        if weight is None:
            return super().forward(x, *args, **kwargs)
        return functional_call(self.get_base_layer(), {"weight": weight}, (x,))

    def _plain(self) -> bool:
        """Whether the kernels of the layer can be added, at full precision."""
        base = self.get_base_layer()
        return (
            type(base) is nn.Conv2d
            and base.groups == 1
            and base.dilation == (1, 1)
            and base.padding_mode == "zeros"  # as PEFT's adapters pad
            and base.weight.dtype in (torch.float32, torch.float64)
        )


class ComposedLoRA(_Composed, LoRAConv2d):
    """PEFT's LoRA on a convolution."""

    def _full_weight(self, x):
        if not self._plain() or self.lora_variant:
            return None
        active, weight = [a for a in self.active_adapters if a in self.lora_A], self.get_base_layer().weight
        for name in active:
            halves = self.lora_A[name], self.lora_B[name]
            drops = self.training and not isinstance(self.lora_dropout[name], nn.Identity)
            if (
                drops
                or halves[1].bias is not None
                or any(h.weight.dtype != weight.dtype or h._forward_hooks for h in halves)
            ):
                return None
        if not active or not self._pays(x, sum(self.lora_A[name].weight.shape[0] for name in active)):
            return None
        shape, flat = weight.shape, weight.flatten(1)
        for name in active:
            flat = torch.addmm(
                flat, self.lora_B[name].weight.flatten(1), self.lora_A[name].weight.flatten(1), alpha=self.scaling[name]
            )
        return flat.view(shape)

    def _pays(self, x: Tensor, rank: int) -> bool:
        """Whether the product costs less than the two thin convolutions, in multiplications per step."""
        outside, inside = self.get_base_layer().weight.flatten(1).shape
        up, across = self.get_base_layer().stride
        positions = x.shape[0] * -(-x.shape[-2] // up) * -(-x.shape[-1] // across)
        thin, full = rank * (inside + outside) + _TRAFFIC * (rank + outside), outside * inside
        if not torch.is_grad_enabled():
            return positions * thin > rank * full
        # One forward and two backward passes; W has a gradient only if it is in the sum.
        return positions * (3 * thin - full) > 3 * rank * full


class _ComposedLycoris(_Composed):
    """PEFT computes the kernel of the adapter anyway and convolves with it a second time."""

    def _full_weight(self, x):
        active = [a for a in self.active_adapters if a in self.r]
        weight = self.get_base_layer().weight
        if not active or not self._plain() or any(self.training and self.module_dropout[a] for a in active):
            return None
        for name in active:
            drops = self.training and bool(self.rank_dropout[name])
            delta = self.get_delta_weight(name, apply_rank_dropout=drops)
            if delta.dtype != weight.dtype:
                return None
            weight = weight + delta
        return weight


class ComposedLoHa(_ComposedLycoris, LoHaConv2d):
    """PEFT's LoHa on a convolution."""


class ComposedLoKr(_ComposedLycoris, LoKrConv2d):
    """PEFT's LoKr on a convolution."""


_FORMS: dict[type, type] = {LoRAConv2d: ComposedLoRA, LoHaConv2d: ComposedLoHa, LoKrConv2d: ComposedLoKr}


def compose(model: nn.Module) -> None:
    """Let every convolution of ``model`` with an adapter run as one convolution; parameters do not change.

    The class of PEFT's layer is replaced by its subclass here: PEFT offers no public way to choose the class of a
    layer, and a new module would have to copy whatever state PEFT keeps in the old one.
    """
    for module in model.modules():
        if type(module) in _FORMS:
            module.__class__ = _FORMS[type(module)]
