"""Factorise a weight into two thin factors.

The matrix of a convolution's weight ``(d_out, d_in, k₁, k₂)`` is ``(d_out·k₁) × (d_in·k₂)`` (FedHM, Yao et al.,
"FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021), so that the
right factor is a ``1×k₂`` convolution to ``r`` channels and the left factor a ``k₁×1`` convolution from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_matrix(weight: Tensor) -> Tensor:
    """``(d_out, d_in, k₁, k₂)`` → ``(d_out·k₁, d_in·k₂)``; a matrix is returned unchanged."""
    if weight.ndim == 2:
        return weight
    out, into, k1, k2 = weight.shape
    return weight.permute(0, 2, 1, 3).reshape(out * k1, into * k2)


def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of ``to_matrix`` for a weight of ``shape``."""
    if len(shape) == 2:
        return matrix
    out, into, k1, k2 = shape
    return matrix.reshape(out, k1, into, k2).permute(0, 2, 1, 3).contiguous()


def factor_shapes(shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the factors of a weight of ``shape``: ``(d_out, r)`` and ``(r, d_in)``, or of the two
    convolutions, ``(d_out, r, k₁, 1)`` and ``(r, d_in, 1, k₂)``."""
    out, into, *kernel = shape
    return ((out, rank), (rank, into)) if not kernel else ((out, rank, kernel[0], 1), (rank, into, 1, kernel[1]))


def factorise(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors ``U √Σ`` and ``√Σ Vᵀ`` of the best approximation of rank ``rank``, in ``factor_shapes``.

    Args:
        weight: ``(d_out, d_in)`` or ``(d_out, d_in, k₁, k₂)``. rank: at most the smaller side of its matrix.
    """
    u, s, vh = torch.linalg.svd(to_matrix(weight), full_matrices=False)
    root = s[:rank].sqrt()
    left, right = u[:, :rank] * root, root[:, None] * vh[:rank]
    if weight.ndim == 2:
        return left, right
    out, into, k1, k2 = weight.shape
    return (
        left.reshape(out, k1, rank).permute(0, 2, 1).unsqueeze(-1).contiguous(),
        right.reshape(rank, into, k2).unsqueeze(2).contiguous(),
    )


def factor_matrices(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The factors as matrices, ``(d_out·k₁, r)`` and ``(r, d_in·k₂)``."""
    if left.ndim == 2:
        return left, right
    out, rank, k1, _ = left.shape
    return left.squeeze(-1).permute(0, 2, 1).reshape(out * k1, rank), right.squeeze(2).reshape(rank, -1)


def product_norm_squared(left: Tensor, right: Tensor) -> Tensor:
    """``‖U V‖_F²``, computed from the two ``r × r`` Gram matrices; its gradient is ``2 (U V Vᵀ, UᵀU V)``."""
    u, v = factor_matrices(left, right)
    return ((u.T @ u) * (v @ v.T)).sum()
