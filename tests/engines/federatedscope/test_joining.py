"""Requests to join: from the server's own address, from addresses that never answer, and more than can be decided."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from types import SimpleNamespace

import pytest

import fs_lowrank
from fs_lowrank.methods import revisions
from fs_lowrank.rounds.joining import proof_of
from fs_lowrank.rounds.site import Site
from tests.engines.federatedscope.conftest import free_ports
from tests.engines.federatedscope.test_network import Stranger, keys, token_of
from tests.engines.federatedscope.test_protocol import log_of

pytestmark = pytest.mark.federatedscope


def valid_request(settings, command, port: int, host="127.0.0.1") -> dict:
    """What a process with the configuration of ``command`` would send as client 1 to join, but for its token."""
    config = fs_lowrank.load_config(settings, command)
    site = Site(config)
    return {
        "address": {"host": host, "port": port},
        **{"process": "b" * 32, "proof": proof_of(site), "revisions": revisions(config)},
        **{"config": config.to_dict(), "samples": site.clients[0].num_samples},
    }


# -- the server's own address --------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_client_that_names_the_servers_address_is_refused_and_told(settings, cluster, tmp_path, host):
    more = {"lowrank.timeout": 12.0}
    workers = cluster.run(settings, 2, keys(tmp_path, **more), sabotage={2: {"announces": host}})
    assert [workers[w].code for w in (0, 1)] == [0, 0], workers[0].said
    assert [r["clients"] for r in workers[0].history] == [[1]] * 3
    assert workers[2].kind == "UserError"
    named = f"names for itself, {host}:{cluster.ports[0]}, is the server's own; correct its distribute.client_host"
    assert named in workers[2].said and named in log_of(tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_member_keeps_its_address_when_the_servers_is_named_for_it(settings, cluster, tmp_path, host):
    """The server knows the token of client 1, so it would take a message to itself for one that has arrived."""
    more = {"federate.total_round_num": 6, "lowrank.timeout": 15.0}
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"waits_for": str(tmp_path)}})
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    token = token_of(tmp_path, 1, cluster.ports[1])
    request = {**valid_request(settings, cluster.commands[0], cluster.ports[0], host), "token": token}
    assert Stranger(cluster.ports[0], token).send(msg_type="join_in", sender=1, content=json.dumps(request)) == "OK"
    (tmp_path / "go").touch()
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert [r["clients"] for r in workers[0].history] == [[1, 2]] * 6
    assert f"{host}:{cluster.ports[0]}, is the server's own" in log_of(tmp_path)


def test_a_client_that_expects_the_server_at_its_own_address(settings, cluster, tmp_path):
    (port,) = free_ports(1)
    more = {"distribute.server_port": port, "lowrank.timeout": 20.0}
    alone = cluster.launch(settings, 1, keys(tmp_path, **more), changed={1: {"distribute.client_port": port}}, only=[1])
    client = cluster.wait(*alone[1])
    assert client.kind == "UserError"
    assert f"127.0.0.1:{port}, where the server is expected, is this client's own address" in client.said


@pytest.mark.parametrize("host", ["ipv4:127.0.0.1", "unix:there", "a:b", "[::1", "::g"])
def test_a_host_is_a_name_or_an_address_and_not_another_way_to_connect(host):
    from pydantic import ValidationError

    from fs_lowrank.engines.federatedscope.messages import Address

    with pytest.raises(ValidationError, match="expected a name or an IP address"):
        Address(host=host, port=5)
    for right in ("localhost", "10.0.0.1", "::1", "[::1]", "a-b.example.org", "fe80::1"):
        assert Address(host=right, port=5).host == right


# -- who does not answer -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, -1])
def test_a_client_does_not_wait_behind_requests_from_an_address_that_never_answers(settings, cluster, tmp_path, number):
    """Several valid requests a second come from there, each takes 5 s to decide, until the client has joined."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(128)
        more = {"lowrank.timeout": 60.0, "federate.client_num": 1}
        started = cluster.launch(settings, 1, keys(tmp_path, **more), only=[0])
        stranger, joined, sent = Stranger(cluster.ports[0]), threading.Event(), []
        cluster.wait_for(lambda: stranger.send() == "UNAUTHENTICATED")
        request = valid_request(settings, cluster.commands[0], silent.getsockname()[1])

        def insist():
            while not joined.wait(0.15):
                content = json.dumps({**request, "token": secrets.token_hex(16)})
                sent.append(stranger.send(msg_type="join_in", sender=number, content=content))

        sender = threading.Thread(target=insist)
        sender.start()
        try:
            cluster.wait_for(lambda: len(sent) >= 12)
            own = {"distribute.role": "client", "distribute.client_port": cluster.ports[1]}
            started[1] = cluster.start(settings, {**cluster.commands[0], **own, "distribute.data_idx": number})
            cluster.wait_for(lambda: "client 1 joined from" in log_of(tmp_path), 50)
        finally:
            joined.set()
            sender.join()
        workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert set(sent) == {"OK"}
    assert [w.code for w in workers.values()] == [0, 0], [w.said for w in workers.values()]
    assert [r["clients"] for r in workers[0].history] == [[1]] * 3


