"""Distributed runs over gRPC on the loopback interface, with processes that stop, return or send invalid messages.

Every wait has a limit.
"""

from __future__ import annotations

import base64
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.rounds.parcel import Parcel

pytestmark = pytest.mark.federatedscope


class Stranger:
    """A process that can reach a port; with a token, one that has joined."""

    def __init__(self, port: int, token: str = ""):
        import grpc
        from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service

        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)])
        self.stub = service.gRPCComServeFuncStub(self.channel)
        self.metadata = (("fs-lowrank-token", token),)

    def send_request(self, request) -> str:
        """The status that the receiver answers with."""
        return self._status(self.stub.sendMessage, request)

    def send_bytes(self, content: bytes) -> str:
        return self._status(self.channel.unary_unary("/gRPCComServeFunc/sendMessage"), content)

    def _status(self, method, sent) -> str:
        import grpc

        try:
            method(sent, timeout=20, metadata=self.metadata)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def send(self, **changed) -> str:
        return self.send_request(self.request(**changed))

    @staticmethod
    def request(**changed):
        from federatedscope.core.message import Message
        from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

        valid = {"msg_type": "model_para", "sender": 2, "receiver": [0], "state": 0, "timestamp": 0, "content": "x"}
        request = protocol.MessageRequest()
        for name, value in {**valid, **changed}.items():
            request.msg[name].MergeFrom(Message().build_msg_value(value))
        return request


class Hostile(Stranger):
    """A process that has joined as a client, with all that a client needs, and then does what a test says."""

    def __init__(self, command: dict, settings, client: int):
        from fs_lowrank.rounds.node import Node
        from fs_lowrank.rounds.workspace import Workspace

        super().__init__(command["distribute.server_port"], "a" * 32)
        self.client, self.node = client, Node(Workspace(fs_lowrank.load_config(settings, command), serves=False))

    def join(self) -> str:
        """The status."""
        return self.send(msg_type="join_in", content=text_of(self.node.introduction(self.client)))

    def next_order(self, seen: int = 0):
        """The parcel of the next order, once there is one."""
        from fs_lowrank.engines.federatedscope.wire import parcel_of

        request = self.request(msg_type="next", state=seen, content=text_of(Parcel({})))
        while True:
            order = parcel_of(self.stub.sendMessage(request, timeout=60, metadata=self.metadata).msg)
            if order.facts:
                return order


def text_of(parcel: Parcel) -> str:
    return base64.b64encode(parcel.to_bytes()).decode("ascii")


# -- slow and silent parties ---------------------------------------------------------------------------


def test_a_stopped_client_does_not_delay_the_others_and_takes_part_again(cluster):
    """A client that is stopped for longer than ``lowrank.timeout`` is left out of its rounds, and takes part later."""
    more = {"lowrank.timeout": 4.0, "federate.total_round_num": 14, "lowrank.min_clients": 2, "eval.freq": 0}
    started = cluster.launch(3, more, sabotage={0: {"sleeps": 0.5}})
    cluster.wait_for(lambda: len(cluster.records()) >= 2)
    os.kill(started[2][0].pid, signal.SIGSTOP)
    cluster.wait_for(lambda: any(f["client"] == 2 for r in cluster.records() for f in r["failed"]))
    left_out = len(cluster.records())
    cluster.wait_for(lambda: len(cluster.records()) >= left_out + 2)
    os.kill(started[2][0].pid, signal.SIGCONT)
    server = cluster.ended(started)[0]
    assert [r["round"] for r in server.history] == list(range(1, 15))
    assert all({1, 3} <= set(r["clients"]) for r in server.history)
    failures = [f for r in server.history for f in r["failed"]]
    # The server notices that it answers nothing, or that it asks for nothing.
    assert {f["client"] for f in failures} == {2}
    assert all(re.match("no answer within|its process is gone", f["reason"]) for f in failures)
    assert len(failures) < 12 and 2 in server.history[-1]["clients"]


