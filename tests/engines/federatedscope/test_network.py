"""Distributed runs over gRPC on the loopback interface, with processes that stop, return or send invalid messages.

Every wait has a limit.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.methods import get_method_class

pytestmark = pytest.mark.federatedscope
KEYS = {"federate.method": "rolora", "train.local_update_steps": 2, "federate.total_round_num": 3}


def keys(tmp_path, **more):
    return {**KEYS, "outdir": str(tmp_path / "run"), **more}


def records(tmp_path) -> list[dict]:
    path = tmp_path / "run" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fields(**changed) -> dict:
    """The fields of a valid message, with those in ``changed`` replaced."""
    return {
        "msg_type": "model_para",
        "sender": 2,
        "receiver": [0],
        "state": 0,
        "timestamp": 0,
        "content": "x",
        **changed,
    }


class Stranger:
    """A process that can reach a port; with ``token``, one that knows the token of a client."""

    def __init__(self, port: int, token: str = ""):
        import grpc
        from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service

        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)])
        self.stub, self.token = service.gRPCComServeFuncStub(self.channel), token

    def send_request(self, request) -> str:
        """The status that the receiver answers with."""
        return self._status(self.stub.sendMessage, request)

    def send_bytes(self, content: bytes) -> str:
        return self._status(self.channel.unary_unary("/gRPCComServeFunc/sendMessage"), content)

    def _status(self, method, sent) -> str:
        import grpc

        try:
            method(sent, timeout=20, metadata=(("fs-lowrank-token", self.token),))
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def send(self, **changed) -> str:
        return self.send_request(self.request(**changed))

    @staticmethod
    def request(**changed):
        from federatedscope.core.message import Message
        from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

        request = protocol.MessageRequest()
        for name, value in fields(**changed).items():
            request.msg[name].MergeFrom(Message().build_msg_value(value))
        return request


def token_of(tmp_path, client: int, port: int) -> str:
    return (tmp_path / "run" / f"client_{client}" / f"token_{port}").read_text()


# -- slow and silent parties ---------------------------------------------------------------------------


def test_a_stopped_client_does_not_delay_the_others_and_takes_part_again(settings, cluster, tmp_path):
    """A client that is stopped for longer than ``lowrank.timeout`` is left out of its rounds, and takes part later."""
    more = {"lowrank.timeout": 4.0, "federate.total_round_num": 14, "lowrank.min_clients": 2, "eval.freq": 0}
    started = cluster.launch(settings, 3, keys(tmp_path, **more), sabotage={0: {"sleeps": 0.5}})
    cluster.wait_for(lambda: len(records(tmp_path)) >= 2)
    os.kill(started[2][0].pid, signal.SIGSTOP)
    cluster.wait_for(lambda: any(f["client"] == 2 for r in records(tmp_path) for f in r["failed"]))
    left_out = len(records(tmp_path))
    cluster.wait_for(lambda: len(records(tmp_path)) >= left_out + 2)
    os.kill(started[2][0].pid, signal.SIGCONT)
    server = cluster.wait(*started[0])
    assert server.code == 0, server.said
    assert [r["round"] for r in server.history] == list(range(1, 15))
    assert all({1, 3} <= set(r["clients"]) for r in server.history)
    failures = [f for r in server.history for f in r["failed"]]
    assert {f["client"] for f in failures} == {2} and all("no answer within" in f["reason"] for f in failures)
    assert len(failures) < 12 and 2 in server.history[-1]["clients"]
    assert [cluster.wait(*started[client]).code for client in (1, 2, 3)] == [0, 0, 0]


def test_a_client_stopped_in_the_clients_evaluation_is_said_and_left_out(settings, cluster, tmp_path):
    """It is stopped while the server is between two rounds, so it neither trains nor evaluates any more."""
    more = {"lowrank.timeout": 8.0, "federate.make_global_eval": False, "eval.freq": 1, "lowrank.min_clients": 1}
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"waits_for": str(tmp_path)}})
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    os.kill(started[2][0].pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    server = cluster.wait(*started[0])
    assert server.code == 0, server.said
    assert [r["clients"] for r in server.history] == [[1, 2], [1], [1]]
    assert [sorted(r["client_scores"]) for r in server.history] == [["1", "2"], ["1"], ["1"]]
    log = (tmp_path / "run" / "exp_print.log").read_text()
    assert log.count("client 2 does not answer (deadline_exceeded") == 1 and "no evaluation of client 2" in log
    # Its share of the wait is halved each time: 8 s for the first answer, then 4, 2 and 1.
    assert sum(sum(r["seconds"].values()) for r in server.history) < 30


def test_a_refused_request_from_an_address_that_never_answers(settings, cluster, tmp_path):
    """The address accepts connections and never answers; the run continues as if there had been no request."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        started = cluster.launch(settings, 2, keys(tmp_path, **{"lowrank.timeout": 20.0}), only=[0, 1])
        cluster.wait_for(lambda: (tmp_path / "run" / "clients.json").exists())
        request = {
            "address": {"host": "127.0.0.1", "port": silent.getsockname()[1]},
            **{"token": "a" * 32, "process": "b" * 32, "proof": {}, "revisions": {}, "samples": 10},
            "config": fs_lowrank.load_config(settings, {"seed": 99}).to_dict(),
        }
        stranger = Stranger(cluster.ports[0])
        for _ in range(3):
            assert stranger.send(msg_type="join_in", content=json.dumps(request)) == "OK"
        started[2] = cluster.start(
            settings, {**cluster.commands[1], "distribute.data_idx": 2, "distribute.client_port": cluster.ports[2]}
        )
        server = cluster.wait(*started[0])
    assert server.code == 0, server.said
    assert [r["clients"] for r in server.history] == [[1, 2]] * 3 and not any(r["failed"] for r in server.history)


