"""Server steps: the mean compared with a loop, FlexLoRA with a dense SVD, FLoRA with one product per client."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.server_costs import Layers
from fs_lowrank.methods import Method, Update, create_method
from fs_lowrank.models.names import pairs
from fs_lowrank.rounds.admission import check_update
from fs_lowrank.settings import AdapterSpec

from . import difference, race, row, threads

ALPHA = 8


class Round:
    """A method, its model and state, and one checked update per client.

    Clients differ around a common pair, as they do after local training, so the sum of their products has
    ``rank`` large singular values, and its best approximation is well determined.
    """

    def __init__(
        self,
        method: str,
        clients: int,
        modules: int,
        d_out: int,
        d_in: int,
        rank: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self.method: Method = create_method(
            method, adapter=AdapterSpec(r=rank, lora_alpha=ALPHA, target_modules=("q", "v")[:modules]), seed=seed
        )
        self.model = self.method.adapt(Layers(modules, d_out, d_in).to(dtype))
        self.state: dict[str, Any] = self.method.initial_state(self.model)
        draw = torch.Generator().manual_seed(seed)
        common = {n: self._normal(t, draw) for n, t in self.state.items()}
        self.raw = [
            Update(k, 100 + k, {n: common[n] + 0.3 * self._normal(t, draw) for n, t in self.state.items()})
            for k in range(1, clients + 1)
        ]
        self.updates = [self.receive(update) for update in self.raw]
        self.weights = self.method.weights(self.updates)
        self.scale = ALPHA / rank

    @staticmethod
    def _normal(like: Any, draw: torch.Generator) -> Tensor:
        return torch.randn(like.shape, generator=draw, dtype=like.dtype) / like.shape[1] ** 0.5

    def receive(self, update: Update) -> Update:
        return check_update(update, self.method.expected(self.state, 1, update.client))

    def aggregate(self) -> dict[str, Tensor]:
        return self.method.aggregate(self.updates, self.state, 1)[1]


def loop_mean(round: Round) -> dict[str, Tensor]:
    """The mean as in most public code: a loop over tensors and over clients."""
    mean: dict[str, Tensor] = {}
    for name in round.raw[0].tensors:
        for update, weight in zip(round.raw, round.weights):
            if name in mean:
                mean[name] += update.tensors[name] * weight
            else:
                mean[name] = update.tensors[name] * weight
    return mean


def dense_svd(round: Round) -> dict[str, Tensor]:
    """FlexLoRA with a dense sum and a full SVD; returns the product of the new pair by layer."""
    products = {}
    for b, a in pairs(round.state):
        rank = round.state[a].shape[0]
        total = sum(w * round.scale * (u.tensors[b] @ u.tensors[a]) for w, u in zip(round.weights, round.updates))
        u, s, vh = torch.linalg.svd(total, full_matrices=False)
        products[a] = (u[:, :rank] * s[:rank]) @ vh[:rank]
    return products


def products_of(message: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """``scale · B A`` by layer."""
    return {a: scale * (message[b] @ message[a]) for b, a in pairs(message)}


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith("base_layer.weight")}


def merge_one_by_one(round: Round, weights: dict[str, Tensor], in_place: bool = False) -> None:
    """FLoRA's sum with one dense product per client, as the formula is written: ``W += p_k s (B_k @ A_k)``.

    Args:
        in_place: use the fastest such loop, in which the factor is part of the addition and nothing else is allocated.
    """
    for b, a in pairs(round.state):
        weight = weights[a.split(".lora_A.")[0] + ".base_layer.weight"]
        for update, p in zip(round.updates, round.weights):
            if in_place:
                weight.add_(update.tensors[b] @ update.tensors[a], alpha=p * round.scale)
            else:
                weight += p * round.scale * (update.tensors[b] @ update.tensors[a])


def averaging(clients=50, modules=48, d_out=1024, d_in=1024, rank=4, repeats=21, dtype=torch.float32) -> dict:
    round = Round("fedlora", clients, modules, d_out, d_in, rank, dtype)
    packed: list[Any] = [u.tensors for u in round.updates]
    buffer = torch.cat([tensors.flat for tensors in packed])
    seconds = race(
        {
            "ours": round.aggregate,
            "loop": lambda: loop_mean(round),
            "read": buffer.sum,
            "check and pack": lambda: [round.receive(u) for u in round.raw],
        },
        repeats,
    )
    return {
        "seconds": seconds,
        "difference": difference(round.aggregate(), loop_mean(round)),
        "bytes": buffer.numel() * buffer.element_size(),
    }


def flexlora(clients=50, modules=48, d_out=1024, d_in=1024, rank=4, repeats=5, slow=2, dtype=torch.float32) -> dict:
    round = Round("flexlora", clients, modules, d_out, d_in, rank, dtype)
    kept = {}
    seconds = race({"ours": round.aggregate, "dense": lambda: kept.update(dense_svd(round))}, repeats, {"dense": slow})
    return {"seconds": seconds, "difference": difference(products_of(round.aggregate(), round.scale), kept)}


@torch.no_grad()
def flora(clients=50, modules=48, d_out=1024, d_in=1024, rank=4, repeats=5, slow=2, dtype=torch.float32) -> dict:
    round = Round("flora", clients, modules, d_out, d_in, rank, dtype)
    before = {n: t.clone() for n, t in base_weights(round.model).items()}
    summed = {n: torch.zeros_like(t) for n, t in before.items()}
    merge_one_by_one(round, summed)
    message = round.aggregate()
    round.method.apply(round.model, message, 1)
    # The sums are compared without the far larger weights, to which they would be rounded.
    merged = {n: t - before[n] for n, t in base_weights(round.model).items()}
    apart = difference(merged, summed)
    del before, merged
    stacks = [(message[n], message[n.replace(".lora_B.", ".lora_A.")]) for n in message if ".lora_B." in n]
    product = torch.empty(d_out, d_in, dtype=dtype)
    seconds = race(
        {
            "ours": lambda: round.method.apply(round.model, round.aggregate(), 1),
            "aggregate alone": round.aggregate,
            "the products alone": lambda: [torch.mm(up, down, out=product) for up, down in stacks],
            "product per client": lambda: merge_one_by_one(round, summed),
            "product per client, in place": lambda: merge_one_by_one(round, summed, in_place=True),
        },
        repeats,
        {"product per client": slow, "product per client, in place": slow},
    )
    return {"seconds": seconds, "difference": apart}


def run() -> dict:
    """All measurements, on all cores; run it on an idle machine."""
    measures: dict[str, Callable[[], dict]] = {
        "averaging": averaging,
        "flexlora 1024": flexlora,
        "flora": flora,
        "flexlora 4096": partial(flexlora, clients=20, modules=1, d_out=4096, d_in=4096, repeats=5, slow=1),
    }
    rows, results = [], {}
    with threads(os.cpu_count()):
        for name, measure in measures.items():
            results[name] = measure()
            gc.collect()
    ms = {name: {k: f"{1e3 * v:.4g} ms" for k, v in r["seconds"].items()} for name, r in results.items()}

    def add(name, case, figure, over, under, more="", **target):
        """Add the ratio of the times of ``over`` and ``under``."""
        taken = results[name]["seconds"]
        note = f"{ms[name][over]} ÷ {ms[name][under]}{more}"
        rows.append(row(case, figure, taken[over] / taken[under], note, results[name]["difference"], **target))

    size = "50 clients × 48 modules × rank 4 × 1024"
    dense = "dense sum and full SVD ÷ ours"
    add("averaging", f"averaging, {size}", "loop over tensors and clients ÷ ours", "loop", "ours", least=5)
    add("averaging", "the same", "ours ÷ reading the bytes once", "ours", "read", most=3)
    add("flexlora 1024", f"flexlora, {size}", dense, "dense", "ours", least=10)
    add("flexlora 4096", "flexlora, one layer of 4096 × 4096, Σr = 80", dense, "dense", "ours", least=100)
    bare, best = "the products alone", "product per client, in place"
    add("flora", f"flora, stacks and merge, {size}", "ours ÷ the bare products of the stacks", "ours", bare)
    add("flora", "the same", "one product per client ÷ ours", "product per client", "ours")
    add("flora", "the same", "the best such loop, all in place ÷ ours", best, "ours")
    return {"threads": os.cpu_count(), "rows": rows, "results": results}
