"""``lowrank.robust`` where the server sees only sums."""

import pytest

import fs_lowrank


def test_a_server_that_sees_only_sums_is_refused(few):
    with pytest.raises(fs_lowrank.UserError, match="needs the update of each client"):
        fs_lowrank.run(few("run", {"lowrank.robust": "median", "federate.online_aggr": True}))