# -- return --------------------------------------------------------------------------------------------


def test_a_killed_client_returns_with_the_same_command(settings, cluster, tmp_path):
    more = {"federate.total_round_num": 12, "lowrank.min_clients": 1}
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"sleeps": 0.7}})
    cluster.wait_for(lambda: len(records(tmp_path)) >= 2)
    started[2][0].kill()
    started[2][0].join(10)
    started[2] = cluster.again(settings, 2)
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert 2 in workers[0].history[-1]["clients"]
    assert "cannot be reached at" not in (tmp_path / "run" / "exp_print.log").read_text(), "it is at its old address"


@pytest.mark.parametrize("method", ["rolora", "fedloru"])
def test_a_resumed_server_finds_its_clients(quick, settings, assert_same, cluster, tmp_path, method):
    """The clients keep running; the result is that of a run that was not interrupted."""
    shape = {"federate.total_round_num": 5, "federate.client_num": 2, "federate.method": method}
    shape |= {"lowrank.tau": 2} if method == "fedloru" else {}
    whole = fs_lowrank.run(quick("whole", {**KEYS, **shape}))
    started = cluster.launch(
        settings, 2, keys(tmp_path, **shape, **{"lowrank.min_clients": 2}), sabotage={0: {"dies_after": 3}}
    )
    assert cluster.wait(*started[0]).code == 9
    started[0] = cluster.again(settings, 0, {"resume": True})
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert [r["round"] for r in workers[0].history] == [1, 2, 3, 4, 5]
    assert_same(dict(whole.model.named_parameters()), workers[0].tensors, atol=0)


def test_clients_that_a_resumed_server_does_not_know_join_again(quick, settings, assert_same, cluster, tmp_path):
    """The file with their tokens is lost, so the server cannot call them; they hear that it does not know them."""
    shape = {"federate.total_round_num": 4, "federate.client_num": 2}
    whole = fs_lowrank.run(quick("whole", {**KEYS, **shape}))
    more = {**shape, "lowrank.min_clients": 2}
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"dies_after": 2}})
    assert cluster.wait(*started[0]).code == 9
    (tmp_path / "run" / "clients.json").unlink()
    started[0] = cluster.again(settings, 0, {"resume": True})
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert [r["clients"] for r in workers[0].history] == [[1, 2]] * 4
    assert_same(dict(whole.model.named_parameters()), workers[0].tensors, atol=0)


