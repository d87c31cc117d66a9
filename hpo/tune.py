"""A search from start to end: creates the studies, and starts the workers that run the trials and the winners."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import optuna

from fs_lowrank import Config, UserError
from fs_lowrank.jobs.crew import check_gpus, run_workers, stop_signals

from .objectives import check_config
from .search import create, data_of, enqueue, retry_failed
from .settings import Settings, check_fit
from .space import Space
from .storage import CONFIRM, FILE, load_study, open_storage, quiet, storage_errors
from .worker import work

#: number of points of a study whose space is no grid, unless it is given
TRIALS = 20


@dataclass(frozen=True)
class Search:
    """The options of a search.

    Attributes:
        name: of the study, or the first part of the names of several.
        trials: number of points of a study, including pruned and failed ones; 0: the whole grid, or ``TRIALS``.
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
    rungs: tuple[int, ...] = ()
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
    check_gpus(options.gpus)
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
                for each in (name, *confirmed):
                    retry_failed(load_study(storage, each))
    order: dict[str, Any] = {
        "where": options.where,
        "names": list(plans),
        "wanted": {name: plan[2] for name, plan in plans.items()},
        "confirm": options.confirm,
        "limit": options.limit,
        "alone": options.workers <= 1,
    }
    ended = False
    deadline = time.monotonic() + options.timeout if options.timeout else None
    with stop_signals() as stopped:

        def late() -> bool:
            return deadline is not None and time.monotonic() > deadline

        if options.workers == 0:
            try:
                device = {"use_gpu": True, "device": int(options.gpus[0])} if options.gpus else {}
                order["folder"] = Path(options.folder)
                work(**order, overrides=device, stopping=lambda: bool(stopped) or late(), say=say)
            except KeyboardInterrupt:
                stopped.append(signal.SIGINT)
        else:
            order["folder"] = str(options.folder)
            given = order, options.workers, stopped
            ended = run_workers("hpo.worker:main", *given, gpus=options.gpus, late=late, say=say) and not late()
        how = "interrupted" if stopped or ended else "timeout" if late() else "done"
    return Ended(how, list(plans))


def _plans(config: Config, space: Space, options: Search) -> dict[str, tuple[Settings, list | None, int]]:
    """The settings of each study, its grid if it has one, and its number of points."""
    plans: dict[str, tuple[Settings, list | None, int]] = {}
    if not re.fullmatch(r"[\w.+-]+", options.name):
        raise UserError(f"study {options.name!r}: expected letters, digits, dots, dashes")
    for values in product(*space.studies.values()) if space.studies else [()]:
        changes = dict(zip(space.studies, values))
        try:
            base = config.replace(changes) if changes else config
        except UserError as error:
            raise UserError(f"studies: {error}") from None
        check_config(base, options.objectives, options.engine)
        mine = space.for_config(base)
        sampler = options.sampler or ("grid" if mine.all_grid else "tpe")
        free = sampler != "grid" and len(options.objectives) == 1 and not options.rungs and base.eval.freq > 0
        fixed = {"federate.total_round_num", "federate.method"}.isdisjoint(p.key for p in mine.parameters)
        pruner = options.pruner or ("median" if free and fixed else "none")
        settings = Settings(
            Settings.kept(base),
            mine.to_dict(),
            options.objectives,
            sampler,
            options.sampler_seed,
            pruner,
            options.rungs,
            options.seeds,
            options.engine,
        )
        check_fit(settings, mine)
        points = mine.grid(base) if sampler == "grid" else None
        if points is not None and options.trials and len(points) > options.trials:
            raise UserError(
                f"{space.source}: a grid of {len(points)} points is too large for trials = "
                f"{options.trials}; give it {len(points)}, or the sampler tpe or random"
            )
        for point in points or ():
            try:
                base.replace(point)
            except UserError as error:
                raise UserError(f"{space.source}: the point {point}: {error}") from None
        label = "".join("." + re.sub(r"[^\w.+-]+", "_", str(v)) for v in values)
        plans[options.name + label] = (
            settings,
            points,
            len(points) if points is not None else options.trials or TRIALS,
        )
    if len(plans) < math.prod(map(len, space.studies.values())):
        raise UserError("studies: two of the values give studies of one name; change one")
    return plans
