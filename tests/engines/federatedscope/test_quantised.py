"""A quantised base on FederatedScope: the tensors of the embedded engine; and what it does not take."""

import pytest

import fs_lowrank
from fs_lowrank import UserError

pytestmark = pytest.mark.federatedscope


@pytest.mark.quantised
@pytest.mark.parametrize(
    "dtype, share, keys",
    [
        ("nf4", True, {"federate.method": "rolora"}),
        ("nf4", False, {"federate.method": "flora", "lowrank.merge": False, "federate.sample_client_num": 2}),
        ("int8", False, {"federate.method": "fedlora"}),
    ],
)
def test_the_result_is_that_of_the_embedded_engine(quick, assert_same, dtype, share, keys):
    keys = {**keys, "lowrank.dtype": dtype, "federate.total_round_num": 2, "federate.client_num": 3}
    local = fs_lowrank.run(quick("local", keys))
    other = fs_lowrank.run(quick("other", {**keys, "federate.share_local_model": share}), "federatedscope")
    assert_same(local, other)


def test_a_base_on_several_devices_is_refused(quick):
    with pytest.raises(UserError, match="model.device_map = 'auto': a client's copy of the model lies on one device"):
        fs_lowrank.run(quick("spread", {"model.device_map": "auto"}), "federatedscope")
