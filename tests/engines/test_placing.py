"""A base that lies in memory and on the disk (``model.device_map``): the results of one that lies in one place."""

import pytest
import torch

from fs_lowrank import UserError, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.finished import load_run
from fs_lowrank.models.machine import input_device
from fs_lowrank.testing.bench import equal, logits, state_of

pytestmark = pytest.mark.more

#: of the small models' 100 kB, so that at least a layer lies on the disk
SPREAD = {"model.device_map": "auto", "model.max_memory": ["cpu=90KB"], "federate.total_round_num": 2}


def on_disk(engine):
    return {n for n, p in engine.model.named_parameters() if p.device.type == "meta"}


@pytest.mark.parametrize(
    "keys", [{}, {"train.cache_frozen": "off"}, {"train.cohort": 3}, {"train.checkpointing": True}]
)
@pytest.mark.parametrize("task", ["encoder", "causal"])
def test_the_result_is_that_of_one_device(make_engine, tmp_path_factory, monkeypatch, task, keys):
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    keys = {"federate.method": "rolora", "federate.total_round_num": 2, **keys}
    one, spread = make_engine(task, keys), make_engine(task, {**keys, **SPREAD})
    held = on_disk(spread)
    assert held and not any("lora_" in n or "modules_to_save" in n for n in held)
    assert input_device(spread.model) == torch.device("cpu")
    assert spread.workspace.base_fingerprint == one.workspace.base_fingerprint
    one.run(), spread.run()
    assert equal(state_of(one), state_of(spread))
    assert one.recorder.history[-1]["metrics"] == spread.recorder.history[-1]["metrics"]
    assert on_disk(spread) == held and one.config.fingerprint() == spread.config.fingerprint()
    loaded = load_run(spread.recorder.outdir).model
    torch.testing.assert_close(logits(loaded, spread.workspace.data.test), logits(one.model, one.workspace.data.test))
    assert not list(here.iterdir()), "weights were written to the current folder"


def test_a_run_is_resumed_on_one_device(make_engine):
    keys = {"federate.total_round_num": 3}
    whole = make_engine("causal", keys)
    whole.run()
    first = make_engine("causal", {**SPREAD, **keys})
    first.on_round = lambda record: record["round"] == 1
    first.run()
    second = LocalEngine(first.config.replace({"model.device_map": "", "model.max_memory": []}))
    second.run(resume=True)
    assert equal(state_of(whole), state_of(second))


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"federate.process_num": 2}, "spreads one model over all devices, and federate.process_num puts one"),
        ({"federate.process_num": "auto"}, "federate.process_num puts one on each"),
        ({"lowrank.save_merged": True}, "needs the whole model on one device"),
        ({"federate.method": "fedavg"}, "fedavg changes the weights of the base"),
        ({"federate.method": "fedloru"}, "set lowrank.merge False"),
        ({"model.device_map": "anywhere"}, "one of '', auto, balanced"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(settings, keys, words):
    with pytest.raises(UserError) as caught:
        load_config(settings, {"federate.method": "fedlora", **SPREAD, **keys})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_size_that_cannot_be_read(make_engine):
    with pytest.raises(UserError, match="model.max_memory: 'cpu:2' raises .*; expected DEVICE=SIZE"):
        make_engine("causal", {**SPREAD, "model.max_memory": ["cpu:2"]})
