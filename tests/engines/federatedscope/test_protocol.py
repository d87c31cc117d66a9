"""Who may send what: what a client does not tell, cannot say, or has no business to send ends nobody else's run."""

from __future__ import annotations

import base64
import json
import pickle
import socket
from types import SimpleNamespace

import pytest
import torch

import fs_lowrank
from fs_lowrank.errors import RunFailed
from fs_lowrank.methods import revisions
from fs_lowrank.rounds.joining import proof_of
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.site import Site

pytestmark = pytest.mark.federatedscope
KEYS = {"federate.method": "rolora", "train.local_update_steps": 2, "federate.total_round_num": 3}
SERVER, CLIENT = (
    "engines.federatedscope.distributed_server.DistributedServer",
    "engines.federatedscope.client.LowRankClient",
)
#: half of a surrogate pair
HALF = "\ud800"


def keys(tmp_path, **more):
    return {**KEYS, "outdir": str(tmp_path / "run"), **more}


def log_of(tmp_path, worker=0) -> str:
    folder = tmp_path / "run" / (f"client_{worker}" if worker else "")
    return (folder / "exp_print.log").read_text()


# -- the schema ----------------------------------------------------------------------------------------


def read(kind, content, serves=True, sender=1, asked=()):
    from federatedscope.core.message import Message

    from fs_lowrank.engines.federatedscope import messages

    return messages.read(Message(kind, sender, [0], 0, content, 0).transform(), serves, sender, asked).content


@pytest.mark.parametrize(
    "content, said",
    [
        ({"client_resource": 0.5}, ""),
        ({"num_sample": 4}, r"it has \['num_sample'\], federate.join_in_info asks for \['client_resource'\]"),
        ({"client_resource": 0.5, "num_sample": 4}, "federate.join_in_info asks for"),
        ({"client_resource": 0.0}, "client_resource: Input should be greater than 0"),
        ({"client_resource": "fast"}, "client_resource: Input should be a valid number"),
        ({"num_sample": 0.5}, "num_sample: Input should be a valid integer"),
    ],
)
def test_information_on_joining_is_what_was_asked_for(content, said):
    if not said:
        assert read("join_in_info", content, asked=["client_resource"]).model_dump(exclude_unset=True) == content
        return
    with pytest.raises(ValueError, match=said):
        read("join_in_info", content, asked=["client_resource"])


def test_no_information_at_all():
    from federatedscope.core.message import Message

    from fs_lowrank.engines.federatedscope import messages

    request = Message("join_in_info", 1, [0], 0, {"a": 1.0}, 0).transform()
    request.msg["content"].dict_msg_stringkey.dict_value.clear()
    with pytest.raises(ValueError, match=r"it has \[\], federate.join_in_info asks for \['num_sample'\]"):
        messages.read(request, True, 1, ["num_sample"])
    assert messages.read(request, True, 1).content.model_dump(exclude_unset=True) == {}


def test_a_client_takes_shares_from_other_clients_and_the_rest_from_the_server():
    from fs_lowrank.engines.federatedscope.wire import content_of

    share = content_of(Parcel({"w": torch.ones(2)}), distributed=True)
    assert read("ss_model_para", share, serves=False, sender=2).opened().nbytes == 8
    for kind, content in {
        "stopped": "go home",
        "finish": "finish",
        "assign_client_id": "3",
        "model_para": share,
    }.items():
        with pytest.raises(ValueError, match="msg_type: Input should be 'ss_model_para'"):
            read(kind, content, serves=False, sender=2)
    with pytest.raises(ValueError, match="Input tag 'ss_model_para'"):
        read("ss_model_para", share, serves=False, sender=0)
    assert read("stopped", "no room", serves=False, sender=0) == "no room"


def test_every_text_of_a_message_has_a_longest_length():
    """By which pydantic also refuses lone surrogates; a request to join is read as JSON, which it refuses there."""
    from fs_lowrank.engines.federatedscope import messages

    def unbounded(node, place=""):
        if isinstance(node, dict):
            bounded = {"maxLength", "pattern", "const", "enum", "contentSchema"} & node.keys()
            if node.get("type") == "string" and not bounded:
                yield place
        for name, inner in (
            node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        ):
            yield from unbounded(inner, f"{place}/{name}")

    schemas = (messages._TO_SERVER, messages._FROM_SERVER, messages._AMONG_CLIENTS, *messages._FACTS.values())
    assert not [place for schema in schemas for place in unbounded(schema.json_schema())]


