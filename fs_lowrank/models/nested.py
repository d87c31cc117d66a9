"""Low-rank updates of low-rank updates: ``W + s (B + s_B B_d B_u)(A + s_A A_d A_u)``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Layer

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


class Nested(nn.Module):
    """The nested pairs of one LoRA layer, applied by hooks on ``lora_A`` and ``lora_B`` of its shared pair.

    ``A_d (r, r_A)``, ``A_u (r_A, d_in)``, ``B_d (d_out, r_B)``, ``B_u (r_B, r)``; for a
    convolution, ``A_u`` is ``(r_A, d_in, k, k)`` and the others are ``1 × 1``. Rank 0 means no pair.
    """

    A_d: nn.Parameter
    A_u: nn.Parameter
    B_d: nn.Parameter
    B_u: nn.Parameter

    def __init__(self, layer: LoraLayer, scale: float):
        super().__init__()
        self.scale = scale
        a, b = layer.lora_A["default"], layer.lora_B["default"]
        for name, shape in nested_shapes(a.weight.shape, b.weight.shape, 0, 0).items():
            self.register_parameter(name, nn.Parameter(a.weight.new_empty(shape)))
        # Bound methods, so that a deep copy of the model uses its own hooks.
        a.register_forward_hook(self.beside_a)
        b.register_forward_hook(self.beside_b)

    def beside_a(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self._beside(module, args[0], output, self.A_u, self.A_d)

    def beside_b(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self._beside(module, args[0], output, self.B_u, self.B_d)

    def _beside(self, module: Any, x: Tensor, output: Tensor, first: Tensor, second: Tensor) -> Tensor:
        if first.shape[0] == 0:
            return output
        if isinstance(module, nn.Linear):
            return output + self.scale * F.linear(F.linear(x, first), second)
        convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[first.ndim]
        inner = convolve(x, first, None, module.stride, module.padding, module.dilation)
        return output + self.scale * convolve(inner, second)


def nested_shapes(a: torch.Size, b: torch.Size, rank_a: int, rank_b: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the nested pairs for ``lora_A`` of shape ``a`` and ``lora_B`` of shape ``b``."""
    ones = (1,) * (len(a) - 2)
    return {
        "A_d": (a[0], rank_a, *ones),
        "A_u": (rank_a, *a[1:]),
        "B_d": (b[0], rank_b, *ones),
        "B_u": (rank_b, *b[1:]),
    }


def nested_product(second: Tensor, first: Tensor, template: Tensor) -> Tensor:
    """``second @ first`` in the shape of ``template``, the matrix to which the nested pair is added."""
    return (second.flatten(1) @ first.flatten(1)).reshape(template.shape)


def cut_nested(layers: Iterable[Layer], rank_a: int, rank_b: int) -> dict[str, Tensor]:
    """The nested pairs of ``layers`` at lower ranks, by name."""
    ranks = {"A_d": (1, rank_a), "A_u": (0, rank_a), "B_d": (1, rank_b), "B_u": (0, rank_b)}  # letter -> (axis, rank)
    return {
        layer.key(letter): getattr(layer, letter).narrow(axis, 0, rank)
        for layer in layers
        for letter, (axis, rank) in ranks.items()
    }


def add_nested(model: nn.Module, scale: float) -> nn.Module:
    """Add nested pairs of rank 0 to every shared LoRA pair, in place."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer) and "default" in module.lora_A:
            module.nested = Nested(module, scale)
    return model
