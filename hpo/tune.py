"""A search from start to end: the studies are made, workers run them, the winners are confirmed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fs_lowrank import Config, UserError

from . import search
from .search import kind
from .settings import Settings, check_config, check_fit, space_keys
from .space import Space
from .storage import CONFIRM, load_study, open_storage, storage_errors
from .worker import work

#: how often the place of a worker that died is taken by another
_REPLACED = 5


@dataclass(frozen=True)
class Search:
    """What to search and how.

    Attributes:
        trials: points for each study, pruned and failed ones included; 0: the whole grid, or 20.
        limit: client-steps after which no trial of a study starts. timeout: seconds for this call.
        workers: processes; 0 runs in this one. gpus: a worker is given one of them each.
        seeds: runs averaged in a trial. confirm: fresh seeds for the winner; 0 leaves it unconfirmed.
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
    storage: str = ""
    folder: Path = Path("runs/hpo")
    retry_failed: bool = False

    @property
    def where(self) -> str:
        return self.storage or str(self.folder / "journal.log")


@dataclass
class Ended:
    """How a search ended: ``done``, ``timeout`` or ``interrupted``; and its studies."""

    how: str
    studies: list[str]


def tune(config: Config, space: Space, options: Search, say: Callable[[str], None] = print) -> Ended:
    """Search ``space`` around ``config``; what is there already is continued.

    Raises:
        UserError: config, space, options and storage do not fit together; the message says how.
    """
    plans = _plans(config, space, options)
    _check_gpus(options.gpus)
    with storage_errors(options.where):
        storage = open_storage(options.where, create=True)
        for name, (settings, points, _) in plans.items():
            study = search.create(storage, name, settings)
            if points is not None:
                search.enqueue_grid(study, points)
            search.reap(study, say)
            search.reap(load_study(storage, name + CONFIRM), say)
            if options.retry_failed:
                _retry_failed(study)
                _retry_failed(load_study(storage, name + CONFIRM))
    wanted = {name: plan[2] for name, plan in plans.items()}
    shared = {"wanted": wanted, "confirm": options.confirm, "limit": options.limit}
    deadline = time.monotonic() + options.timeout if options.timeout else None
    with _stop_signals() as stopped:

        def late() -> bool:
            return deadline is not None and time.monotonic() > deadline

        if options.workers == 0:
            try:
                work(
                    options.where,
                    list(plans),
                    options.folder,
                    **shared,
                    overrides=_device(options.gpus[:1]),
                    stopping=lambda: bool(stopped) or late(),
                    say=say,
                )
            except KeyboardInterrupt:
                stopped.append(signal.SIGINT)
        else:
            _run_workers(options, list(plans), shared, stopped, late, say)
        how = "interrupted" if stopped else "timeout" if late() else "done"
    return Ended(how, list(plans))


def _plans(config: Config, space: Space, options: Search) -> dict[str, tuple[Settings, list | None, int]]:
    """For each study its settings, its grid if it has one, and how many points it tries."""
    plans = {}
    if not re.fullmatch(r"[\w.+-]+", options.name):
        raise UserError(f"--study {options.name!r}: expected letters, digits, dots, dashes")
    for values in product(*space.studies.values()) if space.studies else [()]:
        changes = dict(zip(space.studies, values))
        try:
            base = config.replace(changes) if changes else config
        except UserError as error:
            raise UserError(f"studies: {error}") from None
        check_config(base)
        mine = space.for_config(base)
        sampler = options.sampler or ("grid" if mine.all_grid else "tpe")
        if options.rungs and sampler == "grid":
            sampler = options.sampler or "tpe"
        if options.pruner:
            pruner = options.pruner
        else:
            free = sampler != "grid" and len(options.objectives) == 1 and not options.rungs and base.eval.freq > 0
            pruner = "median" if free and "federate.total_round_num" not in space_keys(mine) else "none"
        settings = Settings(
            base.to_dict(),
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
                f"{space.source}: a grid of {len(points)} points is too large for --trials "
                f"{options.trials}; give it {len(points)}, or --sampler tpe or random"
            )
        for point in points or ():
            try:
                base.replace(point)
            except UserError as error:
                raise UserError(f"{space.source}: the point {point}: {error}") from None
        label = "".join("." + re.sub(r"[^\w.+-]+", "_", str(v)) for v in values)
        plans[options.name + label] = (settings, points, len(points) if points is not None else options.trials or 20)
    if len(plans) < max(1, _count(space.studies)):
        raise UserError("studies: two of the values give studies of one name; change one")
    return plans