# -- messages that do not fit --------------------------------------------------------------------------

NESTED = "[" * 200_000 + "]" * 200_000
WRONG = {
    "type": {"msg_type": ["model_para"]},
    "unknown type": {"msg_type": "boss"},
    "sender": {"sender": "abc"},
    "another sender": {"sender": 1},
    "a state of text": {"state": "now"},
    "content of numbers": {"content": [1, 2]},
    "no parcel": {"content": base64.b64encode(b"junk").decode()},
    "nested": {"msg_type": "join_in", "content": NESTED},
    "a far round": {"msg_type": "metrics", "state": 2**31 - 1, "content": {"test_loss": 0.0}},
    "nan": {"msg_type": "metrics", "content": {"test_loss": float("nan")}},
    "text for a number": {"msg_type": "metrics", "content": {"test_loss": "low"}},
    "a list for metrics": {"msg_type": "metrics", "content": [0.5]},
    "time": {"timestamp": float("inf")},
    "information": {"msg_type": "join_in_info", "content": {"age": 3}},
    "the server's own": {"msg_type": "stopped", "content": "go home"},
}


def test_no_invalid_message_ends_the_server(quick, settings, assert_same, cluster, tmp_path, capfd):
    """Messages of strangers and invalid messages of clients are ignored, and do not change the result."""
    more = {"federate.client_num": 2, "federate.make_global_eval": False}
    local = fs_lowrank.run(quick("local", {**KEYS, **more}))
    # While the server waits for client 2, such a message would count as its answer, so they are sent between rounds.
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"waits_for": str(tmp_path)}})
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    port = cluster.ports[0]
    stranger, client = Stranger(port), Stranger(port, token_of(tmp_path, 2, cluster.ports[2]))
    for what, changed in WRONG.items():
        answer = stranger.send(**changed)
        assert answer == ("OK" if changed.get("msg_type") == "join_in" else "UNAUTHENTICATED"), what
        # Unless changed, each is the metrics of an evaluation that the server did not ask for.
        assert client.send(**{"msg_type": "metrics", **changed}) == "OK", what
    empty = Stranger.request()
    empty.Clear()
    assert client.send_request(empty) == "OK"
    for junk in (b"\xff" * 40, b"\n\x05\xffjunk", b"junk"):
        assert stranger.send_bytes(junk) == client.send_bytes(junk) == "INVALID_ARGUMENT", junk
    assert Stranger(cluster.ports[1]).send(msg_type="stopped", content="go home", sender=0) == "UNAUTHENTICATED"
    (tmp_path / "go").touch()
    workers = {w: cluster.wait(*process, timeout=120) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    said = (tmp_path / "run" / "exp_print.log").read_text()
    assert said.count("bytes that are no message") == 6
    assert "Traceback" not in said + "".join(capfd.readouterr())
    assert [r["clients"] for r in workers[0].history] == [[1, 2]] * 3
    assert_same(dict(local.model.named_parameters()), workers[0].tensors, atol=0)


def test_a_message_larger_than_expected_is_refused(settings, cluster, tmp_path):
    started = cluster.launch(settings, 2, keys(tmp_path, **{"lowrank.timeout": 90.0}), only=[0])
    stranger = Stranger(cluster.ports[0])
    cluster.wait_for(lambda: stranger.send() == "UNAUTHENTICATED")
    before = memory_of(started[0][0].pid)
    for _ in range(3):
        assert stranger.send(content="x" * 50_000_000) == "RESOURCE_EXHAUSTED"
    assert memory_of(started[0][0].pid) - before < 50e6
    assert stranger.send() == "UNAUTHENTICATED", "it still answers"


#: the methods that can keep what they merge beside the base
KEEPING = [name for name in fs_lowrank.list_methods() if hasattr(get_method_class(name).Params, "merge")]


@pytest.mark.parametrize("method", KEEPING)
def test_a_client_may_be_sent_what_has_grown_beside_the_base(wide, settings, tmp_path, method):
    """A client that is started again late is sent the whole model, with all that was merged until then."""
    from federatedscope.core.message import Message

    from fs_lowrank.engines.federatedscope import wire
    from fs_lowrank.engines.federatedscope.session import Session
    from fs_lowrank.methods import Update
    from fs_lowrank.rounds.parcel import Parcel

    own = {"model.type": f"{wide}@transformers", "federate.method": method, "federate.client_num": 2}
    own |= {"data.splitter": "iid", "data.splitter_args": [], "federate.mode": "distributed", "outdir": str(tmp_path)}
    own["llm.adapter.args"] = [{"r": 16, "alpha": 16, "modules": ["query", "key", "value", "intermediate.dense"]}]
    merged = Session(fs_lowrank.load_config(settings, {**own, "lowrank.merge": True}), tmp_path, "client", 1)
    every = {"lowrank.schedule": list(range(1, 19))} if "tau" in merged.method.params.__dataclass_fields__ else {}
    own |= {"lowrank.merge": False, "federate.total_round_num": 18, **every}
    session = Session(fs_lowrank.load_config(settings, own), tmp_path, "client", 1)
    one, model, state = session.method, session.site.model, session.site.initial_state
    limit = session.largest_message(300 * 2**20)
    for round in range(1, 19):
        sent = [
            Update(c, 10, {n: torch.randn_like(t) for n, t in one.expected(state, round, c).items()}) for c in (1, 2)
        ]
        with torch.no_grad():
            state, message = one.aggregate(sent, state, round)
        one.apply(model, one.tailor(message, 1), round)
    whole = wire.content_of(Parcel({**one.view(state, 1), **session.site.changed_base()}), distributed=True)
    bytes_sent = Message("model_para", 0, [1], 18, whole, 0).transform(to_list=True).ByteSize()
    assert 2**22 < bytes_sent < limit
    assert merged.largest_message(300 * 2**20) < 100 * 2**20, "what does not grow has a limit of its own"


def test_a_message_that_is_too_large_says_which_key_to_raise():
    import grpc

    from fs_lowrank.engines.federatedscope.comm import Undelivered

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "raise distribute.grpc_max_receive_" in str(Undelivered(code, "SERVER: Received message larger than max"))
    assert "raise distribute.grpc_max_send_" in str(Undelivered(code, "CLIENT: Sent message larger than max (9 vs. 5)"))
    assert "raise" not in str(Undelivered(code, "more than 5 bytes"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder with a BERT of one layer whose width lets an adapter grow to megabytes."""
    from transformers import BertConfig, BertModel

    from fs_lowrank.testing.small import save_tokenizer

    folder = tmp_path_factory.mktemp("wide")
    shape = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 384}
    config = BertConfig(vocab_size=save_tokenizer(folder), max_position_embeddings=64, **shape)
    BertModel(config).save_pretrained(str(folder))
    return folder


def memory_of(process: int) -> int:
    """Resident bytes of a process."""
    (line,) = (x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_a_client_cannot_send_an_update_in_the_name_of_another(settings, cluster, tmp_path):
    """The update names client 2 as its sender, and comes with the token of client 1."""
    from fs_lowrank.rounds.parcel import Parcel

    started = cluster.launch(settings, 2, keys(tmp_path), sabotage={0: {"sleeps": 1.0}})
    cluster.wait_for(lambda: len(records(tmp_path)) >= 1)
    forged = Parcel({"w": torch.zeros(2)}, round=2, samples=10**9, loss=0.0)
    content = base64.b64encode(forged.to_bytes()).decode()
    one = Stranger(cluster.ports[0], token_of(tmp_path, 1, cluster.ports[1]))
    assert one.send(sender=2, state=1, content=content) == "OK"
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert all(2 in r["clients"] for r in workers[0].history)


def test_information_that_the_framework_asks_for(settings, cluster, tmp_path):
    workers = cluster.run(settings, 2, keys(tmp_path, **{"federate.join_in_info": ["num_sample"]}))
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