ORDER = {"round": 1, "purpose": "train", "since": None, "stands": 0}


@pytest.mark.parametrize(
    "serves, facts, said",
    [
        (True, {"round": 1, "error": HALF, "lost": False}, "Failed.error: .*unicode"),
        (True, {"round": 1, "samples": 1, "loss": 0.1, HALF: 1}, "Trained: .*unicode"),
        (False, {**ORDER, "stamp": HALF}, "stamp: .*unicode"),
        (False, {**ORDER, "purpose": HALF}, "purpose: "),
    ],
)
def test_lone_surrogates_in_facts(serves, facts, said):
    content = base64.b64encode(Parcel({}, **facts).to_bytes()).decode()
    with pytest.raises(ValueError, match=said) as raised:
        read("model_para", content, serves, sender=1 if serves else 0)
    assert str(raised.value).encode()


@pytest.mark.parametrize("field", ["proof", "config", "revisions", "token"])
def test_lone_surrogates_in_a_request_to_join(field):
    request = {"address": {"host": "127.0.0.1", "port": 9}, "token": "a" * 32, "process": "b" * 32, "samples": 5}
    request |= {"proof": {}, "config": {}, "revisions": {}}
    assert read("join_in", json.dumps(request)).samples == 5
    request[field] = HALF if field == "token" else {"name": HALF}
    with pytest.raises(ValueError, match="join_in.content: Invalid JSON"):
        read("join_in", json.dumps(request))


def test_what_is_sent_can_be_encoded():
    from fs_lowrank.engines.federatedscope.wire import content_of, encodable, parcel_of

    assert encodable(f"caf\u00e9 {HALF}") == "caf\u00e9 ?"
    back = parcel_of(content_of(Parcel({}, round=1, error=HALF + "x" * 5000, lost=False), distributed=True))
    assert back.facts == {"round": 1, "error": "?" + "x" * 3999, "lost": False}


@pytest.mark.parametrize("raw", [False, True], ids=["as_we_send_it", "as_it_is"])
def test_a_failure_that_cannot_be_encoded_ends_the_run_with_its_reason(settings, cluster, tmp_path, raw):
    """Too few clients remain, and the others are told so."""
    sabotage = {2: {"says": HALF, "raw": raw}}
    workers = cluster.run(settings, 2, keys(tmp_path, **{"lowrank.min_clients": 2}), sabotage=sabotage)
    reason = "Failed.error: Input should be a valid string" if raw else "RuntimeError: ?"
    assert workers[0].kind == "RunFailed" and "1 usable updates" in workers[0].said and reason in workers[0].said
    for worker in (1, 2):
        assert workers[worker].kind == "RunFailed" and reason in workers[worker].said


# -- what a handler fails at ---------------------------------------------------------------------------


def test_a_handler_of_a_delivery_that_fails(settings, cluster, tmp_path):
    """The server cannot take in the first client that it has welcomed; that client asks again."""
    workers = cluster.run(settings, 2, keys(tmp_path), sabotage={0: {"fails_at": (f"{SERVER}._joined", 1)}})
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert [r["clients"] for r in workers[0].history] == [[1, 2]] * 3
    said = "ignored what became of a message 'assign_client_id' to client"
    assert log_of(tmp_path).count(said) == 1


def test_a_request_to_join_that_fails(settings, cluster, tmp_path):
    """A stranger wants number 1 twice and does not answer; the second request fails, and no other does."""
    from tests.engines.federatedscope.test_network import Stranger

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        fails = {0: {"fails_at": (f"{SERVER}._objection", 2)}}
        more = {"lowrank.timeout": 60.0, "federate.client_num": 1}
        started = cluster.launch(settings, 1, keys(tmp_path, **more), sabotage=fails, only=[0])
        stranger = Stranger(cluster.ports[0])
        cluster.wait_for(lambda: stranger.send() == "UNAUTHENTICATED")
        config = fs_lowrank.load_config(settings, cluster.commands[0])
        site = Site(config)
        request = {
            "address": {"host": "127.0.0.1", "port": silent.getsockname()[1]},
            **{"process": "b" * 32, "proof": proof_of(site), "revisions": revisions(config)},
            **{"config": config.to_dict(), "samples": site.clients[0].num_samples},
        }
        for token in ("a" * 32, "c" * 32):
            assert stranger.send(msg_type="join_in", sender=1, content=json.dumps({**request, "token": token})) == "OK"
        cluster.wait_for(lambda: "ignored a message 'join_in' of client 1: RuntimeError: sabotage" in log_of(tmp_path))
        own = {"distribute.role": "client", "distribute.data_idx": 1, "distribute.client_port": cluster.ports[1]}
        started[1] = cluster.start(settings, {**cluster.commands[0], **own})
        workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0], [w.said for w in workers.values()]


