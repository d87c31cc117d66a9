"""Each patch to the framework: what fails without it, and that it is applied only if it is needed."""

import importlib
import sys
import types

import numpy as np
import pytest

pytestmark = pytest.mark.federatedscope


@pytest.fixture
def compat():
    from fs_lowrank.engines.federatedscope import compat

    return compat


def named(compat, part):
    return next(m for m in (*compat.MENDS, *compat.LATE) if part in m.name)


def test_every_mend_says_why_and_until_when(compat):
    for one in (*compat.MENDS, *compat.LATE):
        assert one.reason and one.until


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


def test_scipy(compat, monkeypatch):
    mend = named(compat, "scipy")
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "scipy.sparse.csc", raising=False)
    assert mend.needed()
    mend.apply(None)
    from scipy.sparse import csc_matrix

    assert sys.modules["scipy.sparse.csc"].csc_matrix is csc_matrix
    assert not mend.needed()
    monkeypatch.delitem(sys.modules, "scipy.sparse.csc")


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


def test_a_mend_that_is_not_needed_is_not_applied(compat):
    done = []
    idle = compat.Mend("idle", "r", "u", lambda: False, done.append)
    busy = compat.Mend("busy", "r", "u", lambda: True, done.append)
    before = len(compat.applied())
    try:
        compat.mend((idle, busy), "place")
        compat.mend((idle, busy), "place")
        assert done == ["place"] and compat.applied()[before:] == (busy,)
    finally:
        compat._applied.remove(busy)
    assert isinstance(sys, types.ModuleType)
