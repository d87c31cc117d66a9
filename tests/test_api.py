"""Running and comparing from Python: accepted arguments, the keys given to each method, errors."""

import dataclasses
import inspect
import json
from importlib import import_module

import pytest
import yaml

import fs_lowrank
from fs_lowrank import UserError, load_config, register_method
from fs_lowrank.errors import RunFailed
from fs_lowrank.methods import get_method_class


@pytest.fixture
def path(settings, tmp_path):
    file = tmp_path / "run.yaml"
    small = {**settings, "federate": {**settings["federate"], "client_num": 2, "total_round_num": 2}}
    file.write_text(yaml.safe_dump({**small, "train": {**settings["train"], "local_update_steps": 1}}))
    return file


@pytest.mark.parametrize(
    "module",
    ["fs_lowrank", *(f"fs_lowrank.{name}" for name in ("data", "finished", "runs.checkpoint", "runs.split")), "hpo"],
)
def test_a_path_is_given_as_text_or_as_a_path(module):
    """Of all functions that these modules are imported for, and of the options of a search."""
    public = import_module(module)
    names = getattr(public, "__all__", ["read_split"] if module.endswith("split") else ["load_checkpoint"])
    functions = {name: f for name in names if inspect.isfunction(f := getattr(public, name))}
    functions |= {"Search": public.Search} if module == "hpo" else {}
    functions |= {n: f for n, f in inspect.getmembers(fs_lowrank.RunResult, inspect.isfunction) if n[0] != "_"}
    for name, function in functions.items():
        for argument, said in inspect.get_annotations(function).items():  # the words, which name it as they stand
            kinds = [kind.strip() for kind in said.split("|")]
            assert argument == "return" or "Path" not in kinds or "str" in kinds, (name, argument)


def compared(*given, **more):
    """By method, the configuration that its run in a comparison has written."""
    return {
        name: load_config(result.outdir / "config.yaml") for name, result in fs_lowrank.compare(*given, **more).items()
    }


# -- accepted arguments -------------------------------------------------------------------------------


@pytest.mark.more
def test_a_path_in_place_of_a_configuration(path):
    runs = compared(str(path), ["rolora", "fedavg"], overrides={"seed": 8})
    assert list(runs) == ["rolora", "fedavg"] and {c.seed for c in runs.values()} == {8}
    with pytest.raises(UserError, match="no such file; did you mean 'run.yaml'"):
        fs_lowrank.run(path.with_name("runn.yaml"))


@pytest.mark.parametrize("wrong", [3, ["run.yaml"]])
def test_other_values_in_place_of_a_configuration(wrong):
    for call in (lambda: fs_lowrank.run(wrong), lambda: fs_lowrank.compare(wrong, ["rolora"])):
        with pytest.raises(UserError, match="config = .*: expected the path of a YAML file, a mapping, or a Config"):
            call()


# -- the keys of each method ---------------------------------------------------------------------------


@pytest.mark.more
def test_every_method_gets_the_keys_that_it_has(path):
    words = "lowrank.mix 0.5 lowrank.ranks [1,2] train.optimizer.lr 0.07 lowrank.min_clients 2"
    runs = compared(path, ["rolora", "flexlora", "flora", "fedavg"], overrides=words.split())
    assert runs["rolora"].method_params == {"mix": 0.5} and runs["fedavg"].method_params == {}
    assert runs["flora"].method_params["ranks"] == runs["flexlora"].method_params["ranks"] == (1, 2)
    assert all(c.train.optimizer.lr == 0.07 and c.lowrank.min_clients == 2 for c in runs.values())


@pytest.mark.more
def test_keys_of_the_files_own_method(path):
    path.write_text(path.read_text().replace("method: fedlora", "method: flora") + "lowrank: {ranks: [2, 1]}\n")
    runs = compared(load_config(path), ["flexlora", "rolora"])
    assert runs["flexlora"].method_params["ranks"] == (2, 1) and "ranks" not in runs["rolora"].method_params
    changed = {"lowrank.ranks": [1, 1], "lowrank.mix": 0.25}
    runs = compared(path, ["flora", "rolora"], overrides=changed, overwrite=True)
    assert runs["flora"].method_params["ranks"] == (1, 1) and runs["rolora"].method_params == {"mix": 0.25}


@pytest.mark.more
def test_a_key_without_a_default(path, own_methods):
    @register_method("needs_a_key")
    class NeedsAKey(get_method_class("fedlora")):
        @dataclasses.dataclass(frozen=True)
        class Params:
            threshold: int

    path.write_text(path.read_text().replace("method: fedlora", "method: needs_a_key"))
    runs = compared(path, ["rolora", "needs_a_key"], overrides={"lowrank.threshold": 3, "lowrank.mix": 0.5})
    assert runs["rolora"].method_params == {"mix": 0.5} and runs["needs_a_key"].method_params == {"threshold": 3}
    with pytest.raises(UserError, match="lowrank.threshold is missing"):
        fs_lowrank.compare(path, ["rolora", "needs_a_key"])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {"lowrank.rankss": [1, 2]},
            "override: unknown key 'lowrank.rankss'; did you mean 'ranks'?; keys of rolora, "
            "flexlora: mix, ranks, split",
        ),
        ({"lowrank.tau": 3}, "override: unknown key 'lowrank.tau'"),
        ({"lowrank.min_client": 3}, "did you mean 'min_clients'?"),
        ({"lowrank": {"miks": 3}}, "did you mean 'mix'?"),
        ({"lowrank.ranks": "many"}, "override: lowrank.ranks = 'many': expected a list of whole numbers"),
        ({"lowrank.mix": "half"}, "override: lowrank.mix = 'half': expected a number"),
        ({"lowrank.mix": 3}, "override: lowrank.mix = 3: expected a number, at least 0 and at most 1"),
        ({"train.local_update_step": 3}, "did you mean 'train.local_update_steps'"),
    ],
)
@pytest.mark.parametrize("as_config", [True, False])
def test_an_override_that_no_method_has(path, tmp_path, overrides, message, as_config):
    with pytest.raises(UserError) as caught:
        fs_lowrank.compare(load_config(path) if as_config else path, ["rolora", "flexlora"], overrides=overrides)
    assert message in str(caught.value) and not (tmp_path / "run").exists()


def test_methods_without_keys_of_their_own(path):
    with pytest.raises(UserError, match="keys of fedavg, ffa_lora: none"):
        fs_lowrank.compare(path, ["fedavg", "ffa_lora"], overrides={"lowrank.ranks": [1]})


# -- files that cannot be written ----------------------------------------------------------------------


@pytest.mark.more
def test_a_comparison_that_cannot_be_written(path, tmp_path):
    (tmp_path / "run" / "comparison.json").mkdir(parents=True)
    config = load_config(path, {"federate.total_round_num": 1})
    with pytest.raises(RunFailed, match="comparison.json cannot be written: .*resume=True"):
        fs_lowrank.compare(config, ["rolora"])
    (tmp_path / "run" / "comparison.json").rmdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fs_lowrank.rounds.trainer.train_client", None)
        result = fs_lowrank.compare(config, ["rolora"], resume=True)["rolora"]
    found = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert found["rolora"]["final"] == result.final