def test_a_wrong_message_that_cannot_be_noted(settings, cluster, tmp_path):
    """What the server does about a message that does not fit fails; that is the message's alone."""
    from tests.engines.federatedscope.test_network import Stranger, token_of

    sabotage = {0: {"waits_for": str(tmp_path), "fails_at": (f"{SERVER}._wrong", 1)}}
    started = cluster.launch(settings, 2, keys(tmp_path), sabotage=sabotage)
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    client = Stranger(cluster.ports[0], token_of(tmp_path, 2, cluster.ports[2]))
    assert client.send(msg_type="metrics", content=[0.5]) == "OK"
    (tmp_path / "go").touch()
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert [r["clients"] for r in workers[0].history] == [[1, 2]] * 3
    said = "ignored what follows from a wrong message 'metrics' of client 2: RuntimeError: sabotage"
    assert log_of(tmp_path).count(said) == 1


# -- information that is missing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sabotage",
    [{"dies_at": (f"{CLIENT}.callback_funcs_for_join_in_info", 1)}, {"informs": {"client_resource": 1.0}}],
    ids=["dies", "something_else"],
)
def test_the_run_starts_without_information_that_does_not_come(settings, cluster, tmp_path, sabotage):
    more = {"lowrank.timeout": 5.0, "federate.join_in_info": ["num_sample"]}
    workers = cluster.run(settings, 2, keys(tmp_path, **more), sabotage={2: sabotage})
    assert [workers[w].code for w in (0, 1)] == [0, 0], workers[0].said
    assert [r["clients"] for r in workers[0].history] == [[1] if "dies_at" in sabotage else [1, 2]] * 3
    log = log_of(tmp_path)
    assert log.count("clients [2] have not told what federate.join_in_info asks for within 5 s; starting without") == 1
    assert "starting with them" not in log


def test_the_run_does_not_start_without_information_that_it_needs(settings, cluster, tmp_path):
    more = {"lowrank.timeout": 5.0, "federate.join_in_info": ["client_resource"], **resources(tmp_path)}
    workers = cluster.run(settings, 2, keys(tmp_path, **more), sabotage={2: {"informs": {"num_sample": 3}}})
    assert [w.kind for w in workers.values()] == ["RunFailed"] * 3
    for worker in workers.values():
        assert "clients [2] have not told their client_resource within 5 s" in worker.said


# -- the framework's samplers --------------------------------------------------------------------------


def resources(tmp_path, sampler="group") -> dict:
    info = tmp_path / "resources.pkl"
    info.write_bytes(pickle.dumps({i: {"computation": 10.0 + i, "communication": 100.0 + i} for i in range(11)}))
    return {"federate.sampler": sampler, "federate.resource_info_file": str(info)}


@pytest.mark.parametrize("sampler", ["group", "responsiveness"])
def test_clients_that_do_not_answer_are_drawn_again(quick, tmp_path, monkeypatch, sampler):
    """They drop out, fail, or are refused."""
    from federatedscope.core import sampler as samplers

    from fs_lowrank.engines.federatedscope.client import LowRankClient

    for cls in (samplers.GroupSampler, samplers.ResponsivenessRealtedSampler):

        def sample(self, size, draw=cls.sample):
            assert self.client_state.sum() == 10, "a client that is not idle is never drawn, and the draw may not end"
            return draw(self, size)

        monkeypatch.setattr(cls, "sample", sample)
    train = LowRankClient._train

    def spoils(self, round):
        if self.ID == 1:
            raise RuntimeError("out of memory")
        parcel, samples = train(self, round)
        return Parcel(parcel.tensors, **{**parcel.facts, **({"loss": "low"} if self.ID == 2 else {})}), samples

    monkeypatch.setattr(LowRankClient, "_train", spoils)
    shape = {
        "federate.client_num": 10,
        "federate.sample_client_num": 5,
        "data.splitter": "iid",
        "data.splitter_args": [],
    }
    shape |= {"federate.total_round_num": 8, "lowrank.drop_rate": 0.3, "train.local_update_steps": 1, "eval.freq": 0}
    result = fs_lowrank.run(quick("run", {**KEYS, **shape, **resources(tmp_path, sampler)}), "federatedscope")
    assert [len(r["selected"]) for r in result.history] == [5] * 8
    assert {f["kind"] for r in result.history for f in r["failed"]} == {"dropped", "failed", "refused"}


