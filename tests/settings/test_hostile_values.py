"""Values that Python, YAML or a file system cannot represent are errors of one line with the expected value."""

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
        (
            "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9)),
            "run.yaml: its aliases stand for more than 1,000,000 values",
        ),
        (HEAD + "data: " + "{a: " * 1000 + "1" + "}" * 1000, "run.yaml: invalid YAML: nested too deep"),
        (HEAD + "data: {args: " + "[" * 3000 + "]" * 3000 + "}", "run.yaml: invalid YAML: nested too deep"),
        (HEAD + "".join(f"{' ' * i}k{i}:\n" for i in range(1000)), "run.yaml: invalid YAML: nested too deep"),
        (
            HEAD + f"train: {{optimizer: {{lr: {DIGITS}}}}}",
            "line 2: train.optimizer.lr = 9+.*expected a number",
        ),
        (HEAD + f"train: {{optimizer: {{momentum: {DIGITS}}}}}", "train.optimizer.momentum = 9+.*expected a number"),
        (HEAD + f"train: {{optimizer: {{lr: {DIGITS}.0}}}}", "train.optimizer.lr = inf: expected a number"),
        (HEAD + "train: {optimizer: {lr: 1e400}}", "train.optimizer.lr = inf: expected a number"),
        (HEAD + f"seed: {DIGITS}", "line 2: seed = 9+.*expected a whole number"),
        (HEAD + f"seed: {'9' * 5000}", "run.yaml: invalid YAML: .*is too long"),
        (HEAD + 'expname: "\\udc80"', r"expname = '\\udc80': expected text without NUL and halves of UTF-16"),
        (HEAD + 'outdir: "a\\0b"', r"outdir = 'a\\x00b': expected text without NUL"),
        (HEAD + 'data: {args: [{text: "a\\0b"}]}', "data.args = .*expected text without NUL"),
        (HEAD + "seed: !!int ''", "run.yaml: invalid YAML: a value does not suit its tag"),
        (HEAD + "use_gpu: !!bool maybe", "run.yaml: invalid YAML: a value does not suit its tag"),
        (HEAD + "seed: !!timestamp yesterday", "run.yaml: invalid YAML: a value does not suit its tag"),
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
        (["data.args", "[" * 2000 + "]" * 2000], "override data.args = .*is not valid YAML: nested too deep"),
        (["seed", "9" * 5000], "override: seed = .9+.*expected a whole number"),
        (["seed", DIGITS], "override: seed = 9+.*expected a whole number"),
        (["expname", "a\0b"], "expname = .*without NUL"),
        (["expname", "\udcff"], "expname = .*without NUL"),
        ([f"data.args.{'9' * 5000}", "1"], "data.args is a list of 0; expected an index up to 0"),
        (["data.args.²", "1"], "data.args is a list of 0; expected an index up to 0"),
        ([".".join("a" * 5000), "1"], "unknown key 'a'"),
    ],
)
def test_overrides(keys, message):
    with refused(message):
        load_config({**BASE, "data.args": []}, keys)


def test_python_values():
    nested = 1
    for _ in range(3000):
        nested = [nested]
    with refused("the configuration is nested too deep"):
        load_config({**BASE, "data.args": nested})
    with refused("federate.total_round_num = .*expected a whole number"):
        load_config({**BASE, "federate.total_round_num": 10**400})
    with refused("seed = .int that is too large to be shown.: expected a whole number"):
        load_config({**BASE, "seed": 10**5000})
    with refused("'a.x00b.yaml': cannot be read: embedded null byte"):
        load_config("a\0b.yaml")


TABLE = pd.DataFrame({"text": ["a", "b"], "label": [0, 1]})


@pytest.mark.parametrize("value", [TABLE, [TABLE], {"x": TABLE}, TABLE["text"], np.zeros(3), torch.zeros(3)])
@pytest.mark.parametrize("form", [lambda v: {"data": {"type": v}}, lambda v: {"data.type": v}])
def test_tables_and_arrays(value, form):
    with refused(r"^data.type\S* is a \w+ of [\d × ]+: .* write them to one, such as with frame.to_csv") as caught:
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
