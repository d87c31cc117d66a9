"""Sums of low-rank products, without ever forming the ``d_out × d_in`` matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stack_pairs(ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Stacks with ``up @ down = Σ_k weights[k] · ups[k] @ downs[k]``.

    Args:
        ups: ``B_k``, each ``(d_out, r_k)``; ranks may differ.
        downs: ``A_k``, each ``(r_k, d_in)``; a convolution's halves may come in their own shapes.
        weights: one number per pair.
    Returns:
        ``(d_out, Σ r_k)`` and ``(Σ r_k, d_in)``.
    """
    ups, downs = ([t if t.dim() == 2 else t.flatten(1) for t in half] for half in (ups, downs))
    # One scaling of the stack, column by column: K small ones would cost more than the product.
    columns = [w for b, w in zip(ups, weights, strict=True) for _ in range(b.shape[1])]
    up = torch.cat(ups, dim=1)
    return up.mul_(up.new_tensor(columns)), torch.cat(downs, dim=0)


def low_rank_sum_svd(
    ups: Sequence[Tensor], downs: Sequence[Tensor], weights: Sequence[float], rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best rank-``rank`` approximation of ``Σ_k weights[k] · B_k A_k``.

    The stacks are factorised by two thin QR decompositions and one SVD of the ``Σr × Σr`` core, which
    costs ``O((d_out + d_in)(Σr)² + (Σr)³)``. Where ``Σr`` is no smaller than the matrix's smaller side
    the thin form saves nothing and the dense SVD is taken.

    Args:
        ups: ``(d_out, r_k)`` each. downs: ``(r_k, d_in)`` each. weights: one number per pair.
        rank: components wanted, at least 1.
    Returns:
        ``U (d_out, q)``, ``S (q,)`` in falling order, ``Vh (q, d_in)`` with
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


def top_components(u: Tensor, s: Tensor, vh: Tensor, rank: int, fill: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exactly ``rank`` components: cut, or continue the row space where there are too few.

    A dense SVD would give the missing right vectors, with singular value zero; without them the
    corresponding rows of ``A`` would be zero, and with ``B``'s columns zero too they could never train.

    Args:
        u: ``(d_out, q)``.
        s: ``(q,)``.
        vh: ``(q, d_in)``.
        rank: components wanted.
        fill: ``(≥ rank - q, d_in)`` directions to continue with, made orthonormal to ``vh``'s rows; any others
            take the place of those that lie in their span.
    """
    missing = rank - s.numel()
    if missing <= 0:
        return u[:, :rank], s[:rank], vh[:rank]
    # Householder's Q is orthonormal even where a direction adds nothing, which projecting it out is not.
    basis = torch.linalg.qr(torch.cat([vh, fill[:missing].to(vh)]).T)[0].T
    return (
        torch.cat([u, u.new_zeros(u.shape[0], missing)], dim=1),
        torch.cat([s, s.new_zeros(missing)]),
        # Beyond d_in no further direction is orthogonal to all; a convolution's rank may be that large.
        torch.cat([vh, basis[s.numel() :], fill[len(basis) : rank].to(vh)]),
    )
