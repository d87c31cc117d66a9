"""A worker process, which runs the jobs that it is handed; the process that hands them out writes their results."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable

from fs_lowrank import RunFailed
from fs_lowrank.jobs.files import disk_error
from fs_lowrank.jobs.shell import message_of

from .execute import Interrupted, execute
from .job import Job
from .suite import import_all


def begin(imports: Iterable[tuple[str, ...]]) -> None:
    """The first call in a worker process.

    Args:
        imports: of the suites.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    for modules in imports:
        import_all(modules)


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


def work(job: Job) -> dict:
    """Run a job.

    Returns:
        Its result; the kind and the text of its error, with ``status`` failed; nothing if it was interrupted.
    Raises:
        RunFailed: the disk is full or broken, so that no other job could run either.
    """
    try:
        return execute(job)
    except Interrupted:
        return {}
    except Exception as error:  # the failure of a cell must not end the others; it is recorded
        if broken := disk_error(error):
            raise RunFailed(f"{job.where}: {job.label}: {broken}") from error
        logging.getLogger("fs_lowrank").error("%s: %s failed: %s", job.where, job.label, message_of(error, job.folder))
        return {"status": "failed", "kind": type(error).__name__, "error": str(error)}
