"""Runs that compute only what the loss reads, in blocks of similar length, against runs that compute everything."""

import logging

import pytest
import torch
from transformers import AutoModel

from fs_lowrank.errors import say_once
from tests.cases import same_end, save_family

pytestmark = pytest.mark.more

OFF = {"train.only_read": "off", "train.blocks": 1}


@pytest.fixture
def make(make_engine):
    # Larger steps enlarge rounding: so does a change of the start by 1e-7.
    few = {"federate.total_round_num": 3, "train.optimizer": {"type": "SGD", "lr": 0.01}}
    return lambda task, keys: make_engine(task, {**few, **keys})


METHODS = {
    "rolora": {},
    "flora": {"lowrank.ranks": [1, 3]},
    "fedavg": {},
    "fedhm": {},
    "mfedloru": {},
}


@pytest.mark.parametrize(
    "task, method", [*(("encoder", name) for name in METHODS), ("causal", "rolora"), ("causal", "fedavg")]
)
def test_the_same_run(make, task, method):
    keys = {"federate.method": method, **METHODS[method]}
    ours, plain = make(task, {**keys, "train.blocks": 3}), make(task, {**keys, **OFF})
    assert ours.workspace.reads and plain.workspace.reads is None
    for engine in (ours, plain):
        engine.run()
    same_end(ours, plain)


def test_a_model_whose_last_layer_is_computed_for_all_positions(make, tmp_path, caplog):
    keys = {
        "model.type": f"{save_family(tmp_path / 'model', 'distilbert', AutoModel)}@transformers",
        "federate.total_round_num": 1,
        "federate.method": "fedlora",
        "llm.adapter.args": [{"r": 2, "modules": ["q_lin"]}],
    }
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fs_lowrank"):
        ours = make("encoder", keys)
    assert "train.only_read: the last layer of DistilBertForSequenceClassification cannot be computed" in caplog.text
    plain = make("encoder", {**keys, **OFF})
    for engine in (ours, plain):
        engine.run()
    assert all(torch.equal(value, plain.ledger.state[n]) for n, value in ours.ledger.state.items())
