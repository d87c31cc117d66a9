"""Fixtures of the tests that run the real framework."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import runpy
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture
def quick(settings, tmp_path, no_curves):
    """``quick(name, **keys)``: the small classification run under an outdir of its own, without drawing curves."""
    from fs_lowrank import load_config

    def make(name, keys=None):
        return load_config(settings, {"train.local_update_steps": 2, "outdir": str(tmp_path / name), **(keys or {})})

    return make


@pytest.fixture
def assert_same():
    def check(a, b, atol=1e-5):
        a, b = (dict(x.model.named_parameters()) if hasattr(x, "model") else x for x in (a, b))
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(
                b[name].detach(), a[name].detach(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )

    return check


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_for(condition, seconds=60.0):
    """Wait until ``condition`` holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.05)


class Cluster:
    """Starts a server and clients as processes on the loopback interface, and waits for them."""

    free_ports = staticmethod(free_ports)
    wait_for = staticmethod(wait_for)

    def __init__(self):
        # Processes are forked from one that has imported everything, which makes their start fast.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fs_lowrank.engines.federatedscope.run", "runpy"])
        self.processes = []
        #: of the last ``launch``: the ports, and the command of each worker
        self.ports: list[int] = []
        self.commands: dict[int, dict] = {}

    def start(self, settings, overrides, sabotage=None):
        answers = self.context.Queue()
        process = self.context.Process(
            target=runpy.run_path,
            args=(str(HERE / "process.py"),),
            daemon=True,
            kwargs={"init_globals": {"job": (settings, overrides, sabotage or {}), "answers": answers}},
        )
        process.start()
        self.processes.append(process)
        return process, answers

    def launch(self, settings, clients=2, overrides=None, sabotage=None, changed=None, only=None):
        """Start the workers (0 is the server), or those of ``only``.

        Args:
            sabotage: by worker, see ``process.py``.
            changed: further overrides, by worker.
        """
        ports = self.ports = free_ports(clients + 1)
        common = {
            "federate.mode": "distributed",
            "distribute.use": True,
            "distribute.server_host": "127.0.0.1",
            "distribute.client_host": "127.0.0.1",
            "distribute.server_port": ports[0],
            "federate.client_num": clients,
            "lowrank.timeout": 30.0,
            **(overrides or {}),
        }
        started = {}
        for worker in range(clients + 1) if only is None else only:
            own = (
                {"distribute.role": "server"}
                if worker == 0
                else {
                    "distribute.role": "client",
                    "distribute.data_idx": worker,
                    "distribute.client_port": ports[worker],
                }
            )
            self.commands[worker] = {**common, **own, **(changed or {}).get(worker, {})}
            started[worker] = self.start(settings, self.commands[worker], (sabotage or {}).get(worker))
        return started

    def again(self, settings, worker, sabotage=None):
        """Start a worker of the last ``launch`` again, with the same command."""
        return self.start(settings, self.commands[worker], sabotage)

    def run(self, *args, timeout=90.0, **kwargs):
        """Start the workers as ``launch`` does, and return the result of each (see ``wait``)."""
        started = self.launch(*args, **kwargs)
        return {worker: self.wait(*process, timeout=timeout) for worker, process in started.items()}

    def wait(self, process, answers, timeout=90.0):
        """The result of a worker: ``kind`` (ok, or an error class), ``said`` or ``history``, ``tensors``, ``code``."""
        deadline, answer, alive = time.monotonic() + timeout, None, True
        while answer is None and alive and time.monotonic() < deadline:
            alive = process.is_alive()  # before looking: what a process has answered is there once it has ended
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=0.1)
        process.join(max(deadline - time.monotonic(), 1))
        assert process.exitcode is not None, f"a process hangs; it said {answer and answer[:2]}"
        kind, said, arrays = answer or ("died", "", {})
        return SimpleNamespace(
            kind=kind,
            said=said,
            history=said,
            code=process.exitcode,
            tensors={n: torch.from_numpy(a) for n, a in arrays.items()},
        )

    def stop(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def cluster():
    processes = Cluster()
    yield processes
    processes.stop()
