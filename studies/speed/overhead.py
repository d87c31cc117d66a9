"""The fraction of a round outside forward, backward, optimizer steps and the forward passes of evaluations.

The timers are added here; the engine has none.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fs_lowrank import Config, load_config
from fs_lowrank.engines.local import LocalEngine

from . import row, threads

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"

#: parts of the overhead -> functions of this package that call neither each other nor the model; the file is given if
#: other files have functions of the same name
PARTS = {
    "making batches": ("batch",),
    "loading tensors": ("load_tensors",),
    "freezing and thawing": ("set_trainable",),
    "reading off the upload": ("upload",),
    "checking and packing": ("round.py:take",),
    "aggregation": ("round.py:finish",),
    "checkpoint and records": ("keeper.py:add",),
}


@contextlib.contextmanager
def timers(model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """A context that measures seconds in ``model.forward``, ``torch.autograd.backward`` and optimizers.

    ``Tensor.backward`` is no place for a timer: where a mode of torch's functions is on, as for the masks of dropout,
    it calls itself a second time.
    """
    spent = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    began = 0.0

    def timed(name, function):
        def wrapper(*args, **kwargs):
            started = time.perf_counter()
            try:  # the pass that fills the cache of frozen layers ends with an exception
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return wrapper

    def begin(*_):
        nonlocal began
        began = time.perf_counter()

    def end(*_):
        spent["optimizer"] += time.perf_counter() - began

    hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
    try:
        with (
            patch.object(model, "forward", timed("forward", model.forward)),
            patch.object(torch.autograd, "backward", timed("backward", torch.autograd.backward)),
        ):
            yield spent
    finally:
        for hook in hooks:
            hook.remove()


def measure(config: Config, rounds: int, profile: bool = False) -> dict:
    """The seconds of each of the first ``rounds`` rounds: ``wall``, the timed parts, and the ``overhead``.

    Args:
        profile: also report the seconds of ``PARTS``, with a profiler that slows the rounds down.
    """
    marks: list[tuple[float, dict[str, float]]] = []
    profiler = cProfile.Profile()

    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FS_LOWRANK_FROZEN=f"{folder}/frozen"):

        def on_client(round, done, clients):
            if not marks:  # the first round begins here; everything before is set-up
                marks.append((time.perf_counter(), dict(spent)))
                if profile:
                    profiler.enable()

        def on_round(record):
            marks.append((time.perf_counter(), dict(spent)))
            if record["round"] >= rounds:
                profiler.disable()
            return record["round"] >= rounds

        engine = LocalEngine(config.replace(**{"outdir": folder, "lowrank.pictures": False}), on_round, on_client)
        with timers(engine.model) as spent:
            engine.run()
    measured = []
    for (before, was), (after, now) in zip(marks, marks[1:]):
        parts = {name: now[name] - was[name] for name in now}
        measured.append({"wall": after - before, **parts, "overhead": after - before - sum(parts.values())})
    result: dict[str, Any] = {
        "rounds": measured,
        "cohort": engine.site.cohort,
        "share": statistics.median(r["overhead"] / r["wall"] for r in measured),
        "share_of_total": sum(r["overhead"] for r in measured) / sum(r["wall"] for r in measured),
    }
    if profile:
        result["parts_seconds"] = _parts(profiler)
    return result


def _parts(profiler: cProfile.Profile) -> dict[str, float]:
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # set by its __init__, unknown to its types
    return {
        part: sum(
            cumulative
            for (path, _, function), (_, _, _, cumulative, _) in stats.items()
            if "fs_lowrank" in path and {function, f"{Path(path).name}:{function}"} & set(functions)
        )
        for part, functions in PARTS.items()
    }


def run(rounds: int = 0) -> dict:
    """Measure the rounds of the demo with its own method, and of the same with smaller batches, which train in cohorts.

    Args:
        rounds: the first ones only; 0: all.
    """
    config = load_config(DEMO)
    rounds = rounds or config.federate.total_round_num
    small = config.replace(**{"dataloader.batch_size": 4})
    with threads(1):
        found = {
            "plain": measure(config, rounds),
            "batches of 4": measure(small, rounds),
            "profiled": measure(config, 2, profile=True),
        }
    rows = [_row(own, found[name], rounds) for name, own in (("plain", config), ("batches of 4", small))]
    return {"threads": 1, "results": found, "rows": rows}


def _row(config: Config, found: dict, rounds: int) -> dict:
    totals = {k: sum(r[k] for r in found["rounds"]) for k in found["rounds"][0]}
    rest = totals["wall"] - totals["overhead"]
    halved = totals["overhead"] / (totals["overhead"] + rest / 2)
    note = f"{halved:.2g} if all else took half as long; a round: " + ", ".join(
        f"{k} {1e3 * v / rounds:.0f} ms" for k, v in totals.items()
    )
    return row(
        f"the demo, MiniLM, {config.sampled_per_round} of {config.federate.client_num} clients a round, batches of "
        f"{config.dataloader.batch_size}, clients in one pass: {found['cohort']}",
        "share of a round that is the engine's own",
        found["share_of_total"],
        note,
        most=0.05,
    )
