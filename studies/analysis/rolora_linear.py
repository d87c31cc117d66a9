"""RoLoRA on a federated linear regressor, in float64, with the results that its theory predicts.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA" (RoLoRA):
section 4.1, Algorithm 2, Lemma 4.3, Theorem 4.5, Proposition 4.6.

Client i holds X_i (m, d), standard Gaussian, and Y_i = X_i a* b*^T (eq. 5); a* is a unit vector. One iteration:

    b_i = argmin_b l_i(a, b),  b = mean_i b_i                       (lines 5-7)
    a+  = a - eta * mean_i grad_a l_i(a, b),  a = a+ / ||a+||       (lines 9-11)

with l_i(a, b) = ||Y_i - X_i a b^T||^2 / m (eq. 6). FFA-LoRA keeps a at its start.

Two remarks on the paper.
* Lemma 4.3 allows eta <= 1/L_max^2. Its proof replaces ||b||^2 by a lower bound inside |1 - 2 eta ||b||^2| (eq. 100),
  which needs 1 - 2 eta ||b||^2 >= 0. With unlimited data the lemma's factor holds for every angle up to delta_0 exactly
  when eta ||b*||^2 <= 1 - (1 - delta_0^2) / 4 (`largest_step`), and at eta = 1/||b*||^2 the contraction factor tends to
  one as the angle falls. eta <= 1/(2 L_max^2), which Lemma A3.16 asks for, is safe.
* The proof takes each iterate to be independent of the data. As in Algorithm 2, the data stay the same throughout.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from benchmark.script import script

from . import label, panels, seeds_option

METHODS = ("rolora", "ffa_lora")


@dataclasses.dataclass(frozen=True)
class Target:
    """The ground truth: `a` (d,) of unit length and `b` (d_out,), float64."""

    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass(frozen=True)
class History:
    """Curves over iterations t = 0..T; entry t belongs to a^t and the averaged b for it, b^{t+1}.

    sin_angle: delta_t (Definition 4.2). loss: global loss (eq. 6). error: ||a b^T - a* b*^T||_F (Theorem 4.5).
    a_norm: ||a^t||. eta, b_norm: the step size and ||b*||.
    """

    sin_angle: list[float]
    loss: list[float]
    error: list[float]
    a_norm: list[float]
    eta: float
    b_norm: float


def make_target(dim: int, b_norm: float, generator: torch.Generator) -> Target:
    """A random unit a* (dim,) and a random b* (dim,) of length `b_norm`."""
    a, b = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    return Target(a / a.norm(), b * (b_norm / b.norm()))


def start_at_angle(a_star: torch.Tensor, delta0: float, generator: torch.Generator) -> torch.Tensor:
    """A unit vector (d,) with |sin angle| to `a_star` equal to `delta0`, in a random direction."""
    if not 0.0 < delta0 < 1.0:
        raise ValueError(f"delta0 must lie in (0, 1), got {delta0}")
    u = torch.randn(a_star.shape, generator=generator, dtype=a_star.dtype)
    for _ in range(2):  # a second pass removes the rounding error of the first
        u = u - a_star * (a_star @ u)
    return math.sqrt(1.0 - delta0**2) * a_star + delta0 * u / u.norm()


def sin_angle(a: torch.Tensor, a_star: torch.Tensor) -> float:
    """||(I - a a^T) a*|| (eq. 7), which is a sine only if `a` has unit length."""
    return (a_star - a * (a @ a_star)).norm().item()


def minimise_b(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Each client's exact argmin_b l_i (eq. 12): (N, d_out) from x (N, m, d), y (N, m, d_out), a (d,)."""
    z = x @ a
    return torch.einsum("nm,nmo->no", z, y) / z.square().sum(1, keepdim=True)


