"""Long tests of distributed runs: processes killed in each phase, a network that drops, floods of connections.

Each measures the longest wait of a client that has nothing wrong, from its message to the server's next one, and the
longest time for which the server waits for a client, and compares them with the limits that follow from
``lowrank.timeout``. ``make soak`` writes them to ``results/soak``; a part of the tests replaces its rows there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

import fs_lowrank
from fs_lowrank.jobs.files import to_json, write_text
from fs_lowrank.runs.environment import versions

pytestmark = [pytest.mark.federatedscope, pytest.mark.slow]
PLUGIN = "engines.federatedscope"
TWO = {"federate.method": "rolora", "federate.client_num": 2}


ABOUT = """# Soak

`{command}` wrote this page and `soak.json`: {versions}.

Distributed runs of tiny models over gRPC on one machine, each with something wrong, beside other work. For a client
that has nothing wrong: the longest time from a message of its own to the server's next message. For the server: the
longest time from asking a client until it has the answer, or goes on without it. The limits follow from
`lowrank.timeout`: so long the server waits for a client, and some seconds until it looks; a client that is not drawn in
a round waits for that round as well. All in seconds.

| what | timeout | client, longest | limit | server, longest | limit |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


@pytest.fixture
def waits(tmp_path):
    """What the processes measure: ``measured(worker: sabotage)`` is for ``launch``, ``compare`` asserts the limits."""
    return Waits(tmp_path)


class Waits:
    def __init__(self, folder: Path):
        self.folder = folder / "waits"
        self.folder.mkdir()

    def measured(self, *healthy: int) -> dict[int, dict]:
        """``sabotage`` by which the server and these clients measure their waits."""
        return {worker: {"waits_in": str(self.folder)} for worker in (0, *healthy)}

    def compare(self, what: str, timeout: float, rounds: int = 1) -> dict[str, float]:
        """Compare the longest waits with their limits, and note them in the table of ``SOAK_TABLE``.

        Args:
            what: went wrong. timeout: ``lowrank.timeout``.
            rounds: the largest number of rounds in a row to which a client's wait may extend.
        """
        files = [json.loads(path.read_text()) for path in self.folder.iterdir()]
        longest = {role: max(found[role] for found in files if role in found) for role in ("client", "server")}
        limit = timeout + 6.0
        row = {"what": what, "timeout": timeout}
        row |= {"client": round(longest["client"], 1), "client_limit": rounds * limit}
        row |= {"server": round(longest["server"], 1), "server_limit": limit}
        assert row["client"] <= row["client_limit"] and row["server"] <= row["server_limit"], row
        if place := os.environ.get("SOAK_TABLE"):
            note(Path(place), row)
        return longest


def note(folder: Path, row: dict) -> None:
    """Add ``row`` to the table in ``folder``, in place of the one of the same name."""
    path = folder / "soak.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = sorted([*(r for r in rows if r["what"] != row["what"]), row], key=lambda r: r["what"])
    result = {"command": "make soak", "versions": versions(), "rows": rows}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, to_json(result, indent=1) + "\n")
    used = ", ".join(" ".join(pair) for pair in result["versions"].items())
    lines = [f"| {' | '.join(f'{v:g}' if isinstance(v, float) else str(v) for v in r.values())} |\n" for r in rows]
    write_text(folder / "README.md", ABOUT.format(command=result["command"], versions=used) + "".join(lines))


