"""Transport and matching of neurons."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_lowrank.algebra import exact_transport, match, nonparametric_matching
from fs_lowrank.errors import UserError


@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 12), copies=st.integers(2, 4), seed=st.integers(0, 99))
def test_matching_permuted_copies(size, copies, seed):
    rng = np.random.default_rng(seed)
    net = 3 * rng.normal(size=(size, 8)) + 20 * np.eye(size, 8)
    orders = [rng.permutation(size) for _ in range(copies)]
    weights, places = nonparametric_matching([net[o] for o in orders], rng=rng)
    assert len(weights) == size, "the net does not grow"
    for order, place in zip(orders, places):
        assert len(set(place)) == size
        np.testing.assert_allclose(weights[place], net[order] * copies / (copies + 1))


def test_different_neurons_make_a_wider_net():
    one, two = np.diag([9.0, 9, 9, 0, 0, 0])[:3], np.diag([0, 0, 9.0, 9, 9, 9])[2:5]
    weights, places = nonparametric_matching([one, two], rng=np.random.default_rng(0))
    assert len(weights) == 5
    shared = set(places[0]) & set(places[1])
    assert len(shared) == 1
    np.testing.assert_allclose(weights[shared.pop()], [0, 0, 6, 0, 0, 0])
    alone = next(iter(set(places[0]) - set(places[1])))
    assert weights[alone].max() == pytest.approx(4.5), "half way to the prior"


def test_gamma_decides_the_width():
    rng = np.random.default_rng(5)
    nets = [rng.normal(size=(10, 4)) for _ in range(3)]
    few, many = (len(nonparametric_matching(nets, gamma=g, rng=np.random.default_rng(0))[0]) for g in (1e-3, 1e6))
    assert 10 <= few < many <= 30
    capped = nonparametric_matching(nets, gamma=1e6, widest=12, rng=np.random.default_rng(0), sweeps=0)[0]
    assert len(capped) < many


def test_a_missing_package(monkeypatch):
    monkeypatch.setattr(match.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'otfusion needs POT; run: pip install "fs-lowrank\[oneshot\]"'):
        match.require("POT", "ot", "otfusion")


@pytest.mark.parametrize("scale", [3e38, float("inf")])
def test_a_plan_that_the_solver_has_not_found_is_an_error(scale):
    """Distances that are too large: the solver only warns, and its plan is a wrong one."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="no transport plan for neurons with squared distances up to"):
        exact_transport(torch.randn(40, 30) * scale, torch.randn(40, 30) * scale)


def test_large_distances_that_the_solver_can_take():
    torch.manual_seed(0)
    points = torch.randn(6, 3)
    order = [2, 0, 1, 4, 3, 5]
    assert exact_transport(points[order] * 1e15, points * 1e15).argmax(1).tolist() == order
