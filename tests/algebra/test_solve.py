"""The solvers: conjugate gradients compared with closed forms, Adam with that of torch."""

from itertools import islice

import pytest
import torch

from fs_lowrank.algebra import adam, conjugate_path, least_change, summed_moments


def gram(size, rank, seed=0):
    root = torch.randn(size, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T / rank


def conjugate_gradients(product, target, start, tolerance=1e-6):
    return conjugate_path(product, target, start, (tolerance,))[0]


def test_cg_solves_to_its_tolerance():
    matrix = gram(40, 60)
    target, start = matrix @ torch.ones(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    x, steps = conjugate_gradients(lambda v: matrix @ v, target, start, tolerance=1e-6)
    assert (matrix @ x - target).norm() <= 1e-6 * (matrix @ start - target).norm() and 0 < steps < 200
    again, none = conjugate_gradients(lambda v: matrix @ v, target, x * 0 + 1)
    assert none == 0 and torch.equal(again, torch.ones(40, dtype=torch.float64))


def test_cg_finds_the_nearest_of_many_solutions():
    # F = diag(2, 0): every (3, y) solves F x = (6, 0); the nearest to (10, -4) is (3, -4)
    matrix = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    x, _ = conjugate_gradients(lambda v: matrix @ v, torch.tensor([6.0, 0.0]), torch.tensor([10.0, -4.0]))
    torch.testing.assert_close(x, torch.tensor([3.0, -4.0], dtype=torch.float64))
    # with a null space that is not along an axis: F of rank 3 in 10 dimensions, compared with the pseudo-inverse
    low, start = gram(10, 3), torch.randn(10, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    target = low @ torch.arange(10, dtype=torch.float64)
    x, steps = conjugate_gradients(lambda v: low @ v, target, start, tolerance=1e-12)
    nearest = start + torch.linalg.pinv(low, rcond=1e-10) @ (target - low @ start)
    torch.testing.assert_close(x, nearest, atol=1e-8, rtol=1e-8)
    assert steps <= 10
    torch.testing.assert_close(least_change(low, target[None], start[None])[0], nearest, atol=1e-6, rtol=1e-6)


def test_a_zero_matrix_changes_nothing():
    zero, start = torch.zeros(4, 4), torch.arange(4.0)
    x, steps = conjugate_gradients(lambda v: zero.double() @ v, torch.zeros(4), start)
    assert steps == 0 and torch.equal(x, start.double())
    assert torch.equal(least_change(zero, torch.zeros(2, 4), torch.ones(2, 4)), torch.ones(2, 4).double())


def test_adam_equals_torch():
    matrix = gram(6, 6).float()
    target = torch.ones(6)
    parameter = torch.nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.99), eps=0.01)
    for iterate in islice(adam(lambda x: [matrix @ x[0] - target], [torch.zeros(6)], lr=0.01), 50):
        torch.testing.assert_close(iterate[0], parameter.detach(), atol=1e-6, rtol=1e-5)
        parameter.grad = (matrix @ parameter - target).detach()
        optimizer.step()


@pytest.mark.parametrize("inside", [False, True])
def test_the_authors_steps_by_hand(inside):
    iterates = summed_moments(lambda x: [x[0] - 1.0], [torch.tensor([0.0])], lr=0.01, eps_inside=inside)
    x, m, d = 0.0, 0.0, 0.0
    for _ in range(3):
        g = x - 1
        m, d = g + 0.9 * m, g * g + 0.99 * d
        x -= 0.01 * m / ((d + 0.01) ** 0.5 if inside else d**0.5 + 0.01)
        assert float(next(iterates)[0]) == pytest.approx(x, rel=1e-6)
