"""The tensors of adapted layers, by the letters that the papers use for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

#: attribute of ``Layer`` -> the part of the tensor's name after the name of the layer
_ENDS = {
    "A": ".lora_A.default.weight",
    "B": ".lora_B.default.weight",
    "W": ".base_layer.weight",
    "U": ".factor_U",
    "V": ".factor_V",
    "A_d": ".nested.A_d",
    "A_u": ".nested.A_u",
    "B_d": ".nested.B_d",
    "B_u": ".nested.B_u",
}


@dataclass(frozen=True)
class Layer:
    """The tensors of one adapted layer; None for tensors that it does not have. Those of convolutions have more axes.

    Attributes:
        name: the layer's name in the model.
        A, B: the shared pair, ``(r, d_in)`` and ``(d_out, r)``.
        W: the weight of the layer, ``(d_out, d_in)``.
        U, V: the factors that replace ``W``, ``(d_out, r)`` and ``(r, d_in)`` (``models.factorised``).
        A_d, A_u, B_d, B_u: the pairs nested in ``A`` and ``B`` (``models.nested``).
    """

    name: str
    A: Tensor | Any = None
    B: Tensor | Any = None
    W: Tensor | Any = None
    U: Tensor | Any = None
    V: Tensor | Any = None
    A_d: Tensor | Any = None
    A_u: Tensor | Any = None
    B_d: Tensor | Any = None
    B_u: Tensor | Any = None

    def key(self, letter: str) -> str:
        """The name of tensor ``letter`` in the model."""
        return self.name + _ENDS[letter]

    def named(self) -> dict[str, Tensor]:
        """The tensors by their names in the model."""
        return {self.key(letter): t for letter in _ENDS if (t := getattr(self, letter)) is not None}


@lru_cache(maxsize=1 << 16)
def _split_name(name: str) -> tuple[str, str] | None:
    """The layer and the letter of tensor ``name``; None for a tensor of no adapted layer."""
    letters = [letter for letter, end in _ENDS.items() if name.endswith(end)]
    return (name.removesuffix(_ENDS[letters[0]]), letters[0]) if letters and ":" not in name else None


def adapted_layers(tensors: Mapping[str, Tensor]) -> list[Layer]:
    """The adapted layers of ``tensors``, sorted by name. Names such as ``x:…`` belong to no layer."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        if parts := _split_name(name):
            layers.setdefault(parts[0], {})[parts[1]] = tensors[name]
    return [Layer(name, **layers[name]) for name in sorted(layers)]
