"""The JSON schema of configuration files accepts what ``load_config`` accepts, and no misspelt key."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest

from fs_lowrank import UserError, cli, list_methods, load_config
from fs_lowrank.keys import json_schema
from fs_lowrank.settings import read_yaml

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[1]
FILES = [
    *sorted((ROOT / "examples").glob("*.yaml")),
    *(
        pytest.param(path, marks=pytest.mark.more)
        for path in sorted((ROOT / "tests/runs/first_edition").glob("*/config.yaml"))
    ),
]
#: sections whose further keys are checked when they are used
OPEN = ("optimizer", "scheduler", "args")


@pytest.fixture(scope="module")
def schema():
    return jsonschema.Draft202012Validator(json_schema())


def wrong(schema, content):
    return [error.message for error in schema.iter_errors(content)]


def misspellings(content, path=()):
    """Copies of a file's content, each with one other key misspelt."""
    node = content
    for part in path:
        node = node[part]
    for key, value in node.items():
        if not path or path[-1] not in OPEN:
            copied = copy.deepcopy(content)
            there = copied
            for part in path:
                there = there[part]
            there[f"{key}x"] = there.pop(key)
            yield copied
        if isinstance(value, dict):
            yield from misspellings(content, (*path, key))


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_configuration_of_the_repository_is_valid_and_none_with_a_misspelt_key(schema, file):
    content = read_yaml(file)[1]
    assert not wrong(schema, content) and not wrong(schema, load_config(file).to_dict())
    changed = list(misspellings(content))
    assert len(changed) > 8 and not any(map(schema.is_valid, changed))


@pytest.mark.more
def test_the_resolved_configuration_of_every_method_is_valid(schema):
    checked = 0
    for name in list_methods():
        for model in ("any@transformers", "lenet", "any@huggingface_llm"):
            with contextlib.suppress(UserError):  # a method that is not for this model
                config = load_config({"federate": {"client_num": 3, "method": name}, "model.type": model})
                assert not wrong(schema, config.to_dict())
                checked += 1
    assert checked > len(list_methods())


@pytest.mark.parametrize(
    "content",
    [
        {"train": {"optimizer.lr": 0.1, "cache_frozen": False, "cohort": "off"}},
        {"train.optimizer.momentum": 0.9, "train": None},
        {"train.optimizer.type": "adamw", "federate.process_num": "auto"},
        {"llm": {"adapter.args": [{"modules": "all-linear", "layers": 2, "dropout": 0.1}], "tok_len": "auto"}},
        {"llm.adapter.args.0.r": 4, "wandb.use": True, "hpo": {"sha": {"elim_rate": 2}}},
        {"lowrank": {"clients": [{"clients": [5, "7-9"], "lr_factor": 0.5}, {"clients": 1, "llm": {"tok_len": 8}}]}},
        {"lowrank.clients": "clients.csv", "data.splits": [0.8, 0.1, 0.1]},
    ],
)
def test_other_spellings_are_valid(schema, content):
    assert not wrong(schema, content)


@pytest.mark.parametrize(
    "content",
    [
        {"lowrank": {"clients": [{"clients": 5, "lr_facor": 0.5}]}},
        {"data": {"args": [{"txt": "a"}]}},
        {"federate": [1]},
        {"eval": {"split": ["tset"]}},
        {"wandb": {"usee": True}},
    ],
)
def test_wrong_keys_and_values_are_refused(schema, content):
    assert wrong(schema, content)


@pytest.mark.more
def test_the_command_prints_it(capsys):
    assert cli.main(["keys", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema" and printed == json_schema()
    jsonschema.Draft202012Validator.check_schema(printed)
    assert (
        "Learning rate" in printed["properties"]["train"]["properties"]["optimizer"]["properties"]["lr"]["description"]
    )