def gradient_a(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each client's gradient of l_i with respect to a (eq. 43): (N, d)."""
    scalar = (x @ a) * (b @ b) - y @ b
    return 2.0 / x.shape[1] * torch.einsum("nmd,nm->nd", x, scalar)


def global_loss(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """The objective of eq. 6, averaged over clients."""
    residual = y - (x @ a).unsqueeze(-1) * b
    return residual.square().sum().item() / (x.shape[0] * x.shape[1])


def simulate(
    num_clients: int,
    samples: int,
    dim: int,
    rounds: int,
    eta: float,
    seed: int,
    target: Target | None = None,
    *,
    method: str = "rolora",
    delta0: float = 0.8,
    b_norm: float = 1.0,
    normalise: bool = True,
) -> History:
    """Run Algorithm 2 (or FFA-LoRA) for `rounds` iterations with `samples` rows per client.

    `target` defaults to a random one with ||b*|| = `b_norm`. The same seed gives both methods the same data and start.
    `normalise=False` leaves out line 11's normalisation. Raises ValueError for an unknown method or a wrong shape.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}, expected one of {', '.join(METHODS)}")
    generator = torch.Generator().manual_seed(seed)
    if target is None:
        target = make_target(dim, b_norm, generator)
    if target.a.shape != (dim,):
        raise ValueError(f"target.a has shape {tuple(target.a.shape)}, expected ({dim},)")
    a = start_at_angle(target.a, delta0, generator)
    x = torch.randn(num_clients, samples, dim, generator=generator, dtype=torch.float64)
    y = (x @ target.a).unsqueeze(-1) * target.b
    truth = torch.outer(target.a, target.b)

    history = History([], [], [], [], eta, target.b.norm().item())
    for t in range(rounds + 1):
        b = minimise_b(x, y, a).mean(0)
        history.sin_angle.append(sin_angle(a, target.a))
        history.loss.append(global_loss(x, y, a, b))
        history.error.append((torch.outer(a, b) - truth).norm().item())
        history.a_norm.append(a.norm().item())
        if method == "rolora" and t < rounds:
            a = a - eta * gradient_a(x, y, a, b).mean(0)
            if normalise:
                a = a / a.norm()
    return history


def lemma_factor(eta: float, delta0: float, b_norm: float) -> float:
    """Lemma 4.3's contraction per iteration: sqrt(1 - eta (1 - delta0^2) ||b*||^2)."""
    return math.sqrt(1.0 - eta * (1.0 - delta0**2) * b_norm**2)


def obeys_lemma(history: History, *, slack: float = 0.0, floor: float = 1e-12) -> bool:
    """Whether delta_{t+1} <= (1 + slack) * factor * delta_t for every t with delta_t above rounding, `floor`."""
    delta = history.sin_angle
    factor = lemma_factor(history.eta, delta[0], history.b_norm) * (1.0 + slack)
    return all(after <= factor * before for before, after in zip(delta, delta[1:]) if before > floor)


def largest_step(delta0: float) -> float:
    """The largest eta ||b*||^2 for which Lemma 4.3's factor holds for every delta <= delta0 with unlimited data."""
    return 1.0 - (1.0 - delta0**2) / 4.0


def c_tilde(num_clients: int, samples: int) -> float:
    """Proposition 4.6's constant (eq. 199), (N(4 - m) - 2) / (N^2 m (m - 2)): negative for m > 4, near -1/(N m)."""
    n, m = num_clients, samples
    return (n * (4 - m) - 2) / (n**2 * m * (m - 2))


def measure_c_tilde(
    num_clients: int, samples: int, draws: int, seed: int, *, dim: int = 4, delta0: float = 0.8
) -> tuple[float, float]:
    """Monte Carlo mean of FFA-LoRA's loss / (||b*||^2 delta0^2) - 1, with its standard error.

    Each draw subtracts the loss at b = (a^T a*) b*, whose expectation is exactly ||b*||^2 delta0^2. Otherwise the
    spread of one draw, sqrt(2 / (N m)), would hide a constant of order 1 / (N m).
    """
    generator = torch.Generator().manual_seed(seed)
    target = make_target(dim, 1.0, generator)
    a = start_at_angle(target.a, delta0, generator)
    values = torch.empty(draws, dtype=torch.float64)
    for k in range(draws):
        x = torch.randn(num_clients, samples, dim, generator=generator, dtype=torch.float64)
        y = (x @ target.a).unsqueeze(-1) * target.b
        loss = global_loss(x, y, a, minimise_b(x, y, a).mean(0))
        values[k] = (loss - global_loss(x, y, a, (a @ target.a) * target.b)) / delta0**2
    return values.mean().item(), values.std().item() / math.sqrt(draws)


def study(
    seeds: int,
    *,
    num_clients: int = 10,
    samples: int = 500,
    dim: int = 20,
    rounds: int = 80,
    delta0: float = 0.8,
    b_norm: float = 2.0,
    steps: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25),
    draws: int = 2000,
) -> dict:
    """Every curve and summary that the command writes; `steps` are eta * L_max^2 with L_max = ||b*||."""

    def run(eta: float, seed: int, method: str) -> History:
        return simulate(num_clients, samples, dim, rounds, eta, seed, method=method, delta0=delta0, b_norm=b_norm)

    rolora = []
    for step in steps:
        runs = [run(step / b_norm**2, seed, "rolora") for seed in range(seeds)]
        finals = [r.sin_angle[-1] for r in runs]
        rolora.append(
            {
                "eta_times_L_squared": step,
                "lemma_factor": lemma_factor(step / b_norm**2, delta0, b_norm)
                if step <= 1.0 / (1.0 - delta0**2)
                else None,
                "seeds_within_lemma": sum(obeys_lemma(r) for r in runs),
                "final_sin_angle": {"min": min(finals), "max": max(finals)},
                "seeds_recovered_to_1e-8": sum(r.error[-1] < 1e-8 for r in runs),
                "runs": [dataclasses.asdict(r) for r in runs],
            }
        )
    ffa = [run(0.0, seed, "ffa_lora") for seed in range(seeds)]
    losses = torch.tensor([r.loss[-1] for r in ffa], dtype=torch.float64)
    floor = (1.0 + c_tilde(num_clients, samples)) * b_norm**2 * delta0**2
    constants = []
    for n, m in ((2, 10), (5, 20), (10, 20), (10, 50), (20, 100)):
        mean, error = measure_c_tilde(n, m, draws, seed=n * m)
        constants.append(
            {"num_clients": n, "samples": m, "formula": c_tilde(n, m), "measured": mean, "standard_error": error}
        )
    return {
        "settings": {
            "num_clients": num_clients,
            "samples": samples,
            "dim": dim,
            "rounds": rounds,
            "delta0": delta0,
            "b_norm": b_norm,
            "seeds": list(range(seeds)),
            "draws_for_c_tilde": draws,
        },
        "largest_valid_eta_times_L_squared": largest_step(delta0),
        "rolora": rolora,
        "ffa_lora": {
            "floor": floor,
            "mean_final_loss": losses.mean().item(),
            "std_final_loss": losses.std().item() if seeds > 1 else 0.0,
            "runs": [dataclasses.asdict(r) for r in ffa],
        },
        "c_tilde": constants,
    }


def plot(result: dict):
    from matplotlib import colormaps

    settings = result["settings"]
    delta0, rounds = settings["delta0"], range(settings["rounds"] + 1)
    figure, (left, middle, right) = panels(3, 15, 6.2)
    colours = colormaps["viridis"]([0.0, 0.2, 0.4, 0.6]).tolist() + ["tab:orange", "tab:red"]

    for colour, entry in zip(colours, result["rolora"]):
        step = entry["eta_times_L_squared"]
        curves = torch.tensor([r["sin_angle"] for r in entry["runs"]], dtype=torch.float64).clamp_min(1e-17)
        left.plot(rounds, curves.log().mean(0).exp(), color=colour, lw=2, label=rf"$\eta L^2 = {step:g}$")
        left.fill_between(rounds, curves.amin(0), curves.amax(0), color=colour, alpha=0.15)
        if entry["lemma_factor"] and step <= 1.0:
            left.plot(rounds, [delta0 * entry["lemma_factor"] ** t for t in rounds], color=colour, ls=":", lw=1.5)
    left.plot([], [], color="grey", ls=":", label="Lemma 4.3's bound, same colour")
    label(left, "RoLoRA: angle to the truth", "iteration", r"$|\sin\theta(a_t, a^*)|$", "y", ylim=(1e-17, 3))

    for colour, entry in zip(colours, result["rolora"]):
        curves = torch.tensor([r["loss"] for r in entry["runs"]], dtype=torch.float64).clamp_min(1e-33)
        text = rf"RoLoRA, $\eta L^2 = {entry['eta_times_L_squared']:g}$"
        middle.plot(rounds, curves.log().mean(0).exp(), color=colour, lw=2, label=text)
    curves = torch.tensor([r["loss"] for r in result["ffa_lora"]["runs"]], dtype=torch.float64)
    middle.plot(rounds, curves.mean(0), color="black", lw=2.5, label="FFA-LoRA")
    floor = r"$(1+\tilde c)\,\|b^*\|^2\delta_0^2$ (Prop. 4.6)"
    middle.axhline(result["ffa_lora"]["floor"], color="magenta", ls="--", lw=1.2, label=floor)
    label(middle, "Global loss", "iteration", "global loss", "y", ylim=(1e-31, 1e2))

    entries = result["c_tilde"]
    size = [e["num_clients"] * e["samples"] for e in entries]
    measured, errors = [-e["measured"] for e in entries], [2 * e["standard_error"] for e in entries]
    right.errorbar(size, measured, errors, fmt="o", capsize=4, label="measured, ± 2 standard errors")
    right.plot(size, [-e["formula"] for e in entries], "x", ms=10, color="magenta", label="eq. 199")
    right.plot(size, [1.0 / s for s in size], color="grey", ls="--", label=r"$1/(Nm)$")
    label(right, r"FFA-LoRA: $\tilde c$ is negative, near $-1/(Nm)$", r"$N\,m$", r"$-\tilde c$", "xy")
    figure.suptitle(
        f"Federated linear regressor: N = {settings['num_clients']} clients, m = {settings['samples']}, "
        f"d = {settings['dim']}, $\\delta_0$ = {delta0:g}, {len(settings['seeds'])} seeds (geometric mean; "
        "band: smallest to largest)"
    )
    return figure


OPTIONS = {
    "--seeds": seeds_option(10),
    "--rounds": dict(type=int, default=80),
    "--draws": dict(type=int, default=2000, help="draws for the constant of Proposition 4.6"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