def test_a_sampler_draws_a_lost_client_again(settings, cluster, tmp_path):
    """Client 2 falls silent in the second round, returns by the same command, and takes part."""
    more = {"lowrank.timeout": 5.0, "federate.total_round_num": 12, "federate.join_in_info": ["client_resource"]}
    more |= resources(tmp_path)
    started = cluster.launch(settings, 2, keys(tmp_path, **more), sabotage={0: {"sleeps": 0.7}, 2: {"dies_in": 2}})
    assert cluster.wait(*started[2]).code == 9
    started[2] = cluster.again(settings, 2)
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    assert [r["selected"] for r in workers[0].history] == [[1, 2]] * 12
    assert workers[0].history[-1]["clients"] == [1, 2]


# -- secret sharing ------------------------------------------------------------------------------------

SHARING = {"federate.method": "fedlora", "federate.use_ss": True, "federate.client_num": 3}


def test_a_client_cannot_stop_another_nor_share_twice(quick, settings, assert_same, cluster, tmp_path):
    alone = fs_lowrank.run(quick("alone", {**KEYS, **SHARING, "federate.use_ss": False}))
    workers = cluster.run(settings, 3, keys(tmp_path, **SHARING), sabotage={2: {"harms": True}})
    assert [w.code for w in workers.values()] == [0] * 4, [w.said for w in workers.values()]
    assert_same(dict(alone.model.named_parameters()), workers[0].tensors)
    log = log_of(tmp_path, 1)
    assert log.count("ignored a message 'stopped' of client 2: msg_type: Input should be 'ss_model_para'") == 3
    for round in (1, 2, 3):
        assert f"client 1 refused a share of client 2 for round {round}: it has sent one already" in log


def shares(monkeypatch, change):
    """After each share that client 2 sends client 1, ``change`` is called with the client and the message."""
    from fs_lowrank.engines.federatedscope.client import LowRankClient

    deliver = LowRankClient._deliver

    def more(self, receiver, message, size=0):
        if (self.ID, receiver, message.msg_type) == (2, 1, "ss_model_para"):
            message = change(self, message)
        deliver(self, receiver, message, size)

    monkeypatch.setattr(LowRankClient, "_deliver", more)


def test_shares_of_who_does_not_take_part(quick, assert_same, monkeypatch, caplog):
    import copy

    alone = fs_lowrank.run(quick("alone", {**KEYS, **SHARING, "federate.use_ss": False}))

    def strange(client, message):
        for sender in (1, 9):
            other = copy.copy(message)
            other.sender = sender
            client.comm_manager.send(other)
        return message

    shares(monkeypatch, strange)
    assert_same(alone, fs_lowrank.run(quick("shared", {**KEYS, **SHARING}), "federatedscope"))
    for sender in (1, 9):
        said = f"client 1 refused a share of client {sender} for round 1: it does not take part in the round"
        assert said in caplog.text


def test_a_share_of_another_shape_is_named(quick, monkeypatch):
    from fs_lowrank.engines.federatedscope.wire import content_of, parcel_of, with_content

    def narrow(client, message):
        tensors = {name: tensor[:1] for name, tensor in parcel_of(message.content).tensors.items()}
        return with_content(message, content_of(Parcel(tensors), distributed=False))

    shares(monkeypatch, narrow)
    with pytest.raises(RunFailed, match="the share that client 2 sent client 1 has other names, shapes or types"):
        fs_lowrank.run(quick("run", {**KEYS, **SHARING}), "federatedscope")


