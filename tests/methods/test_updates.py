"""Updates that are refused, and methods that cannot be created."""

import dataclasses
from dataclasses import dataclass, field

import pytest

from fs_lowrank.errors import UserError
from fs_lowrank.methods import (
    Averaging,
    Phase,
    RefusedUpdate,
    create_method,
    get_method_class,
    list_methods,
    register_method,
)

SIZES = (3, 10, 27)


def test_a_tensor_of_another_name_and_a_missing_one_are_named(toy, federation):
    fed = federation(toy.method("fedlora"), SIZES)
    update = fed.update(2, 1)
    name = sorted(update.tensors)[1]
    renamed = {f"{n}s" if n == name else n: t for n, t in update.tensors.items()}
    for client, tensors, said in (
        (2, renamed, f"unknown tensor '{name}s'; did you mean '{name}'"),
        (1, {}, "is missing"),
    ):
        with pytest.raises(RefusedUpdate, match=f"client {client}.*{said}"):
            fed.receive(dataclasses.replace(update, client=client, tensors=tensors), 1)


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