def _count(studies: Mapping[str, Sequence]) -> int:
    total = 1
    for values in studies.values():
        total *= len(values)
    return total


def _retry_failed(study) -> None:
    """Queue failed trials again, once each."""
    trials = study.get_trials(deepcopy=False)
    key = lambda t: (search.draw_of(t), t.user_attrs.get("rung"), t.user_attrs.get("seed"))  # noqa: E731
    better = {key(t) for t in trials if kind(t) in ("complete", "pruned", "running", "waiting")}
    for trial in trials:
        given_up = kind(trial) == "lost" and trial.user_attrs.get("retry", 0) >= search.RETRIES
        if (kind(trial) == "failed" or given_up) and key(trial) not in better:
            better.add(key(trial))
            search.requeue(study, trial)


def _check_gpus(gpus: Sequence[str]) -> None:
    if not gpus:
        return
    import torch

    count = torch.cuda.device_count()
    for gpu in gpus:
        if not gpu.isdigit():
            raise UserError(f"--gpus {gpu!r}: expected numbers, such as 0,1; or all")
        if int(gpu) >= count:
            raise UserError(
                f"--gpus {gpu}: torch finds {count} GPU{'' if count == 1 else 's'} here"
                + (f", numbered from 0 to {count - 1}" if count else "")
            )


def _device(gpus: Sequence[str]) -> dict:
    return {"use_gpu": True, "device": int(gpus[0])} if gpus else {}


@contextmanager
def _stop_signals():
    """A list that holds a signal once one has come; the second ends everything at once."""
    stopped: list[int] = []

    def handle(number, frame) -> None:
        stopped.append(number)
        if len(stopped) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(options: Search, index: int, names: list[str], shared: dict) -> subprocess.Popen:
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    if not options.gpus:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
    overrides = {}
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = options.gpus[index % len(options.gpus)]
        overrides = {"use_gpu": True, "device": 0}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from hpo.worker import main; sys.exit(main())"],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
    )
    json.dump(
        {"where": options.where, "names": names, "folder": str(options.folder), **shared, "overrides": overrides},
        process.stdin,
    )
    process.stdin.close()
    return process


def _run_workers(options, names, shared, stopped, late, say) -> None:
    workers = {i: _start(options, i, names, shared) for i in range(options.workers)}
    replaced, told, failed = 0, False, ""
    try:
        while workers:
            if (stopped or late() or failed) and not told:
                told = True
                if not failed:
                    say(
                        f"{'stopping' if stopped else 'time is up'}: running trials end now; "
                        "once more Ctrl-C kills them"
                    )
                for process in workers.values():
                    process.send_signal(signal.SIGTERM)
            for index, process in list(workers.items()):
                code = process.poll()
                if code is None:
                    continue
                del workers[index]
                if code == 2:
                    failed = "a worker stopped; its error stands above"
                elif code not in (0, 130) and not told:
                    say(
                        f"worker {index} died ({'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"
                        f"{': out of memory, perhaps' if code == -9 else ''}); its trial is queued again"
                    )
                    replaced += 1
                    if replaced > _REPLACED:
                        failed = f"workers died {replaced} times"
                    else:
                        workers[index] = _start(options, index, names, shared)
            time.sleep(0.1)
    except KeyboardInterrupt:
        for process in workers.values():
            process.kill()
        for process in workers.values():
            process.wait()
        return
    if failed and not stopped:
        raise UserError(failed)
