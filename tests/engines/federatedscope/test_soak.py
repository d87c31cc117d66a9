"""Long tests of distributed runs: processes killed in each phase, a network that drops, floods of connections.

Each prints the longest round. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time

import pytest

import fs_lowrank

pytestmark = [pytest.mark.federatedscope, pytest.mark.slow]
PLUGIN = "engines.federatedscope"
KEYS = {"federate.method": "rolora", "train.local_update_steps": 2, "federate.total_round_num": 4}


def keys(tmp_path, **more):
    return {**KEYS, "federate.client_num": 2, "outdir": str(tmp_path / "run"), **more}


def records(tmp_path) -> list[dict]:
    path = tmp_path / "run" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def longest_round(history) -> float:
    return max(sum(record["seconds"].values()) for record in history)


class Relay:
    """Forwards connections on a port of its own to another port, as long as it is ``open``.

    Args:
        target: the port. most: bytes that are forwarded to it per connection; 0: all.
    """

    def __init__(self, target: int, most: int = 0):
        self.target, self.most, self.open, self.ended = target, most, True, False
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
            outside = socket.create_connection(("127.0.0.1", self.target))
            self.sockets.append(outside)
            carried = 0
            while not self.ended:
                # While it is not open nothing is read, as in a network that loses every packet.
                ready = select.select([inside, outside], [], [], 0.1)[0] if self.open else time.sleep(0.1) or []
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        raise ConnectionError
                    if source is inside and self.most:
                        data = data[: max(self.most - carried, 0)]
                        carried += len(data)
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


CLIENT_PHASES = {
    "asks to join": (f"{PLUGIN}.distributed_client.DistributedClient._ask_to_join", 1),
    "has joined": (f"{PLUGIN}.client.LowRankClient.callback_funcs_for_assign_id", 1),
    "is asked": (f"{PLUGIN}.client.LowRankClient.callback_funcs_for_model_para", 2),
    "follows": ("rounds.copies.OwnCopy.catch_up", 3),
    "trains": ("rounds.site.Site.fit", 2),
    "sends": (f"{PLUGIN}.client.LowRankClient._send", 2),
    "evaluates": (f"{PLUGIN}.client.LowRankClient.callback_funcs_for_evaluate", 2),
    "ends": (f"{PLUGIN}.client.LowRankClient.callback_funcs_for_finish", 1),
}
SERVER_PHASES = {
    "waits": (f"{PLUGIN}.server.LowRankServer._gather", 1),
    "is asked to let join": (f"{PLUGIN}.server.LowRankServer.callback_funcs_for_join_in", 2),
    "begins": (f"{PLUGIN}.server.LowRankServer.trigger_for_start", 1),
    "asks": (f"{PLUGIN}.server.LowRankServer.dispatch", 5),
    "takes": (f"{PLUGIN}.server.LowRankServer.take_update", 4),
    "aggregates": ("rounds.round.Round.finish", 2),
    "evaluates": (f"{PLUGIN}.server.LowRankServer.take_metrics", 4),
    "records": ("rounds.keeper.RecordKeeper.add", 2),
    "saves": ("rounds.keeper.RecordKeeper.save", 2),
    "ends": (f"{PLUGIN}.server.LowRankServer.terminate", 1),
}


@pytest.mark.parametrize("phase", CLIENT_PHASES)
def test_a_client_killed_in_each_phase_returns(quick, settings, assert_same, cluster, tmp_path, phase):
    """What it did not deliver is in the records; if that is nothing, the result is that of a run without the kill."""
    more = {"federate.make_global_eval": False, "federate.total_round_num": 8}
    started = cluster.launch(
        settings, 2, keys(tmp_path, **more), sabotage={2: {"dies_at": CLIENT_PHASES[phase]}, 0: {"sleeps": 0.5}}
    )
    assert cluster.wait(*started[2]).code == 9
    if phase != "ends":
        started[2] = cluster.again(settings, 2)
        assert cluster.wait(*started[2]).code == 0
    server = cluster.wait(*started[0])
    assert server.code == 0, server.said
    assert len(server.history) == 8 and (phase == "ends" or 2 in server.history[-1]["clients"])
    for record in server.history:
        lost = {failure["client"] for failure in record["failed"]}
        assert {1, 2} - {*record["clients"]} == lost <= {2}
    not_evaluated = [r["round"] for r in server.history if "2" not in r["client_scores"]]
    without = [r["round"] for r in server.history if r["failed"]]
    if phase in ("is asked", "trains", "sends"):
        assert without[0] == 2
    if phase == "evaluates":
        assert not_evaluated[0] == 2
    if not without:
        whole = fs_lowrank.run(quick("whole", {**keys(tmp_path), **more, "outdir": str(tmp_path / "whole")}))
        assert_same(dict(whole.model.named_parameters()), server.tensors, atol=0)
    print(
        f"client killed when it {phase}: longest round {longest_round(server.history):.1f} s, "
        f"rounds without its update {without}, without its evaluation {not_evaluated}"
    )


@pytest.mark.parametrize("phase", SERVER_PHASES)
def test_a_server_killed_in_each_phase_is_resumed(quick, settings, assert_same, cluster, tmp_path, phase):
    """The result is, to the bit, that of a run that was not interrupted."""
    more = {"federate.make_global_eval": False, "lowrank.min_clients": 2}
    whole = fs_lowrank.run(quick("whole", {**keys(tmp_path), **more, "outdir": str(tmp_path / "whole")}))
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"dies_at": SERVER_PHASES[phase]}})
    assert cluster.wait(*started[0]).code == 9
    started[0] = cluster.again(settings, 0, {"resume": True})
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert_same(dict(whole.model.named_parameters()), workers[0].tensors, atol=0)
    print(f"server killed when it {phase}: longest round {longest_round(workers[0].history):.1f} s")


def test_a_network_that_drops_for_a_minute(settings, cluster, tmp_path, relay):
    """What client 2 sends arrives a minute late, and its update still counts."""
    (port,) = cluster.free_ports(1)
    line = relay(port)
    more = {"lowrank.timeout": 150.0, "federate.total_round_num": 6, "distribute.server_port": port}
    started = cluster.launch(
        settings,
        2,
        keys(tmp_path, **more),
        sabotage={0: {"sleeps": 0.5}},
        changed={2: {"distribute.server_port": line.port}},
    )
    cluster.wait_for(lambda: len(records(tmp_path)) >= 2)
    line.open = False
    time.sleep(60)
    line.open = True
    workers = {w: cluster.wait(*process, timeout=240) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert all(r["clients"] == [1, 2] for r in workers[0].history)
    print(f"a network down for 60 s: longest round {longest_round(workers[0].history):.1f} s")


def test_ten_thousand_connections(settings, cluster, tmp_path):
    """Idle connections do not prevent clients from joining."""
    started = cluster.launch(settings, 2, keys(tmp_path, **{"lowrank.timeout": 90.0}), only=[0])
    idle: list[socket.socket] = []
    try:
        cluster.wait_for(lambda: _reachable(cluster.ports[0]))
        for _ in range(10_000):
            idle.append(socket.create_connection(("127.0.0.1", cluster.ports[0]), timeout=20))
        more = {"distribute.role": "client", "distribute.server_port": cluster.ports[0]}
        for client in (1, 2):
            own = {"distribute.data_idx": client, "distribute.client_port": cluster.ports[client]}
            started[client] = cluster.start(settings, {**cluster.commands[0], **more, **own})
        workers = {w: cluster.wait(*process, timeout=180) for w, process in started.items()}
    finally:
        for each in idle:
            each.close()
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert all(r["clients"] == [1, 2] for r in workers[0].history)
    print(f"10,000 connections: longest round {longest_round(workers[0].history):.1f} s")


def _reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_peers_that_stop_inside_a_message(settings, cluster, tmp_path, relay):
    """Messages that are never completed do not block those of the clients."""
    started = cluster.launch(settings, 2, keys(tmp_path, **{"lowrank.timeout": 60.0}), only=[0])
    cluster.wait_for(lambda: _reachable(cluster.ports[0]))
    line = relay(cluster.ports[0], most=30_000)
    calls = [_incomplete_message(line.port) for _ in range(100)]
    more = {"distribute.role": "client", "distribute.server_port": cluster.ports[0]}
    for client in (1, 2):
        own = {"distribute.data_idx": client, "distribute.client_port": cluster.ports[client]}
        started[client] = cluster.start(settings, {**cluster.commands[0], **more, **own})
    workers = {w: cluster.wait(*process, timeout=150) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert all(r["clients"] == [1, 2] for r in workers[0].history) and len(calls) == 100
    print(f"100 incomplete messages: longest round {longest_round(workers[0].history):.1f} s")


def _incomplete_message(port: int):
    """A call whose message is never completed, because only its first bytes are forwarded."""
    import grpc
    from federatedscope.core.message import Message
    from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service

    # A subchannel pool of its own gives each call a connection of its own.
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    message = Message("join_in", 1, [0], 0, "x" * 500_000, 0)
    return channel, service.gRPCComServeFuncStub(channel).sendMessage.future(message.transform(), timeout=120)
