"""What one server carries: bytes of a client and seconds of the server in a round, by method, model size and rank.

    python -m studies.speed capacity

``update`` is what the server spends on every client: its message as bytes is read, decoded, checked and kept. ``step``
is the server's step over all clients of the round, with the change of its own model: it is measured for a few of the
adapted matrices, one after the other, and multiplied. ``fedloru`` and ``pfedloru`` merge in some rounds only; here is a
round without.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from fs_lowrank.algebra import nbytes
from fs_lowrank.methods import Update, create_method, list_methods, requirements
from fs_lowrank.rounds.admission import check_update
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.settings import AdapterSpec

from . import race, row, threads
from .server_step import ALPHA, Layers

#: a model's name -> its width, how many of its matrices an adapter on queries and values has, and how many are measured
MODELS = {
    "MiniLM": (384, 12, 12),
    "RoBERTa-large": (1024, 48, 8),
    "a decoder of 7 billion": (4096, 64, 2),
}
RANKS, CLIENTS = (4, 16), (10, 50)


def methods() -> list[str]:
    """The methods over adapters of language models whose server step needs no data."""
    found = []
    for name in list_methods():
        needs = requirements(name)
        if needs.adapter in ("any", "lora") and "CausalLM" in needs.tasks and not needs.validation:
            found.append(name)
    return found


@torch.no_grad()
def measure(
    name: str, width: int, modules: int, rank: int, clients: int, measured: int = 0, repeats: int = 3
) -> dict[str, Any]:
    """One method at one size.

    Args:
        modules: adapted matrices. measured: of them, those of the step that is measured; 0: all.
    Returns:
        ``up_bytes`` of a client and ``down_bytes`` to it; seconds of ``update``, for one client, and of ``step``, for
        all ``clients``: the medians over ``repeats``. All are for ``modules``.
    """
    measured = measured or modules
    times = modules // measured
    spec = AdapterSpec(r=rank, lora_alpha=ALPHA, target_modules=("q", "v"))
    method = create_method(name, adapter=spec, rounds=9, seed=0)
    model: nn.Module = method.adapt(Layers(measured, width, width))
    state, draw = method.initial_state(model), torch.Generator().manual_seed(0)
    wanted = [method.expected(state, 1, k) for k in range(1, clients + 1)]
    raw = [{n: torch.randn(t.shape, generator=draw) / width for n, t in own.items()} for own in wanted]
    updates = [check_update(Update(k, 100, own), want) for k, (own, want) in enumerate(zip(raw, wanted), 1)]
    whole = {f"{i}.{n}": t for i in range(times) for n, t in wanted[0].items()}
    sent = Parcel({n: torch.randn(t.shape) for n, t in whole.items()}, round=1, samples=100, loss=1.0).to_bytes()
    message: dict[str, torch.Tensor] = {}

    def receive() -> None:
        check_update(Update(1, 100, Parcel.of(sent).tensors), whole)

    def step() -> None:
        message.update(method.aggregate(updates, state, 1)[1])
        method.apply(model, message, 1)

    seconds = race({"update": receive, "step": step}, repeats)
    return {
        "up_bytes": times * nbytes(updates[0].tensors),
        "down_bytes": times * nbytes(method.tailor(message, 1)),
        "update_seconds": seconds["update"],
        "step_seconds": times * seconds["step"],
    }


def lines(results: list[dict[str, Any]]) -> list[str]:
    """The results as a table in Markdown, of which ``docs/guides/scale.md`` has a part."""
    head = "| method | model, rank | clients | up, MB | down, MB | update, ms | step, s | clients a second |"
    table = [head, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for found in results:
        update, step = found["update_seconds"], found["step_seconds"]
        numbers = [found["up_bytes"] / 1e6, found["down_bytes"] / 1e6, 1e3 * update, step]
        numbers.append(found["clients"] / (found["clients"] * update + step))
        cells = [f"`{found['method']}`", f"{found['model']}, {found['rank']}", f"{found['clients']}"]
        cells += [f"{float(f'{number:.3g}'):,g}" for number in numbers]
        table.append(f"| {' | '.join(cells)} |")
    return table


def run(repeats: int = 3) -> dict[str, Any]:
    """All methods at the smallest rank, and those sizes and ranks that show how the cost grows."""
    results = []
    with threads(1):
        for model, (width, modules, measured) in MODELS.items():
            for rank in RANKS:
                for clients in CLIENTS:
                    for name in methods():
                        found = measure(name, width, modules, rank, clients, measured, repeats)
                        about = {"method": name, "model": model, "width": width, "modules": modules}
                        results.append({**about, "measured": measured, "rank": rank, "clients": clients, **found})
                        gc.collect()
    of = {(r["method"], r["model"], r["rank"], r["clients"]): r for r in results}
    rows = []
    few, many = CLIENTS
    for name in methods():
        small, large = (of[name, "RoBERTa-large", RANKS[0], clients] for clients in (few, many))
        rows.append(
            row(
                f"{name}, {many} clients, RoBERTa-large, rank {RANKS[0]}",
                f"step ÷ the step with {few} clients",
                large["step_seconds"] / small["step_seconds"],
                f"step {1e3 * large['step_seconds']:.3g} ms, a client's update "
                f"{1e3 * large['update_seconds']:.3g} ms, {large['up_bytes'] / 1e6:.3g} MB up, "
                f"{large['down_bytes'] / 1e6:.3g} MB down",
            )
        )
    return {"threads": 1, "rows": rows, "results": results}
