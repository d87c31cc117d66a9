"""``lowrank.train_head False``: the head of a classifier is neither trained nor sent, over every method."""

import pytest
import torch
from torch import nn

from fs_lowrank import UserError, list_methods
from fs_lowrank.methods import create_method, requirements
from fs_lowrank.models.names import all_tensors, select
from fs_lowrank.rounds.checks import check_head
from fs_lowrank.testing import TASKS, checks

pytestmark = pytest.mark.more

FROZEN = {"lowrank.train_head": False}
#: a head as it is drawn is small, so that far larger steps move what the model says; two, for methods that take turns
FAR = {**checks.SAVED, **FROZEN, "train.optimizer": {"type": "AdamW", "lr": 0.5}, "train.local_update_steps": 2}
METHODS = [m for m in list_methods() if TASKS["encoder"] in requirements(m).tasks and m != "fedhm"]


def heads(tensors):
    return {n: tensors[n].detach().clone() for n in select(tensors, {"head"})}


@pytest.mark.parametrize("method", METHODS)
def test_the_head_keeps_every_bit_and_is_not_sent(bench, method):
    engine = bench.make("encoder", method, FAR)
    before = heads(all_tensors(engine.model))
    result = checks.loads_with_the_plain_libraries(bench, engine, "encoder")
    after = heads(all_tensors(result.model))
    assert before and all(torch.equal(after[n], before[n]) for n in before)
    assert not heads(engine.ledger.state)
    for record in result.history:
        assert record["uplink_bytes"] == record["uplink_bytes_without_head"] > 0
        assert record["downlink_bytes"] == record["downlink_bytes_without_head"]


def test_it_starts_where_a_run_that_trains_the_head_starts_and_ends_elsewhere(bench):
    frozen, trained = (bench.make("encoder", "fedlora", {**checks.SAVED, **keys}) for keys in (FROZEN, {}))
    starts = [dict(all_tensors(engine.model)) for engine in (frozen, trained)]
    assert starts[0].keys() == starts[1].keys() and all(torch.equal(starts[0][n], starts[1][n]) for n in starts[0])
    ends = [all_tensors(engine.run().model) for engine in (frozen, trained)]
    pairs = select(ends[0], {"lora_A", "lora_B"})
    assert pairs and any(not torch.equal(ends[0][n], ends[1][n]) for n in pairs)


def test_a_network_from_scratch(bench):
    engine = bench.make("vision", "fedlora", FROZEN)
    before, rest = heads(all_tensors(engine.model)), select(all_tensors(engine.model), {"rest"})
    start = {n: all_tensors(engine.model)[n].detach().clone() for n in rest}
    after = all_tensors(engine.run().model)
    assert before and all(torch.equal(after[n], before[n]) for n in before)
    assert any(not torch.equal(after[n], start[n]) for n in rest)


def test_clients_that_train_together(bench):
    assert checks.check_cohort(bench, "rolora", "encoder", FROZEN) > 1


def test_a_method_that_names_the_head_itself_refuses_it():
    with pytest.raises(UserError, match="lowrank.train_head = False: fedhm names the head.*self.whole"):
        create_method("fedhm", train_head=False, rounds=3)


@pytest.mark.parametrize(
    "task, keys, words",
    [
        ("causal", {}, "CausalLM has no head of its own"),
        ("encoder", {"llm.adapter.args.0.modules_to_save": ["classifier"]}, "modules_to_save of llm.adapter.args asks"),
    ],
)
def test_where_there_is_nothing_to_freeze(bench, task, keys, words):
    with pytest.raises(UserError, match=f"lowrank.train_head = False.*{words}|lowrank.train_head.*{words}"):
        bench.make(task, "fedlora", {**FROZEN, **keys})


def test_a_model_whose_last_layer_is_no_head(bench):
    with pytest.raises(UserError, match="the model has no head that could be left as it is"):
        check_head(bench.config("encoder", "fedlora").replace(FROZEN), nn.Sequential(nn.Linear(3, 2)), ())
