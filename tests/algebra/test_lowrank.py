"""Sums of low-rank products compared with dense float64 matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_lowrank.algebra import low_rank_sum_svd, top_components


def draw(d_out, d_in, ranks, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    ups = [torch.randn(d_out, r, generator=generator).to(dtype) for r in ranks]
    downs = [torch.randn(r, d_in, generator=generator).to(dtype) for r in ranks]
    weights = [0.3 + 0.7 * i / len(ranks) for i in range(len(ranks))]
    return ups, downs, weights


def dense(ups, downs, weights):
    """``Σ_k w_k B_k A_k`` in float64."""
    total = np.zeros((ups[0].shape[0], downs[0].shape[1]))
    for up, down, weight in zip(ups, downs, weights):
        total += weight * (up.double().numpy() @ down.double().numpy())
    return total


def best(matrix, rank):
    """The best approximation of that rank (Eckart and Young), and all singular values."""
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank], s


def check(ups, downs, weights, rank):
    target = dense(ups, downs, weights)
    wanted, singular = best(target, rank)
    u, s, vh = low_rank_sum_svd(ups, downs, weights, rank)
    count = min(rank, sum(b.shape[1] for b in ups), *target.shape)
    assert (u.shape, s.shape, vh.shape) == ((target.shape[0], count), (count,), (count, target.shape[1]))
    # Rounding errors are relative to the terms, also where these cancel.
    size = sum(w * float(b.norm() * a.norm()) for b, a, w in zip(ups, downs, weights)) + 1e-30
    np.testing.assert_allclose(s.double().numpy(), singular[:count], rtol=0, atol=2e-6 * size)
    assert (s.diff() <= 0).all() and (s >= 0).all()
    for side in (u.T, vh):
        np.testing.assert_allclose((side @ side.T).numpy(), np.eye(count), atol=2e-6)
    # By Eckart and Young, the nearest of its rank is the best approximation.
    # If two singular values are almost equal, the best matrix is not unique, but its distance is.
    product = ((u * s) @ vh).double().numpy()
    assert np.linalg.norm(product - target) <= np.linalg.norm(wanted - target) + 2e-6 * size


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(0, 10**6),
)
def test_any_shapes_and_ranks(d_out, d_in, ranks, rank, seed):
    check(*draw(d_out, d_in, ranks, seed), rank)


@pytest.mark.parametrize("d_out, d_in", [(11, 26), (26, 11)])
def test_rank_deficient_sums(d_out, d_in):
    ups, downs, weights = draw(d_out, d_in, (2, 2, 2))
    same = [ups[0]] * 3, [downs[0]] * 3, weights
    check(*same, 4)
    zero = [torch.zeros_like(b) for b in ups]
    u, s, vh = low_rank_sum_svd(zero, downs, weights, 3)
    assert not s.any() and all(t.isfinite().all() for t in (u, s, vh))
    np.testing.assert_allclose((vh @ vh.T).numpy(), np.eye(3), atol=2e-6)
    check([zero[0], *ups[1:]], downs, weights, 3)
    check(ups, [torch.zeros_like(downs[0]), *downs[1:]], weights, 3)
    check([ups[0], -ups[0]], [downs[0]] * 2, [0.5, 0.5], 3)  # they cancel


def test_float64_is_kept():
    ups, downs, weights = draw(13, 29, (2, 3), dtype=torch.float64)
    u, s, vh = low_rank_sum_svd(ups, downs, weights, 5)
    assert u.dtype == torch.float64
    np.testing.assert_allclose(((u * s) @ vh).numpy(), dense(ups, downs, weights), atol=1e-13)


# -- a given number of components ----------------------------------------------------------------------


def orthonormal(rows):
    np.testing.assert_allclose((rows @ rows.T).numpy(), np.eye(rows.shape[0]), atol=3e-6)


def test_more_components_than_there_are_directions():
    u, vh = torch.eye(8)[:, :2], torch.eye(2)
    fill = torch.arange(12.0).reshape(6, 2)
    u2, s2, vh2 = top_components(u, torch.tensor([2.0, 1.0]), vh, 6, fill)
    assert u2.shape == (8, 6) and s2.tolist() == [2, 1, 0, 0, 0, 0] and not u2[:, 2:].any()
    assert torch.equal(vh2, torch.cat([vh, fill[2:]]))  # the others are taken from ``fill``


def test_dependent_fill_directions():
    # The rows of ``fill`` may be in the span already, since a client that hardly trained sends what it received.
    u, vh = torch.eye(5)[:, :2], torch.eye(7)[:2]
    s = torch.tensor([2.0, 1.0])
    for fill in (torch.eye(7)[:4], torch.zeros(4, 7), torch.eye(7)[:1].repeat(4, 1), 1e-12 * torch.eye(7)[2:6]):
        orthonormal(top_components(u, s, vh, 6, fill)[2])
    generator = torch.Generator().manual_seed(1)
    fill = torch.randn(6, 7, generator=generator)
    vh = torch.linalg.svd(fill[:3], full_matrices=False)[2]
    orthonormal(top_components(torch.zeros(5, 3), torch.zeros(3), vh, 6, fill)[2])
