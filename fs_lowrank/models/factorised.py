"""A layer that uses either its full weight or two thin factors instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..algebra import factor_shapes, product_norm_squared
from ..errors import UserError
from .names import sharing


class Factorised(nn.Module):
    """A linear layer or convolution with factors.

    With factors of rank 0, the initial state, the full weight is used; otherwise the factors are used instead. The
    choice is therefore made by loading tensors (``models.adapters.load_tensors``).

    Args:
        base_layer: ``nn.Linear`` or an ungrouped, zero-padded ``nn.Conv2d``, kept as attribute ``base_layer``.
    Raises:
        UserError: another type of layer.
    """

    def __init__(self, base_layer: Any, name: str):
        super().__init__()
        is_conv = isinstance(base_layer, nn.Conv2d)
        if not (
            isinstance(base_layer, nn.Linear)
            or is_conv
            and base_layer.groups == 1
            and base_layer.padding_mode == "zeros"
            and not isinstance(base_layer.padding, str)
        ):
            raise UserError(
                f"{name} is a {type(base_layer).__name__} that has no factorised form; "
                "nn.Linear and ungrouped, zero-padded nn.Conv2d have one"
            )
        self.base_layer = base_layer
        left, right = factor_shapes(base_layer.weight.shape, 0)
        self.factor_U = nn.Parameter(base_layer.weight.new_empty(left))
        self.factor_V = nn.Parameter(base_layer.weight.new_empty(right))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        if self.factor_V.shape[0] == 0:
            return base(x)
        if isinstance(base, nn.Linear):
            return F.linear(F.linear(x, self.factor_V), self.factor_U, base.bias)
        (s1, s2), (p1, p2), (d1, d2) = base.stride, base.padding, base.dilation
        x = F.conv2d(x, self.factor_V, None, (1, s2), (0, p2), (1, d2))
        return F.conv2d(x, self.factor_U, base.bias, (s1, 1), (p1, 0), (d1, 1))


def factorise_layers(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Replace the modules ``names`` by ``Factorised`` layers, in place.

    Raises:
        UserError: another module has the weight of one of them, too.
    """
    names = sorted(names)
    for name, other in sharing(model, names).items():
        raise UserError(
            f"llm.adapter.args: {name} shares its weight with {other}, which would not have the factors; leave it "
            "out of modules"
        )
    for name in names:
        model.set_submodule(name, Factorised(model.get_submodule(name), name))
    return model


def factorised_layers(model: nn.Module) -> dict[str, Factorised]:
    """The factorised layers by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Factorised)}


def empty_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of rank 0 for ``weight``, with which the full weight is used."""
    left, right = factor_shapes(weight.shape, 0)
    return weight.new_empty(left), weight.new_empty(right)


def full_shape(left: Tensor, right: Tensor) -> tuple[int, ...]:
    """Shape of the weight that the factors replace: ``(d_out, d_in)``, or that of a convolution."""
    return (left.shape[0], right.shape[1], *((left.shape[2], right.shape[3]) if left.ndim == 4 else ()))


def plain(model: nn.Module) -> nn.Module:
    """Replace ``Factorised`` layers by their base layers, in place, so that the original model is saved."""
    for name, layer in factorised_layers(model).items():
        model.set_submodule(name, layer.base_layer)
    return model


def frobenius(model: nn.Module) -> Tensor:
    """``½ Σ ‖U V‖_F²`` over the factorised layers: Frobenius decay, whose gradient is ``(U V Vᵀ, UᵀU V)``."""
    return (
        torch.stack([product_norm_squared(m.factor_U, m.factor_V) for m in factorised_layers(model).values()]).sum() / 2
    )
