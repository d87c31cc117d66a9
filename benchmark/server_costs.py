"""Bytes and server seconds of a round for each method, in the setting of RoLoRA's Table 15.

    python -m benchmark.server_costs [--clients 50] [--rank 4] [--passes 10] [--out results/scripts]

Chen et al., 2025: 50 clients, RoBERTa-large, rank 4, W_q and W_v of layers 15 to 23 (MNLI). Only the adapted layers
matter to the server, so only they are created; updates are random. Bytes are those of the tensors that a client sends
and receives, at their dtype, without the head: 4.2 MB for three classes, the same for every method. A pass
measures every method once; ratios are those of a pass.

Differs from the paper: it reports 1500.8 kB for LoRA, both directions together. 18 modules of 1024 x 1024 at rank 4 in
float32 are 589.8 kB per direction; the paper does not say what else it counted. FLoRA's server stacks the halves, and
every copy of the model computes the product; ``with_product_seconds`` is the time of both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

from fs_lowrank import create_method
from fs_lowrank.algebra import nbytes
from fs_lowrank.methods import Update
from fs_lowrank.methods.base import split_merges
from fs_lowrank.models.names import pairs
from fs_lowrank.rounds.admission import check_update
from fs_lowrank.settings import AdapterSpec

from .script import script

METHODS = ("fedlora", "ffa_lora", "flexlora", "flora", "rolora")
#: of the model; two square modules are adapted in each layer
WIDTH, LAYERS = 1024, 9


def measure(name: str, clients: int, rank: int, repeats: int) -> dict:
    """Mean bytes per client and round, over two rounds, and the median seconds of the server step.

    ``with_product_seconds`` is the median of the step with the products of the halves that the message stacks, if any.
    """
    method = create_method(name, adapter=AdapterSpec(r=rank, lora_alpha=16, target_modules=("q", "v")), seed=0)
    blocks = ({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q", "v")} for _ in range(LAYERS))
    state = method.initial_state(method.adapt(nn.ModuleList(nn.ModuleDict(block) for block in blocks)))
    draw = torch.Generator().manual_seed(0)
    both, seconds, with_product = [], [], []
    for round in (1, 2):
        expected = [method.expected(state, round, k) for k in range(1, clients + 1)]
        drawn = [{n: torch.randn(t.shape, generator=draw) for n, t in sent.items()} for sent in expected]
        updates = [check_update(Update(k, 100, noise), sent) for k, (noise, sent) in enumerate(zip(drawn, expected), 1)]
        for _ in range(-(-repeats // 2)):
            began = time.perf_counter()
            _, message = method.aggregate(updates, state, round)
            seconds.append(time.perf_counter() - began)
            for stacks in split_merges(message)[0].values():
                for b, a in pairs(stacks):
                    torch.mm(stacks[b], stacks[a])
            with_product.append(time.perf_counter() - began)
        both.append(nbytes(updates[0].tensors) + nbytes(message))
    return {
        "both_kB": statistics.fmean(both) / 1e3,
        "server_seconds": statistics.median(seconds),
        "with_product_seconds": statistics.median(with_product),
    }


def study(clients: int, rank: int, repeats: int, passes: int) -> dict:
    """The result of the command, as plain data."""
    return {"passes": [{name: measure(name, clients, rank, repeats) for name in METHODS} for _ in range(passes)]}


def lines(result: dict) -> Iterator[str]:
    for number, rows in enumerate(result["passes"], 1):
        for name, row in rows.items():
            yield f"pass {number:2} {name:10} both ways {row['both_kB']:9.1f} kB  server {row['server_seconds']:.4f} s"


OPTIONS = {
    "--clients": dict(type=int, default=50),
    "--rank": dict(type=int, default=4),
    "--repeats": dict(type=int, default=30),
    "--passes": dict(type=int, default=1, help="measurements of every method, one method after the other"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, lines=lines, out="results/scripts")


if __name__ == "__main__":
    raise SystemExit(main())
