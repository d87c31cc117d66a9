"""Values that no key takes are errors of one line with the expected value."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.settings import parse_overrides

BASE = {"federate.client_num": 3, "federate.method": "fedlora"}


def refused(message):
    return pytest.raises(UserError, match=message)


TABLE = pd.DataFrame({"text": ["a", "b"], "label": [0, 1]})


@pytest.mark.parametrize("value", [TABLE, [TABLE], {"x": TABLE}, TABLE["text"], np.zeros(3), torch.zeros(3)])
@pytest.mark.parametrize("form", [lambda v: {"data": {"type": v}}, lambda v: {"data.type": v}])
def test_tables_and_arrays(value, form):
    with refused(r"^data.type\S* is a \w+: expected text, .* data go to run.data=") as caught:
        load_config(form(value), BASE)
    assert "\n" not in str(caught.value)
    with refused("is a "):
        load_config(BASE, **{"data.args": [{"text": value}]})


@pytest.mark.parametrize(
    "key, value, words", [("drop_rate", 1.0, "below 1"), ("max_update_norm_factor", 0.9, "1 or more, as half")]
)
def test_bounds_that_no_round_could_meet_are_refused(key, value, words):
    with pytest.raises(UserError, match=f"lowrank.{key} = {value}: expected .*{words}"):
        load_config({"federate.client_num": 2, f"lowrank.{key}": value})


@pytest.mark.parametrize(
    "key, value, end",
    [
        ("data.splits", "(0.8, 0.1, 0.1)", "; write [0.8, 0.1, 0.1]"),
        ("train.optimizer", {"type": "Adam", "betas": "(0.9, 0.99)"}, "a list of 2; write [0.9, 0.99]"),
        ("train.scheduler.warmup_ratio", "(0.5)", "at most 1"),
        ("federate.client_num", "(3)", "a whole number"),
    ],
)
def test_round_brackets_are_a_list_only_where_one_is_expected(key, value, end):
    with refused(f"expected .*{re.escape(end)}$"):
        load_config({**BASE, key: value})


def test_two_values_of_one_key(caplog):
    assert parse_overrides(["seed", "1", "seed", "2"]) == {"seed": 2}
    assert "seed is given more than once; the last, '2', is taken" in caplog.text
