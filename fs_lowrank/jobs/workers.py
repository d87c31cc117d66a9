"""Worker processes of a suite or a search: the command hands them jobs one by one, and alone writes results."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .escaped import log_to
from .memo import memoizing
from .pool import Call, Pool, Work, print_to
from .shell import names

#: number of dead workers that are replaced
RESTARTS = 8
#: seconds between two looks for jobs, and until a worker that does not stop is killed
PAUSE, PATIENCE = 0.5, 15.0
#: open as long as a worker runs
_opened = ExitStack()
#: a variable that is set in every worker, so that its jobs start no processes unless configured
INSIDE = "FS_LOWRANK_WORKER"
#: config keys of a worker that sees one GPU
ON_ITS_GPU = {"use_gpu": True, "device": 0}
#: the message for a user who stops a command
CONTINUED = ": running work ends now, and is continued next time; another Ctrl-C kills it"


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Append SIGINT and SIGTERM, which a scheduler sends, to the list; the second raises ``KeyboardInterrupt``.

    SIGINT is caught even in a process that was started in the background and would ignore it. Signals can be caught
    only in the main thread; in another one the list stays empty.
    """
    stopped: list[int] = []

    def handle(number: int, frame: object) -> None:
        stopped.append(number)
        if len(stopped) > 1:
            raise KeyboardInterrupt

    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def threads_each(workers: int) -> int:
    """Threads of each of ``workers`` processes that share the cores of this machine."""
    return max(1, (os.cpu_count() or 1) // workers)


def worker_pool(
    workers: int,
    imports: Sequence[str],
    begin: Sequence[Call] = (),
    *,
    gpus: Sequence[str] = (),
    logs: Path | None = None,
    say: Callable[[str], object] = print,
) -> Pool:
    """Processes that share the cores, each with one of ``gpus`` as its device 0 (``ON_ITS_GPU``).

    Args:
        imports: as of ``Pool``. begin: the first calls in each. gpus: numbers of torch's. logs: a folder for their
            output. say: prints a line.
    """
    # A scheduler that has set the variable gives this process a part of the machine's GPUs, by number or by name.
    visible = names(os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices = [visible[int(gpu)] if visible else gpu for gpu in gpus]

    def variables(index: int) -> dict[str, str]:
        gpu = {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]} if devices else {}
        return {INSIDE: "1", "OMP_NUM_THREADS": str(threads_each(workers)), **os.environ, **gpu}

    def prepare(index: int) -> list[Call]:
        log: list[Call] = [(print_to, logs / f"worker_{index + 1}.log")] if logs else []
        return [*log, (settle, variables(index)), *begin]

    return Pool(workers, prepare, name="worker {}", imports=imports, restarts=RESTARTS, say=say)


def hand_out(
    board: Any,
    work: Callable[[Any], Any],
    pool: Pool,
    stop: Callable[[], str],
    say: Callable[[str], object] = print,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Have the processes of ``pool`` do the jobs of ``board``, until none remains or ``stop`` gives a reason to end.

    Args:
        board: ``claim()`` gives the next job, or None if there is none now; ``finish(job, result)`` gets the
            result of ``work``, None if its process died, ``{}`` if it was stopped; ``remaining``: whether jobs remain.
        work: a function of a module; it is called in a process with a job. SIGTERM asks it to end.
        stop: gives the reason to stop, such as "time is up"; empty: go on.
        say: prints a line. look: is called a few times a second.
    Raises:
        UserError, RuntimeError: ``work`` raised it. RunFailed: too many processes died.
    """
    working: dict[Work, Any] = {}
    idle, deadline = [*pool.processes], math.inf
    try:
        while working or (board.remaining and not stop()):
            look()
            while idle and not stop() and (job := board.claim()):
                working[pool.submit(idle.pop(), work, job)] = job
            if stop() and deadline == math.inf:
                deadline = time.monotonic() + PATIENCE
                say(stop() + CONTINUED)
                for call in working:
                    pool.processes[call.rank].terminate()
            if time.monotonic() > deadline:
                break
            if working:
                wait([call.future for call in working], PAUSE, FIRST_COMPLETED)
            else:
                time.sleep(PAUSE)
            for call in [call for call in working if call.future.done()]:
                try:
                    result = call.future.result()
                except BrokenProcessPool:  # its process has died
                    result = {} if stop() else None
                board.finish(working.pop(call), result)
                if result is None:
                    pool.replace(call.rank)
                idle.append(call.rank)
    except KeyboardInterrupt:
        if not stop():
            raise
    finally:
        pool.end()
        for job in working.values():
            board.finish(job, {})


def settle(variables: Mapping[str, str]) -> None:
    """In a worker: take its GPU and threads, write the log as lines, and load data once for all jobs."""
    os.environ.update(variables)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # it may be imported already
    log_to(logging.StreamHandler())
    _opened.enter_context(memoizing())
