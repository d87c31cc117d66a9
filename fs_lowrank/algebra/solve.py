"""Minimising ``Σ_k (x − x_k)ᵀ F_k (x − x_k)`` using only products with ``F = Σ_k F_k``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

#: of Adam, and of the optimizer of FedFisher's authors
_BETAS, _EPS = (0.9, 0.99), 0.01


def conjugate_path(
    product: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Tensor,
    tolerances: Sequence[float],
    *,
    steps: int = 1000,
) -> list[tuple[Tensor, int]]:
    """Solve ``F x = target`` by conjugate gradients for a symmetric positive semi-definite ``F`` that may be singular.

    Every step adds a vector in the range of ``F`` to ``start``. Of many solutions, the limit is therefore the nearest
    to ``start``, which is also the limit of gradient descent from there (Jhunjhunwala et al. 2024, Lemma 1).

    Args:
        product: ``x`` ↦ ``F x``; same shape.
        target: in the range of ``F``.
        start: any tensor of that shape.
        tolerances: decreasing; each gives the first ``x`` with ``‖F x − target‖ ≤ tolerance · ‖F start − target‖``.
        steps: maximum number of products after the first.
    Returns:
        For each tolerance, ``x`` in float64 and the number of products after the first.
    """
    x, target = start.double().clone(), target.double()
    residual = target - product(x)
    direction = residual.clone()
    square = float((residual * residual).sum())
    goals = [t**2 * square for t in tolerances]
    solutions: list[tuple[Tensor, int]] = []
    for step in range(steps + 1):
        while len(solutions) < len(goals) and (square <= goals[len(solutions)] or square == 0.0):
            solutions.append((x.clone(), step))
        if len(solutions) == len(goals) or step == steps:
            break
        image = product(direction)
        curvature = float((direction * image).sum())
        # Along a direction without curvature, the residual is only rounding error.
        if curvature <= 0.0:
            break
        x.add_(direction, alpha=square / curvature)
        residual.sub_(image, alpha=square / curvature)
        previous, square = square, float((residual * residual).sum())
        direction = residual + (square / previous) * direction
    return solutions + [(x, step)] * (len(goals) - len(solutions))


def adam(
    gradient: Callable[[list[Tensor]], list[Tensor]],
    start: list[Tensor],
    *,
    lr: float,
) -> Iterator[list[Tensor]]:
    """The iterates of Adam, beginning with ``start``, without end (Kingma and Ba 2015, Algorithm 1)."""
    x = [t.clone() for t in start]
    m, v = ([torch.zeros_like(t) for t in x] for _ in range(2))
    step = 0
    while True:
        yield [t.clone() for t in x]
        step += 1
        for tensor, grad, mean, square in zip(x, gradient(x), m, v):
            mean.mul_(_BETAS[0]).add_(grad, alpha=1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(grad, grad, value=1 - _BETAS[1])
            root = (square / (1 - _BETAS[1] ** step)).sqrt_().add_(_EPS)
            tensor.addcdiv_(mean, root, value=-lr / (1 - _BETAS[0] ** step))


def summed_moments(
    gradient: Callable[[list[Tensor]], list[Tensor]],
    start: list[Tensor],
    *,
    lr: float,
    eps_inside: bool = False,
) -> Iterator[list[Tensor]]:
    """The iterates of the optimizer in the code of FedFisher's authors, beginning with the result of the first step.

    ``m ← g + 0.9 m``, ``d ← g² + 0.99 d``, ``x ← x − lr m / (√d + eps)``, or ``/ √(d + eps)`` with ``eps_inside``.
    Unlike Adam, it has no bias correction and sums the moments.
    """
    x = [t.clone() for t in start]
    m, d = ([torch.zeros_like(t) for t in x] for _ in range(2))
    while True:
        for tensor, grad, mean, square in zip(x, gradient(x), m, d):
            mean.mul_(_BETAS[0]).add_(grad)
            square.mul_(_BETAS[1]).addcmul_(grad, grad)
            tensor.addcdiv_(mean, (square + _EPS).sqrt() if eps_inside else square.sqrt() + _EPS, value=-lr)
        yield [t.clone() for t in x]


def least_change(gram: Tensor, cross: Tensor, start: Tensor, precision: torch.dtype = torch.float32) -> Tensor:
    """The ``X`` nearest to ``start`` among the minimisers of ``tr(X G Xᵀ) − 2 tr(X Cᵀ)``, in float64.

    ``X = start + (C − start G) G⁺``: in the null space of ``G``, ``X`` equals ``start``.

    Args:
        gram: ``G``, ``(d_in, d_in)``, symmetric positive semi-definite. cross: ``C``, ``(d_out, d_in)``.
        start: ``(d_out, d_in)``.
        precision: dtype in which ``gram`` was computed; eigenvalues below its rounding error count as zero.
    """
    gram, cross, start = gram.double(), cross.double(), start.double()
    values, vectors = torch.linalg.eigh(gram)
    # Smaller eigenvalues are rounding errors of the largest; their inverse would be noise.
    nonzero = values > values[-1].clamp_min(0) * gram.shape[0] * torch.finfo(precision).eps
    inverse = torch.where(nonzero, 1 / torch.where(nonzero, values, torch.ones_like(values)), torch.zeros_like(values))
    return start + ((cross - start @ gram) @ vectors * inverse) @ vectors.T
