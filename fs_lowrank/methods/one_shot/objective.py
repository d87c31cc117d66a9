"""FedFisher's objective ``Σ_k p_k (W − W_k)ᵀ F_k (W − W_k)``, in blocks of parameters that stand alone.

What each client sent is ``fisher:`` for the full matrix, and ``inputs:LAYER``, ``outputs:LAYER`` for Kronecker factors,
beside ``W_k`` by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra import kron_multiply, least_change
from ..base import Tensors


@dataclass
class Block:
    """Parameters whose part of the objective stands alone: ``F`` as a product, ``F W`` and where to start."""

    product: Callable[[Tensor], Tensor]
    target: Tensor
    start: Tensor
    #: the minimiser nearest to the start, without iterating
    closed: Callable[[], Tensor] | None
    #: name -> its part of the block
    split: Callable[[Tensor], dict[str, Tensor]]


def _flat(tensors: Tensors, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensors[n].flatten().to(dtype) for n in names])


def _split(x: Tensor, names: Sequence[str], like: Tensors) -> dict[str, Tensor]:
    parts = x.split([like[n].numel() for n in names])
    return {n: t.reshape(like[n].shape) for n, t in zip(names, parts)}


def full_block(
    names: Sequence[str], parts: Sequence[Tensors], weights: Sequence[float], mean: Tensors, dtype: torch.dtype
) -> Block:
    """All parameters ``names`` as one vector of size ``d``, with ``F_k`` of ``(d, d)``."""
    start = _flat(mean, names, dtype)
    total, target = start.new_zeros(len(start), len(start)), torch.zeros_like(start)
    for p, part in zip(weights, parts):
        fisher = part["fisher:"].to(dtype)
        total = total + p * fisher
        target = target + p * (fisher @ _flat(part, names, dtype))

    def closed() -> Tensor:
        return least_change(total, target[None], start[None], torch.float64)[0]

    return Block(lambda x: total @ x, target, start, closed, lambda x: _split(x, names, mean))


def diagonal_block(sums: Mapping[str, tuple[Tensor, Tensor]], mean: Tensors, dtype: torch.dtype) -> Block:
    """All parameters as one vector; ``sums`` has ``Σ p_k F_k`` and ``Σ p_k F_k W_k`` of each."""
    names = list(sums)
    total, target = (_flat({n: s[i] for n, s in sums.items()}, names, dtype) for i in (0, 1))
    start, known = _flat(mean, names, dtype), total > 0

    def closed() -> Tensor:
        return torch.where(known, target / torch.where(known, total, 1.0), start)

    return Block(lambda x: total * x, target, start, closed, lambda x: _split(x, names, mean))


def kronecker_block(
    layer: str, bias: bool, parts: Sequence[Tensors], weights: Sequence[float], mean: Tensors, dtype: torch.dtype
) -> Block:
    """One layer: its weight ``(d_out, d_in)`` with the bias as a last column, ``F_k X = G_k X A_k``."""
    names = [f"{layer}.weight", *([f"{layer}.bias"] if bias else [])]

    def matrix(tensors: Tensors) -> Tensor:
        return torch.cat([tensors[n].to(dtype).reshape(len(tensors[n]), -1) for n in names], 1)

    def split(x: Tensor) -> dict[str, Tensor]:
        columns = x.split([x.shape[1] - bias, *([1] if bias else [])], 1)
        return {n: t.reshape(mean[n].shape) for n, t in zip(names, columns)}

    factors = [
        (p * part[f"outputs:{layer}"].to(dtype), part[f"inputs:{layer}"].to(dtype)) for p, part in zip(weights, parts)
    ]

    def product(x: Tensor) -> Tensor:
        return sum((kron_multiply(g, a, x) for g, a in factors), torch.zeros_like(x))

    start = matrix(mean)
    products = (kron_multiply(g, a, matrix(part)) for (g, a), part in zip(factors, parts))
    return Block(product, sum(products, torch.zeros_like(start)), start, None, split)
