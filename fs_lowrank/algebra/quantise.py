"""Compression: uniform quantisation, and symmetric matrices by their leading eigenvectors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes needed for ``count`` values of ``bits`` bits."""
    return math.ceil(count * bits / 8)


def pack(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to ``2^bits - 1`` levels between minus and plus its largest magnitude.

    ``Q(x) = ‖x‖∞ sign(x) round(l |x| / ‖x‖∞) / l`` with ``l = 2^(bits-1) - 1`` levels on each side (Jhunjhunwala et al.
    2024, equation 120, which rounds up; their code and this function round to the nearest level). Zeros remain zero.

    Args:
        x: floating point, any shape. bits: 2 to 16.
    Returns:
        The packed codes, uint8 ``(⌈numel · bits / 8⌉,)``, and the scale, float32 ``(1,)``.
    Raises:
        ValueError: ``bits`` out of range, or a value that is not finite.
    """
    if not 2 <= bits <= 16:
        raise ValueError(f"{bits} bits a value: expected 2 to 16")
    flat = x.detach().double().flatten()
    if not bool(torch.isfinite(flat).all()):
        raise ValueError("a tensor to quantise holds NaN or Inf")
    levels = 2 ** (bits - 1) - 1
    # Rounded to float32, as it is sent, so that both sides use the same number.
    scale = (flat.abs().max() if flat.numel() else flat.sum()).float()
    codes = torch.round(flat * (levels / scale.double())) if scale > 0 else torch.zeros_like(flat)
    codes = (codes.clamp(-levels, levels) + levels).cpu().numpy().astype(np.uint16)
    if bits == 8:
        packed = codes.astype(np.uint8)
    elif bits == 16:
        packed = codes.astype("<u2").view(np.uint8)
    else:
        planes = (codes[:, None] >> np.arange(bits - 1, -1, -1, dtype=np.uint16)) & 1
        packed = np.packbits(planes.astype(np.uint8).reshape(-1))
    return torch.from_numpy(packed.copy()).to(x.device), scale.reshape(1).to(x.device)


def unpack(packed: Tensor, scale: Tensor, shape: torch.Size | tuple[int, ...], bits: int) -> Tensor:
    """The quantised values that ``pack`` encoded, as float32 of ``shape``.

    Raises:
        ValueError: ``packed`` does not have the size for ``shape`` and ``bits``.
    """
    count = math.prod(shape)
    if packed.numel() != packed_bytes(count, bits):
        raise ValueError(f"{count} values of {bits} bits fill {packed_bytes(count, bits)} bytes, got {packed.numel()}")
    raw = packed.cpu().numpy()
    if bits == 8:
        codes = raw.astype(np.float64)
    elif bits == 16:
        codes = raw.view("<u2").astype(np.float64)
    else:
        planes: np.ndarray = np.unpackbits(raw)[: count * bits].reshape(count, bits)
        codes = planes @ (1 << np.arange(bits - 1, -1, -1)).astype(np.float64)
    levels = 2 ** (bits - 1) - 1
    values = (torch.from_numpy(codes) - levels) * (float(scale) / levels)
    return values.float().reshape(shape).to(packed.device)


def leading(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` leading eigenvectors ``(m, count)`` of a symmetric matrix and their eigenvalues, clamped at zero.

    For a Gram matrix this is its truncated SVD ``V diag(values) Vᵀ``, whose left and right vectors are equal.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    return vectors[:, -count:].flip(1).to(matrix.dtype), values[-count:].flip(0).clamp_min(0).to(matrix.dtype)


def vectors_within(sizes: list[int], budget_bits: int, bits: int) -> int:
    """The largest ``l`` such that ``min(m, l)`` eigenvectors of each matrix (of ``sizes``) fit into ``budget_bits``.

    A matrix takes ``bits`` per element of its vectors, 32 per eigenvalue and 32 for the scale of the vectors. The
    result is at least 1.
    """

    def needed(length: int) -> int:
        return sum(8 * packed_bytes(m * min(m, length), bits) + 32 * min(m, length) + 32 for m in sizes)

    low, high = 1, max(sizes, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= budget_bits else (low, middle - 1)
    return low
