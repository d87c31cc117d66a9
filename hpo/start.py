"""A search from start to end: creates the studies, and starts the workers that run the trials and the winners."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import optuna

from fs_lowrank import Config, UserError
from fs_lowrank.jobs.memo import memoizing
from fs_lowrank.jobs.progress import line
from fs_lowrank.jobs.workers import ON_ITS_GPU, hand_out, stop_signals, worker_pool

from . import worker
from .objectives import FILE, check_config
from .search import create, data_of, enqueue, retry_failed
from .settings import Settings, check_fit
from .space import Space
from .storage import CONFIRM, load_study, open_storage, quiet, storage_errors
from .worker import Searches, in_this_process, work

#: the default number of points of a study whose space is no grid
TRIALS = 20


@dataclass(frozen=True)
class Search:
    """The options of a search.

    Attributes:
        name: of the study, or the first part of the names of several.
        trials: number of points of a study, including pruned and failed ones, of a grid the first ones; 0: the whole
            grid, or ``TRIALS``.
        limit: client-steps after which no trial of a study starts.
        timeout: seconds for this call.
        workers: number of processes; 0 runs the trials in this one.
        gpus: each worker gets one of them.
        seeds: number of runs averaged in a trial.
        confirm: number of fresh seeds for the winner; 0 leaves it unconfirmed.
    """

    name: str
    objectives: tuple[str, ...] = ("val_acc",)
    sampler: str = ""
    sampler_seed: int = 0
    pruner: str = ""
    trials: int = 0
    limit: float | None = None
    timeout: float | None = None
    workers: int = 1
    gpus: tuple[str, ...] = ()
    seeds: int = 1
    confirm: int = 3
    engine: str = "local"
    storage: str | Path = ""
    folder: str | Path = "runs/hpo"
    retry_failed: bool = False

    @property
    def where(self) -> str:
        return str(self.storage or Path(self.folder) / FILE)


@dataclass
class Ended:
    """How a search ended (``done``, ``timeout`` or ``interrupted``), and the names of its studies."""

    how: str
    studies: list[str]


@quiet()
def tune(config: Config, space: Space, options: Search, say: Callable[[str], None] = print) -> Ended:
    """Search ``space`` around ``config``; studies that exist are continued.

    Raises:
        UserError: config, space, options and storage do not fit together; the message names the conflict.
    """
    plans = _plans(config, space, options)
    with storage_errors(options.where):
        storage = open_storage(options.where, create=True)
        data: dict[str, str] = {}  # most studies search with the same data
        for name, (settings, points, _) in plans.items():
            source = repr((settings.base.data, settings.base.model.task))
            data[source] = data[source] if source in data else data_of(settings.base)
            study = create(storage, name, settings, data[source])
            enqueue(study, points or ())
            if options.retry_failed:
                confirmed = [n for n in optuna.get_all_study_names(storage) if n.startswith(name + CONFIRM)]
                for study_name in (name, *confirmed):
                    retry_failed(load_study(storage, study_name))
        deadline = time.monotonic() + options.timeout if options.timeout else math.inf
        device = {**ON_ITS_GPU, "device": 0 if options.workers else int(options.gpus[0])} if options.gpus else {}
        wanted = {name: plan[2] for name, plan in plans.items()}
        keywords: dict[str, Any] = {"confirm": options.confirm, "limit": options.limit, "overrides": device, "say": say}
        board = Searches(storage, wanted, options.folder, **keywords)
        total = sum(wanted.values()) + options.confirm * len(wanted)
        with stop_signals() as stopped, board.beating(), line("trials", total, initial=board.ended) as bar:

            def stop() -> str:
                return "stopping" if stopped else "time is up" if time.monotonic() > deadline else ""

            if options.workers == 0:
                with suppress(KeyboardInterrupt), memoizing():
                    in_this_process(board, stop)
            elif not stop():
                pool = worker_pool(options.workers, [worker.__name__], gpus=options.gpus, say=say)
                hand_out(board, work, pool, stop, say, lambda: bar and bar.update(min(board.ended, total) - bar.n))
            outcome = "interrupted" if stopped else "timeout" if board.remaining else "done"
    return Ended(outcome, list(plans))


def _plans(config: Config, space: Space, options: Search) -> dict[str, tuple[Settings, list | None, int]]:
    """The plan of each study, by its name."""
    if not re.fullmatch(r"[\w.+-]+", options.name):
        raise UserError(f"study {options.name!r}: expected letters, digits, dots, dashes")
    plans = {}
    for values in product(*space.studies.values()):
        try:
            base = config.replace(dict(zip(space.studies, values))) if values else config
        except UserError as error:
            raise UserError(f"studies: {error}") from None
        label = "".join("." + re.sub(r"[^\w.+-]+", "_", str(v)) for v in values)
        plans[options.name + label] = _plan(base, space, options)
    return plans


def _plan(base: Config, space: Space, options: Search) -> tuple[Settings, list | None, int]:
    """The settings of the study around ``base``, its grid if it has one, and its number of points."""
    check_config(base, options.objectives, options.engine)
    subspace = space.for_config(base)
    sampler = options.sampler or ("grid" if subspace.all_grid else "tpe")
    free = sampler != "grid" and len(options.objectives) == 1 and base.eval.freq > 0
    fixed = {"federate.total_round_num", "federate.method"}.isdisjoint(p.key for p in subspace.parameters)
    choices = {"sampler": sampler, "pruner": options.pruner or ("median" if free and fixed else "none")}
    values = {f.name: getattr(options, f.name) for f in fields(Settings) if hasattr(options, f.name)}
    settings = Settings(Settings.stored_config(base), subspace.to_dict(), **{**values, **choices})
    check_fit(settings, subspace)
    points = subspace.grid(base)[: options.trials or None] if sampler == "grid" else None
    return settings, points, options.trials or TRIALS if points is None else len(points)
