"""What federated training is compared with: each client alone (``local``), and all data in one place (``pooled``,
``relora``).

The first two train what ``fedlora`` trains (``fedavg`` without an adapter). All have the same start, the same split of
the data, and the optimizer and the schedule of the configuration.

- ``local``: every client trains alone, for as many rounds as it takes part in on average. Nothing is sent. A client
  whose training diverges is left out of the means, and named in the record. The folder has the files of a run of one
  round, and ``local.json`` with the scores of each client; a row that has ended is read again, and not repeated.
- ``pooled``: one client holds all training data and takes as many steps as all clients of a round together. Where
  training is counted in epochs, it passes over the data as often as a client does over its own.
- ``relora``: as ``pooled``, with the accumulations of FedLoRU (``lowrank.tau``), of which it is the centralised form
  (Lialin et al., "ReLoRA: High-Rank Training Through Low-Rank Updates", ICLR 2024).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config
from .engines.local import LocalEngine
from .errors import DamagedFile, RunFailed, UserError, say_once
from .jobs.files import read_json, to_json, write_text
from .methods import requirements
from .models.adapters import load_tensors
from .models.names import all_tensors
from .rounds.evaluator import Evaluator, size_of
from .rounds.finite import not_finite
from .rounds.record import Failure
from .rounds.recorder import Callback, Recorder, facts_of
from .rounds.workspace import Workspace
from .runs.checksums import check_finished, seal, unseal
from .runs.environment import write_environment
from .runs.folder import claim, outdir_of
from .runs.records import Records, flat_metrics, read_records
from .runs.result import RunResult
from .runs.split import write_split
from .seeds import derive
from .settings.metrics import CLIENTS
from .settings.sections import Lowrank
from .training import train_client
from .training.schedule import lr_at
from .versions import SCHEMA

logger = logging.getLogger("fs_lowrank")

ROWS = ("local", "pooled", "relora")
_BYTES = [f"{direction}_bytes{bare}" for direction in ("uplink", "downlink") for bare in ("", "_without_head")]
_NOTHING_SENT = {**dict.fromkeys(_BYTES, 0), "client_uplink_bytes": {}, "client_downlink_bytes": {}}


class _InOnePlace(Callback):
    """Nothing is sent where the data are in one place; a round of one client would count its message."""

    def after_round(self, run: Recorder, record: dict[str, Any]) -> None:
        record |= _NOTHING_SENT


def split_names(methods: Sequence[str]) -> tuple[list[str], list[str]]:
    """``methods`` divided into the names of methods and the names of ``ROWS``.

    Raises:
        UserError: a row is named twice, or there is no method beside the rows.
    """
    rows = [name for name in methods if name.lower() in ROWS]
    if len({name.lower() for name in rows}) < len(rows):
        raise UserError(f"compare needs distinct rows, got {', '.join(rows)}")
    names = [name for name in methods if name not in rows]
    if rows and not names:
        raise UserError(f"{', '.join(rows)}: rows beside methods; name one method, too, such as fedlora")
    return names, [name.lower() for name in rows]


def row_config(name: str, config: Config, outdir: str | Path) -> Config:
    """The configuration of a row; its method averages, over one client or none. Warns of settings that do not apply.

    Raises:
        UserError: for ``pooled`` and ``relora``, some clients train epochs and others steps.
    """
    needs = requirements(config.federate.method, config.method_params)
    method = "fedlora" if needs.adapts(config.llm.adapter.use) else "fedavg"
    method = "fedloru" if name == "relora" else method
    keys: dict[str, Any] = {"federate.method": method, "outdir": str(outdir), "expname": "", "fedopt.use": False}
    if config.federate.process_num != 1:
        say_once(f"{name}: federate.process_num does not apply to it; it trains in one process")
    keys |= {"federate.use_ss": False, "federate.online_aggr": False, "federate.process_num": 1}
    shared_keys = "drop_rate min_clients max_samples max_update_norm max_update_norm_factor drift drift_weight".split()
    shared_keys += ["reuse_clients", "robust", "robust_malicious", "robust_norm", "personal"]
    keys |= {f"lowrank.{name}": getattr(Lowrank(), name) for name in shared_keys}
    # A row's method has one rank for all.
    overrides = {id: {k: v for k, v in values.items() if k != "rank"} for id, values in config.client_settings.items()}
    keys["lowrank.clients"] = [{"clients": id, **values} for id, values in overrides.items() if values]
    if name != "local":
        keys |= {"federate.client_num": 1, "federate.sample_client_num": -1, "federate.sample_client_rate": -1.0}
        keys |= {"lowrank.clients": [], "federate.client_idx_for_local_train": 0}
        if config.data.splitter != "meta":  # which also leaves rows out, as in FederatedScope
            keys |= {"data.splitter": "iid", "data.splitter_args": []}
        keys["federate.make_global_eval"] = True
        keys |= _in_one_place(name, config)
        if ignored := {k for values in overrides.values() for k in values} - {"local_update_steps", "batch_or_epoch"}:
            say_once(f"{name}: {', '.join(sorted(ignored))} of single clients (lowrank.clients) do not apply to it")
    if name == "local" or config.watched[0] == CLIENTS:
        if config.early_stop.patience:
            say_once(f"{name}: early_stop does not apply to it; it trains all its rounds")
        keys |= {"early_stop.patience": 0, "early_stop.delta": 0.0, "eval.best_res_update_round_wise_key": "val_loss"}
    return config.replace(keys)


def _in_one_place(name: str, config: Config) -> dict[str, Any]:
    """How long one client with all data trains in a round, which is as long as the clients of a round do."""
    settings = [config.of_client(client).train for client in range(1, config.taking_part + 1)]
    if len({train.batch_or_epoch for train in settings}) > 1:
        raise UserError(f"{name}: some clients train epochs and others steps (lowrank.clients); leave the row out")
    clients = config.sampled_per_round if settings[0].batch_or_epoch == "batch" else 1
    steps = clients * sum(train.local_update_steps for train in settings) / len(settings)
    return {"train.batch_or_epoch": settings[0].batch_or_epoch, "train.local_update_steps": max(1, round(steps))}


def run_row(
    name: str,
    config: Config,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
) -> RunResult:
    """Run a row whose configuration comes from ``row_config``; the result is a run's, for ``local`` without a model.

    Args:
        resume: as of ``compare``, which has refused a folder that holds a run.
    """
    if name != "local":
        result = LocalEngine(config, on_round, on_client, [_InOnePlace()]).run(resume)
        result.facts["method"] = name
        return result
    workspace, outdir = Workspace(config), outdir_of(config)
    facts = {"method": "local", **facts_of(workspace), "own_models": True}
    facts["client_majority"] = workspace.data.client_majority
    with ExitStack() as stack:
        stack.callback(claim(outdir).release)
        ended = resume and _has_ended(outdir, facts)
        rounds = config.federate.total_round_num
        history = read_records(outdir / "rounds.jsonl", up_to=rounds) if ended else []
        history = history or _write_files(workspace, _train_alone(workspace, on_client), facts)
    record = history[-1]
    if on_round:
        on_round(record)
    final = flat_metrics(record["metrics"])
    return RunResult(history, final, outdir, None, True, {"records": outdir / "local.json"}, facts)


def _has_ended(outdir: Path, facts: Mapping[str, Any]) -> bool:
    """Whether the folder holds this row, of the same configuration, data and model."""
    remedy = "the row is trained again"
    try:
        summary = read_json(outdir / "summary.json", missing={}, remedy=remedy)
        check_finished(outdir, ("summary.json", "rounds.jsonl"), remedy)
    except DamagedFile as error:
        logger.warning("%s", error)
        return False
    return all(summary.get(key) == facts[key] for key in ("method", "data", "model", "config"))


def _write_files(workspace: Workspace, outcome: dict[str, Any], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write the files of the row; returns its only record, as it is in the file."""
    outdir, record = outdir_of(workspace.config), outcome.pop("record")
    unseal(outdir)
    workspace.config.dump(outdir / "config.yaml")
    write_environment(outdir / "environment.json", workspace.new_weights, None, workspace.device)
    write_split(outdir, workspace.data)
    records = Records(outdir / "rounds.jsonl")
    records.add(record)
    final = flat_metrics(record["metrics"])
    header = {"schema": SCHEMA, "final": final, "seed": workspace.config.seed}
    write_text(outdir / "local.json", to_json({**header, **outcome}, indent=1))
    write_text(outdir / "summary.json", to_json({**header, "bytes": dict.fromkeys(_BYTES, 0), **facts}, indent=1))
    seal(outdir)
    return records.history