def test_shares_of_a_round_that_a_resumed_server_begins_again(quick, settings, assert_same, cluster, tmp_path):
    """The server ends when it has the first sum of round 2; the shares of that attempt are in no sum of the next."""
    alone = fs_lowrank.run(quick("alone", {**KEYS, **SHARING, "federate.use_ss": False}))
    dies = {"dies_at": ("engines.federatedscope.server.LowRankServer.take_update", 4)}
    started = cluster.launch(settings, 3, keys(tmp_path, **SHARING), sabotage={0: dies})
    assert cluster.wait(*started[0]).code == 9
    started[0] = cluster.again(settings, 0, {"resume": True})
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0] * 4, [w.said for w in workers.values()]
    assert_same(dict(alone.model.named_parameters()), workers[0].tensors)


# -- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [False, True], ids=["updates", "shares"])
def test_both_ends_count_the_bytes_that_arrived(settings, cluster, tmp_path, shares):
    more = {"federate.make_global_eval": False, **SHARING, "federate.use_ss": shares}
    workers = cluster.run(settings, 3, keys(tmp_path, **more))
    assert [w.code for w in workers.values()] == [0] * 4, [w.said for w in workers.values()]
    counted = {}
    for path in (tmp_path / "run").rglob("system_metrics.log"):
        (line,) = map(json.loads, path.read_text().splitlines())
        counted[line["id"]] = line["total_upload_bytes"], line["total_download_bytes"]
    down = sum(r["downlink_bytes"] for r in workers[0].history)
    up = sum(r["uplink_bytes"] for r in workers[0].history)
    among = (
        up * 2 // 3 if shares else 0
    )  # of three shares of each client two go to other clients, and a sum to the server
    assert counted.keys() == {0, 1, 2, 3} and counted[0] == (down, up - among)
    assert sum(counted[c][0] for c in (1, 2, 3)) == up
    assert sum(counted[c][1] for c in (1, 2, 3)) == down + among
    for client in (1, 2, 3):
        received = sum(r["client_downlink_bytes"].get(str(client), 0) for r in workers[0].history)
        assert counted[client][1] == received + among // 3 > 0


class Counts:
    """What the framework's monitor counts."""

    def __init__(self):
        self.up = self.down = 0

    def track_upload_bytes(self, size):
        self.up += size

    def track_download_bytes(self, size):
        self.down += size


def test_what_did_not_arrive_is_not_counted(monkeypatch, caplog):
    """A client sends over gRPC to a port where nobody listens, then to a server that knows it."""
    from fs_lowrank.engines.federatedscope import comm, wire
    from fs_lowrank.engines.federatedscope.client import LowRankClient
    from tests.engines.federatedscope.conftest import free_ports

    config = SimpleNamespace(lowrank=SimpleNamespace(timeout=1.0))
    session = SimpleNamespace(role="client", config=config, proof={}, largest_message=lambda allowed: 2**20)
    monkeypatch.setattr(comm, "current", lambda: session)
    section = SimpleNamespace(
        grpc_compression="nocompression", grpc_max_send_message_length=2**20, grpc_max_receive_message_length=2**20
    )
    ports = free_ports(2)
    client = LowRankClient()
    client.ID, client.state, client.server_id, client.distributed, client._monitor = 1, 0, 0, True, Counts()
    client.comm_manager = comm.Comm("127.0.0.1", ports[1], 1, section)
    client.comm_manager.neighbors[0], client.comm_manager.tokens[0] = f"127.0.0.1:{ports[0]}", "t"
    parcel = Parcel({"w": torch.ones(4)}, round=1, samples=1, loss=0.5)

    def send() -> None:
        message = wire.message(client, "model_para", [0], wire.content_of(parcel, distributed=True))
        client._deliver(0, message, parcel.nbytes)
        client.comm_manager.receive(20.0).settle()

    send()
    assert client._monitor.up == 0 and "client 1: its model_para did not arrive" in caplog.text
    session.role = "server"
    server = comm.Comm("127.0.0.1", ports[0], 1, section)
    server.senders["t"], server.monitor = 1, Counts()
    try:
        send()
        assert server.receive(20.0).content.opened().facts["round"] == 1
        assert client._monitor.up == server.monitor.down == parcel.nbytes == 16
    finally:
        server.close(1.0)
        client.comm_manager.close(1.0)
