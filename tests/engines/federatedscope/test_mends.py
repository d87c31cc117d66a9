"""Each patch to the framework: what fails without it, and that it is applied only if it is needed."""

import importlib
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.federatedscope


@pytest.fixture
def compat():
    from fs_lowrank.engines.federatedscope import compat

    return compat


def named(compat, part):
    return next(m for m in compat.MENDS if part in m.name)


def test_every_mend_says_why(compat):
    assert len(compat.MENDS) == 5 and all(len(one.reason) > 40 for one in compat.MENDS)


def test_protobuf(compat, monkeypatch):
    mend = named(compat, "protobuf")
    name = "federatedscope.core.proto.gRPC_comm_manager_pb2"
    built = sys.modules[name]
    message = built.MessageRequest()
    message.msg["state"].single_msg.int_value = 3
    assert built.MessageRequest.FromString(message.SerializeToString()).msg["state"].single_msg.int_value == 3
    assert not mend.needed(), "it is there already"
    monkeypatch.delitem(sys.modules, name)
    if mend.needed():
        with pytest.raises(TypeError, match="Descriptors cannot be created directly"):
            importlib.import_module(name)
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    from google.protobuf.internal import api_implementation

    monkeypatch.setattr(api_implementation, "Type", lambda: "python")
    assert not mend.needed()


def test_numbers_in_the_logs(compat):
    mend = named(compat, "logs")
    assert mend.needed() == (int(np.__version__.split(".")[0]) >= 2)
    with np.printoptions():
        mend.apply(None)
        assert str({"loss": np.float64(1.5)}) == "{'loss': 1.5}"


def test_group_sampler(compat):
    from federatedscope.core import sampler

    if named(compat, "group").needed():
        assert not hasattr(np, "int"), "numpy itself stays as it is"
    sampler.GroupSampler(12, [1.0] * 12).sample(3)


def test_a_mend_that_is_not_needed_is_not_applied(compat, monkeypatch):
    done = []
    idle = compat.Mend("idle", done.append, lambda: False, late=True)
    busy = compat.Mend("busy", done.append, lambda: True, late=True)
    monkeypatch.setattr(compat, "MENDS", [idle, busy])
    monkeypatch.setattr(compat, "_applied", [])
    for _ in range(2):
        compat.mend("place", late=True)
        compat.mend("place", late=False)
    assert done == ["place"] and compat.applied() == (busy,)
