"""Updates of which the server sees only a sum: secret shares, and running means; and updates that are rounded.

A secret is a fixed-point number modulo 2^64; its shares are random numbers that add up to it. The framework's
own shares lie modulo 2^61 + 1 in 64-bit arithmetic, which overflows from four clients on and then recovers
something else; modulo 2^64 the overflow is the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from federatedscope.core.compression import symmetric_uniform_dequantization, symmetric_uniform_quantization
from torch import Tensor

from ...algebra import FlatTensors

#: fixed point: 2^-30 is below the rounding of a float32 between -64 and 64, and leaves 2^33 for the sum
_SCALE = 2.0**30
_LARGEST = 2.0**33


def split_secret(tensors: Mapping[str, Tensor], weight: float, parties: int) -> list[dict[str, Tensor]]:
    """``weight`` times the tensors, as one share for each of ``parties``; int64, random but for their sum.

    Raises:
        ValueError: a value too large for the fixed point.
    """
    shares: list[dict[str, Tensor]] = [{} for _ in range(parties)]
    for name, tensor in tensors.items():
        scaled = tensor.detach().cpu().double() * weight
        if not (scaled.abs() * parties < _LARGEST).all():
            raise ValueError(f"{name} times {weight:g} does not fit the fixed-point numbers of secret sharing")
        rest = (scaled * _SCALE).round().to(torch.int64)
        for share in shares[1:]:
            share[name] = torch.frombuffer(bytearray(os.urandom(8 * rest.numel())), dtype=torch.int64).view(rest.shape)
            rest = rest - share[name]
        shares[0][name] = rest
    return shares


def add_shares(shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum, modulo 2^64."""
    total = {name: tensor.clone() for name, tensor in shares[0].items()}
    for share in shares[1:]:
        for name in total:
            total[name] += share[name]
    return total


def recover(total: Mapping[str, Tensor], weight: float, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean whose ``weight``-fold the sum of all shares is, in the dtypes of ``like``."""
    return {name: (tensor.double() / (_SCALE * weight)).to(like[name].dtype) for name, tensor in total.items()}


class RunningMean:
    """The weighted mean of updates that come one after the other, in the memory of one."""

    def __init__(self) -> None:
        self.weight, self.sums = 0.0, None

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        if self.sums is None:
            self.sums = {name: tensor.float() * weight for name, tensor in tensors.items()}
            self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        else:
            for name, total in self.sums.items():
                total.add_(tensors[name], alpha=weight)
        self.weight += weight

    def mean(self) -> Mapping[str, Tensor]:
        means = {name: (total / self.weight).to(self.dtypes[name]) for name, total in self.sums.items()}
        return FlatTensors.pack(means) if len(set(self.dtypes.values())) == 1 else means


# -- rounding ------------------------------------------------------------------------------------------

_QUANTISED, _SCALES, _KEPT = "quantised:", "scale:", "kept:"


def quantise(tensors: Mapping[str, Tensor], nbits: int) -> dict[str, Tensor]:
    """Each tensor as whole numbers of ``nbits`` and a scale, by the framework's own rounding.

    The framework rounds only weights whose names say ``fc`` or ``conv``, which no adapter's does; here every
    floating-point tensor bears such a name on its way through.
    """
    names = sorted(tensors)
    aliases = {f"fc{i}.weight": tensors[n] for i, n in enumerate(names) if tensors[n].is_floating_point()}
    rounded = symmetric_uniform_quantization({a: t.detach() for a, t in aliases.items()}, nbits)
    packed = {}
    for i, name in enumerate(names):
        if f"fc{i}.weight_quant" in rounded:
            packed[_QUANTISED + name] = rounded[f"fc{i}.weight_quant"]
            packed[_SCALES + name] = rounded[f"fc{i}.weight_scale"].reshape(1)
        else:
            packed[_KEPT + name] = tensors[name]
    return packed


def dequantise(packed: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors that ``quantise`` rounded; in the dtypes of ``like`` where given.

    Raises:
        ValueError: what came was not quantised.
    """
    tensors, aliases, names = {}, {}, {}
    for key, tensor in packed.items():
        kind, _, name = key.partition(":")
        kind += ":"
        whole = tensor.dtype in (torch.int8, torch.int16)
        if kind == _QUANTISED and not (whole and (like is None or name in like and like[name].shape == tensor.shape)):
            raise ValueError(f"{name} is rounded to {tensor.dtype} of shape {tuple(tensor.shape)}")
        if kind == _SCALES and not (tensor.is_floating_point() and tensor.numel() == 1):
            raise ValueError(f"the scale of {name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
        if kind == _KEPT:
            tensors[name] = tensor
        elif kind == _QUANTISED:
            if _SCALES + name not in packed:
                raise ValueError(f"{name} came without its scale")
            alias = f"fc{len(names)}.weight"
            names[alias] = name
            aliases[alias + "_quant"], aliases[alias + "_scale"] = tensor, packed[_SCALES + name]
        elif kind != _SCALES:
            raise ValueError(f"{key!r} is not quantised, but quantization.method is set")
    for alias, tensor in symmetric_uniform_dequantization(aliases).items():
        name = names[alias]
        tensors[name] = tensor.to(like[name].dtype) if like and name in like else tensor
    return tensors
