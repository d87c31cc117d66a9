"""``fs-lowrank benchmark run SUITE… --estimate``: what the open cells and searches will take, before anything trains.

It is the sum of what ``fs-lowrank run --dry-run`` says of each (``fs_lowrank.estimate``). Runs that differ only in
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

#: of the jobs of an experiment: how many, runs in all, samples trained on, seconds, and jobs of which nothing is known:
#: scripts, and runs that do not fit in memory
_SUMMED = ("cells", "searches", "runs", "samples", "seconds", "unknown")
#: the most bytes that one takes
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
            {"where": job.where, **_of(job, say, probed)}
            for job in plan(options)
            if not (job.rated(options.store) or job).done(options.store)
        ]
    frame = pd.DataFrame(rows, columns=["where", *_SUMMED, *_LARGEST]).fillna(0)
    how = {**dict.fromkeys(_SUMMED, "sum"), **dict.fromkeys(_LARGEST, "max")}
    whole = frame.agg(how).fillna(0)
    whole["seconds"] /= workers
    whole[["memory", "disk"]] *= workers
    if gpus:
        whole["device"] *= fullest(workers, [int(gpu) for gpu in gpus])
    head = ("experiment", "cells", "searches", "runs", "samples", "time", "GPU memory", "memory", "disk", "not known")
    lines: list[Sequence[str]] = [head]
    lines += [_line(str(where), found) for where, found in frame.groupby("where", sort=False).agg(how).iterrows()]
    lines += [(), _line(f"in all, by {workers} workers", whole)]
    return lines if gpus else [(*line[:6], *line[7:]) for line in lines]


def _line(where: str, found: pd.Series) -> tuple[str, ...]:
    cells, searches, runs, unknown = (str(int(found[name]) or "") for name in ("cells", "searches", "runs", "unknown"))
    sizes = (human_bytes(found[name]) for name in _LARGEST)
    return (where, cells, searches, runs, f"{int(found['samples']):,}", human_time(found["seconds"]), *sizes, unknown)


def _of(job: Job, say: Callable[[str], None], probed: dict[str, Estimate]) -> dict[str, float]:
    """What a job adds to the sums of its experiment."""
    if not isinstance(job, Cell | Search):
        return {"cells": 1, "unknown": 1}
    make_training_file(job)
    config = within_budget(job)
    if config.federate.process_num == 0:  # auto: one in a worker of a suite
        config = config.replace({"federate.process_num": 1})
    runs = _trials(job, config) * job.seeds if isinstance(job, Search) else 1
    if (key := _alike(config)) not in probed:
        say(f"probing {job.where}  {job.label}")
        probed[key] = estimate(config)
    found = probed[key]
    taken: dict[str, float] = {"searches" if isinstance(job, Search) else "cells": 1, "runs": runs}
    taken |= {where: found.total(where) for where in _LARGEST}
    if found.seconds is None:
        return {**taken, "unknown": 1}
    seconds = runs * found.seconds
    if isinstance(job, Cell) and job.experiment.test == "once":
        seconds += found.scoring.get("test", 0.0)
    return {**taken, "samples": runs * samples_of(config), "seconds": seconds}


def _trials(search: Search, config: Config) -> int:
    """The points of a search's grid, and of its last step."""
    space = hpo.space_from(dict(search.spec["space"]))
    step = search.last_step({RATE: config.train.optimizer.lr})
    return (len(space.grid(config)) if space.all_grid else hpo.TRIALS) + 2 * bool(step)


def _alike(config: Config) -> str:
    """A text that is the same for two configurations that cost the same."""
    kept = {k: v for k, v in decisive(config).items() if k not in ("seed", RATE, "lowrank.test_seed")}
    return json.dumps(kept, sort_keys=True, default=str)
