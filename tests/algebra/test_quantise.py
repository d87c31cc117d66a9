"""Quantisation: levels, packed bytes, zeros; symmetric matrices by eigenvectors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_lowrank.algebra import leading, pack, packed_bytes, unpack, vectors_within


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 16),
    shape=st.sampled_from([(1,), (7,), (3, 5), (2, 3, 4), (129,), (0,)]),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e20]),
    seed=st.integers(0, 9),
)
def test_unpacked_values_are_within_half_a_level(bits, shape, scale, seed):
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    packed, top = pack(x, bits)
    assert packed.dtype == torch.uint8 and packed.numel() == math.ceil(x.numel() * bits / 8)
    back = unpack(packed, top, x.shape, bits)
    assert back.shape == x.shape and back.dtype == torch.float32
    if x.numel():
        largest = float(x.abs().max())
        level, rounding = largest / (2 ** (bits - 1) - 1), 2**-22 * largest  # of float32
        assert float((back - x).abs().max()) <= 0.5 * level + rounding
        assert float(back.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_a_zero_layer_stays_zero(bits):
    packed, scale = pack(torch.zeros(4, 3), bits)
    assert torch.equal(unpack(packed, scale, (4, 3), bits), torch.zeros(4, 3))


def test_the_packed_bits_by_hand():
    # 3 bits: the levels -3 … 3 have the codes 0 … 6, so 1.5, -1.5, 0.5 and 0 with a maximum of 1.5 are 6, 0, 4 and 3
    packed, scale = pack(torch.tensor([1.5, -1.5, 0.5, 0.0]), 3)
    assert float(scale) == 1.5 and packed.tolist() == [0b11000010, 0b00110000]


def test_values_that_cannot_be_packed_are_refused():
    for bad in (1, 17, 32):
        with pytest.raises(ValueError, match="expected 2 to 16"):
            pack(torch.ones(2), bad)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or Inf"):
            pack(torch.tensor([1.0, value]), 8)
    with pytest.raises(ValueError, match="fill 3 bytes, got 2"):
        unpack(torch.zeros(2, dtype=torch.uint8), torch.ones(1), (3,), 8)


def test_leading_vectors_are_the_best_of_their_number():
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(9, 9, generator=draw)
    gram = root @ root.T
    u, s, vh = torch.linalg.svd(gram)
    for count in (1, 4, 9):
        vectors, values = leading(gram, count)
        torch.testing.assert_close(
            (vectors * values) @ vectors.T, (u[:, :count] * s[:count]) @ vh[:count], atol=1e-4, rtol=1e-4
        )
    vectors, values = leading(torch.zeros(3, 3), 2)
    assert torch.equal(values, torch.zeros(2)) and torch.isfinite(vectors).all()


def test_vectors_fill_the_budget():
    sizes, bits = [25, 6, 150, 16, 256, 120], 8
    for budget in (10_000, 100_000, 700_000):
        length = vectors_within(sizes, budget, bits)
        used = [
            sum(8 * packed_bytes(m * min(m, k), bits) + 32 * min(m, k) + 32 for m in sizes)
            for k in (length, length + 1)
        ]
        assert used[0] <= budget < used[1] or length == max(sizes)
    assert vectors_within(sizes, 0, bits) == 1
