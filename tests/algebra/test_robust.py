"""Robust means compared with their definitions, written out in float64 with NumPy for each value and client."""

import itertools

import numpy as np
import pytest
import torch

import fs_lowrank.algebra.robust as robust_module
from fs_lowrank.algebra import bounded_mean, krum_scores, median, norm_of_change, squared_distances, trimmed_mean

SHAPES = {"b": (3, 5), "a": (2, 7), "scalar": (), "conv": (4, 3, 2, 2)}
LARGEST = torch.finfo(torch.float32).max


def clients(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()} for _ in range(count)]


def flat(tensors):
    return np.concatenate([tensors[n].double().numpy().reshape(-1) for n in sorted(SHAPES)])


@pytest.fixture(params=["one block", "small blocks"])
def blocks(request, monkeypatch):
    if request.param == "small blocks":
        monkeypatch.setattr(robust_module, "_BLOCK", 4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_coordinate_wise_rules(blocks, count, dtype, tolerance):
    parts = clients(count, dtype)
    rows = np.stack([flat(p) for p in parts])
    cases = [(median(parts), np.median(rows, axis=0))]
    for cut in range((count + 1) // 2):
        wanted = [np.mean(sorted(column)[cut : count - cut]) for column in rows.T]
        cases.append((trimmed_mean(parts, cut), np.array(wanted)))
    for result, wanted in cases:
        np.testing.assert_allclose(flat(result), wanted, rtol=tolerance, atol=tolerance)
        assert all(result[n].shape == parts[0][n].shape and result[n].dtype == dtype for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count, malicious", [(3, 0), (5, 1), (6, 1), (9, 3)])
def test_krum(blocks, count, malicious, dtype):
    parts = clients(count, dtype)
    rows = [flat(p) for p in parts]
    distances = squared_distances(parts)
    wanted = np.array([[((x - y) ** 2).sum() for y in rows] for x in rows])
    np.testing.assert_allclose(distances.numpy(), wanted, rtol=1e-12, atol=1e-12)
    scores = krum_scores(distances, malicious)
    for i in range(count):
        nearest = sorted(wanted[i][j] for j in range(count) if j != i)[: count - malicious - 2]
        assert float(scores[i]) == pytest.approx(sum(nearest), rel=1e-12)


def test_krum_with_equal_clients_and_too_few():
    parts = [clients(1)[0]] * 4 + clients(1, seed=9)
    scores = krum_scores(squared_distances(parts), 1)
    assert scores[:4].tolist() == [0.0] * 4 and scores[4] > 0
    with pytest.raises(ValueError, match="Krum with 2 malicious clients needs 7 updates, got 6"):
        krum_scores(torch.zeros(6, 6), 2)


@pytest.mark.parametrize("bad", list(itertools.product([LARGEST, -LARGEST, 1e19], repeat=2)), ids=str)
def test_two_of_seven_clients_at_the_end_of_float32(bad):
    honest, (start,) = clients(5), clients(1, seed=7)
    parts = [*honest, *({n: torch.full(s, value) for n, s in SHAPES.items()} for value in bad)]
    low, high = (reduce(np.stack([flat(p) for p in honest]), axis=0) for reduce in (np.min, np.max))
    for result in (median(parts), trimmed_mean(parts, 2)):
        assert (low - 1e-6 <= flat(result)).all() and (flat(result) <= high + 1e-6).all()
    scores = krum_scores(squared_distances(parts), 2)
    assert torch.isfinite(scores).all() and int(scores.argmin()) < 5
    factors = [min(1.0, 3.0 / norm_of_change(p, start)) for p in parts]
    result = bounded_mean(parts, [1 / 7] * 7, start, factors)
    assert np.linalg.norm(flat(result) - flat(start)) <= 3.0 * (1 + 1e-5)
