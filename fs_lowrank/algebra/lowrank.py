"""Sums of low-rank products, computed without the ``d_out × d_in`` matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: one number for each pair, or one for each of its components
Weights = Sequence[float] | Sequence[Sequence[float]]


def stack_pairs(ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Weights) -> tuple[Tensor, Tensor]:
    """Stack pairs so that ``up @ down = Σ_k weights[k] · ups[k] @ downs[k]``.

    Args:
        ups: ``B_k``, each ``(d_out, r_k)``; ranks may differ.
        downs: ``A_k``, each ``(r_k, d_in)``; the pair of a convolution may have its 4-D shapes.
        weights: one number per pair, or ``r_k`` numbers, one for each column of ``B_k``.
    Returns:
        ``(d_out, Σ r_k)`` and ``(Σ r_k, d_in)``.
    """
    ups, downs = ([t if t.dim() == 2 else t.flatten(1) for t in half] for half in (ups, downs))
    # Scaling the stack once is cheaper than K small scalings, which would cost more than the product.
    by_pair = (w if isinstance(w, Sequence) else [w] * b.shape[1] for b, w in zip(ups, weights, strict=True))
    columns = [w for values in by_pair for w in values]
    up = torch.cat(ups, dim=1)
    return up.mul_(up.new_tensor(columns)), torch.cat(downs, dim=0)


def low_rank_sum_svd(
    ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Weights, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best rank-``rank`` approximation of ``Σ_k weights[k] · B_k A_k``.

    The stacks are factorised by two thin QR decompositions and one SVD of the ``Σr × Σr`` core, which
    costs ``O((d_out + d_in)(Σr)² + (Σr)³)``. If ``Σr ≥ min(d_out, d_in)``, this saves nothing, and the dense
    SVD is used.

    Args:
        ups: ``(d_out, r_k)`` each. downs: ``(r_k, d_in)`` each. weights: as for ``stack_pairs``.
        rank: number of components, at least 1.
    Returns:
        ``U (d_out, q)``, ``S (q,)`` in decreasing order, ``Vh (q, d_in)`` with
        ``q = min(rank, Σr, d_out, d_in)``.
    """
    up, down = stack_pairs(ups, downs, weights)
    if up.shape[1] >= min(up.shape[0], down.shape[1]):
        u, s, vh = torch.linalg.svd(up @ down, full_matrices=False)
    else:
        q_up, r_up = torch.linalg.qr(up)
        q_down, r_down = torch.linalg.qr(down.T)
        u, s, vh = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
        u, vh = q_up @ u[:, :rank], vh[:rank] @ q_down.T
    return u[:, :rank].contiguous(), s[:rank].contiguous(), vh[:rank].contiguous()


def signed(u: Tensor, s: Tensor, vh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same decomposition with signs that do not depend on rounding: the largest entry of each right vector is
    positive.

    Args:
        u: ``(d_out, q)``. s: ``(q,)``. vh: ``(q, d_in)``.
    """
    signs = torch.sign(vh.gather(1, vh.abs().argmax(1, keepdim=True)))
    return u * signs.T, s, vh * signs


def top_components(u: Tensor, s: Tensor, vh: Tensor, rank: int, fill: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Truncate or extend an SVD to exactly ``rank`` components.

    Missing components get singular value zero and right vectors that extend the row space, as in a dense SVD.
    With zero vectors, a row of ``A`` and a column of ``B`` would both be zero and could never be trained.

    Args:
        u: ``(d_out, q)``.
        s: ``(q,)``.
        vh: ``(q, d_in)``.
        rank: number of components.
        fill: ``(≥ rank - q, d_in)`` directions for the missing components, made orthonormal to the rows of ``vh``.
            A direction in their span is replaced by an arbitrary orthonormal one.
    """
    missing = rank - s.numel()
    if missing <= 0:
        return u[:, :rank], s[:rank], vh[:rank]
    # Householder QR gives an orthonormal Q even for dependent directions; projecting them out would not.
    basis = torch.linalg.qr(torch.cat([vh, fill[:missing].to(vh)]).T)[0].T
    return (
        torch.cat([u, u.new_zeros(u.shape[0], missing)], dim=1),
        torch.cat([s, s.new_zeros(missing)]),
        # The rank of a convolution may exceed d_in, beyond which no orthogonal direction exists.
        torch.cat([vh, basis[s.numel() :], fill[len(basis) : rank].to(vh)]),
    )
