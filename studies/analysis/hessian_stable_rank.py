"""Stable rank of the loss Hessian by amount of data.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", Theorem 3.2, Figure 1 and Appendix D.3: on fewer samples, ||H||_F^2 / ||H||_2^2 is larger.

Two studies on a small network:

    same weights   H of one network on N samples that were not used for training, which is the case of the theorem
    own training   H of a network on its N training samples during training, which is the paper's figure

The paper counts training in epochs, which have more steps for a larger sample. Here the axis is steps, from which both
can be read (an epoch is N / 50 steps).

Products H v are computed by curvlinops. ||H||_2 is the largest Ritz value of Lanczos from a random start. ||H||_F^2 is
exact on the leading Ritz vectors Q and estimated by random probes g on the rest (Hutch++, Meyer et al., 2021):

    ||H||_F^2 = ||H Q||_F^2 + E ||H (I - Q Q^T) g||^2

Differs from the paper: its figure is ResNet-18 on CIFAR-100, and its estimate divides by the density of the largest
singular value on a smoothed spectrum (eq. 87); here the two norms themselves are estimated. For a transformer, load it
with ``attn_implementation="eager"``: fused attention has no second derivative on a CPU.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmark.execute import threads
from benchmark.script import script
from fs_lowrank import UserError

from . import band, label, panels, seeds_option
from .data import DATA, Data, data_options, load

#: Lanczos steps, leading Ritz vectors on which the norm is exact, random probes for the rest
STEPS, LEADING, PROBES = 40, 20, 10
#: of training
LR, MOMENTUM, BATCH = 0.05, 0.9, 50
#: steps of training at which the second study measures
POINTS = (0, 5, 10, 20, 40, 80, 160, 320)


def hessian(model: nn.Module, loss: nn.Module, x, y: torch.Tensor) -> tuple[Callable, int]:
    """``V (D, k) -> H V`` for the mean loss over the samples, and D; H is over the parameters that train."""
    from curvlinops import HessianLinearOperator

    params = [p for p in model.parameters() if p.requires_grad]
    operator = HessianLinearOperator(model, loss, params, [(x, y)], check_deterministic=False)
    return (lambda v: operator @ v), sum(p.numel() for p in params)


def lanczos(matmul: Callable, dim: int, steps: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ritz values (at most ``steps``, by decreasing magnitude) and vectors (dim, ...) from a random start.

    Every new vector is made orthogonal to all before it, twice, so that no Ritz value appears more than once.
    """
    v = torch.randn(dim, generator=generator)
    basis, diagonal, norms = [v / v.norm()], [], []
    for _ in range(min(steps, dim)):
        w = matmul(basis[-1].unsqueeze(1)).squeeze(1)
        diagonal.append(torch.dot(w, basis[-1]))
        span = torch.stack(basis, dim=1)
        for _ in range(2):
            w = w - span @ (span.T @ w)
        norms.append(w.norm())
        if norms[-1] < 1e-6 * max(abs(d) for d in diagonal):
            break  # the space is exhausted
        basis.append(w / norms[-1])
    size = len(diagonal)
    off_diagonal = torch.stack(norms[: size - 1]) if size > 1 else torch.zeros(0)
    small = torch.diag(torch.stack(diagonal)) + torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    values, vectors = torch.linalg.eigh(small.double())
    order = values.abs().argsort(descending=True)
    return values[order].float(), torch.stack(basis[:size], dim=1) @ vectors[:, order].float()


def stable_rank(
    matmul: Callable, dim: int, seed: int, *, steps: int = STEPS, leading: int = LEADING, probes: int = PROBES
) -> dict[str, float]:
    """``stable_rank``, ``spectral`` (||H||_2), ``frobenius`` (||H||_F), and the standard error of the stable rank that
    is due to the probes."""
    generator = torch.Generator().manual_seed(seed)
    values, vectors = lanczos(matmul, dim, steps, generator)
    q = torch.linalg.qr(vectors[:, :leading]).Q
    exact = matmul(q).square().sum()
    g = torch.randn(dim, probes, generator=generator)
    residual = matmul(g - q @ (q.T @ g)).square().sum(0)
    spectral = values[0].abs()
    frobenius2 = exact + residual.mean()
    return {
        "stable_rank": (frobenius2 / spectral**2).item(),
        "spectral": spectral.item(),
        "frobenius": frobenius2.sqrt().item(),
        "error": (residual.std() / probes**0.5 / spectral**2).item(),
    }


def network(inputs: int, hidden: int, classes: int, seed: int) -> nn.Module:
    """A network with two hidden layers, ReLU and PyTorch's initialisation."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, generator: torch.Generator) -> Iterator[int]:
    """Train with SGD on cross-entropy over epochs; yields the number of steps done, starting with 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    order, step = iter(()), 0
    yield step
    while step < steps:
        rows = next(order, None)
        if rows is None:
            order = iter(torch.randperm(len(y), generator=generator).split(BATCH))
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        step += 1
        yield step


def measure(model: nn.Module, x: torch.Tensor, y: torch.Tensor, seed: int) -> dict[str, float]:
    return stable_rank(*hessian(model, nn.CrossEntropyLoss(), x, y), seed)


