"""Updates that are refused, and methods that cannot be created."""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch

from fs_lowrank.algebra import FlatTensors
from fs_lowrank.errors import UserError
from fs_lowrank.methods import (
    Averaging,
    Phase,
    RefusedUpdate,
    Update,
    create_method,
    get_method_class,
    list_methods,
    register_method,
)
from fs_lowrank.rounds.admission import check_update

SIZES = (3, 10, 27)


def without(tensors, name):
    return {n: t for n, t in tensors.items() if n != name}


#: what is made of an update's tensors and the name of one of them, and what is said
FAULTS = {
    "transposed": (lambda t, n: {**t, n: t[n].transpose(0, 1).contiguous()}, "has shape"),
    "one letter more": (lambda t, n: {**without(t, n), f"{n}s": t[n]}, "unknown tensor.*did you mean 'base_model"),
    "one too many": (lambda t, n: {**t, "more": t[n]}, "unknown tensor 'more'"),
    "nothing": (lambda t, n: {}, "is missing"),
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_wrong_update_is_refused_by_client_and_tensor(toy, federation, how):
    fed = federation(toy.method("fedlora"), SIZES)
    update, (spoil, said) = fed.update(2, 1), FAULTS[how]
    name = sorted(update.tensors)[1]
    with pytest.raises(RefusedUpdate, match=f"client 2.*{said}") as refusal:
        fed.receive(dataclasses.replace(update, tensors=spoil(update.tensors, name)), 1)
    assert how in ("one too many", "nothing") or name in str(refusal.value)


@pytest.mark.parametrize("name", ["flexlora", "flora"])
def test_the_rank_of_another_client_is_a_wrong_shape(toy, federation, name):
    fed = federation(toy.method(name, ranks=(1, 3, 2)), SIZES)
    with pytest.raises(RefusedUpdate, match=r"client 1: .* has shape \(3, .*expected \(1, "):
        fed.receive(dataclasses.replace(fed.update(2, 1), client=1), 1)


def test_rolora_refuses_the_other_half(toy, federation):
    fed = federation(toy.method("rolora"), SIZES)
    late = fed.update(1, 2)
    with pytest.raises(RefusedUpdate, match="unknown tensor .*lora_A"):
        fed.receive(late, 1)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_checked_update_is_a_copy(mixed):
    # The tensors of a client are the parameters of a shared model, which the next client overwrites.
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16 if mixed else torch.float32)}
    checked = check_update(Update(1, 5, tensors), tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert all((t == 1).all() for t in checked.tensors.values())
    assert isinstance(checked.tensors, FlatTensors) != mixed


# -- names and hyperparameters -------------------------------------------------------------------------


@pytest.mark.usefixtures("own_methods")
def test_the_registry():
    assert list_methods() == sorted(list_methods()) and {"fedavg", "flora"} <= set(list_methods())
    assert get_method_class("RoLoRA").name == "rolora" and get_method_class("fedit") is get_method_class("lora")
    with pytest.raises(UserError, match="no method 'rollora'; did you mean 'rolora'.*there are: .*flora"):
        create_method("rollora")

    @register_method("half_and_half")
    class HalfAndHalf(Averaging):
        @dataclass(frozen=True)
        class Params:
            share: float = field(default=0.5, metadata={"min": 0.0, "max": 1.0})

        def phases(self, round, client=None):
            return [Phase(("lora_B",), steps=1), Phase(("lora_A", "head"), steps=2)]

    assert "half_and_half" in list_methods() and create_method("half_and_half", share=0.25).params.share == 0.25
    with pytest.raises(UserError, match="registered already"):
        register_method("rolora")(HalfAndHalf)

    class Narrow(HalfAndHalf):
        @dataclass(frozen=True)
        class Params:
            width: float = 0.5

    with pytest.raises(UserError, match="'width' is a key of the section lowrank already"):
        register_method("narrow")(Narrow)
    assert "narrow" not in list_methods()


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("rolora", {"mix": 1.5}, "lowrank.mix.*1.5.*at most 1"),
        ("rolora", {"mix": "half"}, "lowrank.mix"),
        ("rolora", {"miks": 0.5}, "unknown key 'lowrank.miks'; did you mean 'lowrank.mix'|did you mean 'mix'"),
        ("rolora", {"mix": 0.5}, "number of rounds"),
        ("flexlora", {"ranks": (2, 0)}, "lowrank.ranks.*at least 1"),
        ("flexlora", {"split": "c"}, "one of b, sqrt"),
        ("fedlora", {"ranks": (2,)}, "keys of fedlora: none"),
    ],
)
def test_hyperparameters_are_checked(name, params, message):
    with pytest.raises(UserError, match=message):
        create_method(name, **params)
