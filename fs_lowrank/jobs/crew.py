"""Worker processes that take their work from a common store, and their supervisor."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import ROWS_LOGGER, RunFailed, UserError
from .nursery import Forked, Nursery, nursery
from .process import Process
from .shell import FAILED, INTERRUPTED, OK, WRONG_USE, message_of, names

#: how many workers that died are replaced
RESTARTS = 8
#: a variable that is set in every worker, so that what runs there starts no processes of its own unless it is told to
INSIDE = "FS_LOWRANK_WORKER"


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


class Crew:
    """Workers that each call one function until the store has no work left; a worker that dies is replaced.

    Args:
        target: ``module:function``, called in each worker with ``options``. It returns an exit code: 0 if no work is
            left, 130 if it was stopped by a signal. A ``UserError`` from it ends the whole crew.
        options: plain data.
        workers: number of processes; they share the cores.
        gpus: numbers of torch's; each worker sees one of them, as device 0; the config keys for it are added to
            ``overrides`` in the options.
        logs: a folder for the workers' output; None: the output of this process.
        patience: seconds that a worker may take to stop before it is killed; None: until the second signal.
        say: prints a line.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any],
        workers: int,
        *,
        gpus: Sequence[str] = (),
        logs: Path | None = None,
        patience: float | None = None,
        say: Callable[[str], object] = print,
    ):
        self.target, self.options, self.workers, self.gpus = target, dict(options), workers, tuple(gpus)
        self.logs, self.patience, self.say = logs, patience, say
        self.processes: dict[int, Process] = {}
        self._nursery: Nursery | None = None

    def _start(self, index: int) -> None:
        environment, options = self._environment(), self.options
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = visible(self.gpus[index % len(self.gpus)])
            options = {**options, "overrides": {**options.get("overrides", {}), "use_gpu": True, "device": 0}}
        order = {"target": self.target, "options": options, "logs": str(self.logs or "")}
        log = self.logs / f"worker_{index}.log" if self.logs else None
        process = self.processes[index] = Process(
            f"{__name__}:serve", environment=environment, log=log, nursery=self._nursery
        )
        with suppress(OSError):  # it died at once; ``run`` sees its exit code
            process.connection.send_bytes(json.dumps(order).encode())

    def _environment(self) -> dict[str, str]:
        """The variables of every worker, in addition to those of this process."""
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_each(self.workers))}
        return {INSIDE: "1", **threads}

    def run(
        self,
        stopped: Sequence[int],
        late: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> bool:
        """Start the workers and wait until all have ended; returns whether any was stopped by a signal.

        Args:
            stopped: from ``stop_signals``; when a signal is in it, the workers are stopped.
            late: when it returns True, they are stopped too.
            meanwhile: called a few times a second.
        Raises:
            UserError: a worker raised it; all workers have been stopped. RunFailed: too many workers died.
        """
        stopping, ended, replaced, error = 0.0, False, 0, None
        try:
            if self.workers > 1:
                self._nursery = nursery(self.target.partition(":")[0], self._environment())
            for index in range(self.workers):
                self._start(index)
            while self.processes:
                meanwhile()
                if not stopping and (stopped or error or late()):
                    stopping = time.monotonic()
                    if not error:
                        why = "stopping" if stopped else "time is up"
                        self.say(f"{why}: what runs ends now, and is continued next time; once more Ctrl-C kills it")
                    for process in self.processes.values():
                        process.process.terminate()
                for index, process in list(self.processes.items()):
                    if stopping and self.patience and time.monotonic() - stopping > self.patience:
                        process.kill()
                    code = process.process.poll()
                    if code is None:
                        continue
                    del self.processes[index]
                    error = error or _error_of(process)
                    process.connection.close()
                    ended |= code == INTERRUPTED
                    if code in (OK, WRONG_USE, INTERRUPTED) or stopping:
                        continue
                    # A nursery that was killed cannot tell how its processes ended; the store knows what is left.
                    replaced += not (isinstance(process.process, Forked) and process.process.end_is_unknown)
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    how += ": out of memory, perhaps" * (code == -signal.SIGKILL)
                    self.say(f"worker {index} died ({how}); another takes its place")
                    if replaced <= RESTARTS:
                        self._start(index)
                    else:
                        error = RunFailed(f"workers died {replaced} times" + f"; see {self.logs}" * bool(self.logs))
                time.sleep(0.1)
        except KeyboardInterrupt:
            if not stopped:
                raise
        finally:
            try:
                for process in self.processes.values():
                    process.kill()
            finally:
                if self._nursery:
                    self._nursery.end()
                    self._nursery = None
        if error and not stopped:
            raise error
        return ended or bool(stopped)


def _error_of(process: Process) -> UserError | None:
    """The ``UserError`` that ended a worker, if any."""
    try:
        if not process.connection.poll():
            return None
        kind, text = json.loads(process.connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return RunFailed(text) if kind == RunFailed.__name__ else UserError(text)


def serve(connection: Connection) -> int:
    """Run in a worker: call the function that the supervisor names."""
    order = json.loads(connection.recv_bytes())
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger(ROWS_LOGGER).setLevel(logging.INFO)
    module, _, name = order["target"].partition(":")
    try:
        code: int = getattr(import_module(module), name)(order["options"])
        return code
    except UserError as error:
        kind = RunFailed if isinstance(error, RunFailed) else UserError
        connection.send_bytes(json.dumps([kind.__name__, str(error)]).encode())
        return WRONG_USE
    except Exception as error:  # of the package: one line, as in every command
        print(f"error: {message_of(error, Path(order['logs']) if order['logs'] else None)}", file=sys.stderr)
        return FAILED
