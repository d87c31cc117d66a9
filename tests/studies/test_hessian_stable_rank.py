"""Stable rank by Lanczos against matrices with known eigenvalues and against an exact Hessian."""

import json

import pytest
import torch
from torch import nn

pytest.importorskip("curvlinops")
pytest.importorskip("sklearn")

from studies.analysis import hessian_stable_rank as hs  # noqa: E402

pytestmark = pytest.mark.more


def matrix(values, seed=0):
    """A symmetric matrix with these eigenvalues, in a random basis."""
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed))).Q
    return q @ torch.diag(torch.as_tensor(values)) @ q.T


def test_lanczos_finds_the_leading_eigenpairs():
    values = [10.0, -7.0, 3.0] + [0.5 - i / 200 for i in range(197)]
    m = matrix(values)
    found, vectors = hs.lanczos(lambda v: m @ v, 200, 40, torch.Generator().manual_seed(1))
    assert found[:3].tolist() == pytest.approx([10, -7, 3], abs=1e-4)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(vectors.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(m @ vectors[:, 1], -7 * vectors[:, 1], atol=1e-3, rtol=0)


def test_lanczos_stops_where_the_space_is_exhausted():
    m = matrix([2.0, 2.0, -1.0] + [0.0] * 7)
    found, _ = hs.lanczos(lambda v: m @ v, 10, 10, torch.Generator().manual_seed(0))
    assert found[:2].tolist() == pytest.approx([2, -1], abs=1e-4) and found[2:].abs().max() < 1e-4


def test_the_stable_rank_of_a_known_matrix():
    values = torch.cat([torch.tensor([10.0, -7.0, 3.0]), torch.linspace(-0.5, 0.5, 297)])
    m = matrix(values)
    found = hs.stable_rank(lambda v: m @ v, 300, 0)
    assert found["spectral"] == pytest.approx(10, abs=1e-3)
    assert found["stable_rank"] == pytest.approx((values.square().sum() / 100).item(), abs=4 * found["error"] + 0.01)
    assert found["error"] < 0.05


def test_an_exact_hessian():
    """The Hessian is compared with second derivatives by autograd, column by column; frozen parameters have none."""
    torch.manual_seed(0)
    model, x, y = hs.network(6, 5, 3, 0), torch.randn(40, 6), torch.randint(3, (40,))
    model[2].weight.requires_grad_(False)
    matmul, dim = hs.hessian(model, nn.CrossEntropyLoss(), x, y)
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    exact = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(e, params, retain_graph=True)]) for e in flat]
    )
    torch.testing.assert_close(matmul(torch.eye(dim)), exact, atol=1e-5, rtol=1e-4)
    values = torch.linalg.eigvalsh(exact)
    expected = (values.square().sum() / values.abs().max() ** 2).item()
    found = hs.stable_rank(matmul, dim, 0)
    assert found["stable_rank"] == pytest.approx(expected, abs=4 * found["error"] + 0.01)


def test_training_counts_its_steps_over_epochs():
    torch.manual_seed(0)
    x, y = torch.randn(120, 4), torch.randint(2, (120,))  # three batches per epoch, the last of 20 samples
    model = hs.network(4, 3, 2, 0)
    start = [p.clone() for p in model.parameters()]
    steps = hs.train(model, x, y, 7, torch.Generator().manual_seed(0))
    assert next(steps) == 0 and all(torch.equal(a, b) for a, b in zip(start, model.parameters()))
    assert list(steps) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("sizes, parts", [((10, 40), (4, 1)), ((12, 40), (3, 1)), ((30, 40), (1, 1))])
def test_a_mean_is_over_parts_of_one_size(monkeypatch, sizes, parts):
    measured = []
    monkeypatch.setattr(hs, "measure", lambda model, x, y, seed: measured.append(len(x)) or {"stable_rank": len(x)})
    monkeypatch.setattr(hs, "POINTS", (0,))
    x, y = torch.randn(100, 4), torch.arange(100) % 2
    found = hs.curves(hs.Data(x, y, x, y), sizes=sizes, compared=(10, 40), seeds=1, trained_on=50, steps=1, hidden=3)
    assert all(entry["stable_rank"] == entry["samples"] for entry in found["same_weights"])
    assert measured[: sum(parts)] == [size for size, count in zip(sizes, parts) for _ in range(count)]


def test_the_command_writes_json_and_png(tmp_path, monkeypatch):
    monkeypatch.setattr(hs, "POINTS", (0, 2, 4))
    options = "--seeds 1 --sizes 10 20 --compared 10 30 --trained-on 50 --steps 4 --hidden 8"
    hs.main([*options.split(), "--out", str(tmp_path)])
    written = json.loads((tmp_path / "hessian_stable_rank_digits.json").read_text())
    assert [(e["steps"], e["samples"]) for e in written["same_weights"]] == [(0, 10), (0, 20), (4, 10), (4, 20)]
    assert [p["steps"] for p in written["own_training"][1]["curve"]] == [0, 2, 4]
    assert all(e["stable_rank"] >= 1 for e in written["same_weights"])
    assert (tmp_path / "hessian_stable_rank_digits.png").stat().st_size > 10_000
