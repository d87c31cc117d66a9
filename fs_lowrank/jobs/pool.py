"""Processes that keep their loaded values: executors of the standard library, of one process each.

A process ends when this one does. One that dies is started anew, brought up to date, and its work is done again; after
another death the run ends, and can be continued. Processes are forked from one that has imported the libraries and does
nothing else (``forkserver``), so these are imported once and are in memory once.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import RunFailed, user_location
from ..spin import bound_spin

logger = logging.getLogger("fs_lowrank")

#: imports of every process of a run, beside its own code
LIBRARIES = ("peft", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", __name__)
#: a function of a module, and its arguments
Call = tuple[Any, ...]


@dataclass(eq=False)
class Work:
    """A call that a process makes. ``future`` is done when it has ended; ``Pool.result`` gives its result."""

    rank: int
    call: Call
    executor: ProcessPoolExecutor
    future: Future[Any] = field(default_factory=Future)

    def hand_to(self, executor: ProcessPoolExecutor) -> None:
        """Have the process of ``executor`` make the call."""
        self.executor = executor
        try:
            self.future = executor.submit(_call, *self.call)
        except BrokenProcessPool as error:  # it has died meanwhile
            self.future = Future()
            self.future.set_exception(error)


class Pool:
    """Processes number 0 to ``count`` − 1, which start at once.

    Args:
        count: how many.
        prepare: gives the calls by which process number ``rank`` is brought up to date when it starts, also anew.
        name: of a process in messages, such as "process {} of federate.process_num", with its number from 1.
        imports: modules that every process imports.
        restarts: the number of processes that may be started anew. say: gets a line for each.

    Attributes:
        prepared: the work by which the processes are brought up to date at first.
    """

    def __init__(
        self,
        count: int,
        prepare: Callable[[int], Sequence[Call]] = lambda rank: [],
        *,
        name: str = "process {}",
        imports: Sequence[str] = (),
        restarts: int = 1,
        say: Callable[[str], object] = logger.warning,
    ):
        self.prepare, self.name, self.restarts, self.say = prepare, name, restarts, say
        self.context = import_ahead(*imports)
        self.executors: dict[int, ProcessPoolExecutor] = {}
        self.processes: dict[int, BaseProcess] = {}
        self.prepared = [work for rank in range(count) for work in self._start(rank)]

    def _start(self, rank: int) -> list[Work]:
        executor = self.executors[rank] = ProcessPoolExecutor(1, self.context)
        inherited = dict(os.environ), os.getcwd()
        with _starting():
            entered = self.submit(rank, _enter, *inherited)
        (self.processes[rank],) = executor._processes.values()
        return [entered, *(self.submit(rank, *call) for call in self.prepare(rank))]

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Work:
        """Have process number ``rank`` call ``function`` with ``args`` after its earlier work."""
        work = Work(rank, (function, *args), self.executors[rank])
        work.hand_to(work.executor)
        return work

    def result(self, work: Work) -> Any:
        """The result of the call; waits for it.

        Raises:
            RunFailed: its process died, and no other may take its place. Exception: the call raised it.
        """
        while isinstance(work.future.exception(), BrokenProcessPool):
            if self.executors[work.rank] is work.executor:  # else another process replaced it for earlier work
                self.replace(work.rank)
            work.hand_to(self.executors[work.rank])
        return work.future.result()

    def replace(self, rank: int) -> None:
        """Start another process in place of number ``rank``, which has died.

        Raises:
            RunFailed: no restart is left.
        """
        self.executors[rank].shutdown()  # its process object knows how it ended after this
        code = self.processes[rank].exitcode or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        cause += ": out of memory, perhaps" * (code == -signal.SIGKILL)
        ended = f"{self.name.format(rank + 1)} ended ({cause})"
        _kill_family(self.processes[rank])
        if not self.restarts:
            raise RunFailed(f"{ended}; run again with resume=True")
        self.restarts -= 1
        self.say(f"{ended}; another takes its place")
        for work in self._start(rank):
            self.result(work)

    def end(self) -> None:
        """Kill all processes and the processes that they have started."""
        for rank, executor in self.executors.items():
            _kill_family(self.processes[rank])
            executor.shutdown(cancel_futures=True)


def _kill_family(process: BaseProcess) -> None:
    """Kill a process, which leads a group, and the group."""
    try:
        assert process.pid
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # so young that it leads no group yet, and has started none; or all have ended
        process.kill()


def import_ahead(*imports: str) -> BaseContext:
    """Begin to import ``imports`` and ``LIBRARIES`` in the process from which all others are forked, and do not wait.

    A second call changes nothing. Where nothing can be forked, each process will import them by itself.

    Returns:
        How processes start.
    """
    if _imports_ask_cuda():
        return multiprocessing.get_context("spawn")
    bound_spin()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*imports, *LIBRARIES])
    from multiprocessing import forkserver  # where there is none, nothing is imported in vain

    with _starting():
        forkserver.ensure_running()
    return context


def _imports_ask_cuda() -> bool:
    """Whether importing ``LIBRARIES`` asks for GPUs of this machine: PEFT imports bitsandbytes, which does so.

    A process forked after that can use no GPU, nor choose the visible ones.
    """
    if not find_spec("bitsandbytes"):
        return False
    import torch

    return torch.cuda.device_count() > 0


@contextmanager
def _starting() -> Iterator[None]:
    """Processes that start in this block find this one's modules, and do not run its main module again.

    So a script needs no ``if __name__ == "__main__"``.
    """
    main, environment = vars(sys.modules["__main__"]), dict(os.environ)
    saved: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del main["__spec__"]
        main.update(saved)
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            os.environ.pop(name)
            os.environ.update({name: environment[name]} if name in environment else {})


# -- in a process --------------------------------------------------------------------------------------


def _enter(environment: Mapping[str, str], folder: str) -> None:
    """The first call in every process: take over the environment of its parent, and end with the parent."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which would be reported as leaked by a killed process
    gc.freeze()  # else the first collection would copy every object of the process from which this one was forked
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.setsid()  # so that Ctrl-C does not reach it
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def print_to(path: Path) -> None:
    """From now on, append the output of this process to the file at ``path``."""
    with path.open("a") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """The result of ``function``. An error gets its location as ``place``, since its traceback exists here alone.

    An error that cannot be sent to another process would end this one; a ``RuntimeError`` with its text replaces it.
    """
    try:
        return function(*args)
    except Exception as error:
        location = user_location(error)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # of a class of the user's, such as one whose __init__ takes two arguments
            error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
        error.place = location  # type: ignore[attr-defined]
        raise error
