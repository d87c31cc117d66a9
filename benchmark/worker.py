"""A process that takes one job after the other until none is left."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import time

from fs_lowrank import RunFailed
from fs_lowrank.jobs.shell import INTERRUPTED, OK, message_of

from .execute import Interrupted, execute
from .plan import Job, Options, plan
from .store import Store

#: how often a job is begun again that its worker did not survive
_DEATHS = 2
#: seconds between two signs of life in the marker
_BEAT = 0.5


class Marker:
    """Says in the job's marker how far it is."""

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


def work(options: Options) -> int:
    """Take jobs until every one is finished or has failed, here or in another process.

    Raises:
        RunFailed: results cannot be written.
    """
    store, jobs = options.store, plan(options)
    while True:
        waiting = False
        for job in list(jobs):
            ready = job.rated(store) if hasattr(job, "rated") else job
            if ready is None and _search_failed(store, job):
                ready = job
            elif ready is None:
                waiting = True
                continue
            if ready is not job:
                store.forget_failure(job.key)  # of the search that it waited for, which has succeeded since
            if ready.done(store):
                jobs.remove(job)
                continue
            with store.claim(ready.key) as ours:
                if ours and not ready.done(store):
                    _do(store, ready)
                if ours:
                    jobs.remove(job)
                    break  # an earlier one may have become possible
                waiting = True
        else:
            if not waiting:
                return OK
            time.sleep(0.3)


def _search_failed(store: Store, job: Job) -> bool:
    return job.search.done(store) and job.search.result(store) is None


def _do(store: Store, job: Job) -> None:
    """Do one job that is ours, and write what came of it."""
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
    waits = getattr(job, "search", None)
    if waits is not None:
        reason = store.read("failed", waits.key)["error"]
        _fail(store, job, "search", f"the search of its learning rate failed: {reason}")
        return
    marker = Marker(store, job, deaths)
    try:
        record = execute(job, marker)
    except Interrupted:
        store.unmark(job.key)
        raise
    except Exception as error:  # whatever a cell does must not end the others; it is kept with its reason
        if disk_full(error):
            store.unmark(job.key)
            raise RunFailed(f"{job.where}: {job.label}: {error}") from error
        logging.getLogger("fs_lowrank").error("%s: %s failed: %s", job.where, job.label, message_of(error, job.folder))
        _fail(store, job, type(error).__name__, str(error))
        return
    store.write("cells" if job.kind == "cells" else "searches", {**record, "finished": time.time()})
    store.unmark(job.key)
    if not job.options.keep:
        shutil.rmtree(job.folder, ignore_errors=True)


def _fail(store: Store, job: Job, kind: str, reason: str) -> None:
    store.write(
        "failed",
        {**job.identity(), "status": "failed", "kind": kind, "error": reason, "job": job.kind, "finished": time.time()},
    )
    store.unmark(job.key)


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is at the bottom of it: then no other cell has a chance."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "no space left on device" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _interrupt(number, frame) -> None:
    raise Interrupted


def main(given: dict) -> int:
    """A worker of the crew, with the fields of ``Options`` as plain data; returns the exit code."""
    options = Options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return work(options)
    except Interrupted:
        return INTERRUPTED
