"""The content of messages: no pickle, true sizes; secret shares; quantisation equal to the framework's."""

import base64
import os
import pickle
import re

import pytest
import torch

from fs_lowrank.errors import UserError
from fs_lowrank.rounds.parcel import Parcel

pytestmark = pytest.mark.federatedscope


def test_content_survives_as_text_and_within_one_process():
    from fs_lowrank.engines.federatedscope.wire import content_of, parcel_of

    tensors = {"a.lora_A.default.weight": torch.arange(6.0).reshape(2, 3)}
    for distributed in (True, False):
        back = parcel_of(content_of(Parcel(tensors, round=3), distributed))
        assert back.facts == {"round": 3} and torch.equal(back.tensors["a.lora_A.default.weight"], *tensors.values())


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "content",
    [
        base64.b64encode(pickle.dumps(Harm())).decode(),
        "",
        "!!",
        base64.b64encode(b"\xff" * 40).decode(),
        None,
        3,
        {},
        [1],
        base64.b64encode((10).to_bytes(8, "little") + b"{}        ").decode(),
    ],
    ids=range(9),
)
def test_other_content_is_refused_and_never_unpickled(content, tmp_path, monkeypatch):
    from fs_lowrank.engines.federatedscope.wire import parcel_of

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the content"):
        parcel_of(content)
    assert not (tmp_path / "harmed").exists()


def test_the_framework_measures_the_size_of_the_tensors():
    from federatedscope.core.message import Message

    from fs_lowrank.engines.federatedscope.wire import content_of

    tensors = {"a": torch.zeros(1000), "b": torch.zeros(10, dtype=torch.float64)}
    content = content_of(Parcel(tensors), distributed=False)
    down, up = Message(msg_type="model_para", receiver=[1, 2], content=content).count_bytes()
    assert 4080 <= down < 4400 and up == 2 * down


