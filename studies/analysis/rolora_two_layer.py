"""RoLoRA, FFA-LoRA and LoRA on a two-layer network with label-skewed clients.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA" (RoLoRA), section 4.2, eq. 10
and Figure 2:

    f(x) = ReLU(x A B) W_out,    A (d, r), B (r, d), W_out (d, c) fixed.

Five clients with two labels each, or ten with one each; five local epochs, batch 64, plain SGD on cross-entropy. A
round trains the halves below from the server's copy, then averages each with weights n_k / sum n_k:

    lora      A and B
    ffa_lora  B
    rolora    B in rounds 1, 3, 5, ..., A in rounds 2, 4, 6, ...

Here A is (d, r): PEFT's lora_A transposed.

The paper does not give the initial values, the learning rates and the number of rounds. Here all three matrices start
uniform within 1/sqrt(fan_in). B cannot start at zero as in LoRA, because ReLU'(0) = 0 would make both gradients zero.
The learning rate of each method is chosen from one grid by the accuracy on held-out training samples. `--clients 1` is
the control without label skew and averaging.

All clients are trained together in batched products; a client without samples left in an epoch takes no step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmark.execute import threads
from benchmark.script import script
from fs_lowrank.jobs import shell

from . import band, moments, panels, seeds_option
from .data import DATA, Data, data_options, load

METHODS = ("lora", "ffa_lora", "rolora")
LABELS = {"lora": "LoRA (FedAvg of both)", "ffa_lora": "FFA-LoRA (A frozen)", "rolora": "RoLoRA (alternates)"}
GRID = (0.03, 0.1, 0.3, 1.0, 3.0)


@dataclasses.dataclass(frozen=True)
class Clients:
    """Padded to the largest client: x (N, n_max, d), y (N, n_max); `counts` (N,) real samples per client."""

    x: torch.Tensor
    y: torch.Tensor
    counts: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Model:
    """a (d, r), b (r, d), w_out (d, c). On clients, a trained half has one more, leading, axis N."""

    a: torch.Tensor
    b: torch.Tensor
    w_out: torch.Tensor


def subsample(data: Data, samples: int | None, seed: int) -> Data:
    """A random subset of `samples` training samples; the test set does not change."""
    if samples is None or samples >= len(data.y):
        return data
    keep = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))[:samples]
    return dataclasses.replace(data, x=data.x[keep], y=data.y[keep])


def hold_out(data: Data, share: float, seed: int) -> Data:
    """Split the training data in two: the second part, a random `share`, replaces the test set."""
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    retained, held = order[int(share * len(order)) :], order[: int(share * len(order))]
    return Data(data.x[retained], data.y[retained], data.x[held], data.y[held])


def split_by_label(data: Data, num_clients: int) -> Clients:
    """Client k gets all samples of the k-th group of consecutive labels; no label is in two groups."""
    classes = int(data.y.max()) + 1
    if classes % num_clients:
        raise ValueError(f"{classes} labels cannot be dealt evenly to {num_clients} clients")
    owner = data.y // (classes // num_clients)
    counts = torch.bincount(owner, minlength=num_clients)
    if not counts.all():
        raise ValueError(f"client {int((counts == 0).nonzero()[0])} has no sample: use more samples")
    x = data.x.new_zeros(num_clients, int(counts.max()), data.x.shape[1])
    y = data.y.new_zeros(num_clients, int(counts.max()))
    for k in range(num_clients):
        x[k, : counts[k]], y[k, : counts[k]] = data.x[owner == k], data.y[owner == k]
    return Clients(x, y, counts)


def start(dim: int, rank: int, classes: int, generator: torch.Generator) -> Model:
    """A model whose matrices are uniform within 1/sqrt(fan_in)."""

    def uniform(rows: int, columns: int) -> torch.Tensor:
        return (2 * torch.rand(rows, columns, generator=generator) - 1) / math.sqrt(rows)

    return Model(uniform(dim, rank), uniform(rank, dim), uniform(dim, classes))


def halves_of(method: str, round_number: int) -> tuple[str, ...]:
    """The halves, of "a" and "b", that clients train in this round; rounds count from 1."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}, expected one of {', '.join(METHODS)}")
    if method == "lora":
        return ("a", "b")
    return ("b",) if method == "ffa_lora" or round_number % 2 else ("a",)


