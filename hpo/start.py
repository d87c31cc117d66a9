"""A search from start to end: creates the studies, and starts the workers that run the trials and the winners."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import optuna

from fs_lowrank import Config, UserError
from fs_lowrank.jobs.memo import memoizing
from fs_lowrank.jobs.progress import line
from fs_lowrank.jobs.workers import hand_out, stop_signals, worker_pool

from . import worker
from .objectives import check_config
from .search import create, data_of, enqueue, retry_failed
from .settings import Choices, Search, Settings, check_fit, unprunable
from .space import Space
from .storage import CONFIRM, load_study, open_storage, quiet, storage_errors
from .worker import Searches, in_this_process, work

#: the default number of points of a study whose space is no grid
TRIALS = 20


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
        for name, (settings, points) in plans.items():
            study = create(storage, name, settings, data_of(settings.base))
            enqueue(study, points)
            if options.retry_failed:
                confirmed = [n for n in optuna.get_all_study_names(storage) if n.startswith(name + CONFIRM)]
                for study_name in (name, *confirmed):
                    retry_failed(load_study(storage, study_name))
        deadline = time.monotonic() + options.timeout if options.timeout else math.inf
        wanted = {name: len(points) or options.trials or TRIALS for name, (_, points) in plans.items()}
        board = Searches(storage, wanted, options, say)
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


def _plans(config: Config, space: Space, options: Search) -> dict[str, tuple[Settings, list[dict[str, Any]]]]:
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
        if options.name + label in plans:
            raise UserError(f"studies: two of the values give a study the name {options.name + label}; change one")
        plans[options.name + label] = _plan(base, space, options)
    return plans


def _plan(base: Config, space: Space, options: Search) -> tuple[Settings, list[dict[str, Any]]]:
    """The settings of the study around ``base``, and the points of its grid; none if a sampler draws them."""
    check_config(base, options.objectives, options.engine)
    subspace = space.for_config(base)
    sampler = options.sampler or ("grid" if subspace.all_grid else "tpe")
    values = {f.name: getattr(options, f.name) for f in fields(Choices)}
    settings = Settings(Settings.stored_config(base), subspace.to_dict(), **{**values, "sampler": sampler})
    if not options.pruner:
        settings = replace(settings, pruner="none" if sampler == "grid" or unprunable(settings) else "median")
    check_fit(settings, subspace)
    return settings, subspace.grid(base)[: options.trials or None] if sampler == "grid" else []
