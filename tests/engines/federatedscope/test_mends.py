"""Patches to the framework: each says what fails without it, is applied once, and only if it is needed."""

import numpy as np
import pytest

pytestmark = pytest.mark.federatedscope


@pytest.fixture
def compat():
    from fs_lowrank.engines.federatedscope import compat

    return compat


def test_every_mend_says_why(compat):
    assert len(compat.MENDS) == 5 and all(len(one.reason) > 40 for one in compat.MENDS)


def test_numbers_in_the_logs_are_plain(compat):
    (mend,) = (one for one in compat.MENDS if "logs" in one.name)
    assert mend.needed() == (int(np.__version__.split(".")[0]) >= 2)
    with np.printoptions():
        mend.apply(None)
        assert str({"loss": np.float64(1.5)}) == "{'loss': 1.5}"


def test_numpy_itself_stays_as_it_is():
    assert not hasattr(np, "int")


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
