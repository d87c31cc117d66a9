"""Every key has an effect, or is refused, or is reported. The tests go over all sections and keys."""

import ast
from pathlib import Path

import pytest

import fs_lowrank
from fs_lowrank.callbacks.trackers import trackers_of
from fs_lowrank.config import check_local, load_config
from fs_lowrank.engines.flower.keys import check
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.models.vision import VISION_MODELS  # noqa: F401  (imports torch before the tests)
from fs_lowrank.settings import Settings, flat_keys, framework, known_keys

BASE = {"federate.client_num": 4, "federate.method": "fedlora", "model.type": "x@transformers", "data.type": "x.csv"}
KEYS = known_keys()
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS})
#: keys that are read under another name: by a property of ``Settings``, or by a name that is composed
READ_INDIRECTLY = {
    "federate.sample_client_num",
    "federate.sample_client_rate",
    "use_gpu",
    "device",
    "train.is_enable_half",
    "data.val_transform",
    "data.test_transform",
}


def misspelt(section):
    """The key with the longest name in the section, with one letter changed."""
    names = [key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == section]
    name = max(names, key=len)
    return name, name[:-1] + ("x" if name[-1] != "x" else "y")


def test_a_misspelt_key_of_every_section_is_refused(caplog):
    default = dict((k, v) for k, v, _ in flat_keys(Settings())) | framework.DEFAULTS
    for section in SECTIONS:
        name, wrong = misspelt(section)
        prefix = f"{section}." if section else ""
        config = {**BASE, prefix + wrong: default.get(prefix + name)}
        if framework.within(section, framework.OPEN):  # FederatedScope accepts any key there
            say_once.cache_clear()
            check_local(load_config(config))
            assert f"{prefix + wrong} = " in caplog.text and "has no effect" in caplog.text
            continue
        with pytest.raises(UserError) as caught:
            check_local(load_config(config))
        message = str(caught.value)
        assert f"unknown key {prefix + wrong!r}" in message, message
        assert "did you mean" in message or "there are: " in message, message


@pytest.fixture
def silent(caplog, other):
    """``silent(check, names)``: those of the framework's keys that ``check`` neither refuses nor reports."""

    def names_of(check, names):
        silent = []
        for name in names:
            config = load_config({**BASE, name: other(framework.DEFAULTS[name])})
            say_once.cache_clear()
            caplog.clear()
            try:
                check(config)
            except UserError as error:
                said = f"{name} = " in str(error)
            else:
                said = f"{name} = " in caplog.text and "has no effect" in caplog.text
            silent += [] if said else [name]
        return silent

    return names_of


@pytest.mark.more
def test_a_key_of_the_framework_is_refused_or_reported(silent, other):
    followed = [n for n in framework.FOLLOWED["local"] if framework.off_switch(n, {}) is None]
    assert silent(check_local, sorted(framework.DEFAULTS)) == followed
    assert followed == ["federate.client_idx_for_local_train", "wandb.use"]
    value = other(framework.DEFAULTS["federate.client_idx_for_local_train"])
    assert load_config({**BASE, "federate.client_idx_for_local_train": value}).alone == value
    assert trackers_of(load_config({**BASE, "wandb.use": True})) == ["wandb"]


@pytest.mark.more
def test_a_key_of_the_framework_is_honoured_refused_or_reported_on_flower(silent):
    for name in silent(check, sorted(framework.DEFAULTS)):
        assert framework.treatment(name, "flower") == "followed", name


def used_names():
    """All attribute names, and parts of dotted strings, in the package without the schema and the plug-in."""
    root = Path(fs_lowrank.__file__).parent
    names = set()
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "settings") or path.is_relative_to(root / "engines" / "federatedscope"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(node.value.split("."))
    return names


@pytest.mark.more
def test_every_key_of_ours_is_used():
    names = used_names()
    unused = [
        key for key, *_ in flat_keys(Settings()) if key.rpartition(".")[2] not in names and key not in READ_INDIRECTLY
    ]
    assert not unused


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"device": 0}, "device = 0 has no effect: use_gpu is False"),
        ({"federate.save_freq": 3}, "federate.save_freq = 3 has no effect: take lowrank.checkpoint_freq in"),
        ({"wandb.name_user": "me"}, "wandb.name_user = 'me' has no effect: wandb.use is False"),
        (
            {"federate.sample_client_num": 2, "federate.sample_client_rate": 0.25},
            "federate.sample_client_num = 2 has no effect: federate.sample_client_rate = 0.25 takes precedence",
        ),
        (
            {"federate.method": "fedavg", "llm.adapter.args": [{"r": 4}]},
            "has no effect: federate.method = fedavg trains all weights",
        ),
    ],
)
def test_combinations_without_effect_are_reported_once(keys, message, caplog):
    config = load_config({**BASE, **keys})
    say_once.cache_clear()
    check_local(config)
    assert message in caplog.text
    reported = len(caplog.records)
    check_local(config)
    assert len(caplog.records) == reported