def curves(
    data: Data,
    *,
    sizes: tuple[int, ...],
    compared: tuple[int, int],
    seeds: int,
    trained_on: int,
    steps: int,
    hidden: int,
) -> dict:
    """Both studies of the module's docstring; the first one trains ``steps`` steps on ``trained_on`` samples."""
    classes = int(data.y.max()) + 1
    fresh, own_training = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(data.y), generator=generator)
        x, y = data.x[order], data.y[order]
        model = network(x.shape[1], hidden, classes, seed)
        fresh_x, fresh_y = x[trained_on:], y[trained_on:]
        for step in train(model, x[:trained_on], y[:trained_on], steps, generator):
            for size in sizes if step in (0, steps) else ():
                # Small samples vary more, so up to four disjoint samples are averaged.
                parts = torch.randperm(max(sizes), generator=generator).split(size)[: min(4, max(sizes) // size)]
                ranks = [measure(model, fresh_x[rows], fresh_y[rows], seed)["stable_rank"] for rows in parts]
                fresh.append({"seed": seed, "steps": step, "samples": size, "stable_rank": sum(ranks) / len(ranks)})
        for size in compared:
            model, curve = network(x.shape[1], hidden, classes, seed), []
            for step in train(model, x[:size], y[:size], max(POINTS), generator):
                if step in POINTS:
                    with torch.no_grad():
                        loss = nn.functional.cross_entropy(model(x[:size]), y[:size]).item()
                    curve.append(
                        {
                            "steps": step,
                            "epochs": step * BATCH / size,
                            "loss": loss,
                            **measure(model, x[:size], y[:size], seed),
                        }
                    )
            own_training.append({"samples": size, "seed": seed, "curve": curve})
    return {"same_weights": fresh, "own_training": own_training}


def by_size(result: dict, steps: int) -> torch.Tensor:
    """The stable ranks of the first study after ``steps`` of training (seeds, sizes)."""
    sizes, seeds = result["settings"]["sizes"], range(result["settings"]["seeds"])
    ranks = {(e["seed"], e["samples"]): e["stable_rank"] for e in result["same_weights"] if e["steps"] == steps}
    return torch.tensor([[ranks[seed, size] for size in sizes] for seed in seeds])


def study(data: str, root: Path | None, **settings) -> dict:
    """The result of the command, as plain data."""
    try:
        version = importlib.metadata.version("curvlinops-for-pytorch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("this needs curvlinops: pip install curvlinops-for-pytorch") from None
    loaded = load(data, root)
    if max(max(settings["sizes"]) + settings["trained_on"], *settings["compared"]) > len(loaded.y):
        raise UserError(
            f"--sizes, --trained-on and --compared ask for more than the {len(loaded.y)} training samples of {data}"
        )
    model = network(loaded.x.shape[1], settings["hidden"], 10, 0)
    with threads(1):
        result = {
            "settings": {
                "data": data,
                **settings,
                "lanczos_steps": STEPS,
                "leading": LEADING,
                "probes": PROBES,
                "lr": LR,
                "momentum": MOMENTUM,
                "batch": BATCH,
                "points": list(POINTS),
                "parameters": sum(p.numel() for p in model.parameters()),
                "curvlinops": version,
            },
            **curves(loaded, **settings),
        }
    result["mean_by_size"] = {
        name: dict(zip(map(str, settings["sizes"]), by_size(result, steps).mean(0).tolist()))
        for name, steps in (("untrained", 0), ("trained", settings["steps"]))
    }
    return result


def stable_ranks(result: dict, size: int) -> torch.Tensor:
    """The stable ranks of the second study on ``size`` samples (seeds, points)."""
    runs = [e["curve"] for e in result["own_training"] if e["samples"] == size]
    return torch.tensor([[point["stable_rank"] for point in curve] for curve in runs])


def plot(result: dict):
    settings = result["settings"]
    figure, (left, right) = panels(2, 12, 5)
    for k, step in enumerate((0, settings["steps"])):
        text = "at the start" if not step else f"after {step} steps on {settings['trained_on']} other samples"
        band(left, settings["sizes"], by_size(result, step), f"C{k + 2}", text, marker="o")
    for k, size in enumerate(settings["compared"]):
        band(right, POINTS, stable_ranks(result, size), f"C{k}", f"N = {size}", marker="o")
    ratio, steps = r"$\|H\|_F^2\,/\,\|H\|_2^2$", f"steps of training, batches of {BATCH}"
    label(left, "Same weights, Hessian on N fresh samples", "samples N", ratio, "xy")
    label(right, "Each network trained on its own N samples only", steps, ratio, "y")
    right.set_xscale("symlog", linthresh=POINTS[1])
    top = max(axis.get_ylim()[1] for axis in (left, right))
    for axis in (left, right):
        axis.set(ylim=(1, top))
        axis.yaxis.set_major_formatter("{x:g}")
    figure.suptitle(
        f"Stable rank of the loss Hessian: {DATA[settings['data']]}, {settings['parameters']:,} "
        f"parameters, {settings['seeds']} seeds (mean; band: smallest to largest)"
    )
    return figure


OPTIONS: dict[str, dict[str, Any]] = {
    **data_options("digits"),
    "--sizes": dict(type=int, nargs="+", default=[25, 50, 100, 200, 500, 1000]),
    "--compared": dict(type=int, nargs=2, default=[50, 500], help="sizes of the second study"),
    "--seeds": seeds_option(5),
    "--trained-on": dict(type=int, default=400, help="samples of the first study's training"),
    "--steps": dict(type=int, default=320, help="steps of it"),
    "--hidden": dict(type=int, default=32),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
