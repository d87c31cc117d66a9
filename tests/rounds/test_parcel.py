"""Parcels: the format of messages, which is never pickle."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save

from fs_lowrank.algebra import digest
from fs_lowrank.rounds.parcel import Parcel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8])
def test_tensors_and_facts_survive_serialisation(dtype):
    tensors = {"a.lora_A.default.weight": torch.arange(6).reshape(2, 3).to(dtype), "merge:3:b": torch.ones(4)[::2]}
    back = Parcel.of(Parcel(tensors, round=3, loss=0.1, train=True).to_bytes())
    assert back.facts == {"round": 3, "loss": 0.1, "train": True}
    for name, tensor in tensors.items():
        assert torch.equal(back.tensors[name], tensor) and back.tensors[name].dtype == tensor.dtype


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "data",
    [pickle.dumps(Harm()), b"", b"\xff" * 40, None, 3, "text", {}, (10).to_bytes(8, "little") + b"{}        "],
    ids=range(8),
)
def test_other_bytes_are_refused_and_never_unpickled(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the content"):
        Parcel.of(data)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("facts", ["[1]", "1", "x", "[" * 100_000, '{"samples": ' + "9" * 5000 + "}"])
def test_invalid_facts_are_a_value_error(facts):
    with pytest.raises(ValueError, match="the content cannot be read") as refusal:
        Parcel.of(save({"a": torch.ones(2)}, {"facts": facts}))
    assert len(str(refusal.value)) < 400


def test_facts_may_have_the_names_of_parameters():
    back = Parcel.of(save({"a": torch.ones(2)}, {"facts": '{"tensors": 3, "cls": 4, "self": 5}'}))
    assert back.facts == {"tensors": 3, "cls": 4, "self": 5} and list(back.tensors) == ["a"]


def test_a_digest_is_of_names_shapes_types_and_values():
    start = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3), "c": torch.ones(2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.0000001])},
        {"a": torch.zeros(2, 3)},
    ]
    assert digest(dict(reversed(start.items()))) == digest(start) != digest(start, "another seed")
    assert len({digest(t) for t in (start, *others)}) == 6


def test_whatever_reading_raises_is_a_refusal(monkeypatch):
    import safetensors.torch

    data = Parcel({"a": torch.ones(2)}, round=1).to_bytes()
    long = (2**40).to_bytes(8, "little") + data[8:]
    with pytest.raises(ValueError, match="the content cannot be read"):
        Parcel.of(long)
    vast = (10**8 + 1).to_bytes(8, "little") + b"[" * (10**8 + 1)
    with pytest.raises(ValueError, match="the content cannot be read: .*[Hh]eader"):
        Parcel.of(vast)
    for error in (MemoryError("full"), RecursionError("deep"), AssertionError("odd"), OverflowError("large")):

        def fail(data, error=error):
            raise error

        monkeypatch.setattr(safetensors.torch, "load", fail)
        with pytest.raises(ValueError, match="the content cannot be read"):
            Parcel.of(data)