def _train_alone(workspace: Workspace, on_client: Callable[[int, int, int], object] | None) -> dict[str, Any]:
    """Train every client alone.

    Returns:
        ``record``, as of a round, with the means over the clients; ``rounds_of_a_client``; ``clients``: the scores.
    Raises:
        RunFailed: the training of every client diverged.
    """
    config, evaluator, count = workspace.config, Evaluator(workspace), len(workspace.clients)
    rounds = math.ceil(config.federate.total_round_num * config.sampled_per_round / count)
    start, spent = (
        workspace.method.view(workspace.initial_state),
        {"training": 0.0, "aggregation": 0.0, "evaluation": 0.0},
    )
    scores: list[dict[str, Any]] = []
    failed: list[Failure] = []
    losses, samples = [], 0
    for done, client in enumerate(workspace.clients):
        if on_client:
            on_client(rounds, done, count)
        began = time.perf_counter()
        load_tensors(workspace.model, start)
        settings = config.of_client(client.id)
        for round in range(1, rounds + 1):
            trained = train_client(
                workspace.model,
                workspace.data.clients[client.id - 1],
                workspace.method.phases(round, client.id),
                settings,
                lr=lr_at(round, rounds, settings.train.optimizer.lr, workspace.schedule),
                seed=derive(config.seed, "train", round, client.id),
                owner=f"client {client.id}",
                prefix=workspace.prefix,
            )
            samples += trained.samples
        ended = time.perf_counter()
        spent["training"] += ended - began
        tensors = all_tensors(workspace.model)
        diverged = not_finite({name: tensors[name] for name in start})
        if diverged or not math.isfinite(trained.loss):
            reason = f"its training diverged: {diverged or 'its loss'} is not finite"
            logger.warning("local: client %d is left out: %s", client.id, reason)
            failed.append({"client": client.id, "kind": "failed", "reason": reason})
            continue
        losses.append(trained.loss)
        score: dict[str, Any] = {"client": client.id, "samples": client.num_samples}
        score |= {
            split: evaluator.score(examples, split, config.metrics) for split, examples in workspace.held_out().items()
        }
        test = workspace.data.client_tests[client.id - 1]
        if test is not None:
            score[CLIENTS] = {**evaluator.score(test, f"client {client.id} test"), **size_of(test)}
        spent["evaluation"] += time.perf_counter() - ended
        scores.append(score)
    if not scores:
        raise RunFailed(f"local: {failed[0]['reason']}, of client 1 and all others; lower train.optimizer.lr")
    metrics: dict[str, dict[str, Any]] = {}
    for split in workspace.held_out():
        metrics[split] = {m: float(np.mean([s[split][m] for s in scores])) for m in scores[0][split]}
    shares = {s["client"]: s[CLIENTS] for s in scores if CLIENTS in s}
    per_client: dict[int, dict[str, float]] = {}
    if shares:
        metrics[CLIENTS] = evaluator.combined(shares)
        per_client = metrics[CLIENTS].pop("clients")
    record = {
        "round": config.federate.total_round_num,
        "selected": [],
        "clients": [score["client"] for score in scores],
        "failed": failed,
        "samples": samples,
        "loss": float(np.mean(losses)),
        "metrics": metrics,
        **({"client_scores": {str(client): values for client, values in per_client.items()}} if per_client else {}),
        **_NOTHING_SENT,
        "seconds": spent,
    }
    return {"record": record, "rounds_of_a_client": rounds, "clients": scores}
