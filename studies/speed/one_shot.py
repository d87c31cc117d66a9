"""FedFisher: conjugate gradients compared with the paper's Adam, the Fisher pass with training, the server's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fs_lowrank.algebra import adam, nbytes, weighted_mean
from fs_lowrank.methods import Client, Update, Workbench, create_method
from fs_lowrank.models.curvature import diagonal_fisher, kronecker_fisher, matrix_layers
from fs_lowrank.models.vision import VisionOptions, build_vision

from . import race, row, threads

CLIENTS, SAMPLES, BATCH, EPOCHS, STEPS = 5, 500, 64, 30, 2000
#: epochs of training before the Fisher is computed, so that the objective is that of trained networks
WARM = 2


def pictures(count: int, shape: tuple[int, int, int], seed: int, classes: range = range(10)) -> list[dict[str, Tensor]]:
    """Images with noise around one image per class."""
    means = torch.randn(10, *shape, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.tensor(list(classes))[torch.randint(0, len(classes), (count,), generator=draw)]
    x = means[labels] + 2 * torch.randn(count, *shape, generator=draw)
    return [{"pixel_values": x[i : i + BATCH], "labels": labels[i : i + BATCH]} for i in range(0, count, BATCH)]


def network(kind: str, shape: tuple[int, int, int]) -> nn.Module:
    torch.manual_seed(0)
    return build_vision(VisionOptions(kind, 10, shape, use_bias=False))


def epoch(model: nn.Module, data: list[dict[str, Tensor]], optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for batch in data:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def trained(kind: str, shape: tuple[int, int, int], data: list[dict[str, Tensor]], epochs: int) -> nn.Module:
    model = network(kind, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(epochs):
        epoch(model, data, optimizer)
    return model


class Round:
    """The server with the updates of ``clients`` trained clients; ``params`` are those of FedFisher."""

    def __init__(self, clients: int, **params):
        shape = (3, 32, 32)
        self.method: Any = create_method("fedfisher", fisher="kfac", **params)
        self.model = self.method.adapt(network("fedma_cnn", shape))
        held_out = pictures(500, shape, seed=99)
        self.method.workbench = Workbench(self.model, lambda: iter(held_out), 0)
        self.state = self.method.initial_state(self.model)
        self.updates = []
        for k in range(1, clients + 1):
            data = pictures(SAMPLES, shape, seed=k, classes=range(2 * k - 2, 2 * k + 1) if k < 5 else range(7, 10))
            model = trained("fedma_cnn", shape, data, WARM)
            sent = self.method.upload(model, 1, Client(k, SAMPLES, partial(list, data)))
            self.updates.append(Update(k, SAMPLES, {n: t.detach().clone() for n, t in sent.items()}))

    def aggregate(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.method.aggregate(self.updates, self.state, 1)[1]

    def objective(self, tensors: dict[str, Tensor]) -> float:
        """``Σ p_k (W − W_k)ᵀ F_k (W − W_k)`` in float64."""
        total = 0.0
        for layer in self.method.layers:
            for update in self.updates:
                t = update.tensors
                apart = (tensors[f"{layer}.weight"] - t[f"{layer}.weight"]).double().flatten(1)
                image = t[f"outputs:{layer}"].double() @ apart @ t[f"inputs:{layer}"].double()
                total += float((apart * image).sum()) / len(self.updates)
        return total


def _solvers() -> list[dict]:
    """Seconds of the server step: cg to its tolerance, and 2,000 steps of the paper's Adam; no iterates are scored."""
    round = Round(CLIENTS, select=False)
    solutions: dict[str, dict[str, Tensor]] = {}
    parts, weights = [u.tensors for u in round.updates], round.method.weights(round.updates)
    mean = weighted_mean(parts, weights)

    def last_of_adam():
        with torch.no_grad():
            blocks = list(round.method.blocks(parts, weights, mean, torch.float32))
            iterates = adam(lambda x: [b.product(at) - b.target for b, at in zip(blocks, x)], [b.start for b in blocks])
            *_, last = islice(iterates, STEPS + 1)
            solutions["adam"] = {n: t for b, at in zip(blocks, last) for n, t in b.split(at).items()}

    seconds = race({"cg": lambda: solutions.update(cg=round.aggregate()), "adam": last_of_adam}, repeats=1)
    low, high, start = (round.objective(t) for t in (solutions["cg"], solutions["adam"], mean))
    note = (
        f"{seconds['adam']:.1f} s, {seconds['cg']:.1f} s; objective {high:.3g} and {low:.3g}, {start:.3g} at the mean"
    )
    case = f"K-FAC, FedMA CNN, {CLIENTS} clients"
    return [
        row(case, f"{STEPS:,} Adam steps / cg", seconds["adam"] / seconds["cg"], note, least=10),
        row("the same", "objective with cg / with Adam", low / high, note, most=1),
    ]


def _passes() -> list[dict]:
    """The Fisher pass as a fraction of 30 local epochs."""
    rows = []
    for kind, shape in (("lenet", (1, 28, 28)), ("fedma_cnn", (3, 32, 32))):
        data = pictures(SAMPLES, shape, seed=1)
        model = trained(kind, shape, data, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        names = sorted(dict(model.named_parameters()))
        seconds = race(
            {
                "epoch": partial(epoch, model, data, optimizer),
                "diag": partial(diagonal_fisher, model, data, names),
                "kfac": partial(kronecker_fisher, model, data, matrix_layers(model, names)),
            },
            repeats=3,
        )
        for fisher in ("diag", "kfac"):
            rows.append(
                row(
                    f"{fisher} Fisher, {kind}",
                    "share of 30 epochs",
                    seconds[fisher] / (EPOCHS * seconds["epoch"]),
                    f"{seconds[fisher]:.2f} s, an epoch {seconds['epoch']:.2f} s",
                    most=0.15,
                )
            )
    return rows


def _memory() -> list[dict]:
    """Peak bytes of torch during the server step, by the number of clients."""
    peaks, factors = {}, 0
    for clients in (2, 5):
        round = Round(clients, steps=2)
        peaks[clients] = _peak(round.aggregate)
        factors = nbytes(round.updates[0].tensors)
        del round
        gc.collect()
    grows = (peaks[5] - peaks[2]) / 3 / factors
    note = (
        f"{factors / 1e6:.1f} MB sent, of which one layer at a time is held in float64; peak above the updates "
        f"{peaks[2] / 1e6:.0f} MB with 2 clients, {peaks[5] / 1e6:.0f} MB with 5"
    )
    return [row("K-FAC server step, FedMA CNN", "peak bytes per further client / what it sent", grows, note, most=3)]


def _peak(step: Callable[[], object]) -> int:
    """Peak bytes of tensors above those before, measured by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    alive = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


def run() -> dict:
    with threads(1):
        return {"rows": [*_solvers(), *_passes(), *_memory()], "threads": 1}
