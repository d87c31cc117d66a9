"""``fs-lowrank benchmark run SUITE… --estimate``: the costs of the open cells and searches, before anything trains.

They are sums of the estimates of ``fs-lowrank run --dry-run`` (``fs_lowrank.estimate``). Runs that differ only in
their seed or learning rate cost the same, so one of them is probed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import torch

from fs_lowrank import Config
from fs_lowrank.estimate import Estimate, estimate, fullest
from fs_lowrank.jobs.workers import threads_each
from fs_lowrank.runs.summary import human_bytes, human_time

from .beside import hpo
from .execute import threads
from .job import RATE, Cell, Job, Options, Search, decisive
from .plan import make_training_file, plan
from .samples import samples_of, within_budget

#: of the jobs of an experiment: how many, runs in all, samples trained on, seconds, and jobs without an estimate:
#: scripts, and runs that do not fit in memory
_SUMMED = ("cells", "searches", "runs", "samples", "seconds", "unknown")
#: bytes of the largest job
_LARGEST = ("device", "memory", "disk")


def table(options: Options, workers: int, say: Callable[[str], None], gpus: Sequence[str] = ()) -> list[Sequence[str]]:
    """The sums by experiment, and of all, as the lines of a table; the first is its header.

    Args:
        workers: processes that share the work. say: is called before each run that is probed. gpus: of the workers;
            runs are probed on the first.
    Raises:
        UserError: a suite, its data, a model or a GPU are wrong or missing.
    """
    if gpus:
        options = replace(options, overrides={**options.overrides, "use_gpu": True, "device": int(gpus[0])})
    probed: dict[str, Estimate] = {}
    with threads(min(torch.get_num_threads(), threads_each(workers))):  # as a worker has
        rows = [
            {"where": job.where, **_costs(job, say, probed)}
            for job in plan(options)
            if not (job.rated(options.store) or job).done(options.store)
        ]
    frame = pd.DataFrame(rows, columns=["where", *_SUMMED, *_LARGEST]).fillna(0)
    reducers = {**dict.fromkeys(_SUMMED, "sum"), **dict.fromkeys(_LARGEST, "max")}
    total = frame.agg(reducers).fillna(0)
    total["seconds"] /= workers
    total[["memory", "disk"]] *= workers
    if gpus:
        total["device"] *= fullest(workers, [int(gpu) for gpu in gpus])
    head = ("experiment", "cells", "searches", "runs", "samples", "time", "GPU memory", "memory", "disk", "not known")
    lines: list[Sequence[str]] = [head]
    lines += [_line(str(where), sums) for where, sums in frame.groupby("where", sort=False).agg(reducers).iterrows()]
    lines += [(), _line(f"in all, by {workers} worker{'s' * (workers > 1)}", total)]
    return lines if gpus else [(*line[:6], *line[7:]) for line in lines]


def _line(label: str, sums: pd.Series) -> tuple[str, ...]:
    cells, searches, runs, unknown = (str(int(sums[name]) or "") for name in ("cells", "searches", "runs", "unknown"))
    sizes = (human_bytes(sums[name]) for name in _LARGEST)
    return (label, cells, searches, runs, f"{int(sums['samples']):,}", human_time(sums["seconds"]), *sizes, unknown)


def _costs(job: Job, say: Callable[[str], None], probed: dict[str, Estimate]) -> dict[str, float]:
    """The part of a job in the sums of its experiment."""
    if not isinstance(job, Cell | Search):
        return {"cells": 1, "unknown": 1}
    make_training_file(job)
    config = within_budget(job)
    if config.federate.process_num == 0:  # auto: one in a worker of a suite
        config = config.replace({"federate.process_num": 1})
    runs = _trials(job, config) * job.seeds if isinstance(job, Search) else 1
    if (key := _cost_key(config)) not in probed:
        say(f"probing {job.where}  {job.label}")
        probed[key] = estimate(config)
    cost = probed[key]
    sums: dict[str, float] = {"searches" if isinstance(job, Search) else "cells": 1, "runs": runs}
    sums |= {name: cost.total(name) for name in _LARGEST}
    if cost.seconds is None:
        return {**sums, "unknown": 1}
    seconds = runs * cost.seconds
    if isinstance(job, Cell) and job.experiment.test == "once":
        seconds += cost.scoring.get("test", 0.0)
    return {**sums, "samples": runs * samples_of(config), "seconds": seconds}


def _trials(search: Search, config: Config) -> int:
    """The points of a search's grid, and of its last step."""
    space = hpo.space_from(dict(search.spec["space"]))
    step = search.last_step({RATE: config.train.optimizer.lr})
    return (len(space.grid(config)) if space.all_grid else hpo.TRIALS) + 2 * bool(step)


def _cost_key(config: Config) -> str:
    """A text that is the same for two configurations that cost the same."""
    settings = {k: v for k, v in decisive(config).items() if k not in ("seed", RATE, "lowrank.test_seed")}
    return json.dumps(settings, sort_keys=True, default=str)
