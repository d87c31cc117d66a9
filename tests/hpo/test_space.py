"""Search spaces: their meaning, and the message for every wrong one."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

import hpo
from fs_lowrank import UserError
from hpo.space import at_an_end, load_space, space_from


def test_the_shipped_spaces_are_valid_and_have_the_values_of_the_papers():
    folder = Path(hpo.__file__).parent / "spaces"
    spaces = {p.stem: load_space(p) for p in folder.glob("*.yaml")}
    assert spaces["rolora_lr"].parameters[0].values == [5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1]
    assert spaces["fedloru"].parameters[0].values == [0.3, 0.2, 0.1, 0.05, 0.01]
    assert load_space("rolora_lr").to_dict() == spaces["rolora_lr"].to_dict()


def test_a_conditional_key_is_left_out_for_a_method_that_lacks_it(config):
    space = load_space("fedloru")
    bases = [config.replace({"federate.method": name}) for name in ("fedlora", "fedloru")]
    assert [len(space.for_config(base).grid(base)) for base in bases] == [20, 140]


@pytest.mark.parametrize("name", ["fedloru", "FedLoRU"])
def test_a_condition_names_methods_as_a_configuration_does(config, name):
    space = space_from(
        {
            "federate.method": {"grid": [name, "FedLoRA"]},
            "lowrank.tau": {"grid": [1, 2], "when": {"federate.method": name}},
        }
    ).for_config(config)
    tau = [{"federate.method": "fedloru", "lowrank.tau": value} for value in (1, 2)]
    assert space.grid(config) == [*tau, {"federate.method": "fedlora"}]
    alone = space_from({"lowrank.tau": {"grid": [1], "when": {"federate.method": name}}})
    assert alone.for_config(config.replace({"federate.method": "fedloru"})).parameters


@pytest.mark.parametrize("written, applies", [("adam", True), ("Adam", True), ("sgd", False)])
def test_a_condition_has_values_as_a_configuration_may_write_them(config, written, applies):
    base = config.replace({"train.optimizer.type": "Adam"})
    lr = {"grid": [1e-3, 1e-2], "when": {"train.optimizer.type": written}}
    space = space_from({"train.optimizer.lr": lr, "train.local_update_steps": {"grid": [1]}}).for_config(base)
    assert len(space.grid(base)) == (2 if applies else 1)


def test_grid_with_a_condition_on_a_searched_key(config):
    space = space_from(
        {
            "fedopt.optimizer.lr": {"grid": [0.1, 1.0], "when": {"fedopt.use": True}},
            "fedopt.use": {"choice": [False, True]},
        }
    ).for_config(config)
    assert space.grid(config) == [
        {"fedopt.use": False},
        {"fedopt.use": True, "fedopt.optimizer.lr": 0.1},
        {"fedopt.use": True, "fedopt.optimizer.lr": 1.0},
    ]


def test_every_kind_of_range_is_respected(config):
    space = space_from(
        {
            "train": {"optimizer": {"lr": {"loguniform": [1e-3, 1e-1]}}},
            "llm.adapter.args.0.r": {"choice": [2, 4]},
            "train.local_update_steps": {"int": [2, 8], "step": 2},
            "grad.grad_clip": {"uniform": [0.5, 2.0]},
            "llm.adapter.args.0.modules": {"choice": [["query"], ["query", "value"]]},
        }
    ).for_config(config)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        point = space.suggest(study.ask(), config)
        made = config.replace(point)
        assert 1e-3 <= made.train.optimizer.lr <= 1e-1 and made.adapter.r in (2, 4)
        assert made.train.local_update_steps in (2, 4, 6, 8) and 0.5 <= made.grad.grad_clip <= 2
        assert made.adapter.target_modules in (("query",), ("query", "value"))


RATES = {"grid": [0.1, 0.2]}
WRONG = [
    ({"train.optimiser.lr": {"grid": [1, 2]}}, "unknown key .*did you mean 'train.optimizer'"),
    (
        {"lowrank.tau": {"grid": [1, 2]}},
        "unknown key 'lowrank.tau', which is of fedloru, mfedloru, pfedloru, pmfedloru",
    ),
    ({"train.optimizer.lr": {"loguniform": [0.1, 0.01]}}, "train.optimizer.lr: `low <= high` must hold"),
    ({"train.optimizer.lr": {"loguniform": [0, 0.01]}}, "lr = 0.0: expected a number, above 0"),
    (
        {"train.optimizer.lr": {"logunifrom": [1e-3, 1e-2]}},
        "lr = {'logunifrom'.*: expected exactly one of .*did you mean 'loguniform'",
    ),
    ({"train.optimizer.lr": {"grid": [1, 2], "choice": [1, 2]}}, "= {'grid': .*: expected exactly one of grid, choice"),
    ({"train.optimizer.lr": {"grid": [0.01, 0.01]}}, "0.01 twice"),
    ({"train.optimizer.lr": {"grid": []}}, "train.optimizer.lr.grid = ..: expected a list of values that is not empty"),
    ({"train.optimizer.lr": {"grid": [0.1, -1.0]}}, "train.optimizer.lr = -1.0"),
    ({"train.optimizer.lr": [0.1, 0.2]}, "expected exactly one of grid"),
    (
        {"train.local_update_steps": {"int": [1, 9], "step": 2.5}},
        "train.local_update_steps.step = 2.5: expected a whole number",
    ),
    (
        {"train.local_update_steps": {"int": [1.5, 4]}},
        "train.local_update_steps.int = .1.5, 4.: expected .low, high., two whole numbers",
    ),
    ({"seed": {"int": [0, 4]}}, "seeds"),
    ({"eval.freq": {"int": [1, 4]}}, "is not searched"),
    ({"train.optimizer.lr": {**RATES, "when": {"federate.metod": "rolora"}}}, "unknown key 'federate.metod'"),
    ({"train.optimizer.lr": {**RATES, "when": {"federate.method": "rolora"}}}, "no key .* applies to fedlora"),
    ({"train.optimizer.lr": {**RATES, "when": {"federate.method": "roloro"}}}, "no method 'roloro'.*rolora"),
    ({"a": {"grid": [1, 2], "when": {"b": 1}}, "b": {"grid": [1, 2], "when": {"a": 1}}}, "depend on each other"),
    ({}, "expected config keys"),
    (
        {"studies": {"federate.method": "rolora"}, "train.optimizer.lr": {"grid": [1, 2]}},
        "studies.federate.method = 'rolora': expected a list of values",
    ),
    (
        {"studies": {"federate.method": ["rolora", "rolora"]}, "train.optimizer.lr": {"grid": [1, 2]}},
        "studies.federate.method has 'rolora' twice; name it once",
    ),
]


@pytest.mark.parametrize("content, message", WRONG)
def test_wrong_spaces_are_named(config, content, message):
    with pytest.raises(UserError, match=message):
        space_from(content).for_config(config)


def test_wrong_files(tmp_path):
    for text, message in (
        ("a: {grid: [1]}\na: {grid: [2]}", "s.yaml, line 2: a is given twice; first in line 1"),
        ("a:\n  b: {grid: []}", "s.yaml, line 2: a.b.grid = .*expected a list of values"),
        ("a: [", "line 1, column 5: invalid YAML"),
        ("", "expected config keys"),
    ):
        (tmp_path / "s.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            load_space(tmp_path / "s.yaml")
    with pytest.raises(UserError, match="ss.yaml: no such file; did you mean 's.yaml'"):
        load_space(tmp_path / "ss.yaml")
    with pytest.raises(UserError, match="did you mean 'rolora_lr'"):
        load_space("rolora_rl")


def test_numbers_are_read_as_configs_read_them(tmp_path):
    (tmp_path / "s.yaml").write_text("train.optimizer.lr: {loguniform: [5e-4, 1e-1]}")
    assert load_space(tmp_path / "s.yaml").parameters[0].entry["loguniform"][0] == 5e-4


def test_a_winner_at_an_end_of_the_values_that_were_tried():
    """The direction in which a better value may lie, by key; single values and values without order have no end."""
    tried = [
        {"lr": lr, "r": 4, "type": kind, "flag": flag}
        for lr in (0.1, 0.3, 1)
        for kind, flag in (("a", False), ("b", True))
    ]
    point = {"lr": 0.3, "r": 4, "type": "a", "flag": True}
    assert at_an_end(point, tried) == {}
    assert at_an_end({**point, "lr": 1}, tried) == {"lr": 1} and at_an_end({**point, "lr": 0.1}, tried) == {"lr": -1}
    assert at_an_end({"lr": 0.1}, [{"lr": 0.3}]) == {"lr": -1} and at_an_end({"lr": 0.1}, [{"lr": 0.1}]) == {}


@pytest.mark.parametrize(
    "key, tried, ends",
    [
        ("lowrank.mix", (0, 0.5, 1), [None, None, None]),  # from 0 to 1
        ("lowrank.mix", (0.25, 0.5), [-1, 1]),
        ("llm.adapter.args.0.r", (1, 2, 4), [None, None, 1]),  # whole numbers, at least 1
        ("llm.adapter.args.0.lora_dropout", (0.0, 0.1, 0.9), [None, None, 1]),  # at least 0, below 1
        ("llm.adapter.args.0.lora_alpha", (1, 2), [-1, 1]),  # above 0
        ("train.optimizer.lr", (1e-3, 1e-2), [-1, 1]),  # above 0
    ],
)
def test_an_end_of_what_a_key_can_be_is_none(config, key, tried, ends):
    rolora, points = config.replace({"federate.method": "rolora"}), [{key: value} for value in tried]
    assert [at_an_end(point, points, rolora).get(key) for point in points] == ends
