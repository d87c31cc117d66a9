"""FedFisher with the full Fisher on a two-layer ReLU network: its loss by width and by number of local steps.

Jhunjhunwala et al., "FedFisher", AISTATS 2024, section 3, Figure 1, with the details of appendix D.1.

Two clients have 100 samples each in two dimensions: x ~ N(b_i, diag(1, 2^-1.2)), scaled to length 1, and y = w_iᵀ x,
where w_i ~ N(u_i, I), b_i ~ N(v_i, I), u_i, v_i ~ N(0, 1). The network is f(x) = Σ_r a_r relu(w_rᵀ x), where the
a_r = ±1/√m are random and fixed, and w_r ~ N(0, 1/2). Each client takes K steps of gradient descent at rate 0.1 on
(1/n) Σ (y - f(x))² / 2; its Fisher at the end is (1/n) Σ ∇f ∇fᵀ. The global model is the result of gradient descent on
Σ_i (W - W_i)ᵀ F_i (W - W_i) from the mean of the W_i at rate 0.001 (Algorithm 1, line 14). The paper does not give the
number of server steps, on which the result depends strongly: the limit, which is the minimiser nearest to the mean
(Lemma 1), is far from the mean in the directions in which ΣF_i is almost zero. The figure is therefore drawn for
several numbers of steps; the iterate after any number of steps is computed exactly from the eigenvalues of ΣF_i.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from benchmark.script import script

from . import label, panels

CLIENTS, SAMPLES, RATE, SERVER_RATE = 2, 100, 0.1, 0.001
#: numbers of server steps; the claims are checked for the first
SERVER_STEPS = (10_000, 100_000, 1_000_000)
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
STEPS = (16, 64, 256, 1024, 2048, 4096, 8192)
#: fixed in the other panel
AT_STEPS, AT_WIDTH = 2048, 512


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """``x (clients, samples, 2)`` of unit length and ``y (clients, samples)``, float64."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    weights, centres = (normal(CLIENTS, 1) + normal(CLIENTS, 2) for _ in range(2))
    spread = torch.tensor([1.0, 2**-1.2], dtype=torch.float64).sqrt()
    x = centres[:, None] + spread * normal(CLIENTS, SAMPLES, 2)
    x = x / x.norm(dim=2, keepdim=True)
    return x, torch.einsum("ksd,kd->ks", x, weights)


