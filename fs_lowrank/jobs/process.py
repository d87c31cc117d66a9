"""A Python process that runs one function and does not outlive the process that started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from .nursery import Forked, Nursery

#: seconds that a process whose parent has ended may take to end after SIGTERM
GRACE = 60.0


class Process:
    """A function that runs in a process of its own, with a connection to this one.

    It is not started by multiprocessing, which would run the user's main module again. The process has the same module
    search path, and a session of its own, so that Ctrl-C does not reach it. Its standard input is a pipe from this
    process: when this process ends, the pipe closes, and the process receives SIGTERM.

    Args:
        target: ``module:function``; it is called with the ``Connection`` and returns the exit code, or None for 0.
        timeout: seconds that sending or receiving a message may take; 0: no limit.
        beat: seconds after which the process sends an empty message while it works; 0: never.
        environment: variables in addition to those of this process.
        log: a file to which its output is appended.
        nursery: it is forked from this process's nursery, if that lives.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 0.0,
        beat: float = 0.0,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        nursery: Nursery | None = None,
    ):
        self.connection, theirs = multiprocessing.Pipe()
        if timeout:
            bound = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
                for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    pipe.setsockopt(socket.SOL_SOCKET, option, bound)
        self.process: subprocess.Popen[bytes] | Forked
        #: the process ends when this is closed
        self._lifeline: IO[bytes]
        with theirs, log.open("a") if log else contextlib.nullcontext() as output:
            if nursery is not None:
                with contextlib.suppress(OSError):  # it has ended
                    self.process = self._forked(nursery, theirs, output, (target, beat), environment or {})
                    return
            path = os.pathsep.join(p or os.getcwd() for p in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {target!r}, {beat})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {}), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
            assert self.process.stdin is not None
            self._lifeline = self.process.stdin

    def _forked(
        self,
        nursery: Nursery,
        theirs: Connection,
        output: IO[str] | None,
        arguments: tuple[str, float],
        environment: Mapping[str, str],
    ) -> Forked:
        read, write = os.pipe()
        self._lifeline = os.fdopen(write, "wb")
        printed = {"1": output.fileno(), "2": output.fileno()} if output else {}
        try:
            handles = {"connection": theirs.fileno(), "0": read, **printed}
            return nursery.fork(f"{__name__}:serve", arguments, handles, environment)
        except OSError:
            self._lifeline.close()
            raise
        finally:
            os.close(read)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the process, ``seconds`` at most; returns whether it has ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and the processes that it started, and close the connection."""
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # so young that it leads no group yet, and has started none
                self.process.kill()
            self.process.wait()
        self.connection.close()
        self._lifeline.close()

    def end(self) -> None:
        """Close the connection and wait for the process to end; then send SIGTERM, then kill it."""
        self.connection.close()
        if not self.ends_within(0.5):
            self.process.terminate()
            self.ends_within(5.0)
        self.kill()


class Beating:
    """A process's end of a connection: between receiving an item and asking for the next it sends empty messages.

    Whoever reads them knows that the process lives, however long its item takes.

    Args:
        seconds: between two of them.
    """

    def __init__(self, connection: Connection, seconds: float):
        self._connection, self._writing, self._works = connection, threading.Lock(), True
        threading.Thread(target=self._beat, args=(seconds,), daemon=True).start()

    def _beat(self, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            with self._writing, contextlib.suppress(OSError):  # closed: the process ends
                if self._works:
                    self._connection.send_bytes(b"")

    def recv_bytes(self) -> bytes:
        """As of a ``Connection``."""
        with self._writing:
            self._works = False
        data = self._connection.recv_bytes()
        self._works = True
        return data

    def send_bytes(self, data: bytes) -> None:
        """As of a ``Connection``."""
        with self._writing:
            self._connection.send_bytes(data)


def serve(handle: int, target: str, beat: float = 0.0) -> None:
    """Run in the process: call ``target`` with the connection whose file descriptor is ``handle``."""
    lifeline = os.dup(0)  # no process that this one starts inherits it
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    connection = Beating(Connection(handle), beat) if beat else Connection(handle)
    module, _, name = target.partition(":")
    raise SystemExit(getattr(import_module(module), name)(connection))


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: this returns when the parent has ended
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
