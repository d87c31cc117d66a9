"""Known answers of RoLoRA's theory: Lemma 4.3, Theorem 4.5, Proposition 4.6."""

import json
import math

import pytest
import torch

from studies.analysis import rolora_linear as rl

pytestmark = pytest.mark.more

SETTING = dict(num_clients=8, samples=400, dim=10, rounds=60)
B_NORM = 2.0


def run(step, seed=0, **options):
    """`step` is eta ||b*||^2."""
    return rl.simulate(**SETTING, eta=step / B_NORM**2, seed=seed, b_norm=B_NORM, **options)


@pytest.mark.parametrize("delta0", [0.1, 0.5, 0.8, 0.99])
def test_the_start_has_the_angle_asked_for(delta0):
    generator = torch.Generator().manual_seed(3)
    target = rl.make_target(30, 2.0, generator)
    a = rl.start_at_angle(target.a, delta0, generator)
    assert a.norm().item() == pytest.approx(1.0, abs=1e-14)
    assert rl.sin_angle(a, target.a) == pytest.approx(delta0, abs=1e-14)
    assert math.sin(math.acos((a @ target.a).item())) == pytest.approx(delta0, abs=1e-13)
    assert run(0.5, delta0=delta0).sin_angle[0] == pytest.approx(delta0, abs=1e-14)


def test_the_two_updates_match_autograd_and_least_squares():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 7, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64)
    a = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, generator=generator, dtype=torch.float64)
    for i in range(3):
        loss = (y[i] - torch.outer(x[i] @ a, b)).square().sum() / 7
        (expected,) = torch.autograd.grad(loss, a)
        torch.testing.assert_close(rl.gradient_a(x, y, a.detach(), b)[i], expected)
        least_squares = torch.linalg.lstsq((x[i] @ a.detach()).unsqueeze(1), y[i]).solution[0]
        torch.testing.assert_close(rl.minimise_b(x, y, a.detach())[i], least_squares)


@pytest.mark.parametrize("step", [0.125, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_angle_falls_within_the_exact_bound_of_lemma_4_3(step, seed):
    history = run(step, seed)
    assert rl.obeys_lemma(history, slack=0.0)
    assert all(n == pytest.approx(1.0, abs=1e-12) for n in history.a_norm)


def test_the_target_is_recovered():
    history = run(0.5)
    assert history.sin_angle[-1] < 1e-8
    assert history.error[-1] < 1e-8
    assert history.loss[-1] < 1e-15


def test_the_error_follows_theorem_4_5():
    history = run(0.25)
    for delta, error in zip(history.sin_angle, history.error):
        if delta > 1e-10:
            assert error <= 1.05 * delta * B_NORM  # epsilon' = 0.05


@pytest.mark.parametrize("broken", [dict(method="ffa_lora"), dict(normalise=False)])
def test_the_check_fails_without_training_or_normalising_a(broken):
    history = run(0.25, **broken)
    assert not rl.obeys_lemma(history, slack=0.0)
    assert not rl.obeys_lemma(history, slack=0.02)
    assert history.sin_angle[-1] > 1e-2


def test_a_step_of_one_over_l_squared_is_too_long():
    """Lemma 4.3 allows it; its proof needs eta ||b||^2 <= 1/2 (eq. 100)."""
    history = run(1.0)
    assert not rl.obeys_lemma(history, slack=0.0)
    assert history.sin_angle[-1] > 1e-2


def population_step(delta, step):
    """delta_{t+1} from delta_t with unlimited data and step = eta ||b*||^2 (Algorithm 2 in expectation).

    Then b = cos * b* and the gradient is 2 (a ||b||^2 - a* b*^T b), which is orthogonal to a.
    """
    cos2 = 1.0 - delta**2
    return delta * abs(1.0 - 2.0 * step * cos2) / math.sqrt(1.0 + 4.0 * step**2 * delta**2 * cos2)


def test_the_largest_step_with_unlimited_data():
    delta0 = 0.8
    k = 1 - delta0**2
    limit = rl.largest_step(delta0)
    assert limit == pytest.approx(0.91)
    angles = [delta0 * i / 1000 for i in range(1, 1001)]
    for step, holds in ((0.1, True), (0.5, True), (0.9, True), (0.92, False), (1.0, False)):
        factor = math.sqrt(1 - step * k)
        assert all(population_step(d, step) <= factor * d for d in angles) == holds, step


def test_many_samples_approach_the_unlimited_data_recursion():
    def deviation(samples):
        history = rl.simulate(8, samples, 4, 5, 0.5, seed=1, b_norm=1.0)
        return max(
            abs(population_step(before, 0.5) - after) for before, after in zip(history.sin_angle, history.sin_angle[1:])
        )

    assert deviation(20_000) < 0.01
    assert deviation(20_000) < deviation(200)


def test_ffa_lora_stays_at_its_floor():
    losses = [run(0.0, seed, method="ffa_lora").loss for seed in range(10)]
    floor = B_NORM**2 * 0.8**2
    spread = floor * math.sqrt(2 / (8 * 400))  # standard deviation of one run
    for loss in losses:
        assert loss[0] == loss[-1]
        assert abs(loss[-1] - floor) < 4 * spread
    assert sum(loss[-1] for loss in losses) / 10 == pytest.approx(floor, abs=4 * spread / math.sqrt(10))


def test_c_tilde_matches_eq_199_and_falls_as_one_over_nm():
    measured = {}
    for n, m in ((3, 10), (6, 40)):
        mean, error = rl.measure_c_tilde(n, m, draws=2000, seed=0)
        assert abs(mean - rl.c_tilde(n, m)) < 4 * error
        assert mean < -5 * error  # the constant is negative
        measured[n * m] = mean
    assert 5.5 < measured[30] / measured[240] < 10.5  # eight times the samples
    assert rl.c_tilde(100, 1000) * 100 * 1000 == pytest.approx(-1.0, abs=0.01)


def test_the_command_writes_json_and_png(tmp_path):
    rl.main(["--seeds", "1", "--rounds", "3", "--out", str(tmp_path), "--draws", "20"])
    written = json.loads((tmp_path / "rolora_linear.json").read_text())
    assert written["command"].startswith("python -m studies.analysis.rolora_linear --seeds 1 --rounds 3")
    assert len(written["rolora"][0]["runs"][0]["sin_angle"]) == 4
    assert (tmp_path / "rolora_linear.png").stat().st_size > 10_000
