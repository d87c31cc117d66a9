"""What only the process of a program has, where other processes of its run would need it: refused before they start."""

import pytest

import fs_lowrank
from fs_lowrank import UserError
from fs_lowrank.data import PARTITIONERS
from fs_lowrank.engines.flower.keys import check
from fs_lowrank.methods import get_method_class
from fs_lowrank.methods.registry import registered


@pytest.fixture
def registers(monkeypatch):
    """The running script registers a method ``mine`` and a splitter ``ours``."""
    mine = type("Mine", (get_method_class("rolora"),), {"__module__": "__main__", "name": "mine"})
    monkeypatch.setitem(registered(), "mine", mine)

    def ours(rows, num_clients, rng):
        return PARTITIONERS["iid"](rows, num_clients, rng)

    monkeypatch.setattr(ours, "__module__", "__main__")
    monkeypatch.setitem(PARTITIONERS, "ours", ours)


FEW = {"federate.total_round_num": 1, "train.local_update_steps": 1, "data.splitter_args": []}
CASES = [
    ({"federate.method": "mine"}, "federate.method = mine: other processes do not have what the running script"),
    ({"data.splitter": "ours"}, "data.splitter = ours: other processes do not have what the running script"),
]


@pytest.mark.more
@pytest.mark.parametrize("engine", ["local", pytest.param("federatedscope", marks=pytest.mark.federatedscope)])
@pytest.mark.parametrize("keys, said", CASES, ids=["method", "splitter"])
def test_what_the_script_registers_is_for_its_own_process(registers, few, keys, said, engine):
    assert fs_lowrank.run(few("run", {"data.splitter": "iid", **keys}), engine).history, "which has it"
    with pytest.raises(UserError, match=said) as caught:
        fs_lowrank.run(few("two", {"data.splitter": "iid", **keys, "federate.process_num": 2}), engine)
    assert "set federate.process_num 1" in str(caught.value)
    with pytest.raises(UserError, match=said) as caught:
        check(few("run", {"data.splitter": "iid", **keys}))
    assert "take engine local, with federate.process_num 1" in str(caught.value)


def test_a_module_that_a_program_gave_is_for_its_own_process(few):
    with pytest.raises(UserError, match="model = Net: other processes cannot have a module that(?s:.*)engine local"):
        check(few("run", {"model.type": "Net@object", "model.task": "SequenceClassification"}))
