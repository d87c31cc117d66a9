"""A process that has imported what others need, and from which they are forked (Linux).

What it has imported is in memory once for all of them, and is imported once. It does nothing but import and fork, so it
has no state of torch's, and no threads of it, that a fork could break.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import Any, NoReturn


def _available() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, an old kernel, or a sandbox that forbids it
        return False
    return True


#: whether this system can do it
AVAILABLE = _available()
#: what every process of a run imports, beside its own code
LIBRARIES = ("peft", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_LONGEST = 1 << 20


class Forked:
    """A process of a nursery, with what this package uses of ``subprocess.Popen``.

    Attributes:
        returncode: None while it lives; -N after signal N.
        handle: can be read when the process has ended; None before it has begun and after its end is known.
    """

    def __init__(self, nursery: Nursery):
        self._nursery, self._pid = nursery, 0
        self.returncode: int | None = None
        self.handle: int | None = None
        #: whether it has ended after the nursery had, so that its code is a guess
        self.end_is_unknown = False

    def begun(self, pid: int) -> None:
        """It has the number ``pid``."""
        self._pid, self.handle = pid, os.pidfd_open(pid)

    def over(self, code: int) -> None:
        """It has ended with ``code``."""
        self.returncode = code
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    @property
    def pid(self) -> int:
        """Its number, which is that of its session, too. Waits until the nursery has forked it."""
        while not self._pid and self.returncode is None:
            self._nursery.listen(None)
        return self._pid

    def poll(self) -> int | None:
        """The return code, None while it lives."""
        if self.returncode is None:
            self._nursery.listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = 1.0 if end is None else end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._nursery.listen(min(left, 1.0))
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Nursery:
    """The engine's side. The process ends with this one.

    Args:
        modules: that it imports.
        environment: variables in addition to those of this process.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]):
        #: processes that are asked for, in their order; those that live, by number
        self._asked: list[Forked] = []
        self._children: dict[int, Forked] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {list(modules)!r})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )

    def fork(
        self, call: str, arguments: Sequence[Any], handles: Mapping[str, int], environment: Mapping[str, str]
    ) -> Forked:
        """Have a process start that calls ``call``, as ``module:function``, in a session of its own. Does not wait.

        Args:
            arguments: of the function, plain data, after the descriptor of the file ``connection``.
            handles: open files: ``connection``, and ``0``, ``1`` and ``2``, which replace the standard ones.
            environment: variables in addition to those of the nursery.
        Raises:
            OSError: the nursery has ended.
        """
        order = {"call": call, "arguments": arguments, "handles": list(handles), "environment": dict(environment)}
        packed = array.array("i", handles.values())
        self._control.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
        self._asked.append(Forked(self))
        return self._asked[-1]

    def listen(self, seconds: float | None) -> None:
        """Note a process that has begun or ended; waits for one, ``seconds`` at most, None: as long as it takes."""
        if self._control.fileno() < 0:  # it was ended
            self._orphaned(seconds)
            return
        if not wait([self._control], seconds):
            return
        try:
            data = self._control.recv(_LONGEST)
        except ConnectionError:
            data = b""
        if not data:
            self._orphaned(seconds)
            return
        (what, pid), *code = json.loads(data).items()
        if what == "began":
            self._children[pid] = self._asked.pop(0)
            self._children[pid].begun(pid)
            return
        self._children.pop(pid).over(code[0][1])
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"forget": pid}).encode())

    def _orphaned(self, seconds: float | None) -> None:
        """The nursery has ended, so that nobody knows the codes of its processes: those that are gone were killed."""
        while self._asked:
            self._asked.pop().over(-signal.SIGKILL)
        by_handle = {child.handle: pid for pid, child in self._children.items() if child.handle is not None}
        wait(list(by_handle), min(seconds or 0.0, 0.1))
        for handle, pid in by_handle.items():
            if wait([handle], 0):
                child = self._children.pop(pid)
                child.end_is_unknown = True
                child.over(-signal.SIGKILL)

    def end(self) -> None:
        """End the nursery's own process; those that were forked from it live on."""
        self._control.close()
        self.process.kill()
        self.process.wait()


def nursery(module: str, environment: Mapping[str, str]) -> Nursery | None:
    """A nursery that imports ``module`` and ``LIBRARIES``; None where every process is to be started by itself.

    Args:
        module: that every process runs.
        environment: variables in addition to those of this process.
    """
    return Nursery((module, *LIBRARIES), environment) if AVAILABLE and not _imports_ask_cuda() else None


def _imports_ask_cuda() -> bool:
    """Whether there are GPUs that importing ``LIBRARIES`` asks for: PEFT imports bitsandbytes, which does so.

    What is forked from a process that has asked can use no GPU, nor choose which ones it sees.
    """
    if not find_spec("bitsandbytes"):
        return False
    import torch

    return torch.cuda.device_count() > 0


# -- in the process ------------------------------------------------------------------------------------


def serve(handle: int, modules: Sequence[str]) -> None:
    """Import ``modules`` and fork until the other end of the socket is closed."""
    control = socket.socket(fileno=handle)
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection in a child would copy every object
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for found, _ in selector.select():
                if found.fileobj is not control:
                    _report(control, selector, found)
                    continue
                try:
                    data, packed, _, _ = control.recvmsg(_LONGEST, socket.CMSG_SPACE(4 * 8))
                except ConnectionError:  # the other end was killed before it had read all
                    return
                if not data:
                    return
                order = json.loads(data)
                if "forget" in order:
                    os.waitpid(order["forget"], 0)
                    continue
                files = array.array("i")
                for _, _, raw in packed:
                    files.frombytes(raw[: len(raw) - len(raw) % files.itemsize])
                pid = os.fork()
                if not pid:
                    selector.close()
                    control.close()
                    _become(order, list(files))
                for file in files:
                    os.close(file)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _send(control, {"began": pid})


def _report(control: socket.socket, selector: selectors.BaseSelector, found: selectors.SelectorKey) -> None:
    """Tell how a process ended. It stays a zombie until that is read, so its number is not given to another."""
    status = os.waitid(os.P_PID, found.data, os.WEXITED | os.WNOWAIT)
    assert status is not None
    code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    selector.unregister(found.fileobj)
    os.close(found.fd)
    _send(control, {"ended": found.data, "code": code})


def _send(control: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed: the next ``recvmsg`` sees it
        control.send(json.dumps(message).encode())


def _become(order: Mapping[str, Any], files: list[int]) -> NoReturn:
    """Be the process that was asked for; ends as every process of Python does."""
    os.setsid()
    os.environ.update(order["environment"])
    given = dict(zip(order["handles"], files, strict=True))
    connection = given.pop("connection")
    for standard, file in given.items():
        os.dup2(file, int(standard))
        os.close(file)
    module, _, name = order["call"].partition(":")
    getattr(import_module(module), name)(connection, *order["arguments"])
    raise SystemExit
