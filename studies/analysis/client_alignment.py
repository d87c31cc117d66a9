"""The agreement of the clients' updates with the global update, by round.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", Appendix F.5, Figure 8:

    mean over the round's clients of cos(W_k - W, W' - W)

with W the global weights before the round, W_k those of a client after training, and W' the new global weights, all as
the network uses them: for an adapted layer, W + s B A, so methods with and without an adapter can be compared. The
paper says "model weights were vectorized" and leaves this open. Weights that do not change do not contribute.

The updates are recorded by a subclass of the method that is registered under another name.

Differs from the paper: LeNet on 6,000 images of MNIST (``fs-lowrank fetch mnist``) instead of ResNet-18 on CIFAR-100.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fs_lowrank
from benchmark.script import script

from . import ServerStep, band, panels, seeds_option, watched_run

#: the fetched data
NEEDS = ("mnist",)
METHODS = ("fedavg", "fedlora", "fedloru")
LABELS = {"fedavg": "FedAvg (all weights)", "fedlora": "FedLoRA", "fedloru": "FedLoRU"}
#: learning rates of SGD
RATES = {"fedavg": 0.02, "fedlora": 0.05, "fedloru": 0.05}
#: F.5's first setting: 20 clients, half of them in each round, IID, trained from scratch
BASE = {
    "federate": {"client_num": 20, "sample_client_num": 10},
    "data": {"type": "mnist", "splitter": "iid", "splits": [0.9, 0.0, 0.1], "subsample": 0.1},
    "model": {"type": "lenet"},
    "llm": {"adapter": {"args": [{"r": 8, "alpha": 16}]}},
    "dataloader": {"batch_size": 32},
    "train": {"local_update_steps": 10, "optimizer": {"type": "SGD", "momentum": 0.9}},
    "eval": {"freq": 1000, "split": ["test"], "batch_size": 256},
}


def effective_change(after: Mapping[str, Tensor], before: Mapping[str, Tensor], scale: float) -> Tensor:
    """The change of the weights as one vector, float32: ``s (B' A' - B A)`` for a pair, else the difference.

    Args:
        after: tensors by name; each ``lora_A`` with its ``lora_B``.
        before: the same names, and possibly more.
    """
    parts = []
    for name in sorted(after):
        if ".lora_A." in name:
            b = name.replace(".lora_A.", ".lora_B.")
            parts.append(
                scale * (after[b].flatten(1) @ after[name].flatten(1) - before[b].flatten(1) @ before[name].flatten(1))
            )
        elif ".lora_B." not in name:
            parts.append(after[name] - before[name])
    return torch.cat([part.detach().float().flatten() for part in parts])


def cosines(
    updates: Sequence[Mapping[str, Tensor]], mean: Mapping[str, Tensor], before: Mapping[str, Tensor], scale: float
) -> list[float]:
    """The cosine of each client's change to the global change; NaN if one of them is zero."""
    global_change = effective_change(mean, before, scale)
    result = []
    for tensors in updates:  # one at a time: a vector is as large as the network
        change = effective_change(tensors, before, scale)
        norms = (change.norm() * global_change.norm()).item()
        result.append(torch.dot(change, global_change).item() / norms if norms else math.nan)
    return result


def entry_of(step: ServerStep) -> dict[str, Any]:
    """The cosines of one round, as plain data."""
    return {"round": step.round, "cosines": cosines(step.tensors, step.mean, step.before, step.scale)}


def runs(
    base: Mapping,
    methods: Sequence[str],
    rounds: int,
    seeds: int,
    *,
    rates: Mapping[str, float] = RATES,
    tau: int = 10,
) -> list[dict[str, Any]]:
    """One run per method and seed; with the same seed, all methods have the same split, clients and batches."""
    results = []
    for method in methods:
        keys = {"federate.method": method, "train.optimizer.lr": rates[method]}
        config = fs_lowrank.load_config(base, {**keys, **({"lowrank.tau": tau} if method == "fedloru" else {})})
        for seed in range(seeds):
            score, steps = watched_run(config, rounds, seed, entry_of)
            results.append({"method": method, "seed": seed, "lr": rates[method], "test_acc": score, "rounds": steps})
    return results


def mean_curve(entry: dict) -> list[float]:
    """The mean over clients, by round."""
    return [sum(r["cosines"]) / len(r["cosines"]) for r in entry["rounds"]]


def study(methods: Sequence[str], rounds: int, seeds: int, tau: int, base: Mapping = BASE) -> dict[str, Any]:
    """The result of the command as plain data."""
    entries = runs(base, methods, rounds, seeds, tau=tau)
    return {
        "settings": {"base": base, "methods": list(methods), "rounds": rounds, "seeds": seeds, "tau": tau},
        "mean_cosine": {
            method: statistics.fmean(c for e in entries if e["method"] == method for c in mean_curve(e))
            for method in methods
        },
        "runs": entries,
    }


def plot(result: dict):
    settings = result["settings"]
    figure, (axis,) = panels(1, 8, 5)
    for k, method in enumerate(settings["methods"]):
        runs = [e for e in result["runs"] if e["method"] == method]
        curves = torch.tensor([mean_curve(e) for e in runs])
        rounds = [r["round"] for r in runs[0]["rounds"]]
        accuracy = sum(e["test_acc"] for e in runs) / len(runs)
        label = f"{LABELS.get(method, method)}, lr {runs[0]['lr']:g}; test accuracy {accuracy:.3f}"
        band(axis, rounds, curves, f"C{k}", label, marker="o", ms=4)
    clients = settings["base"]["federate"]
    sampled = clients.get("sample_client_num", clients["client_num"])
    orthogonal = 1 / math.sqrt(sampled)
    axis.axhline(orthogonal, color="grey", ls=":", label=f"orthogonal updates of {sampled} equal clients")
    axis.set(xlabel="round", ylabel="mean cosine to the global update", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="best")
    axis.set_title(
        f"{settings['base']['model']['type'].split('@')[0]} on {settings['base']['data']['type']}: "
        f"{clients['client_num']} clients, {sampled} a round, {settings['seeds']} seed"
        + "s (mean; band: smallest to largest)"
        * (settings["seeds"] > 1)
    )
    return figure


OPTIONS: dict[str, dict[str, Any]] = {
    "--methods": dict(nargs="+", default=list(METHODS), choices=METHODS),
    "--rounds": dict(type=int, default=30),
    "--seeds": seeds_option(2),
    "--tau": dict(type=int, default=10, help="rounds between FedLoRU's accumulations"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
