"""Fixtures of the tests that run the real framework."""

from __future__ import annotations

import contextlib
import json
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
#: what a distributed run has if its test does not say otherwise
KEYS = {"federate.method": "rolora", "train.local_update_steps": 2, "federate.total_round_num": 3}


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

    def __init__(self, settings, folder):
        # Processes are forked from one that has imported everything, which makes their start fast.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fs_lowrank.engines.federatedscope.run", "runpy"])
        self.settings, self.folder, self.processes = settings, folder, []
        #: of the last ``launch``: the ports, and the command of each worker
        self.ports: list[int] = []
        self.commands: dict[int, dict] = {}

    def start(self, overrides, sabotage=None, settings=None):
        answers = self.context.Queue()
        told = {"job": (settings or self.settings, overrides, sabotage or {}), "answers": answers}
        script, told = (str(HERE / "process.py"),), {"init_globals": told}
        process = self.context.Process(target=runpy.run_path, args=script, daemon=True, kwargs=told)
        process.start()
        self.processes.append(process)
        return process, answers

    def launch(self, clients=2, overrides=None, sabotage=None, changed=None, only=None):
        """Start the workers (0 is the server), or those of ``only``, for a run in the folder ``run`` of the test.

        Args:
            overrides: keys beside ``KEYS``.
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
            "outdir": str(self.folder / "run"),
            **KEYS,
            **(overrides or {}),
        }
        for worker in range(clients + 1):
            own = {"distribute.role": "client", "distribute.data_idx": worker, "distribute.client_port": ports[worker]}
            own = own if worker else {"distribute.role": "server"}
            self.commands[worker] = {**common, **own, **(changed or {}).get(worker, {})}
        return {worker: self.again(worker, (sabotage or {}).get(worker)) for worker in only or self.commands}

    def again(self, worker, sabotage=None):
        """Start a worker of the last ``launch``, or start it again with the same command."""
        return self.start(self.commands[worker], sabotage)

    def run(self, *args, codes=None, timeout=90.0, **kwargs):
        """Start the workers as ``launch`` does, and return the result of each (see ``ended``)."""
        return self.ended(self.launch(*args, **kwargs), codes, timeout)

    def ended(self, started, codes=None, timeout=90.0):
        """The results of workers (see ``wait``), which end with exit code 0, or with that of ``codes``."""
        workers = {worker: self.wait(*process, timeout=timeout) for worker, process in started.items()}
        for worker, found in workers.items():
            assert found.code == (codes or {}).get(worker, 0), (worker, found.said)
        return workers

    def records(self):
        """The records that the server has written so far."""
        path = self.folder / "run" / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

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
def cluster(settings, tmp_path):
    processes = Cluster(settings, tmp_path)
    yield processes
    processes.stop()