def test_a_client_stopped_in_the_clients_evaluation_is_said_and_left_out(cluster, tmp_path):
    """It is stopped while the server is between two rounds, so it neither trains nor evaluates any more."""
    more = {"lowrank.timeout": 8.0, "federate.make_global_eval": False, "eval.freq": 1, "lowrank.min_clients": 1}
    started = cluster.launch(2, more, sabotage={0: {"waits_for": str(tmp_path)}})
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    os.kill(started[2][0].pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    server = cluster.ended({0: started[0]})[0]
    assert [r["clients"] for r in server.history] == [[1, 2], [1], [1]]
    assert [sorted(r["client_scores"]) for r in server.history] == [["1", "2"], ["1"], ["1"]]
    assert [u["client"] for u in server.history[0].get("unevaluated", [])] in ([], [2])
    # It costs the wait for one answer; then it is not asked until it answers again.
    assert sum(sum(r["seconds"].values()) for r in server.history) < 25


# -- return --------------------------------------------------------------------------------------------


def test_of_two_processes_of_one_client_the_later_is_refused(cluster):
    """The same command is started once more while the first still runs."""
    more = {"federate.total_round_num": 6, "lowrank.min_clients": 2}
    started = cluster.launch(2, more, sabotage={0: {"sleeps": 0.7}})
    cluster.wait_for(lambda: len(cluster.records()) >= 2)
    later = cluster.wait(*cluster.again(2))
    assert later.kind == "RunFailed" and "another run is writing into" in later.said
    cluster.ended(started)


def test_a_resumed_server_finds_its_clients(quick, assert_same, cluster):
    """The clients keep running; the result is that of a run that was not interrupted."""
    shape = {"federate.total_round_num": 5, "federate.client_num": 2, "federate.method": "fedloru", "lowrank.tau": 2}
    whole = fs_lowrank.run(quick("whole", shape))
    started = cluster.launch(2, {**shape, "lowrank.min_clients": 2}, sabotage={0: {"dies_after": 3}})
    assert cluster.wait(*started[0]).code == 9
    started[0] = cluster.again(0, {"resume": True})
    workers = cluster.ended(started)
    assert [r["round"] for r in workers[0].history] == [1, 2, 3, 4, 5]
    assert_same(whole, workers[0].tensors, atol=0)


# -- messages that do not fit --------------------------------------------------------------------------

WRONG = {
    "type": {"msg_type": ["model_para"]},
    "unknown type": {"msg_type": "boss"},
    "a state of text": {"state": "now"},
    "a far state": {"state": 2**31 - 1},
    "an answer to nothing": {"state": 0},
    "content of numbers": {"content": [1, 2]},
    "no parcel": {"content": base64.b64encode(b"junk").decode()},
    "a deep request to join": {"msg_type": "join_in", "content": "[" * 200_000 + "]" * 200_000},
    "an empty request to join": {"msg_type": "join_in", "content": ""},
    "a list for an order": {"msg_type": "next", "content": [0.5]},
    "the server's own": {"msg_type": "stopped", "content": "go home"},
}


def test_no_invalid_message_ends_the_server(settings, cluster, tmp_path, capfd):
    """Messages of strangers and of a client that does not fit are ignored, and the others' result is not changed."""
    more = {"federate.client_num": 3, "federate.make_global_eval": False, "federate.total_round_num": 4}
    more |= {"lowrank.timeout": 60.0, "lowrank.min_clients": 1}
    started = cluster.launch(3, more, only=[0, 1, 2])
    stranger, client = Stranger(cluster.ports[0]), Hostile(cluster.commands[3], settings, 3)
    cluster.wait_for(lambda: client.join() == "OK")
    order = client.next_order()
    assert order.facts["purpose"] == "train" and order.facts["round"] == 1
    for what, changed in WRONG.items():
        for one in (stranger, client):
            answer = one.send(**changed)
            assert answer in ("OK", "UNAUTHENTICATED", "INVALID_ARGUMENT", "PERMISSION_DENIED"), (what, answer)
            assert answer != "OK" or one is client, what
    empty = Stranger.request()
    empty.Clear()
    assert client.send_request(empty) == "INVALID_ARGUMENT"
    for junk in (b"\xff" * 40, b"\n\x05\xffjunk", b"junk"):
        assert stranger.send_bytes(junk) == client.send_bytes(junk) == "INVALID_ARGUMENT", junk
    # An answer that is none; one of wrong facts; then one that is right, once more, and one that was for round 1.
    assert client.send(state=1, content="junk") == "OK"
    order = client.next_order(1)
    assert order.facts["purpose"] == "evaluate"
    scores = {"acc": 7.0, "loss": "low"}
    lie = Parcel({}, scores=scores, standing={"no": "list"}, spent=["x"], agreed=client.node.agreed)
    assert client.send(state=2, content=text_of(lie)) == "OK"
    order = client.next_order(2)
    assert order.facts["round"] == 2
    memory, identity = tmp_path / "hostile", "a run"
    answer = client.node.obey(order, 3, memory, identity)
    answer.facts["agreed"] = client.node.agreed
    for _ in range(2):
        assert client.send(state=3, content=text_of(answer)) == "OK"
    assert client.send(state=1, content=text_of(answer)) == "OK"
    order = client.next_order(3)
    answer = Parcel({"w": torch.zeros(2)}, round=10**400, samples=True, loss="x", agreed=client.node.agreed)
    assert client.send(state=4, content=text_of(answer)) == "OK"
    order = client.next_order(4)
    assert client.send(state=5, content=text_of(Parcel({}, round=3, agreed="another"))) == "OK"
    workers = cluster.ended(started, timeout=120)
    history = workers[0].history
    assert [r["clients"] for r in history] == [[1, 2], [1, 2, 3], [1, 2], [1, 2]]
    first, last = history[0]["failed"][0], history[2]["failed"][0]
    assert first["kind"] == last["kind"] == "refused" and "cannot be read" in first["reason"]
    assert "another number, configuration or base model" in last["reason"]
    (left_out,) = history[0]["unevaluated"]
    assert left_out == {"client": 3, "reason": "its answer has no loss and acc that it can be"}
    assert "Traceback" not in (tmp_path / "run" / "exp_print.log").read_text() + "".join(capfd.readouterr())


def test_who_may_have_a_number(settings, cluster):
    """A number that is taken by a process that lives; a token of another form; a wrong proof, configuration or size."""
    more = {"federate.total_round_num": 2, "lowrank.timeout": 60.0}
    started = cluster.launch(2, more, only=[0])
    one = Hostile(cluster.commands[1], settings, 1)
    cluster.wait_for(lambda: one.join() == "OK")

    def refused(client=1, token="c" * 32, **changed):
        introduction = one.node.introduction(1)
        content = text_of(Parcel({}, **{**introduction.facts, "client": client, **changed}))
        return Stranger(cluster.ports[0], token).send(msg_type="join_in", content=content)

    denied = "PERMISSION_DENIED"
    assert refused() == denied, "client 1 has joined already"
    assert refused(token="secret") == "INVALID_ARGUMENT"
    assert {refused(client=wrong) for wrong in (3, -1, "2", None, [2], 10**30, True)} == {denied}
    assert refused(client=2, proof={}) == refused(client=2, proof=[]) == refused(client=2, agreed=7) == denied
    assert refused(client=2, config={}) == refused(client=2, config={"federate": {"client_num": 10**9}}) == denied
    assert refused(client=2, samples=10**9) == refused(client=2, samples=-1) == refused(client=2, samples="9") == denied
    assert one.join() == "OK", "the same process once more"
    assert started[0][0].is_alive()


def test_a_message_larger_than_expected_is_refused(cluster):
    more = {"distribute.grpc_max_receive_message_length": 1_000_000, "lowrank.timeout": 90.0}
    started = cluster.launch(2, more, only=[0])
    stranger = Stranger(cluster.ports[0])
    cluster.wait_for(lambda: stranger.send() == "UNAUTHENTICATED")
    before = memory_of(started[0][0].pid)
    for _ in range(3):
        assert stranger.send(content="x" * 50_000_000) == "RESOURCE_EXHAUSTED"
    assert memory_of(started[0][0].pid) - before < 50e6
    assert stranger.send() == "UNAUTHENTICATED", "it still answers"


def test_a_client_whose_answer_is_too_large_says_which_key_to_raise(cluster):
    """The server goes on without it."""
    own = {"llm.adapter.args": [{"r": 32, "alpha": 32}], "federate.total_round_num": 1, "lowrank.min_clients": 1}
    small = {2: {"distribute.grpc_max_send_message_length": 12_000}}
    workers = cluster.run(2, own, changed=small, codes={2: 2})
    assert "raise distribute.grpc_max_send_message_length" in workers[2].said
    (failed,) = workers[0].history[0]["failed"]
    assert failed["client"] == 2 and failed["reason"] == "its process is gone"


def memory_of(process: int) -> int:
    """Resident bytes of a process."""
    (line,) = (x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024
