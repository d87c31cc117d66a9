"""Values that no key takes are errors of one line with the expected value."""

import numpy as np
import pandas as pd
import pytest
import torch

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.settings import parse_overrides

BASE = {"federate.client_num": 3, "federate.method": "fedlora"}
HEAD = "federate: {client_num: 3, method: fedlora}\n"
DIGITS = "9" * 400


def refused(message):
    return pytest.raises(UserError, match=message)


@pytest.mark.more
@pytest.mark.parametrize(
    "text, message",
    [
        (HEAD + f"train: {{optimizer: {{lr: {DIGITS}.0}}}}", "train.optimizer.lr = inf: expected a number"),
        (HEAD + "train: {optimizer: {lr: 1e400}}", "train.optimizer.lr = inf: expected a number"),
        (HEAD + "use_gpu: !!int x", "run.yaml: invalid YAML: "),
        (HEAD + "data: {args: " + "[" * 3000 + "]" * 3000 + "}", "run.yaml: invalid YAML: maximum recursion"),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9)),
            "run.yaml: its aliases stand for more than 1,000,000 values",
        ),
        (HEAD + f"train: {{optimizer: {{lr: {DIGITS}}}}}", "train.optimizer.lr = 9+.*expected a number"),
        (HEAD + "use_gpu: !!bool maybe", "run.yaml: invalid YAML: "),
        ("seed: 1\0", "run.yaml: invalid YAML: special characters"),
    ],
)
def test_files(tmp_path, text, message):
    (tmp_path / "run.yaml").write_bytes(text.encode())
    with refused(message) as caught:
        load_config(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "keys, message",
    [
        (["data.args", "[" * 2000 + "]" * 2000], "override data.args = .*is not valid YAML: "),
        (["data.args.1", "1"], "data.args is a list of 0; expected an index up to 0"),
        ([".".join("a" * 5000), "1"], "unknown key 'a'"),
    ],
)
def test_overrides(keys, message):
    with refused(message):
        load_config({**BASE, "data.args": []}, keys)


TABLE = pd.DataFrame({"text": ["a", "b"], "label": [0, 1]})


@pytest.mark.parametrize("value", [TABLE, [TABLE], {"x": TABLE}, TABLE["text"], np.zeros(3), torch.zeros(3)])
@pytest.mark.parametrize("form", [lambda v: {"data": {"type": v}}, lambda v: {"data.type": v}])
def test_tables_and_arrays(value, form):
    with refused(r"^data.type\S* is a \w+: expected text, .* data go to run.data=") as caught:
        load_config(form(value), BASE)
    assert "\n" not in str(caught.value)
    with refused("is a "):
        load_config(BASE, **{"data.args": [{"text": value}]})
    assert load_config(BASE, seed=np.int64(3)).seed == 3


@pytest.mark.parametrize(
    "key, value, words", [("drop_rate", 1.0, "below 1"), ("max_update_norm_factor", 0.9, "1 or more, as half")]
)
def test_bounds_that_no_round_could_meet_are_refused(key, value, words):
    with pytest.raises(UserError, match=f"lowrank.{key} = {value}: expected .*{words}"):
        load_config({"federate.client_num": 2, f"lowrank.{key}": value})


def test_two_values_of_one_key(caplog):
    assert parse_overrides(["seed", "1", "seed", "2"]) == {"seed": 2}
    assert "seed is given more than once; the last, '2', is taken" in caplog.text
