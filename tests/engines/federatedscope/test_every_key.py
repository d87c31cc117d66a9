"""On the framework's engine every key does something, or is refused, or is reported: walks over sections and keys."""

import re
from pathlib import Path

import pytest

from fs_lowrank.errors import UserError, say_once
from fs_lowrank.settings import framework, known_keys

pytestmark = pytest.mark.federatedscope
KEYS = known_keys()
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS})
RUN = {"federate.method": "rolora", "federate.client_num": 4, "model.type": "x@transformers", "data.type": "x.csv"}


@pytest.fixture
def cfg():
    from federatedscope.core.configs.config import global_cfg

    import fs_lowrank.engines.federatedscope  # noqa: F401

    made = global_cfg.clone()
    made.merge_from_list([part for pair in RUN.items() for part in pair])
    say_once.cache_clear()
    return made


def resolved(cfg):
    from fs_lowrank.engines.federatedscope.config import from_framework

    return from_framework(cfg)


def test_the_declaration_names_keys_that_there_are():
    declared = [*framework.FOLLOWED["federatedscope"], *framework.IDLE["federatedscope"]]
    names = [*declared, *framework.INSTEAD]
    assert not [name for name in names if not any(framework.within(key, [name]) for key in KEYS)]
    assert len(set(declared)) == len(declared)


def test_the_framework_has_no_key_that_is_not_known(cfg):
    from fs_lowrank.engines.federatedscope.config import _walk

    names = {name for name, _ in _walk(cfg)}
    assert not names - set(KEYS)


def test_nothing_is_reported_for_a_plain_run(cfg, caplog):
    resolved(cfg)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelt_key_of_every_section_is_refused_or_reported(cfg, section, caplog):
    from fs_lowrank.engines.federatedscope.config import unknown_key_in

    prefix = f"{section}." if section else ""
    name = max((key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == section), key=len)
    wrong = prefix + name[:-1] + ("x" if name[-1] != "x" else "y")
    try:
        cfg.merge_from_list([wrong, 3])
        resolved(cfg)
    except (UserError, KeyError, AssertionError) as error:  # the framework's error, as its launcher shows it
        message = unknown_key_in(error) or str(error)
        assert f"unknown key {wrong!r}" in message or "unexpected keyword" in message, message
        assert "did you mean" in message or "there are: " in message, message
    else:
        assert framework.within(section, framework.OPEN) and f"{wrong} = 3 has no effect" in caplog.text


@pytest.mark.parametrize("name", sorted(framework.DEFAULTS))
def test_a_key_of_the_framework_is_honoured_refused_or_reported(cfg, name, caplog, other):
    from fs_lowrank.engines.federatedscope.config import _node

    node, key = _node(cfg, name)
    node[key] = other(framework.DEFAULTS[name])
    try:
        resolved(cfg)
    except UserError as error:
        assert f"{name} = " in str(error)
    else:
        reported = f"{name} = " in caplog.text and "has no effect" in caplog.text
        followed = framework.treatment(name, "federatedscope") == "followed"
        assert reported != followed or framework.off_switch(name, {})


def test_what_is_honoured_is_used():
    """By the framework's launcher, runners and workers, or by this package."""
    from fs_lowrank.engines.federatedscope import FRAMEWORK

    ours = Path(__file__).parents[3] / "fs_lowrank/engines/federatedscope"
    read = [*ours.glob("*.py"), FRAMEWORK / "main.py"]
    for folder in ("core/workers", "core/auxiliaries", "core/monitors", "core/configs"):
        read += (FRAMEWORK / folder).glob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*read, FRAMEWORK / "core/fed_runner.py"])
    honoured = [name for name in framework.DEFAULTS if framework.treatment(name, "federatedscope") == "followed"]
    unused = [n for n in honoured if not re.search(rf"\.{n.rpartition('.')[2]}\b", text)]
    assert not unused


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("llm.chat.max_len", 7, "our methods do not use it"),
        ("federate.merge_test_data", True, "our methods do not use it"),
        ("fedprox.mu", 0.3, "fedprox.use is False"),
        ("early_stop.delta", 0.3, "early_stop.patience is 0"),
    ],
)
def test_what_has_no_effect_says_why(cfg, name, value, reason, caplog):
    cfg.merge_from_list(["early_stop.patience", 0, name, value])
    resolved(cfg)
    assert f"{name} = {value} has no effect: {reason}" in caplog.text


def test_an_argument_of_the_optimizer_on_the_command_line(cfg):
    """The framework raises a KeyError for every key that is new to a section, unless a file has it."""
    cfg.merge_from_list(["train.optimizer.momentum", "0.9"])
    assert resolved(cfg).train.optimizer.extra == {"momentum": 0.9}
