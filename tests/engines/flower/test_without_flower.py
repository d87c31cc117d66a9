"""What does not need Flower: the folder of an app, the keys, and what is said where Flower is absent."""

import tomllib
from importlib.util import find_spec

import pytest

import fs_lowrank
from fs_lowrank import UserError, cli
from fs_lowrank.doctor import examine
from fs_lowrank.engines import get_engine, list_engines, locate_flower
from fs_lowrank.engines.flower.keys import check
from fs_lowrank.engines.flower.project import CONFIG
from fs_lowrank.engines.waiting import listed, replies
from fs_lowrank.methods import get_method_class
from fs_lowrank.rounds.codec import codec_of
from fs_lowrank.settings.effects import without_effect


def test_the_engine_is_listed_and_says_what_is_missing(monkeypatch):
    assert "flower" in list_engines()
    found = next(c for c in examine() if c.subject == "engine flower")
    assert found.ok == bool(find_spec("flwr") and find_spec("ray"))
    if not find_spec("flwr"):
        with pytest.raises(UserError, match=r"Flower \(flwr\) is not installed; pip install 'fs-lowrank\[flower\]'"):
            get_engine("flower")
        assert "not installed" in found.status and "pip install" in found.remedy
    monkeypatch.setattr(locate_flower, "version", lambda name: "1.30.0")
    with pytest.raises(UserError, match="flwr 1.30.0 is installed, and this engine is written for flwr>=1.41,<1.43"):
        locate_flower.require()
    monkeypatch.setattr(locate_flower, "version", lambda name: "1.41.0")
    monkeypatch.setattr(locate_flower, "find_spec", lambda name: None)
    assert locate_flower.require() == "1.41.0"
    with pytest.raises(UserError, match="flwr 1.41.0 is installed without Ray"):
        locate_flower.require(simulation=True)


@pytest.mark.more
def test_the_app_is_two_files_without_code(quick, tmp_path, capsys):
    config = quick("run", {"federate.method": "rolora"})
    config.dump(tmp_path / "mine.yaml")
    assert cli.main(["flower", "app", str(tmp_path / "app"), "--cfg", str(tmp_path / "mine.yaml")]) == 0
    assert "start it with: flwr run" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "app").iterdir()} == {"pyproject.toml", CONFIG}
    assert (tmp_path / "app" / CONFIG).read_text() == (tmp_path / "mine.yaml").read_text()
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"] == {"cfg": CONFIG, "resume": False, "overwrite": False}
    for half in project["tool"]["flwr"]["app"]["components"].values():
        module, _, name = half.partition(":")
        assert find_spec(module) and f"\n{name} = " in open(find_spec(module).origin).read()
    # Once more is the same; another content is not overwritten.
    assert cli.main(["flower", "app", str(tmp_path / "app"), "--cfg", str(tmp_path / "mine.yaml")]) == 0
    config.replace({"seed": 8}).dump(tmp_path / "mine.yaml")
    assert cli.main(["flower", "app", str(tmp_path / "app"), "--cfg", str(tmp_path / "mine.yaml")]) == 2
    assert "exists and says something else" in capsys.readouterr().err


def test_a_wrong_configuration_makes_no_app(quick, tmp_path, capsys):
    quick("run", {"federate.method": "rolora", "federate.use_ss": True}).dump(tmp_path / "mine.yaml")
    assert cli.main(["flower", "app", str(tmp_path / "app"), "--cfg", str(tmp_path / "mine.yaml")]) == 2
    assert "engine='flower' does not honour" in capsys.readouterr().err and not (tmp_path / "app").exists()
    assert cli.main(["flower", "app", str(tmp_path / "app"), "--cfg", str(tmp_path / "none.yaml")]) == 2
    assert cli.main(["flower"]) == 2 and cli.main(["flower", "ap", "x"]) == 2


def test_keys_that_the_engine_does_not_honour(quick):
    with pytest.raises(fs_lowrank.UserError, match="engine='flower' does not honour(?s:.*)former interface"):
        check(quick("ss", {"federate.use_ss": True}))
    with pytest.raises(fs_lowrank.UserError, match="nbafl.use = True: our methods do not use it"):
        check(quick("dp", {"nbafl.use": True}))
    with pytest.raises(fs_lowrank.UserError, match="federate.mode = .distributed.: engine='federatedscope' honours it"):
        check(quick("mode", {"federate.mode": "distributed"}))
    with pytest.raises(fs_lowrank.UserError, match="quantization.nbits = 4: expected 8 or 16"):
        check(quick("bits", {"quantization.method": "uniform", "quantization.nbits": 4}))
    with pytest.raises(fs_lowrank.UserError, match="quantization.method = 'other': expected none or uniform"):
        check(quick("other", {"quantization.method": "other"}))


def test_keys_that_have_an_effect_here_and_not_on_the_embedded_engine(quick):
    config = quick("some", {"quantization.method": "uniform", "lowrank.timeout": 5.0, "train.cohort": 4})
    check(config)
    assert codec_of(config).nbits == 8 and codec_of(quick("plain")).exact
    method = get_method_class(config.federate.method)
    idle = {name for name, _, _ in without_effect(config, "flower", method)}
    assert "train.cohort" in idle and not idle & {"lowrank.timeout", "quantization.method"}


def test_what_is_said_of_keys_of_the_other_engines(quick):
    """wandb.use is followed here as on the embedded engine; share_local_model has no effect."""
    config = quick("some", {"wandb.use": True, "wandb.client_train_info": True, "federate.share_local_model": True})
    method = get_method_class(config.federate.method)
    for engine in ("flower", "local"):
        said = {name: why for name, _, why in without_effect(config, engine, method)}
        assert "wandb.use" not in said and said["wandb.client_train_info"] == "only FederatedScope uses it"
        assert said["federate.share_local_model"] == "only FederatedScope uses it"


@pytest.mark.parametrize("work, at", [(False, [5, 10, 20, 40, 80, 160]), (True, [30, 60, 120])])
def test_a_wait_says_for_whom_and_how_long(caplog, work, at):
    """From the last reply on, here after 59 seconds; none comes from nodes 7 and 8."""
    now = [1000.0]

    def come():
        now[0] += 1.0
        return [(9, "reply"), (9, "once more")] if now[0] == 1059.0 else []

    came = list(replies([9, 8, 7], come, 200.0, "node", work, clock=lambda: now[0]))
    assert came[0] == (9, "reply") and [place for place, _ in came] == [9, 7, 8] and now[0] == 1259.0
    assert {reply.reason for _, reply in came[1:]} == {"no answer within lowrank.timeout, 200 s"}
    words = [record.message for record in caplog.records if "nodes 7, 8:" in record.message]
    assert words == [
        f"waiting for nodes 7, 8: no answer for {s} s; for up to {200 - s} s more, by lowrank.timeout = 200" for s in at
    ]


def test_of_many_five_are_named(caplog):
    now = iter(range(100))
    gone = {place: "gone" for place in range(8)}
    came = list(replies(range(9), list, 60.0, "node", False, lambda p: gone.get(p, ""), clock=lambda: next(now)))
    assert [reply.reason for _, reply in came] == ["gone"] * 8 + ["no answer within lowrank.timeout, 60 s"]
    assert "waiting for node 8: no answer" in caplog.text
    assert listed(range(9)) == "0, 1, 2, 3, 4 and 4 more"
