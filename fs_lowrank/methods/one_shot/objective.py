"""FedFisher's objective ``Σ_k p_k (W − W_k)ᵀ F_k (W − W_k)`` in independent blocks of parameters, and its minimisation.

Besides ``W_k`` by name, a client sends ``fisher:``, the full matrix, or the Kronecker factors ``inputs:LAYER`` and
``outputs:LAYER``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Any

import torch
from torch import Tensor

from ...algebra import adam, conjugate_path, least_change, summed_moments
from ..terms import Tensors

#: steps between two iterates of adam and reference that are scored
SCORED = 100


@dataclass
class Block:
    """Parameters whose part of the objective is independent of the others.

    Attributes:
        product: ``x`` ↦ ``F x`` with ``F = Σ p_k F_k``; same shape.
        target: ``Σ p_k F_k W_k``.
        start: the mean.
        closed: computes the minimiser nearest to the start without iterating; None: there is no such form.
        split: ``x`` by name of the parameter.
    """

    product: Callable[[Tensor], Tensor]
    target: Tensor
    start: Tensor
    closed: Callable[[], Tensor] | Any
    split: Callable[[Tensor], dict[str, Tensor]]


def _flat(tensors: Tensors, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensors[n].flatten().to(dtype) for n in names])


def _split(x: Tensor, names: Sequence[str], template: Tensors) -> dict[str, Tensor]:
    parts = x.split([template[n].numel() for n in names])
    return {n: t.reshape(template[n].shape) for n, t in zip(names, parts)}


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
    """All parameters as one vector; ``sums`` holds ``Σ p_k F_k`` and ``Σ p_k F_k W_k`` of each."""
    names = list(sums)
    total, target = (_flat({n: s[i] for n, s in sums.items()}, names, dtype) for i in (0, 1))
    start, nonzero = _flat(mean, names, dtype), total > 0

    def closed() -> Tensor:
        return torch.where(nonzero, target / torch.where(nonzero, total, 1.0), start)

    return Block(lambda x: total * x, target, start, closed, lambda x: _split(x, names, mean))


def kronecker_block(
    layer: str, bias: bool, parts: Sequence[Tensors], weights: Sequence[float], mean: Tensors, dtype: torch.dtype
) -> Block:
    """The weight ``(d_out, d_in)`` of one layer, with the bias as the last column; ``F_k X = G_k X A_k``."""
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
        return sum((g @ x @ a for g, a in factors), torch.zeros_like(x))

    start = matrix(mean)
    products = (g @ matrix(part) @ a for (g, a), part in zip(factors, parts))
    return Block(product, sum(products, torch.zeros_like(start)), start, None, split)


def minimise(
    blocks: Callable[[torch.dtype], Iterable[Block]],
    mean: Tensors,
    solver: str,
    *,
    steps: int,
    lr: float,
    tolerance: float,
    scored: bool,
    eps_inside: bool,
) -> Iterator[dict[str, Tensor]]:
    """The models to select from, in the dtypes of ``mean``; the last is the last iterate.

    Args:
        blocks: the objective in the given dtype.
        mean: the weights by name where the iteration starts.
        solver: ``closed``, ``cg``, ``adam`` or ``reference``, as in ``fedfisher``.
        steps: number of steps of adam and reference; maximum for cg.
        lr: learning rate of adam and reference.
        tolerance: factor by which cg reduces the residual.
        scored: also yield the iterates before the last that are to be scored.
        eps_inside: ``√(d + ε)`` for reference.
    """

    def named(parts: Iterable[tuple[Block, Tensor]]) -> dict[str, Tensor]:
        return {n: t.to(mean[n].dtype) for block, x in parts for n, t in block.split(x).items()}

    if solver == "closed":
        yield {**mean, **named((b, b.closed()) for b in blocks(torch.float64))}
    elif solver == "cg":
        levels = [*(takewhile(lambda f: f > 1.001 * tolerance, (10 ** (-i / 2) for i in count(1))) if scored else ())]
        models = [dict(mean) for _ in (*levels, tolerance)]
        # One block at a time in float64, so that the server holds the clients' factors and little more.
        for block in blocks(torch.float64):
            path = conjugate_path(block.product, block.target, block.start, (*levels, tolerance), steps=steps)
            for model, (x, _) in zip(models, path):
                model |= named([(block, x)])
        yield from (dict(mean), *models)
    else:
        parts = list(blocks(torch.float32))

        def gradient(x: list[Tensor]) -> list[Tensor]:
            return [block.product(tensor) - block.target for block, tensor in zip(parts, x)]

        start = [block.start for block in parts]
        if solver == "adam":
            iterates, last = islice(adam(gradient, start, lr=lr), steps + 1), steps
        else:
            # The authors score the iterates after steps 1, 101, …, and never the last.
            iterates = islice(summed_moments(gradient, start, lr=lr, eps_inside=eps_inside), steps)
            last = steps - 1 if not scored else -1
        for i, iterate in enumerate(iterates):
            if scored and i % SCORED == 0 or i == last:
                yield {**mean, **named(zip(parts, iterate))}