class Relay:
    """Forwards connections on a port of its own to another port, as long as it is ``open``.

    Args:
        target: the port. most: bytes that are forwarded to it per connection; 0: all.
    """

    def __init__(self, target: int, most: int = 0):
        self.target, self.most, self.open, self.ended = target, most, True, False
        self.carried = 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self.ended:
            with contextlib.suppress(OSError):
                inside = self.listener.accept()[0]
                self.sockets.append(inside)
                threading.Thread(target=self._forward, args=(inside,), daemon=True).start()

    def _forward(self, inside: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not (self.open or self.ended):
                time.sleep(0.1)
            outside = socket.create_connection(("127.0.0.1", self.target))
            self.sockets.append(outside)
            given = 0
            while not self.ended:
                # While it is not open nothing is read, as in a network that loses every packet.
                ready = select.select([inside, outside], [], [], 0.1)[0] if self.open else time.sleep(0.1) or []
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        raise ConnectionError
                    if source is inside and self.most:
                        data = data[: max(self.most - given, 0)]
                        given += len(data)
                    self.carried += len(data)
                    (outside if source is inside else inside).sendall(data)
        inside.close()

    def close(self) -> None:
        self.ended = True
        for each in (self.listener, *self.sockets):
            each.close()


@pytest.fixture
def relay():
    made: list[Relay] = []

    def make(*args, **kwargs) -> Relay:
        made.append(Relay(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


CLIENT = f"{PLUGIN}.distributed.RemoteClient"
CLIENT_PHASES = {
    "asks to join": (f"{CLIENT}._join", 1),
    "has joined": (f"{CLIENT}._follow", 1),
    "is asked": (f"{CLIENT}._answer", 3),
    "follows": ("rounds.copies.OwnCopy.catch_up", 3),
    "trains": ("rounds.trainer.Trainer.fit", 2),
    "evaluates": ("rounds.evaluator.Evaluator.score", 2),
}
SERVER = f"{PLUGIN}.distributed.Clients"
SERVER_PHASES = {
    "waits": (f"{SERVER}.begin", 1),
    "is asked to let join": (f"{SERVER}._join", 2),
    "asks": (f"{SERVER}.exchange", 3),
    "takes": ("rounds.round.Round.take", 4),
    "aggregates": ("rounds.round.Round.finish", 2),
    "evaluates": (f"{SERVER}.exchange", 4),
    "records": ("rounds.recorder.Recorder.add", 2),
    "saves": ("rounds.recorder.Recorder.save", 2),
    "ends": (f"{SERVER}.end", 1),
}


@pytest.mark.parametrize("phase", CLIENT_PHASES)
def test_a_client_killed_in_each_phase_returns(quick, assert_same, cluster, waits, phase):
    """What it did not deliver is in the records; if that is nothing, the result is that of a run without the kill."""
    more = {"federate.make_global_eval": False, "federate.total_round_num": 200}
    sabotage = {**waits.measured(1), 2: {"dies_at": CLIENT_PHASES[phase]}}
    sabotage[0] |= {"sleeps": 0.5, "until": (8, 2)}
    started = cluster.launch(2, more, sabotage)
    assert cluster.wait(*started[2]).code == 9
    started[2] = cluster.again(2)
    server = cluster.ended({worker: started[worker] for worker in (2, 0)})[0]
    assert 2 in server.history[-1]["clients"]
    for record in server.history:
        lost = {failure["client"] for failure in record["failed"]}
        assert {1, 2} - {*record["clients"]} == lost <= {2}
    if not any(r["failed"] for r in server.history):
        rounds = {"federate.total_round_num": len(server.history)}
        assert_same(fs_lowrank.run(quick("whole", {**TWO, **more, **rounds})), server.tensors, atol=0)
    waits.compare(f"a client is killed when it {phase}", 30.0)


@pytest.mark.parametrize("phase", SERVER_PHASES)
def test_a_server_killed_in_each_phase_is_resumed(quick, assert_same, cluster, waits, phase):
    """The result is, to the bit, that of a run that was not interrupted."""
    more = {"federate.make_global_eval": False, "lowrank.min_clients": 2, "federate.total_round_num": 4}
    whole = fs_lowrank.run(quick("whole", {**TWO, **more}))
    sabotage = waits.measured(1, 2)
    again = {**sabotage[0], "resume": True}
    sabotage[0]["dies_at"] = SERVER_PHASES[phase]
    started = cluster.launch(2, more, sabotage)
    assert cluster.wait(*started[0]).code == 9
    started[0] = cluster.again(0, again)
    assert_same(whole, cluster.ended(started)[0].tensors, atol=0)
    waits.compare(f"the server is killed when it {phase}", 30.0)


def test_a_network_that_drops_for_a_minute(cluster, waits, relay):
    """Nothing passes between the server and client 2, in either direction; its updates count, a minute late."""
    (server_port,) = cluster.free_ports(1)
    line = relay(server_port)
    more = {"lowrank.timeout": 150.0, "federate.total_round_num": 6, "distribute.server_port": server_port}
    sabotage = waits.measured(1)
    sabotage[0]["sleeps"] = 0.5
    started = cluster.launch(2, more, sabotage, changed={2: {"distribute.server_port": line.port}})
    cluster.wait_for(lambda: len(cluster.records()) >= 2)
    line.open, before = False, line.carried
    assert before, "every message in either direction goes through the relay"
    time.sleep(60)
    assert line.carried == before and len(cluster.records()) <= 3
    line.open = True
    history = cluster.ended(started, timeout=240)[0].history
    assert all(r["clients"] == [1, 2] for r in history)
    assert waits.compare("no packet between the server and a client for 60 s", 150.0)["server"] > 40


def both_take_part(cluster, started, sabotage):
    """Clients are started where the server has its strangers, and both take part in every round."""
    started |= {client: cluster.again(client, sabotage[client]) for client in (1, 2)}
    history = cluster.ended(started, timeout=180)[0].history
    assert all(r["clients"] == [1, 2] for r in history)


def test_ten_thousand_connections(cluster, waits):
    """Idle connections do not prevent clients from joining."""
    sabotage = waits.measured(1, 2)
    started = cluster.launch(2, {"lowrank.timeout": 90.0}, sabotage, only=[0])
    cluster.wait_for(lambda: _reachable(cluster.ports[0]))
    with contextlib.ExitStack() as idle:
        for _ in range(10_000):
            idle.enter_context(socket.create_connection(("127.0.0.1", cluster.ports[0]), timeout=20))
        both_take_part(cluster, started, sabotage)
    waits.compare("10,000 connections that say nothing", 90.0)


def _reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_peers_that_stop_inside_a_message(cluster, waits, relay):
    """Messages that are never completed do not block those of the clients."""
    sabotage = waits.measured(1, 2)
    started = cluster.launch(2, {"lowrank.timeout": 60.0}, sabotage, only=[0])
    cluster.wait_for(lambda: _reachable(cluster.ports[0]))
    line = relay(cluster.ports[0], most=30_000)
    calls = [_incomplete_message(line.port) for _ in range(100)]
    both_take_part(cluster, started, sabotage)
    assert len(calls) == 100
    waits.compare("100 peers that stop inside a message", 60.0)


def _incomplete_message(port: int):
    """A call whose message is never completed, because only its first bytes are forwarded."""
    import grpc
    from federatedscope.core.message import Message
    from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service

    # A subchannel pool of its own gives each call a connection of its own.
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    message = Message("join_in", 1, [0], 0, "x" * 500_000, 0)
    return channel, service.gRPCComServeFuncStub(channel).sendMessage.future(message.transform(), timeout=120)


def test_sampled_participation(cluster, waits):
    """Two of four clients take part in a round, and one of the four is stopped."""
    more = {"federate.sample_client_num": 2, "federate.total_round_num": 12, "lowrank.timeout": 5.0}
    sabotage = waits.measured(1, 2, 3)
    sabotage[0]["sleeps"] = 0.3
    started = cluster.launch(4, more, sabotage)
    cluster.wait_for(lambda: len(cluster.records()) >= 1)
    os.kill(started[4][0].pid, signal.SIGSTOP)
    history = cluster.ended({worker: started[worker] for worker in (0, 1, 2, 3)}, timeout=150)[0].history
    assert [r["round"] for r in history] == list(range(1, 13))
    for record in history:
        assert {f["client"] for f in record["failed"]} <= {4} and {*record["selected"]} - {4} <= {*record["clients"]}
    asked = {c: [0, *(r["round"] for r in history if c in r["selected"]), 13] for c in (1, 2, 3)}
    apart = max(b - a for rounds in asked.values() for a, b in zip(rounds, rounds[1:]))
    waits.compare("two of four clients a round, and one is stopped", 5.0, rounds=apart)
