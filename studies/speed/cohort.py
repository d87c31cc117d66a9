"""Speed of the local steps of a cohort, whose clients train in one pass (``train.cohort``), relative to the same steps
client by client. The states of the frozen layers are kept in both."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from fs_lowrank import Config, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.frozen import FrozenPrefix
from fs_lowrank.models.machine import wait
from fs_lowrank.training import train_client
from fs_lowrank.training.cohort import Member, train_cohort

from . import difference, race, row, threads
from .frozen_cache import MINILM

#: clients that train together, as many as in the issue's trial
CLIENTS = 7


def measure(config: Config, repeats: int, clients: int = CLIENTS, size: int = CLIENTS) -> dict:
    """``train.local_update_steps`` steps of each of ``clients`` on samples of the full length, in two ways in turn: one
    by one, and ``size`` of them together.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(config.replace(outdir=folder))
    site, model, method = engine.site, engine.model, engine.method
    data: Any = site.data.clients[0]
    longest = np.argsort(-data.lengths, kind="stable")
    rows = config.dataloader.batch_size * config.train.local_update_steps
    sets = {f"client {i}": data.select(np.resize(longest, clients * rows)[i::clients]) for i in range(clients)}
    prefix = FrozenPrefix(model, {*method.shared}, limit=4e9, changing=method.changed_base(model))
    prefix.plan({name: (examples, float("inf")) for name, examples in sets.items()})
    members = [
        Member(name, examples, method.phases(1, 1), i, config) for i, (name, examples) in enumerate(sets.items())
    ]
    start, lr = method.view(engine.ledger.state), config.train.optimizer.lr
    trained: dict[str, list[dict]] = {}

    def alone() -> None:
        trained["alone"] = []
        for each in members:
            load_tensors(model, start)
            train_client(
                model,
                each.examples,
                each.phases,
                config,
                lr=lr,
                seed=each.seed,
                owner=each.owner,
                prefix=prefix,
                reads=site.reads,
            )
            tensors = method.upload(model, 1, site.clients[0])
            trained["alone"].append({n: t.detach().clone() for n, t in tensors.items()})
        wait(site.device)

    def together() -> None:
        trained["together"] = []
        for first in range(0, clients, size):
            found = train_cohort(
                model,
                members[first : first + size],
                lambda i: load_tensors(model, start),
                {*method.shared, *method.personal},
                config,
                lr=lr,
                prefix=prefix,
                reads=site.reads,
            )
            trained["together"] += [tensors for _, tensors in found]
        wait(site.device)

    ways = {"alone": alone, "together": together}
    steps = clients * config.train.local_update_steps
    seconds = {name: taken / steps for name, taken in race({n: partial(w) for n, w in ways.items()}, repeats).items()}
    sent = [set(each) for each in trained["alone"]]
    pairs = zip(trained["together"], trained["alone"], sent)
    lengths = np.concatenate([e.lengths for e in sets.values()])
    return {
        "clients": clients,
        "seconds_a_clients_step": seconds,
        "only_read": bool(site.reads),
        "lengths": [int(lengths.min()), int(lengths.max())],
        "tokens": dict(Counter(lengths.tolist())),
        "speed_up": seconds["alone"] / seconds["together"],
        "difference": max(difference({n: ours[n] for n in names}, theirs) for ours, theirs, names in pairs),
    }


def of_minilm(tokens: int, batch: int, read: str) -> dict:
    """MiniLM with other sizes."""
    adapter = {"r": 4, "alpha": 8, "modules": ["query", "value"], "layers": [4, 5]}
    return {
        **MINILM,
        "llm": {"tok_len": tokens, "adapter": {"args": [adapter]}},
        "dataloader": {"batch_size": batch},
        "train": {"local_update_steps": 3, "optimizer": {"type": "SGD", "lr": 0.05}, "only_read": read},
    }


def run() -> dict:
    rows, results = [], {}
    for tokens, batch in ((20, 4), (20, 16), (64, 8)):
        for read in ("off", "auto"):
            name = f"MiniLM, layers 4 and 5 of 6, {batch} × {tokens} tokens, train.only_read {read}"
            with threads(1):
                found = results[name] = measure(load_config(of_minilm(tokens, batch, read)), 7)
            step = {k: f"{1e3 * v:.4g} ms" for k, v in found["seconds_a_clients_step"].items()}
            rows.append(
                row(
                    name,
                    f"a client's local step, one by one ÷ {found['clients']} clients together",
                    found["speed_up"],
                    f"{step['alone']} ÷ {step['together']}",
                    found["difference"],
                )
            )
    return {"threads": 1, "rows": rows, "results": results}
