"""Random Hessians: exact expectations, the limits of Proposition 3.1, and the directions of both theorems."""

import json

import pytest
import torch

from studies.analysis import random_matrix as rm

pytestmark = pytest.mark.more


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_draw_is_symmetric_with_the_stated_variance_and_the_true_eigenvalues():
    h = rm.draw((), 600, 0.5, generator())
    assert torch.equal(h, h.T)
    upper = h[torch.triu_indices(600, 600).unbind()]
    assert upper.var().item() == pytest.approx(0.25 / 600, rel=0.02)
    assert abs(upper.mean().item()) < 4 * 0.5 / 600**0.5 / len(upper) ** 0.5
    assert torch.linalg.eigvalsh(rm.draw((3.0, -2.0), 20, 0.0, generator()))[[0, -1]].tolist() == [-2.0, 3.0]


@pytest.mark.parametrize("theta, s, where", [(3.0, 0.6, 3.12), (-3.0, 0.6, -3.12), (0.5, 1.0, 2.0), (-0.5, 1.0, -2.0)])
def test_outliers_and_the_edge(theta, s, where):
    """The last two eigenvalues stay at the edge, although theta + s^2 / theta = 2.5 is beyond it."""
    assert rm.outlier(theta, s) == pytest.approx(where)
    values = torch.linalg.eigvalsh(rm.draw((theta,), 800, s, generator()))
    assert values[-1 if theta > 0 else 0].item() == pytest.approx(where, rel=0.02)


def test_stable_rank_of_known_matrices():
    assert rm.stable_rank(torch.tensor([2.0, -2.0, 0.0])) == 2.0
    assert rm.stable_rank(torch.tensor([-3.0, 1.0, 1.0, 1.0])) == pytest.approx(12 / 9)


@pytest.mark.parametrize("s", [0.1, 0.4, 0.9])
def test_the_measured_stable_rank_is_the_expected_one(s):
    found = rm.stable_rank(torch.linalg.eigvalsh(rm.draw(rm.THETA, 600, s, generator(1))))
    assert found == pytest.approx(rm.expected_stable_rank(rm.THETA, 600, s), rel=0.03)


def test_theorem_3_2_needs_its_assumption():
    """The stable rank grows with s while theta_0 > sigma s, and then reaches R / 4, that of the semicircle law."""
    grid = [rm.expected_stable_rank(rm.THETA, 800, s) for s in (0.1, 0.3, 1.0, 3.0, 4.5)]
    assert grid == sorted(grid)
    assert rm.expected_stable_rank((1.0,), 800, 2.0) == pytest.approx(800 / 4, rel=0.01)
    assert rm.expected_stable_rank((1.0,), 800, 4.0) < rm.expected_stable_rank((1.0,), 800, 2.0)


def test_cosines_follow_eqs_54_and_57_and_fall_with_the_rank():
    ranks, s = (1, 3, 5, 8, 20), 0.8
    found = torch.tensor(rm.cosines(rm.THETA, 500, s, ranks, clients=8, alpha=1.0, beta=0.5, seed=0)).mean(1).tolist()
    expected = [rm.expected_cosine(rm.THETA, s, r, 1.0, 0.5) for r in ranks]
    assert found == pytest.approx(expected, abs=0.03)
    assert found == sorted(found, reverse=True) and expected == sorted(expected, reverse=True)
    assert rm.expected_cosine((4.0, -2.0), 1.0, 1, 1.0, 1.0) == pytest.approx(15 / 16)
    assert rm.expected_cosine((4.0, -2.0), 1.0, 4, 1.0, 1.0) == pytest.approx((15 / 16 + 3 / 4) / 4)


def test_fewer_samples_align_less():
    few, many = (torch.tensor(rm.cosines(rm.THETA, 300, rm.scale(n), (3,), 6, 1.0, 0.5, 0)).mean() for n in (50, 500))
    assert few < many


def test_the_command_writes_json_and_png(tmp_path):
    rm.main(["--dim", "120", "--seeds", "2", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "random_matrix.json").read_text())
    assert all(gap["positive"] for gap in written["theorem_3_2"]["gaps"])
    assert len(written["theorem_3_3"][0]["cosines"]) == len(written["theorem_3_3"][0]["ranks"])
    assert (tmp_path / "random_matrix.png").stat().st_size > 10_000
