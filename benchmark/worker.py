"""A worker process, which runs one job after the other until all are done."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fs_lowrank import RunFailed
from fs_lowrank.jobs.files import disk_error
from fs_lowrank.jobs.kept import keeping
from fs_lowrank.jobs.shell import INTERRUPTED, OK, message_of

from .execute import Interrupted, execute
from .job import Cell, Job, Options
from .store import Store
from .suite import import_all

#: number of workers that may die while they run a job, before the job counts as failed
_DEATHS = 2
#: seconds between two writes of the progress
_BEAT = 0.5


class Marker:
    """Writes the progress of a job to the store, at most twice a second."""

    def __init__(self, store: Store, job: Job, deaths: int):
        self.store, self.key, self.written = store, job.key, 0.0
        self.content = {
            **job.identity(),
            "pid": os.getpid(),
            "deaths": deaths,
            "since": job.options.since,
            "began": time.time(),
        }
        store.mark(self.key, self.content)

    def __call__(self, news: dict) -> None:
        self.content.update(news)
        if time.monotonic() - self.written > _BEAT:
            self.written = time.monotonic()
            self.store.mark(self.key, self.content)


def work(options: Options, jobs: Iterable[Job]) -> int:
    """Run ``jobs`` until every one has finished or failed, in this process or another.

    Raises:
        RunFailed: results cannot be written.
    """
    store, jobs = options.store, list(jobs)
    while True:
        waiting = False
        for job in list(jobs):
            ready = job.rated(store)
            if ready is None and not _search_failed(store, job):
                waiting = True
                continue
            ready = ready or job
            if ready is not job:
                store.forget_failure(job.key)  # its search had failed, and has succeeded since
            if ready.done(store):
                jobs.remove(job)
                continue
            with store.claim(ready.key) as claimed:
                if claimed and not ready.done(store):
                    _do(store, ready)
                if claimed:
                    jobs.remove(job)
                    break  # an earlier job may have become ready
                waiting = True
        else:
            if not waiting:
                return OK
            time.sleep(0.3)


def _search_failed(store: Store, job: Job) -> bool:
    """Whether the search that ``job`` needs has failed in this call."""
    search = getattr(job, "search", None)
    return search is not None and search.done(store) and search.result(store) is None


def _do(store: Store, job: Job) -> None:
    """Run a job whose lock this process holds, and write its result or failure."""
    left = store.marked(job.key)
    deaths = left["deaths"] + 1 if left and left.get("since") == job.options.since else 0
    if deaths >= _DEATHS:
        _fail(
            store,
            job,
            "died",
            f"the process that ran it died {deaths} times, out of memory perhaps; "
            "try fewer --workers, or a smaller batch",
        )
        return
    if isinstance(job, Cell) and job.search is not None:
        failed = store.read("failed", job.search.key) or {"error": "its record cannot be read"}
        _fail(store, job, "search", f"the search of its learning rate failed: {failed['error']}")
        return
    marker = Marker(store, job, deaths)
    try:
        record = execute(job, marker)
    except Interrupted:
        store.unmark(job.key)
        raise
    except Exception as error:  # the failure of a cell must not end the others; it is recorded
        if broken := disk_error(error):
            store.unmark(job.key)
            raise RunFailed(f"{job.where}: {job.label}: {broken}") from error
        logging.getLogger("fs_lowrank").error("%s: %s failed: %s", job.where, job.label, message_of(error, job.folder))
        _fail(store, job, type(error).__name__, str(error))
        return
    store.write(job.kind, {**record, "finished": time.time()})
    if isinstance(job, Cell) and (before := job.stale(store)) and store.path("cells", before["hash"]).exists():
        store.supersede(before["hash"])
    store.unmark(job.key)
    if not job.options.keep:
        shutil.rmtree(job.folder, ignore_errors=True)


def _fail(store: Store, job: Job, kind: str, reason: str) -> None:
    store.write(
        "failed",
        {**job.identity(), "status": "failed", "kind": kind, "error": reason, "job": job.kind, "finished": time.time()},
    )
    store.unmark(job.key)


def _interrupt(number, frame) -> None:
    raise Interrupted


def main(given: dict[str, Any]) -> int:
    """A worker of the crew, with the ``options``, the ``jobs`` and its device; returns the exit code."""
    options, jobs = given["options"], given["jobs"]
    for job in jobs:
        import_all(job.suite.imports)
    if "overrides" in given:
        options = replace(options, overrides=given["overrides"])
        jobs = [job.on_device(options) for job in jobs]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        with keeping():  # most cells of a suite start from the same model and data
            return work(options, jobs)
    except Interrupted:
        return INTERRUPTED
