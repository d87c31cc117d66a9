"""``fs-lowrank benchmark run``: checks everything, hands the jobs to workers, writes their results, shows progress."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from fs_lowrank import UserError
from fs_lowrank.jobs.progress import line
from fs_lowrank.jobs.shell import say
from fs_lowrank.jobs.workers import ON_ITS_GPU, hand_out, stop_signals, worker_pool
from fs_lowrank.runs.summary import for_people

from .job import Cell, Job, Options, Search, Trained
from .page import value_of
from .plan import plan
from .store import Store

#: number of workers that may die while they run a job, before the job counts as failed
_DEATHS = 2
UNREADABLE = {"error": "its record cannot be read"}
_DIED = {
    "status": "failed",
    "error": f"the process that ran it died {_DEATHS} times, out of memory perhaps; try fewer --workers, or a smaller "
    "batch",
}


def run(options: Options, workers: int, gpus: Sequence[str] = ()) -> Board:
    """Run all jobs of the suites that are not done; returns how they are afterwards.

    Raises:
        UserError: before any training, if something is wrong or missing.
        RunFailed: results cannot be written, or too many workers died.
    """
    from .check import check
    from .execute import work

    options = dataclasses.replace(options, since=time.time(), overrides=ON_ITS_GPU if gpus else {})
    jobs, store = [cell_of(options)] if options.cell else plan(options), options.store
    board = Board(jobs, store)
    board.look()
    board.skipped, board.finished = board.finished, 0
    for path, reason in store.damaged.items():
        say(f"damaged, and taken as missing: {path}: {reason}")
    if not board.remaining:
        return board
    check([job for job in jobs if job.key in board.open], options)
    workers = max(1, min(workers, board.remaining))
    logs = Path(options.work) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    say(
        f"{board.remaining} jobs to do, {board.skipped} done before; {workers} worker{'s' * (workers > 1)}; "
        f"their logs: {logs}"
    )
    interrupt = signal.signal, signal.SIGTERM, signal.default_int_handler
    pool = worker_pool(workers, [work.__module__], [interrupt], gpus=gpus, logs=logs, say=say)
    with stop_signals() as stopped, line("jobs", board.remaining) as bar:

        def look() -> None:
            for news in board.look():
                say(news)
            if bar is not None:
                bar.set_postfix_str(board.state, refresh=False)
                bar.update(board.finished + len(board.failed) - bar.n)  # by 0, too: a log has its line every 30 s

        hand_out(board, work, pool, lambda: "stopping" * bool(stopped), say, look)
        look()
    board.interrupted = bool(stopped)
    return board


def cell_of(options: Options) -> Job:
    """The cell of the suites with the hash of ``--cell``, which its result has, ready to run.

    Raises:
        UserError: there is no such cell, or its learning rate is not searched yet.
    """
    for job in plan(dataclasses.replace(options, cell=""), extra=True):
        if not isinstance(job, Search) and (ready := job.rated(options.store)) and ready.key == options.cell:
            return ready
    raise UserError(
        f"--cell {options.cell}: {', '.join(options.suites)} ({options.size}) has no cell of that hash; its result in "
        f"{options.results}/cells has it, and the searches of learning rates run first"
    )


def verify(options: Options) -> list[tuple[str, float | None, float | None]]:
    """Run the cell of ``--cell`` again, in a folder of its own; its metrics that differ from those of its result.

    Raises:
        UserError: there is no such cell, or it has no result.
    """
    import torch

    from .execute import execute, threads

    Path(options.work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        job = cell_of(dataclasses.replace(options, work=folder))
        recorded = job.result(options.store)
        if recorded is None:
            raise UserError(f"--verify {options.cell}: this cell has no result yet; give --cell to run it")
        with threads(recorded.get("machine", {}).get("threads", torch.get_num_threads())):
            # A script's files go there, too.
            again = dataclasses.replace(job, options=dataclasses.replace(job.options, results=folder))
            repeated = json.loads(json.dumps(execute(again)))
    pairs = [(name, old, repeated["metrics"].get(name)) for name, old in recorded["metrics"].items()]
    return [(name, old, new) for name, old, new in pairs if str(old) != str(new)]  # NaN is the same as NaN


class Board:
    """The state of all jobs: finished, failed, running, or not started.

    Attributes:
        skipped, finished: how many were done before, and in this call. failed: records of failures.
        interrupted: whether the user did it.
    """

    def __init__(self, jobs: Iterable[Job], store: Store):
        self.store = store
        #: key -> job, for jobs that are not done; a cell that waits for a search has another key afterwards
        self.open = {job.key: job for job in jobs}
        #: key -> a job that this process has claimed, its lock, and the time when it began
        self.running: dict[str, tuple[Job, FileLock, float]] = {}
        self.failed: list[dict] = []
        self._deaths = Counter[str]()
        self.skipped = self.finished = 0
        self.interrupted = False

    @property
    def remaining(self) -> int:
        return len(self.open)

    def claim(self) -> Job | None:
        """The next job that can run, whose lock this process then holds; None if there is none now."""
        for job in self.open.values():
            ready = job.rated(self.store)
            if ready is None:
                assert isinstance(job, Cell) and job.search
                if job.search.done(self.store) and not job.done(self.store):  # it has failed in this call
                    failed = self.store.read("failed", job.search.key) or UNREADABLE
                    error = f"the search of its learning rate failed: {failed['error']}"
                    self._write(job, {"status": "failed", "error": error})
                continue
            if ready.key in self.running or ready.done(self.store) or (lock := self.store.claim(ready.key)) is None:
                continue
            if ready.done(self.store):  # by another command, meanwhile
                lock.release()
                continue
            if ready is not job:
                self.store.forget_failure(job.key)  # its search had failed, and has succeeded since
            self.running[ready.key] = ready, lock, time.time()
            return ready
        return None

    def finish(self, job: Job, outcome: Mapping | None) -> None:
        """Write the outcome of a job that this process had claimed, as ``work`` returned it, and release its lock.

        None: its worker died. The job is then run once more; if that worker dies too, the job has failed.
        """
        _, lock, _ = self.running.pop(job.key)
        if outcome is None:
            self._deaths[job.key] += 1
            outcome = _DIED if self._deaths[job.key] == _DEATHS else {}
        try:
            if outcome:
                self._write(job, outcome)
        finally:
            lock.release()

    def _write(self, job: Job, outcome: Mapping) -> None:
        record = {**job.identity(), **outcome, "finished": time.time()}
        if outcome["status"] == "failed":
            self.store.write("failed", {**record, "job": job.kind})
            return
        self.store.write(job.kind, record)
        if job.kind == "cells":
            self.store.supersede(job.earlier_keys)
        if not job.options.keep:
            shutil.rmtree(job.folder, ignore_errors=True)

    def look(self) -> list[str]:
        """Remove the jobs that were done since the last call from ``open``; returns a line about each."""
        news: list[str] = []
        for key, job in list(self.open.items()):
            ready = job.rated(self.store) or job
            if not ready.done(self.store):
                continue
            del self.open[key]
            record, failed = ready.result(self.store), self.store.read("failed", ready.key)
            if record is None or (failed and failed["finished"] >= ready.options.since):
                failed = failed or {**ready.identity(), **UNREADABLE}
                self.failed.append(failed)
                news.append(f"failed  {ready.where}  {ready.label}: {failed['error']}")
                continue
            self.finished += 1
            news.append(
                f"done    {ready.where}  {ready.label}  {_headline(record, ready)}  {record['seconds_in_all']:.0f} s  "
                f"({len(self.open)} left)"
            )
        return news

    @property
    def state(self) -> str:
        """Which jobs run here, and for how long."""
        now = time.time()
        return ", ".join(f"{job.label} ({(now - began) / 60:.0f} min)" for job, _, began in self.running.values())


def _headline(record: dict, job: Job) -> str:
    """A few figures of a result of ``job``."""
    best = record.get("winner", {"point": {}, "values": record.get("metrics", {})})
    point = [f"{key.rpartition('.')[2]} {value_of(value)}" for key, value in best["point"].items()]
    metrics = {name: value for name, value in best["values"].items() if name in ("val_acc", "val_loss", "test_acc")}
    language = isinstance(job, Trained) and job.config.is_language
    return ", ".join([*point, *(f"{name} {value:.3f}" for name, value in for_people(metrics, language).items())])
