"""What may differ in the configuration with which a run is continued."""

from contextlib import nullcontext

import pytest

from fs_lowrank import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.rounds.joining import check_configuration
from fs_lowrank.rounds.workspace import method_of
from fs_lowrank.training.schedule import lr_at, schedule_of


@pytest.mark.parametrize("scheduler", [{}, {"type": "linear"}, {"warmup_ratio": 0.5}])
def test_the_number_of_rounds_may_change_where_no_rate_depends_on_it(scheduler):
    keys = {"federate.client_num": 2, "federate.method": "fedlora", "train.scheduler": scheduler}
    short, longer = (load_config({**keys, "federate.total_round_num": rounds}) for rounds in (2, 4))
    schedule = schedule_of(longer.train.scheduler)
    same = all(lr_at(t, 2, 0.1, schedule) == lr_at(t, 4, 0.1, schedule) for t in (1, 2))
    assert same == (not scheduler)
    given = short.to_dict(), longer, method_of(longer), "run"
    if same:
        check_configuration(*given)
    else:
        with pytest.raises(UserError, match="started with another federate.total_round_num; continue it with its own"):
            check_configuration(*given)


@pytest.mark.parametrize(
    "here, there, same",
    [
        ({"model.type": "a/m@transformers"}, {"model.type": "/b/m@transformers"}, True),
        ({"data.type": "a/x.csv"}, {"data.type": "/b/x.csv"}, True),
        ({"data.args": [{"label": "y", "test": "a.csv"}]}, {"data.args": [{"label": "y", "test": "/b.csv"}]}, True),
        ({"data.args": [{"label": "y"}]}, {"data.args": [{"label": "z"}]}, False),
        ({"model.type": "m@transformers"}, {"model.type": "m@huggingface_llm"}, False),
        ({"model.type": "lenet", "data.type": "x"}, {"model.type": "resnet10", "data.type": "x"}, False),
    ],
)
def test_data_and_model_may_lie_elsewhere(here, there, same):
    """Their contents have been compared; what else these keys say must be the same."""
    base = {"federate.client_num": 2, "federate.method": "fedavg", "data.type": "x.csv", "model.type": "m@transformers"}
    then, now = (load_config({**base, **keys}) for keys in (here, there))
    with nullcontext() if same else pytest.raises(UserError, match="started with another .*(args|type)"):
        check_configuration(then.to_dict(), now, method_of(now), "run")