def gradients(
    x: torch.Tensor,
    projected: torch.Tensor,
    labels: torch.Tensor,
    valid: torch.Tensor,
    model: Model,
    halves: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Gradients of each client's mean cross-entropy over its valid samples, for the given halves.

    x (N, m, d), projected = x A (N, m, r), labels and valid (N, m); a (N, d, r), b (N, r, d): each may lack its N.
    """
    hidden = projected @ model.b
    active = hidden > 0
    d_logits = torch.softmax(torch.relu(hidden) @ model.w_out, dim=-1)
    d_logits.scatter_add_(-1, labels.unsqueeze(-1), d_logits.new_full((*labels.shape, 1), -1.0))
    d_logits *= (valid / valid.sum(1, keepdim=True).clamp_min(1)).unsqueeze(-1)
    d_hidden = (d_logits @ model.w_out.T) * active
    result = {}
    if "b" in halves:
        result["b"] = projected.transpose(1, 2) @ d_hidden
    if "a" in halves:
        result["a"] = x.transpose(1, 2) @ (d_hidden @ model.b.transpose(-1, -2))
    return result


def train_locally(
    model: Model,
    clients: Clients,
    halves: tuple[str, ...],
    *,
    lr: float,
    epochs: int,
    batch: int,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Every client's trained halves after `epochs` of SGD from the server's `model`: a (N, d, r) and/or b (N, r, d)."""
    num_clients, longest, _ = clients.x.shape
    local = {name: getattr(model, name).expand(num_clients, -1, -1).clone() for name in halves}
    model = dataclasses.replace(model, **local)
    rows = torch.arange(num_clients).unsqueeze(1)
    padding = torch.arange(longest) >= clients.counts.unsqueeze(1)
    frozen_a = "a" not in halves
    source = clients.x @ model.a if frozen_a else clients.x
    for _ in range(epochs):
        order = torch.rand(num_clients, longest, generator=generator).masked_fill(padding, 2.0).argsort(1)
        for first in range(0, longest, batch):
            index = order[:, first : first + batch]
            valid = (torch.arange(first, first + index.shape[1]) < clients.counts.unsqueeze(1)).float()
            x = source[rows, index]
            projected = x if frozen_a else x @ model.a
            for name, gradient in gradients(x, projected, clients.y[rows, index], valid, model, halves).items():
                local[name].sub_(gradient, alpha=lr)
    return local


def aggregate(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """sum_k n_k V_k / sum_k n_k over the leading axis."""
    weights = counts.to(values.dtype) / counts.sum()
    return torch.tensordot(weights, values, dims=1)


def accuracy(model: Model, x: torch.Tensor, y: torch.Tensor) -> float:
    logits = torch.relu(x @ model.a @ model.b) @ model.w_out
    return (logits.argmax(1) == y).float().mean().item()


def train(
    data: Data,
    clients: Clients,
    method: str,
    *,
    rounds: int,
    lr: float,
    seed: int,
    rank: int = 16,
    epochs: int = 5,
    batch: int = 64,
    after_round=None,
) -> list[float]:
    """Test accuracy before round 1 and after every round. With the same seed, all methods have the same start.

    `after_round(round_number, before, local, after)`, if given, sees both server models and the clients' halves.
    """
    model = start(data.x.shape[1], rank, int(data.y.max()) + 1, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    curve = [accuracy(model, data.x_test, data.y_test)]
    for t in range(1, rounds + 1):
        local = train_locally(
            model, clients, halves_of(method, t), lr=lr, epochs=epochs, batch=batch, generator=generator
        )
        after = dataclasses.replace(model, **{n: aggregate(v, clients.counts) for n, v in local.items()})
        if after_round:
            after_round(t, model, local, after)
        model = after
        curve.append(accuracy(model, data.x_test, data.y_test))
    return curve


def tail(curve: list[float]) -> float:
    """Mean over the last quarter of the rounds, since the accuracy varies between rounds under label skew."""
    return statistics.fmean(curve[-max(1, len(curve) // 4) :])


def choose_rate(
    data: Data, method: str, num_clients: int, *, grid: tuple[float, ...], share: float = 0.1, seed: int = 0, **options
) -> tuple[float, dict[str, float]]:
    """The rate of the grid with the best `tail` accuracy on held-out training samples, and all scores."""
    part = hold_out(data, share, seed)
    clients = split_by_label(part, num_clients)
    scores = {f"{lr:g}": tail(train(part, clients, method, lr=lr, seed=seed, **options)) for lr in grid}
    return float(max(scores, key=lambda rate: scores[rate])), scores


def compare(
    data: Data,
    *,
    clients: tuple[int, ...],
    seeds: int,
    samples: int | None,
    lr: float | None,
    grid: tuple[float, ...] = GRID,
    **options,
) -> list[dict]:
    """For each number of clients and method: rate, scores of the grid, curves, and their summary over seeds."""
    entries = []
    for num_clients in clients:
        for method in METHODS:
            rate, scores = (
                (lr, None)
                if lr is not None
                else choose_rate(subsample(data, samples, seed=0), method, num_clients, grid=grid, **options)
            )
            curves = []
            for seed in range(seeds):
                part = subsample(data, samples, seed)
                curves.append(train(part, split_by_label(part, num_clients), method, lr=rate, seed=seed, **options))
            last_quarter = moments([tail(c) for c in curves])
            entries.append(
                {
                    "num_clients": num_clients,
                    "method": method,
                    "lr": rate,
                    "held_out_accuracy_by_lr": scores,
                    "accuracy_last_quarter": last_quarter,
                    "accuracy_last_round": [c[-1] for c in curves],
                    "accuracy_best_round": [max(c) for c in curves],
                    "curves": curves,
                }
            )
    return entries


def study(data: str, root: Path | None, samples: int, seeds: int, lr: float | None, clients, **options):
    """The result of the command, as plain data."""
    loaded = load(data, root)
    with threads(1):
        runs = compare(loaded, clients=tuple(clients), seeds=seeds, samples=samples or None, lr=lr, **options)
    return {
        "settings": {
            "data": data,
            "train_samples": min(samples or len(loaded.y), len(loaded.y)),
            "test_samples": len(loaded.y_test),
            "dim": loaded.x.shape[1],
            **options,
            "seeds": list(range(seeds)),
            "lr_grid": list(GRID) if lr is None else None,
        },
        "paper": {"figure": 2, "ffa_lora_accuracy": 0.55},
        "accuracy": {
            str(n): {r["method"]: r["accuracy_last_quarter"]["mean"] for r in runs if r["num_clients"] == n}
            for n in clients
        },
        "runs": runs,
    }


def plot(result: dict):
    settings = result["settings"]
    sizes = sorted({e["num_clients"] for e in result["runs"]})
    labels = {1: "one label", 2: "two labels", 5: "five labels"}
    figure, axes = panels(len(sizes), 6.5 * len(sizes), 5.2, sharey=True)
    colours = {"lora": "tab:blue", "ffa_lora": "tab:red", "rolora": "tab:green"}
    for axis, size in zip(axes, sizes):
        for entry in (e for e in result["runs"] if e["num_clients"] == size):
            curves = 100 * torch.tensor(entry["curves"])
            method, rounds = entry["method"], range(curves.shape[1])
            band(axis, rounds, curves, colours[method], f"{LABELS[method]}, lr {entry['lr']:g}")
        if settings["data"] == "mnist" and size > 1:
            axis.axhline(55, color="grey", ls=":", label="FFA-LoRA in the paper, about 55 %")
        title = "one client, all labels" if size == 1 else f"{size} clients, {labels[10 // size]} each"
        axis.set(xlabel="round", title=title, ylim=(0, 100))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="lower right", fontsize=9)
    axes[0].set_ylabel("test accuracy, %")
    figure.suptitle(
        f"{DATA[settings['data']]}, {settings['train_samples']} training samples, "
        f"rank {settings['rank']},\n{len(settings['seeds'])} seeds (mean; band: smallest to largest)"
    )
    return figure


OPTIONS: dict[str, dict[str, Any]] = {
    **data_options("mnist"),
    "--samples": dict(type=shell.at_least(0), default=5000, help="training samples in all; 0 for every one"),
    "--rounds": dict(type=int, default=40),
    "--seeds": seeds_option(3),
    "--lr": dict(type=float, help="one rate for every method, instead of the grid"),
    "--clients": dict(type=int, nargs="+", default=[5, 10]),
    "--rank": dict(type=int, default=16),
    "--epochs": dict(type=int, default=5),
    "--batch": dict(type=int, default=64),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
