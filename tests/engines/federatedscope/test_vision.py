"""Image networks give the same tensors, running statistics included, on the framework and on the embedded engine."""

import pytest
import torch

import fs_lowrank
from fs_lowrank.methods import requirements
from fs_lowrank.models.names import all_tensors
from fs_lowrank.testing import TASKS

pytestmark = pytest.mark.federatedscope


#: what is for images alone, where clients have models of their own or one together
ALONE = [
    ({"federate.method": method, "federate.share_local_model": share, "federate.total_round_num": 2}, 2)
    for method in fs_lowrank.list_methods()
    for share in (False, True)
    if TASKS["encoder"] not in requirements(method).tasks
]


@pytest.fixture
def quick(few, vision_settings, keys_of):
    def config(name, keys):
        own = keys_of(keys.get("federate.method", "fedlora"))
        return few(name, {"federate.total_round_num": 3, **own, **keys}, vision_settings)

    return config


@pytest.mark.parametrize(
    "keys, sample",
    [
        ({"federate.method": "fedavg"}, 2),
        ({"federate.method": "fedlora", "lowrank.base_init": "zero"}, -1),
        ({"federate.share_local_model": True, "model.type": "lenet", "lowrank.width": 1}, 2),
        ({"federate.method": "fedloru", "lowrank.tau": 2}, 2),
        ({"federate.method": "rolora", "lowrank.norm": "group"}, -1),
        *ALONE,
    ],
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else None,
)
def test_same_as_local(quick, keys, sample):
    keys = {**keys, "federate.client_num": 3, "federate.sample_client_num": sample}
    local, other = fs_lowrank.run(quick("local", keys)), fs_lowrank.run(quick("other", keys), "federatedscope")
    mine, theirs = all_tensors(local.model), all_tensors(other.model)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(local.history, other.history, strict=True):
        assert a["client_uplink_bytes"] == b["client_uplink_bytes"]
        assert a["client_downlink_bytes"] == b["client_downlink_bytes"]
        assert b["metrics"]["test"] == pytest.approx(a["metrics"]["test"], abs=1e-5)


def test_between_processes(vision_settings, quick, assert_same, cluster):
    keys = {"federate.method": "fedlora", "federate.total_round_num": 2, "federate.client_num": 2}
    cluster.settings = vision_settings
    assert_same(fs_lowrank.run(quick("local", keys)), cluster.run(2, keys)[0].tensors)


def test_our_model_names_are_built_before_the_framework_looks_at_them():
    from federatedscope import register

    from fs_lowrank.settings import VISION_MODELS

    assert not {"lr", "mlp", "convnet2", "convnet5", "vgg11", "lstm", "gcn"} & set(VISION_MODELS)
    # One of the framework's model builders fails on every name that contains "resnet", so ours is asked first.
    assert next(iter(register.model_dict)) == "lowrank"
