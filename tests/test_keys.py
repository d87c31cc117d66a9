"""The reference of keys is complete, describes every key, and is the page of the documentation."""

import pytest
import yaml

from fs_lowrank import UserError, cli, load_config
from fs_lowrank.data import PARTITIONERS
from fs_lowrank.keys import find, framework_entries, reference
from fs_lowrank.settings import known_keys


@pytest.mark.more
def test_every_key_is_listed_with_a_description():
    entries = reference()
    assert not [e.name for e in entries if not e.meaning.endswith((".", "!", "?"))]
    names = {e.name for e in [*entries, *framework_entries()]}
    assert not set(known_keys()) - names
    assert len({(e.group, e.name) for e in entries}) == len(entries)


@pytest.mark.more
def test_defaults_are_those_of_a_configuration():
    config = load_config({"federate.client_num": 1})
    checked = 0
    for entry in reference():
        if entry.name in known_keys():
            assert yaml.safe_load(entry.default) == config.get(entry.name) or entry.name in (
                "federate.client_num",
                "federate.method",  # resolved
                "llm.adapter.use",
                "llm.adapter.args",
            ), entry.name
            checked += 1
    assert checked > 80


def test_what_a_user_looks_for_is_there():
    """Keys inside lists of one mapping have a type and a default; splitters and ``messages`` are named."""
    entries = {entry.name: entry for entry in reference()}
    args = ("max_len", "quoting", "test", "validation", "template", "loss_on", "text_pair", "category")
    for name in (*(f"data.args.0.{a}" for a in args), "early_stop.patience", "grad.grad_accum_count"):
        assert entries[name].type and entries[name].default and entries[name].meaning, name
    assert "`messages`" in entries["data.args.0.instruction"].meaning
    ours = {name for name, function in PARTITIONERS.items() if function.__module__.startswith("fs_lowrank.")}
    assert {"iid", "quantity"} <= ours and all(f"`{name}`" in entries["data.splitter"].meaning for name in ours)


@pytest.mark.more
def test_a_section_a_name_and_a_method_are_found():
    assert [e.name for e in find("train.optimizer.lr")] == ["train.optimizer.lr"]
    assert {e.name for e in find("grad")} == {"grad.grad_clip", "grad.grad_accum_count"}
    assert {e.group for e in find("min_size")} >= {"data.splitter: lda or dirichlet", "data.splitter: quantity"}
    assert {e.name for e in find("rolora")} == {"lowrank.mix"}
    assert find("backend")[0].engines == "refused"
    assert find("wandb.use")[0].engines == "followed"
    with pytest.raises(UserError, match="no key 'train.optimiser.lr'; did you mean 'train.optimizer.lr'"):
        find("train.optimiser.lr")


@pytest.mark.more
def test_the_command(capsys):
    assert cli.main(["keys", "lowrank.on_bad_round"]) == 0
    out = capsys.readouterr().out
    assert "default: stop" in out and "one of stop, skip" in out and "engines: all" in out
    assert cli.main(["keys", "data.args"]) == 0
    assert "data.args.0.quoting" in capsys.readouterr().out
    assert cli.main(["keys"]) == 0 and "fs-lowrank keys FederatedScope" in capsys.readouterr().out
    assert cli.main(["keys", "FederatedScope"]) == 0 and "asyn.use" in capsys.readouterr().out
    assert cli.main(["keys", "lowrnak"]) == 2 and len(capsys.readouterr().err.splitlines()) == 1