def make_net(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """First layer ``(width, 2)``, and the fixed second one ``(width,)``."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + width)
    first = torch.randn(width, 2, generator=draw, dtype=torch.float64) * math.sqrt(0.5)
    signs = 2.0 * torch.randint(0, 2, (width,), generator=draw) - 1
    return first, signs.double() / math.sqrt(width)


def answers(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
    """``f(x)`` of each client's net: ``first (clients, width, 2)``, ``x (clients, samples, 2)``."""
    return torch.relu(x @ first.transpose(1, 2)) @ second


def train(first: Tensor, second: Tensor, x: Tensor, y: Tensor, steps: int) -> Tensor:
    """All clients' first layers after ``steps`` of gradient descent, ``(clients, width, 2)``."""
    first = first.expand(len(x), *first.shape).clone()
    for _ in range(steps):
        hidden = x @ first.transpose(1, 2)
        error = (torch.relu(hidden) @ second - y) / x.shape[1]
        first -= RATE * ((hidden > 0) * error[..., None] * second).transpose(1, 2) @ x
    return first


def jacobians(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
    """``∇f`` at every sample of every client, ``(clients, samples, width · 2)``."""
    active = (x @ first.transpose(1, 2) > 0) * second
    return (active[..., None] * x[:, :, None]).flatten(2)


def fuse(local: Tensor, second: Tensor, x: Tensor, server_steps: int) -> Tensor:
    """The server's model ``(width, 2)`` after ``server_steps`` of ``W ← W - 0.001 Σ_i F_i (W - W_i)`` from the mean.

    With ``ΣF_i = JᵀJ / n`` and ``U, λ`` of ``JJᵀ / n``: ``W = mean + Jᵀ U diag((1 - (1 - 0.001 λ)^T) / λ) Uᵀ c / n``,
    where ``c`` holds ``J_i (W_i - mean)``.
    """
    slopes, flat, samples = jacobians(local, second, x), local.flatten(1), x.shape[1]
    mean = flat.mean(0)
    offsets, rows = torch.einsum("ksp,kp->ks", slopes, flat - mean).flatten(), slopes.flatten(0, 1)
    values, vectors = torch.linalg.eigh(rows @ rows.T / samples)
    values = values.clamp_min(1e-300)
    gain = -torch.expm1(server_steps * torch.log1p(-SERVER_RATE * values)) / values
    return (mean + rows.T @ (vectors @ (gain * (vectors.T @ offsets))) / samples).reshape(local.shape[1:])


def loss(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> float:
    """The global loss ``(1/N) Σ (y - f(x))² / 2`` of one net over all clients' samples."""
    return float((answers(first.expand(len(x), *first.shape), second, x) - y).square().mean() / 2)


def trial(width: int, steps: int, seed: int) -> dict[str, float]:
    """Losses of one seed: of FedFisher by number of server steps, of the mean, and of clients on their own data."""
    (x, y), (first, second) = make_data(seed), make_net(width, seed)
    local = train(first, second, x, y, steps)
    fused = {f"fedfisher {t}": loss(fuse(local, second, x, t), second, x, y) for t in SERVER_STEPS}
    return {
        **fused,
        "mean": loss(local.mean(0), second, x, y),
        "local": float((answers(local, second, x) - y).square().mean() / 2),
    }


def sweep(settings: list[tuple[int, int]], seeds: int) -> list[dict]:
    """For each setting ``(width, steps)``, the mean, median and standard error of every loss over the seeds.

    ``loss_by_seed`` has FedFisher's losses after the number of server steps for which the claims are checked.
    """
    entries = []
    for width, steps in settings:
        trials = [trial(width, steps, seed) for seed in range(seeds)]
        entry: dict[str, Any] = {"width": width, "steps": steps}
        entry["loss_by_seed"] = [t[f"fedfisher {SERVER_STEPS[0]}"] for t in trials]
        for name in trials[0]:
            values = torch.tensor([t[name] for t in trials], dtype=torch.float64)
            entry[name] = {
                "mean": float(values.mean()),
                "median": float(values.median()),
                "standard_error": float(values.std() / math.sqrt(seeds)) if seeds > 1 else 0.0,
            }
        entries.append(entry)
    return entries


def changes(entries: list[dict]) -> list[dict[str, float]]:
    """By seed, the change of the loss from each width to the next; negative where it falls."""
    pairs = list(zip(entries, entries[1:]))
    return [
        {f"{a['width']} to {b['width']}": b["loss_by_seed"][seed] - a["loss_by_seed"][seed] for a, b in pairs}
        for seed in range(len(entries[0]["loss_by_seed"]))
    ]


def bends(entries: list[dict]) -> list[dict[str, float]]:
    """By seed, how much the loss falls from the fewest local steps to the best number, and rises from there on.

    It rises to the loss after the most steps. The best number for a seed is that with the lowest mean over the
    other seeds: chosen on the same seed, the fall and the rise would be positive by the choice alone.
    """
    losses = torch.tensor([entry["loss_by_seed"] for entry in entries], dtype=torch.float64)
    result = []
    for seed in range(losses.shape[1]):
        other_losses = torch.cat([losses[:, :seed], losses[:, seed + 1 :]], dim=1)
        best = losses[int(other_losses.mean(1).argmin()) if other_losses.shape[1] else 0, seed]
        result.append({"falls": float(losses[0, seed] - best), "rises": float(losses[-1, seed] - best)})
    return result


def study(seeds: int, step_seeds: int, widths=WIDTHS, steps=STEPS) -> dict:
    """Both panels of the figure, and by seed the values of their claims."""
    by_width = sweep([(width, AT_STEPS) for width in widths], seeds)
    by_steps = sweep([(AT_WIDTH, step) for step in steps], step_seeds)
    means = [[entry[f"fedfisher {SERVER_STEPS[0]}"]["mean"] for entry in entries] for entries in (by_width, by_steps)]
    width_changes, step_bends = changes(by_width), bends(by_steps)
    return {
        "settings": {
            "clients": CLIENTS,
            "samples": SAMPLES,
            "rate": RATE,
            "server_rate": SERVER_RATE,
            "server_steps": SERVER_STEPS,
            "width_seeds": seeds,
            "step_seeds": step_seeds,
            "steps_of_width_panel": AT_STEPS,
            "width_of_steps_panel": AT_WIDTH,
        },
        "by_width": by_width,
        "by_steps": by_steps,
        "changes_by_seed": width_changes,
        "bends_by_seed": step_bends,
        "claims": {
            "widest_over_narrowest": means[0][-1] / means[0][0],
            "lowest_at_steps": steps[means[1].index(min(means[1]))],
            "change": {pair: statistics.fmean(seed[pair] for seed in width_changes) for pair in width_changes[0]},
            **{name: statistics.fmean(seed[name] for seed in step_bends) for name in ("falls", "rises")},
        },
    }


def plot(result: dict):
    """Both panels, on logarithmic axes."""
    settings = result["settings"]
    figure, (left, right) = panels(2, 10.5, 4.2)
    models = [(f"fedfisher {t}", f"FedFisher, {t:,} server steps", "o") for t in settings["server_steps"]]
    titles = (
        f"{settings['steps_of_width_panel']} local steps, {settings['width_seeds']} seeds",
        f"width {settings['width_of_steps_panel']}, {settings['step_seeds']} seeds",
    )
    for axes, key, axis_name, title in zip((left, right), ("width", "steps"), ("width", "local steps"), titles):
        entries = result[f"by_{key}"]
        for name, model, marker in (*models, ("mean", "mean of the models", "s")):
            means, errors = ([e[name][statistic] for e in entries] for statistic in ("mean", "standard_error"))
            axes.errorbar([e[key] for e in entries], means, errors, marker=marker, capsize=3, label=model)
        label(axes, title, axis_name, "training loss, mean ± standard error", "xy")
    return figure


OPTIONS = {
    "--seeds": dict(type=int, default=50, help="seeds of the panel by width, 0 to seeds - 1"),
    "--step-seeds": dict(type=int, default=10, help="seeds of the panel by local steps"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
