"""The weighted mean of named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .flat import FlatTensors

# A block of the running sum stays in the cache while the same block of every client is added to it.
_BLOCK = 1 << 18


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are summed and scaled: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = rows[0]
    out = torch.empty(first.shape, dtype=wide(first.dtype), device=first.device)
    for start in range(0, out.numel(), _BLOCK):
        block = out[start : start + _BLOCK]
        # Copied before scaling, because the product of a 16-bit row would be rounded to 16 bits.
        block.copy_(first[start : start + _BLOCK]).mul_(weights[0])
        for row, weight in zip(rows[1:], weights[1:]):
            block.add_(row[start : start + _BLOCK], alpha=weight)
    return out.to(first.dtype)


def weighted_mean(tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """``Σ_k weights[k] · tensors[k]`` for every name.

    Args:
        tensors: one mapping per client, with equal names, shapes and dtypes. ``FlatTensors`` with equal
            layouts are read at about memory bandwidth; other mappings are packed first.
        weights: one number per client, not normalised here.
    Returns:
        New tensors with the same names, shapes and dtypes, in the same order. Sums are in float32, or in
        float64 for float64.
    Raises:
        ValueError: nothing to average, or names, shapes or dtypes differ.
    """
    if not tensors or len(tensors) != len(weights):
        raise ValueError(f"need one weight per client, got {len(tensors)} clients and {len(weights)} weights")
    disagree = ValueError("clients disagree on the names, shapes or dtypes of the tensors to average")
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors[0].items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    result: dict[str, Tensor] = {}
    for dtype, names in by_dtype.items():
        try:
            packed = [t if isinstance(t, FlatTensors) else FlatTensors.pack({n: t[n] for n in names}) for t in tensors]
        except (KeyError, TypeError):
            raise disagree from None
        if any(
            len(t) != len(tensors[0]) or p.layout != packed[0].layout or p.flat.dtype != dtype
            for t, p in zip(tensors, packed)
        ):
            raise disagree
        flat = _mean([p.flat for p in packed], weights)
        result.update(FlatTensors(flat, packed[0].layout))
    return {name: result[name] for name in tensors[0]}
