"""What travels: no pickle, real sizes; secret shares and rounding by themselves."""

import base64
import os
import pickle

import pytest
import torch

pytestmark = pytest.mark.federatedscope


@pytest.fixture
def Parcel():
    from fs_lowrank.engines.federatedscope.wire import Parcel

    return Parcel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8])
def test_there_and_back(Parcel, dtype):
    tensors = {"a.lora_A.default.weight": torch.arange(6).reshape(2, 3).to(dtype), "merge:3:b": torch.ones(4)[::2]}
    back = Parcel.of(Parcel(tensors, round=3, loss=0.1, train=True).encode())
    assert back.facts == {"round": 3, "loss": 0.1, "train": True}
    for name, tensor in tensors.items():
        assert torch.equal(back.tensors[name], tensor) and back.tensors[name].dtype == tensor.dtype


def test_nothing(Parcel):
    assert not Parcel.of(Parcel({}, error="x").encode()).tensors


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
def test_what_is_no_parcel_is_refused_and_never_unpickled(Parcel, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the content"):
        Parcel.of(content)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("facts", ['{"self": 1}', "[1]", "1", "x", "[" * 100_000, '{"samples": ' + "9" * 5000 + "}"])
def test_facts_that_are_none_are_a_value_error(Parcel, facts):
    from safetensors.torch import save

    content = base64.b64encode(save({"a": torch.ones(2)}, {"facts": facts})).decode()
    with pytest.raises(ValueError, match="the content cannot be read") as refusal:
        Parcel.of(content)
    assert len(str(refusal.value)) < 400


def test_any_other_name_is_a_fact(Parcel):
    from safetensors.torch import save

    back = Parcel.of(save({"a": torch.ones(2)}, {"facts": '{"tensors": 3, "cls": 4}'}))
    assert back.facts == {"tensors": 3, "cls": 4} and list(back.tensors) == ["a"]


def test_the_framework_measures_what_it_holds(Parcel):
    from federatedscope.core.message import Message

    tensors = {"a": torch.zeros(1000), "b": torch.zeros(10, dtype=torch.float64)}
    down, up = Message(msg_type="model_para", receiver=[1, 2], content=Parcel(tensors)).count_bytes()
    assert 4080 <= down < 4400 and up == 2 * down


@pytest.mark.parametrize("parties", [2, 5, 12])
def test_shares(parties):
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
def test_what_cannot_be_shared(value):
    from fs_lowrank.engines.federatedscope.sums import split_secret

    with pytest.raises(ValueError, match="does not fit the fixed-point numbers"):
        split_secret({"w": torch.tensor([value])}, 1, 2)


@pytest.mark.parametrize("nbits, worst", [(8, 1 / 127), (16, 1 / 32767)])
def test_rounding(nbits, worst):
    from fs_lowrank.engines.federatedscope.sums import dequantise, quantise

    torch.manual_seed(0)
    tensors = {
        "x.lora_A.default.weight": torch.randn(8, 16),
        "zero": torch.zeros(3, 2),
        "merge:1:a": torch.randn(5),
        "x:count": torch.tensor([3]),
    }
    packed = quantise(tensors, nbits)
    back = dequantise(packed, tensors)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert (back[name] - tensor).abs().max() <= 0.51 * worst * max(float(tensor.abs().max()), 1e-9)
    again = dequantise(quantise(back, nbits), tensors)
    for name in tensors:
        torch.testing.assert_close(again[name], back[name], rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="is not quantised"):
        dequantise(tensors)