@pytest.mark.parametrize("parties", [2, 5, 12])
def test_secret_shares_add_up_to_the_tensor(parties):
    from fs_lowrank.engines.federatedscope.sums import add_shares, recover, split_secret

    torch.manual_seed(0)
    owners = [{"w": torch.randn(3, 4), "b": torch.randn(2)} for _ in range(parties)]
    weights = range(1, parties + 1)
    dealt = [split_secret(t, w, parties) for t, w in zip(owners, weights)]
    sums = [add_shares([shares[i] for shares in dealt]) for i in range(parties)]
    mean = recover(add_shares(sums), sum(weights), owners[0])
    for name in ("w", "b"):
        expected = sum(w * t[name] for t, w in zip(owners, weights)) / sum(weights)
        torch.testing.assert_close(mean[name], expected, rtol=0, atol=1e-6)
    one = dealt[0][1]["w"].double() / 2.0**63
    assert one.abs().max() > 0.1, "a share by itself is noise over the whole range"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_cannot_be_shared(value):
    from fs_lowrank.engines.federatedscope.sums import split_secret

    with pytest.raises(ValueError, match="does not fit the fixed-point numbers"):
        split_secret({"w": torch.tensor([value])}, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nbits", [8, 16])
def test_our_quantisation_is_the_frameworks_bit_for_bit(nbits, dtype):
    """The framework rounds only weights whose names say ``fc`` or ``conv``.

    Those of 16 bits it scales in 16 bits, which flips the sign of the largest; ours are what it makes of float32.
    """
    from federatedscope.core.compression import symmetric_uniform_dequantization, symmetric_uniform_quantization

    from fs_lowrank.algebra import wide
    from fs_lowrank.rounds.codec import Uniform

    drawn = torch.Generator().manual_seed(0)
    values = {
        "normal": torch.randn(40, 33, generator=drawn).to(dtype),
        "small": (torch.randn(7, 5, 3, generator=drawn) * 1e-3).to(dtype),
        "zero": torch.zeros(3, 2, dtype=dtype),
        "halves": (torch.arange(-8, 9) / 2).to(dtype),
        "one": torch.tensor([-3.25], dtype=dtype),
    }
    codec = Uniform(nbits)
    ours = codec.encode(values)
    back = codec.decode(ours, {})
    for name, value in values.items():
        theirs = symmetric_uniform_quantization({"fc.weight": value.to(wide(dtype))}, nbits)
        assert torch.equal(ours[f"quantised:{name}"], theirs["fc.weight_quant"])
        assert ours[f"quantised:{name}"].dtype == theirs["fc.weight_quant"].dtype
        assert torch.equal(ours[f"scale:{name}"].view(wide(dtype)), theirs["fc.weight_scale"].reshape(1))
        whole = symmetric_uniform_dequantization(theirs)["fc.weight"].to(dtype)
        assert torch.equal(back[name], whole) and back[name].dtype == dtype


def test_the_framework_makes_its_manager_as_ours_expects():
    import inspect

    from federatedscope.core.communication import gRPCCommManager
    from federatedscope.core.workers import client, server

    place = "fs_lowrank/engines/federatedscope/comm.py takes the place of the framework's gRPC manager"
    for worker in (client, server):
        source = inspect.getsource(worker)
        for part in ("gRPCCommManager(", "host=host", "port=port", "client_num=", "cfg=self._cfg.distribute"):
            assert part in source, f"{place} and is made with {part}, which {worker.__name__} does not say any more"
    for name in ("add_neighbors", "get_neighbors"):
        assert callable(getattr(gRPCCommManager, name, None)), f"{place} and inherits {name}, which is gone"


@pytest.mark.parametrize(
    "serves, changed, said",
    [
        (True, {}, ""),
        (True, {"state": "0"}, "model_para.state: "),
        (True, {"sender": -2}, "model_para.sender: "),
        (True, {"sender": 1.0}, "model_para.sender: "),
        (True, {"timestamp": float("nan")}, "model_para.timestamp: "),
        (True, {"timestamp": "now"}, "it is not a message: AssertionError"),
        (True, {"msg_type": "finish", "content": "finish"}, "Input tag 'finish'"),
        (True, {"msg_type": ["a"]}, "Input tag"),
        (True, {"msg_type": "metrics", "content": {"loss": float("inf")}}, "metrics.content"),
        (True, {"msg_type": "join_in", "content": "{"}, "join_in.content: Invalid JSON"),
        (True, {"msg_type": "join_in", "content": "[" * 200_000}, "join_in.content: Invalid JSON"),
        (True, {"msg_type": "join_in", "content": '{"token": "x"}'}, "join_in.content.address: Field required"),
        (True, {"content": "@"}, "the content cannot be read"),
        (False, {"msg_type": "stopped", "content": "x" * 5000}, "stopped.content: "),
        (False, {"msg_type": "address", "content": {1: "127.0.0.1:80"}}, "address.content.1: "),
    ],
)
def test_the_schema_names_the_field(serves, changed, said):
    from federatedscope.core.message import Message
    from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

    from fs_lowrank.engines.federatedscope import messages, wire

    parcel = Parcel({"w": torch.ones(2)}, round=1, samples=3, loss=0.5)
    values = {"msg_type": "model_para", "sender": 1, "receiver": [0], "state": 0, "timestamp": 0}
    values |= {"content": wire.content_of(parcel, distributed=True), **changed}
    request = protocol.MessageRequest()
    for name, value in values.items():
        request.msg[name].MergeFrom(Message().build_msg_value(value))
    if not said:
        assert messages.read(request, serves, sender=1).content.opened().facts == parcel.facts
        return
    with pytest.raises(ValueError, match=re.escape(said)):
        messages.read(request, serves, sender=1 if serves else messages.SERVER)


@pytest.mark.parametrize(
    "facts", [{}, {"round": 1, "samples": 3.5, "loss": 0.1}, {"round": 1, "samples": 3, "loss": 0.1, "x": 1}]
)
def test_the_facts_of_an_update_have_a_schema(facts):
    from federatedscope.core.message import Message

    from fs_lowrank.engines.federatedscope import messages, wire

    content = wire.content_of(Parcel({"w": torch.ones(2)}, **facts), distributed=True)
    with pytest.raises(ValueError, match="Trained|Failed"):
        messages.read(Message("model_para", 1, [0], 0, content, 0).transform(), True, sender=1)


def test_the_roster_shortens_the_wait_for_clients_that_miss_rounds(tmp_path):
    from fs_lowrank.engines.federatedscope.messages import Address, Request
    from fs_lowrank.engines.federatedscope.roster import Roster, own_token

    token = own_token(tmp_path / "client" / "token_1")
    assert own_token(tmp_path / "client" / "token_1") == token and len(token) == 32
    request = Request(
        address=Address(host="127.0.0.1", port=9),
        token=token,
        process="b" * 32,
        proof={},
        config={},
        revisions={},
        samples=5,
    )
    roster = Roster(tmp_path / "clients.json", timeout=16.0, resume=False)
    roster.add(3, request)
    waited = []
    for _ in range(7):
        waited.append(roster.patience(3))
        roster.missed(3)
    assert waited == [16, 8, 4, 2, 1, 1, 1]
    for path in (tmp_path / "clients.json", tmp_path / "client" / "token_1"):
        assert path.stat().st_mode & 0o077 == 0, "only the user may read tokens"
    resumed = Roster(tmp_path / "clients.json", timeout=16.0, resume=True)
    known = resumed.with_token(token)
    assert known is not None and known.number == 3 and not known.joined and resumed.patience(3) == 16
    (tmp_path / "clients.json").write_text("[{}]")
    with pytest.raises(UserError, match="clients.json, the clients of the run to resume, cannot be read"):
        Roster(tmp_path / "clients.json", timeout=16.0, resume=True)
