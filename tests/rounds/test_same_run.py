"""What may differ in the configuration with which a run is continued."""

from types import SimpleNamespace

import pytest

from fs_lowrank import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.rounds.keeper import RecordKeeper
from fs_lowrank.rounds.site import method_of
from fs_lowrank.training.schedule import lr_at, schedule_of


@pytest.mark.parametrize("scheduler", [{}, {"type": "linear"}, {"warmup_ratio": 0.5}])
def test_the_number_of_rounds_may_change_where_no_rate_depends_on_it(scheduler):
    keys = {"federate.client_num": 2, "federate.method": "fedlora", "train.scheduler": scheduler}
    short, longer = (load_config({**keys, "federate.total_round_num": rounds}) for rounds in (2, 4))
    schedule = schedule_of(longer.train.scheduler)
    same = all(lr_at(t, 2, 0.1, schedule) == lr_at(t, 4, 0.1, schedule) for t in (1, 2))
    assert same == (not scheduler)
    keeper = SimpleNamespace(config=longer, method=method_of(longer), outdir="run")
    if same:
        RecordKeeper._check_same_run(keeper, short.to_dict())
    else:
        with pytest.raises(UserError, match="started with another federate.total_round_num; continue it with its own"):
            RecordKeeper._check_same_run(keeper, short.to_dict())
