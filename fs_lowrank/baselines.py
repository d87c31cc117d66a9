"""What federated training is compared with: each client alone (``local``), and all data in one place (``pooled``).

Both train what ``fedlora`` trains (``fedavg`` without an adapter), from the same start, on the same split of the data,
with the optimizer and the schedule of the configuration.

- ``local``: every client trains alone, for as many rounds as it takes part in on average. Nothing is sent.
- ``pooled``: one client holds all training data and takes as many steps as all clients of a round together. Where
  training is counted in epochs, it passes over the data as often as a client does over its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config
from .engines.local import LocalEngine
from .errors import UserError
from .jobs.files import write_text
from .methods import requirements
from .models.adapters import load_tensors
from .rounds.evaluator import CLIENTS, Evaluator
from .rounds.site import Site
from .runs.folder import check_outdir
from .runs.result import RunResult
from .seeds import derive
from .training import train_client
from .training.schedule import lr_at
from .versions import SCHEMA

ROWS = ("local", "pooled")
_BYTES = [f"{direction}_bytes{bare}" for direction in ("uplink", "downlink") for bare in ("", "_without_head")]


def split_names(methods: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of methods, and those of ``ROWS``, of what is to be compared.

    Raises:
        UserError: a row is named twice, or there is no method beside the rows.
    """
    rows = [name for name in methods if name.lower() in ROWS]
    if len({name.lower() for name in rows}) < len(rows):
        raise UserError(f"compare needs distinct rows, got {', '.join(rows)}")
    rest = [name for name in methods if name not in rows]
    if rows and not rest:
        raise UserError(f"{', '.join(rows)}: rows beside methods; name one method, too, such as fedlora")
    return rest, [name.lower() for name in rows]


def row_config(name: str, config: Config, outdir: str | Path) -> Config:
    """The configuration of a row; its method averages, over one client or none."""
    needs = requirements(config.federate.method, config.method_params)
    method = "fedlora" if needs.adapts(config.llm.adapter.use) else "fedavg"
    keys: dict[str, Any] = {"federate.method": method, "outdir": str(outdir), "expname": "", "fedopt.use": False}
    keys |= {
        "federate.use_ss": False,
        "federate.online_aggr": False,
        "lowrank.drop_rate": 0.0,
        "lowrank.min_clients": 1,
    }
    keys |= {"lowrank.max_update_norm": 0.0, "lowrank.max_update_norm_factor": 0.0, "lowrank.reuse_clients": ""}
    keys |= {"lowrank.robust": "none", "lowrank.robust_malicious": 1, "lowrank.robust_norm": 0.0}
    keys["federate.process_num"] = 1
    if name == "pooled":
        keys |= {"federate.client_num": 1, "federate.sample_client_num": -1, "federate.sample_client_rate": -1.0}
        keys |= {"data.splitter": "iid", "data.splitter_args": [], "federate.make_global_eval": True}
        if config.train.batch_or_epoch == "batch":
            keys["train.local_update_steps"] = config.train.local_update_steps * config.sampled_per_round
    return config.replace(keys)


def run_row(
    name: str,
    config: Config,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
) -> RunResult:
    """Run a row whose configuration comes from ``row_config``; the result is like that of a run."""
    if name == "pooled":
        check_outdir(config, resume)
        result = LocalEngine(config, on_round, on_client).run(resume)
        # Nothing is sent where the data are in one place; the run's own records count the copy to its one client.
        none = {key: 0 for key in _BYTES}
        history = [{**r, **none, "client_uplink_bytes": {}, "client_downlink_bytes": {}} for r in result.history]
        facts = {**result.facts, "method": name, "formula_bytes": 0}
        return dataclasses.replace(result, history=history, facts=facts)
    return _alone(config, on_client)


def _alone(config: Config, on_client: Callable[[int, int, int], object] | None) -> RunResult:
    """Every client alone; ``final`` has the means over the clients of their scores."""
    site = Site(config)
    evaluator, count = Evaluator(site), len(site.clients)
    rounds = math.ceil(config.federate.total_round_num * config.sampled_per_round / count)
    start, began = site.method.view(site.initial_state), time.perf_counter()
    scores: list[dict[str, Any]] = []
    losses = []
    for done, client in enumerate(site.clients):
        if on_client:
            on_client(rounds, done, count)
        load_tensors(site.model, start)
        for round in range(1, rounds + 1):
            trained = train_client(
                site.model,
                site.data.clients[client.id - 1],
                site.method.phases(round, client.id),
                config,
                lr=lr_at(round, rounds, config.train.optimizer.lr, site.schedule),
                seed=derive(config.seed, "train", round, client.id),
                owner=f"client {client.id}",
                prefix=site.prefix,
            )
        losses.append(trained.loss)
        score: dict[str, Any] = {"client": client.id, "samples": client.num_samples}
        score |= {split: evaluator.score(examples, split) for split, examples in site.held_out().items()}
        own = site.data.client_tests[client.id - 1]
        if own is not None:
            score[CLIENTS] = {**evaluator.score(own, f"client {client.id} test"), "samples": len(own)}
        scores.append(score)
    metrics: dict[str, dict[str, float]] = {}
    for split in site.held_out():
        metrics[split] = {m: float(np.mean([s[split][m] for s in scores])) for m in ("acc", "loss")}
    shares = [s[CLIENTS] for s in scores if CLIENTS in s]
    if shares:
        metrics[CLIENTS] = evaluator.combined(shares, [s["samples"] for s in shares])
    record = {
        "round": config.federate.total_round_num,
        "selected": [],
        "clients": [],
        "failed": [],
        "loss": float(np.mean(losses)),
        "metrics": metrics,
        **{key: 0 for key in _BYTES},
        "client_uplink_bytes": {},
        "client_downlink_bytes": {},
        "seconds": {"training": time.perf_counter() - began, "aggregation": 0.0, "evaluation": 0.0},
    }
    outdir = Path(config.outdir)
    facts = {
        "method": "local",
        "source": site.data.source,
        "data": site.data.fingerprint,
        "model": site.base_fingerprint,
        "config": config.fingerprint(),
        "clients": [c.num_samples for c in site.clients],
        "majority": site.data.majority,
        "parameters": site.parameters,
        "images": site.data.image_shape,
        "labels": site.data.label_names,
        "formula_bytes": 0,
    }
    final = {f"{split}_{name}": value for split, values in metrics.items() for name, value in values.items()}
    about = {"schema": SCHEMA, "final": final, "rounds_of_a_client": rounds, "clients": scores, "seed": config.seed}
    write_text(outdir / "local.json", json.dumps(about, indent=1))
    return RunResult([record], final, outdir, site.model, True, {"records": outdir / "local.json"}, facts)
