"""Means of named tensors that a few arbitrary clients cannot move far.

Written here because no library on PyPI serves: torchjd 0.18 sums distances in Krum where its definition sums squares,
byzfl 0.0.11 requires torchvision, matplotlib and seaborn, and Flower's are bound to its messages.

All sums are in float64, so that values up to the largest of float32 give finite results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

# A block of every client is in memory at a time, in float64.
_BLOCK = 1 << 18


def _blocks(rows: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Positions in the flattened tensors, and the values there as one ``(clients, positions)`` matrix."""
    flat = [row.flatten() for row in rows]
    for start in range(0, flat[0].numel(), _BLOCK):
        part = slice(start, start + _BLOCK)
        yield part, torch.stack([row[part] for row in flat])


def trimmed_mean(tensors: Sequence[Mapping[str, Tensor]], cut: int) -> dict[str, Tensor]:
    """Of each coordinate, the mean without the ``cut`` largest and the ``cut`` smallest values.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, definition 2.

    Args:
        tensors: one mapping per client, with equal names, shapes and dtypes.
        cut: below half of the number of clients; clients are not weighted.
    Returns:
        New tensors with the same names, shapes and dtypes.
    Raises:
        ValueError: nothing would be left.
    """
    count = len(tensors)
    if not 0 <= 2 * cut < count:
        raise ValueError(f"without the {cut} largest and smallest of {count} values, none is left")
    result = {}
    for name, first in tensors[0].items():
        out = torch.empty_like(first).flatten()
        for part, rows in _blocks([t[name] for t in tensors]):
            out[part] = rows.sort(0).values[cut : count - cut].double().mean(0).to(out.dtype)
        result[name] = out.view(first.shape)
    return result


def median(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of each coordinate, the median, for an even number of clients the mean of the two middle values.

    Yin et al., ICML 2018, definition 1. Arguments and result as for ``trimmed_mean``.
    """
    return trimmed_mean(tensors, (len(tensors) - 1) // 2)


def squared_distances(tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """``‖x_i − x_j‖²`` of every two clients over all their tensors: float64 ``(clients, clients)``."""
    total = torch.zeros(len(tensors), len(tensors), dtype=torch.float64)
    for name in tensors[0]:
        for _, rows in _blocks([t[name] for t in tensors]):
            exact = torch.cdist(rows.double(), rows.double(), compute_mode="donot_use_mm_for_euclid_dist")
            total += exact.square().cpu()
    return total


def krum_scores(distances: Tensor, malicious: int) -> Tensor:
    """For each client, the sum of its squared distances to the ``n − f − 2`` nearest others; a low score is good.

    Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017, section 4.

    Args:
        distances: ``(n, n)``, from ``squared_distances``.
        malicious: ``f``, with ``n ≥ 2 f + 3``.
    Returns:
        ``(n,)``.
    Raises:
        ValueError: too few clients.
    """
    count = len(distances)
    if count < 2 * malicious + 3:
        raise ValueError(f"Krum with {malicious} malicious clients needs {2 * malicious + 3} updates, got {count}")
    off_diagonal = distances[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    return off_diagonal.sort(1).values[:, : count - malicious - 2].sum(1)


def norm_of_change(tensors: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """``‖x − start‖`` over all ``tensors``, in float64; ``start`` may hold more."""
    squares = [(t.double() - start[n].double()).square().sum() for n, t in tensors.items()]
    return float(torch.stack(squares).sum().sqrt())


def bounded_mean(
    tensors: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    start: Mapping[str, Tensor],
    factors: Sequence[float],
) -> dict[str, Tensor]:
    """``start + Σ_k weights[k] · factors[k] · (x_k − start)``, the mean of changes that were scaled to a bounded norm.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019, section 3.

    Args:
        tensors: one mapping per client, with equal names, shapes and dtypes; ``start`` may hold more.
        weights: one number per client, not normalised here.
        factors: one number from 0 to 1 per client; the values of a client with 0 are not read.
    Returns:
        New tensors with the same names, shapes and dtypes.
    """
    result = {}
    for name, first in tensors[0].items():
        mean = start[name].double()
        for update, weight, factor in zip(tensors, weights, factors, strict=True):
            if factor:
                mean = mean + weight * factor * (update[name].double() - start[name].double())
        result[name] = mean.to(first.dtype)
    return result