class Wire:
    """In place of ``Comm``: keeps what is sent, and answers when it is told to."""

    host, port, joins_waiting = "127.0.0.1", 1, 3

    def __init__(self):
        self.neighbors, self.tokens, self.senders = {}, {}, {}
        self.pings, self.sent, self.untold = {}, [], []

    def ping(self, receiver, then, timeout, address="", token="", insist=()):
        self.pings[token] = then

    def deliver(self, receiver, message, then=None, *, address="", token="", **_):
        self.sent.append((message.msg_type, token, message.content, then))

    def answer_with(self, token, process, reason):
        self.untold.append((token, reason))

    def answers(self, letter, failed=None):
        """The process with the token of ``letter`` gives a sign of life."""
        self.pings.pop(letter * 32)(failed)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of two clients that has begun nothing, and takes whoever is there."""
    from fs_lowrank.engines.federatedscope.server import LowRankServer

    server = object.__new__(LowRankServer)
    server._cfg = SimpleNamespace(federate=SimpleNamespace(join_in_info=[], use_ss=False))
    server._ID, server._state, server.cur_timestamp, server._client_num = 0, 0, 0, 2
    server.distributed, server.started, server.timeout, server.own_data = True, False, 60.0, set()
    server._monitor, server.comm_manager = None, Wire()
    server.session = SimpleNamespace(outdir=tmp_path, resume=False)
    server.ledger = SimpleNamespace(admission=SimpleNamespace(samples={}), forget=lambda numbers: None)
    full = "all 2 clients have joined"
    monkeypatch.setattr(LowRankServer, "_objection", lambda self, number, *_: "" if number else full)
    server._open()
    return server


def ask(server, letter, number, port=0):
    """A request to join with the token that is 32 times ``letter``."""
    from federatedscope.core.message import Message

    from fs_lowrank.engines.federatedscope.messages import Address, Request

    request = Request(
        address=Address(host="127.0.0.1", port=port or ord(letter)),
        **{"token": letter * 32, "process": letter * 32, "proof": {}, "config": {}, "revisions": {}, "samples": 1},
    )
    server.decided.append(Message("join_in", number, [0], 0, request, 0))
    server._step()


def told(server, letter):
    """What the process was told last, by type and content; it arrives."""
    kind, _, content, then = next(x for x in reversed(server.comm_manager.sent) if x[1] == letter * 32)
    if then is not None:
        with contextlib.suppress(ValueError):
            server.comm_manager.sent.remove((kind, letter * 32, content, then))
        then(None)
    return kind, content


def work_off(server):
    while server.decided:
        server._step()


def test_of_two_that_want_one_number_the_first_that_answers_has_it(server):
    ask(server, "a", 1)
    ask(server, "b", 1)
    ask(server, "b", 1)
    assert server.comm_manager.pings.keys() == {"a" * 32, "b" * 32}
    server.comm_manager.answers("b")
    server.comm_manager.answers("a")
    assert told(server, "b") == ("assign_client_id", "1")
    work_off(server)
    server.comm_manager.answers("a")
    server.comm_manager.answers("b")  # which has the number, and is asked whether it is there
    assert told(server, "a")[0] == "refused"
    assert server.roster.members[1].token == "b" * 32 and not server._under_way()


def test_those_that_want_the_number_of_a_silent_member_do_not_wait_for_each_other(server):
    import grpc

    from fs_lowrank.engines.federatedscope.comm import Undelivered

    ask(server, "a", 1)
    server.comm_manager.answers("a")
    told(server, "a")
    asked = []
    for letter in "bc":
        ask(server, letter, 1)
        server.comm_manager.answers(letter)
        asked.append(server.comm_manager.pings.pop("a" * 32))
    ask(server, "a", 1, port=9)  # the member, which has another address now
    server.comm_manager.answers("a")
    assert told(server, "a") == ("assign_client_id", "1"), "it does not wait for those that want its number"
    for decide in asked:
        decide(Undelivered(grpc.StatusCode.UNAVAILABLE, "connection refused"))
        server.comm_manager.answers("a")
    assert told(server, "b")[0] == told(server, "c")[0] == "refused"
    assert server.roster.members[1].address == "127.0.0.1:9" and not server._under_way()


def test_a_client_without_a_number_waits_for_the_last_one_that_may_be_free(server):
    import grpc

    from fs_lowrank.engines.federatedscope.comm import Undelivered

    for letter in "abc":
        ask(server, letter, -1)
        server.comm_manager.answers(letter)
    assert told(server, "a") == ("assign_client_id", "1")
    then = next(x[3] for x in server.comm_manager.sent if x[1] == "b" * 32)
    then(Undelivered(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer"))
    work_off(server)
    server.comm_manager.answers("c")
    assert told(server, "c") == ("assign_client_id", "2")
    ask(server, "d", -1)
    server.comm_manager.answers("d")
    assert told(server, "d") == ("refused", "all 2 clients have joined")


def test_requests_beyond_the_bound_are_decided_when_there_is_room(server, caplog):
    import grpc

    from fs_lowrank.engines.federatedscope.comm import Undelivered

    for letter in "abcde":
        ask(server, letter, 1)
    assert sorted(server.comm_manager.pings) == [letter * 32 for letter in "abc"]
    server.comm_manager.answers("a", Undelivered(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer"))
    work_off(server)
    assert sorted(server.comm_manager.pings) == [letter * 32 for letter in "bcd"]
    assert "client 1 asked to join, but cannot be reached at 127.0.0.1:97: deadline_exceeded" in caplog.text


def test_a_refusal_that_does_not_arrive_is_the_answer_to_the_next_request(server):
    import grpc

    from fs_lowrank.engines.federatedscope.comm import Undelivered

    ask(server, "a", 0)
    (kind, _, reason, then) = server.comm_manager.sent[0]
    then(Undelivered(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer"))
    assert kind == "refused" and server.comm_manager.untold == [("a" * 32, reason)]


def test_a_request_that_was_put_off_and_fails_is_the_only_one(server, monkeypatch, caplog):
    """Whatever becomes of it, and of what is done about that, does not end the server."""

    def fails(*_):
        raise RuntimeError("sabotage")

    ask(server, "a", 1)
    ask(server, "b", 1)
    server.comm_manager.answers("a")
    server.comm_manager.answers("b")
    told(server, "a")
    with monkeypatch.context() as patched:
        patched.setattr(server, "_objection", fails)
        patched.setattr(server, "_wrong", fails)
        work_off(server)
    assert "ignored a message 'join_in' of client 1: RuntimeError: sabotage" in caplog.text
    assert "ignored what follows from a wrong message 'join_in' of client 1: RuntimeError: sabotage" in caplog.text
    assert server.roster.members[1].token == "a" * 32 and not server._under_way()
    ask(server, "b", 2)
    server.comm_manager.answers("b")
    assert told(server, "b") == ("assign_client_id", "2")


# -- the communication manager -------------------------------------------------------------------------


@pytest.fixture
def comm(monkeypatch):
    """A server's, without a server."""
    from fs_lowrank.engines.federatedscope import comm as module

    lowrank = SimpleNamespace(timeout=20.0)
    session = SimpleNamespace(
        role="server", config=SimpleNamespace(lowrank=lowrank), proof={}, largest_message=lambda allowed: allowed
    )
    monkeypatch.setattr(module, "current", lambda: session)
    limits = {"grpc_max_send_message_length": 2**20, "grpc_max_receive_message_length": 2**20}
    made = module.Comm("127.0.0.1", free_ports(1)[0], 1, SimpleNamespace(grpc_compression="nocompression", **limits))
    yield made
    made.close(0.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_message_that_comes_back_to_its_sender_has_not_arrived(comm, host):
    comm.senders["a" * 32] = 1
    comm.ping(1, lambda failed: None, 10.0, f"{host}:{comm.port}", "a" * 32)
    outcome = comm.receive(15.0)
    assert outcome.failed is not None and outcome.failed.itself and not outcome.failed.gone


def test_a_refused_process_is_answered_and_others_are_not(comm):
    import grpc

    stranger = Stranger(comm.port, "a" * 32)
    for process in ("b" * 32, "c" * 32):
        comm.answer_with("a" * 32, process, "the seed differs \ud800 " * 1000)

    def ask(process):
        metadata = (("fs-lowrank-token", "a" * 32), ("fs-lowrank-process", process))
        with contextlib.suppress(grpc.RpcError):
            return stranger.stub.sendMessage(Stranger.request(msg_type="join_in"), timeout=20, metadata=metadata).msg
        return "refused"

    assert [ask(process * 32) for process in "bcd"] == ["refused", "refused", "ACK"]
    for number in range(1000):
        comm.answer_with("a" * 32, f"{number:032x}", "no")
    assert ask("b" * 32) == "ACK", "what is kept is bounded"


def test_a_delivery_that_fails_as_nobody_foresaw_has_an_outcome(comm, monkeypatch):
    async def fails(*_):
        raise RuntimeError("sabotage")

    monkeypatch.setattr(comm, "_attempt", fails)
    comm.ping(1, lambda failed: None, 10.0, "127.0.0.1:1", "a" * 32)
    outcome = comm.receive(15.0)
    assert outcome.receiver == 1 and str(outcome.failed) == "internal: RuntimeError: sabotage"


def test_a_message_that_cannot_be_read_for_whatever_reason(comm, monkeypatch, caplog):
    from fs_lowrank.engines.federatedscope import messages
    from fs_lowrank.engines.federatedscope.comm import Misfit

    def fails(*_):
        raise RuntimeError("sabotage")

    monkeypatch.setattr(messages, "read", fails)
    comm.senders["a" * 32] = 1
    assert Stranger(comm.port, "a" * 32).send(msg_type="metrics") == "OK"
    assert comm.receive(15.0) == Misfit(1, "metrics", "RuntimeError: sabotage")
    assert "ignored a message 'metrics' of client 1: RuntimeError: sabotage" in caplog.text
