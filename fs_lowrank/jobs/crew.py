"""Worker processes that take their work from a common store, and their supervisor."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ROWS_LOGGER, RunFailed, UserError
from .escaped import Formatter
from .pool import Call, Pool
from .shell import INTERRUPTED, message_of, names

#: how many workers that died are replaced
RESTARTS = 8
#: a variable that is set in every worker, so that what runs there starts no processes of its own unless it is told to
INSIDE = "FS_LOWRANK_WORKER"
#: config keys of a worker that sees one GPU
ON_ITS_GPU = {"use_gpu": True, "device": 0}
#: what a user who stops a command reads
CONTINUED = ": what runs ends now, and is continued next time; once more Ctrl-C kills it"


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

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_gpus(gpus: Sequence[str]) -> None:
    """Check the numbers of GPUs, which are torch's: of those that ``CUDA_VISIBLE_DEVICES`` names, if it is set.

    Raises:
        UserError: one is not a number, or not one of a GPU that torch finds.
    """
    if not gpus:
        return
    import torch

    count = torch.cuda.device_count()
    for gpu in gpus:
        if not gpu.isdigit():
            raise UserError(f"gpus={gpu!r}: expected numbers, such as 0,1; or all")
        if int(gpu) >= count:
            raise UserError(
                f"gpus={gpu!r}: torch finds {count} GPU{'' if count == 1 else 's'} here"
                + (f", numbered from 0 to {count - 1}" if count else "")
            )


def visible(gpu: str) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` has to be for a process that is to see GPU number ``gpu`` of this one alone.

    A scheduler that has set the variable gives this process a part of the machine's GPUs, by number or by name.
    """
    named = names(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return named[int(gpu)] if named else gpu


def threads_each(workers: int) -> int:
    """Threads of each of ``workers`` processes that share the cores of this machine."""
    return max(1, (os.cpu_count() or 1) // workers)


def make_crew(
    workers: int,
    imports: Sequence[str],
    prepare: Callable[[int], Sequence[Call]] = lambda rank: [],
    *,
    gpus: Sequence[str] = (),
    logs: Path | None = None,
    say: Callable[[str], object] = print,
) -> Pool:
    """Processes that share the cores, each with one of ``gpus`` as its device 0 (``ON_ITS_GPU``).

    Args:
        imports, prepare: as of ``Pool``. gpus: numbers of torch's. logs: a folder for their output. say: prints a line.
    """

    def variables(index: int) -> dict[str, str]:
        gpu = {"CUDA_VISIBLE_DEVICES": visible(gpus[index % len(gpus)])} if gpus else {}
        return {INSIDE: "1", "OMP_NUM_THREADS": str(threads_each(workers)), **os.environ, **gpu}

    log = (lambda index: logs / f"worker_{index + 1}.log") if logs else None
    name = "worker {}"
    return Pool(workers, prepare, name=name, imports=imports, log=log, variables=variables, restarts=RESTARTS, say=say)


def run_workers(
    target: str,
    options: Mapping[str, Any],
    workers: int,
    stopped: Sequence[int],
    *,
    gpus: Sequence[str] = (),
    logs: Path | None = None,
    late: Callable[[], bool] = lambda: False,
    say: Callable[[str], object] = print,
) -> bool:
    """Run workers that each call one function until the store has no work left; one that dies is replaced.

    Args:
        target: ``module:function``, called in each worker with ``options``. It returns an exit code: 0 if no work is
            left, 130 if it was stopped by a signal. An error of it ends all workers.
        options: plain data.
        workers: number of processes; they share the cores.
        stopped: from ``stop_signals``; when a signal is in it, the workers are stopped.
        gpus: numbers of torch's; each worker sees one of them, as device 0; the config keys for it are added to
            ``overrides`` in the options.
        logs: a folder for the workers' output; None: the output of this process.
        late: when it returns True, they are stopped too.
        say: prints a line.
    Returns:
        Whether any was stopped by a signal.
    Raises:
        UserError: a worker raised it; all workers have been stopped. RunFailed: too many workers died.
    """
    options = dict(options)
    if gpus:
        options["overrides"] = {**options.get("overrides", {}), **ON_ITS_GPU}
    pool = make_crew(workers, [target.partition(":")[0]], gpus=gpus, logs=logs, say=say)
    stopping, interrupted = False, False
    error: Exception | None = None
    try:
        working = [pool.submit(i, serve, target, options, str(logs or "")) for i in range(workers)]
        while working:
            if not stopping and (stopped or error or late()):
                stopping = True
                if not error:
                    say(("stopping" if stopped else "time is up") + CONTINUED)
                for work in working:
                    pool.processes[work.rank].terminate()
            for work in [work for work in working if work.future.done()]:
                if pool.died(work) and not stopping:
                    pool.again(work)
                    continue
                working.remove(work)
                if not pool.died(work):
                    try:
                        interrupted |= pool.result(work) == INTERRUPTED
                    except (UserError, RuntimeError) as raised:
                        error = error or raised
            time.sleep(0.1)
    except KeyboardInterrupt:
        if not stopped:
            raise
        return True
    finally:
        pool.end()
    if error and not stopped:
        raise error
    return interrupted or bool(stopped)


def serve(target: str, options: Mapping[str, Any], logs: str) -> int:
    """In a worker: call the function that the supervisor names."""
    settle()
    module, _, name = target.partition(":")
    try:
        code: int = getattr(import_module(module), name)(options)
        return code
    except UserError:
        raise
    except Exception as error:  # of the package: one line, as in every command
        raise RunFailed(message_of(error, Path(logs) if logs else None)) from error


def settle() -> None:
    """In a worker: take its threads, and write the log as lines."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # it may be imported already
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(ROWS_LOGGER).setLevel(logging.INFO)
