"""Engines of other packages, whose clients' processes end after every message, give the results of the embedded one."""

import importlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.methods import get_method_class, requirements
from tests.cases import same_model

ENGINE = Path(__file__).with_name("files_engine.py")
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own_engine.md"
METHODS = [m for m in fs_lowrank.list_methods() if "SequenceClassification" in requirements(m).tasks]
FOR_CAUSAL = [m for m in fs_lowrank.list_methods() if "CausalLM" in requirements(m).tasks]
FOR_IMAGES = [m for m in fs_lowrank.list_methods() if m not in METHODS]
#: hyperparameters that change what is sent, or what a copy must remember
VARIANTS = [
    ("flora", {"lowrank.ranks": [1, 3, 2]}),
    ("flexlora", {"lowrank.ranks": [1, 3, 2]}),
    ("fedloru", {"lowrank.tau": 2, "lowrank.init": "momentum", "federate.total_round_num": 3}),
    ("pfedloru", {"lowrank.tau": 2, "federate.total_round_num": 3}),
    ("fedloru", {"fedopt.use": True, "fedopt.optimizer.type": "Adam", "fedopt.optimizer.lr": 0.01}),
    ("pfedlora", {"lowrank.drop_rate": 0.4, "seed": 5, "federate.total_round_num": 3}),
    ("rolora", {"federate.make_global_eval": False}),
    ("fedloru", {"lowrank.tau": 2, "lowrank.merge": False, "federate.total_round_num": 3}),
    ("fedloru", {"lowrank.tau": 2, "lowrank.merge": False, "lowrank.init": "momentum", "federate.total_round_num": 3}),
    ("fedloru", {"lowrank.tau": 1, "llm.adapter.args.0.adapter_method": "loha"}),
    ("fedloru", {"lowrank.tau": 1, "llm.adapter.args.0.adapter_method": "lokr"}),
    ("mfedloru", {"lowrank.tau": 2, "lowrank.nested_ranks": [1, 0], "llm.adapter.args.0.r": 3}),
    ("pmfedloru", {"lowrank.tau": 2, "lowrank.nested_ranks": [1, 0], "llm.adapter.args.0.r": 3}),
    ("pfedlora", {"lowrank.variant": 2}),
    ("rolora", {"lowrank.robust": "norm_bound"}),
    ("rolora", {"lowrank.drift": "scaffold", "train.optimizer": {"type": "SGD", "lr": 0.1}}),
    ("fedlora", {"lowrank.drift": "feddyn", "lowrank.drift_weight": 0.5}),
    ("rolora", {"eval.client_scores": True, "eval.before": True}),
    ("mfedloru", {"lowrank.robust": "median", "lowrank.nested_ranks": [1, 0], "llm.adapter.args.0.r": 3}),
    ("fedhm", {"lowrank.rank_factors": [2, 8, 4]}),
    ("fedfisher", {"lowrank.fisher": "kfac", "lowrank.steps": 40}),
    ("fedfisher", {"lowrank.fisher": "kfac", "lowrank.steps": 40, "lowrank.compress": True}),
]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes the engine available as an installed package would."""
    info = tmp_path / "site" / "files_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: files-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fs_lowrank.engines]\nfiles = files_engine\n")
    shutil.copy(ENGINE, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    sys.modules.pop("files_engine", None)


FEW = {"federate.client_num": 3, "train.cache_frozen": "off"}


@pytest.fixture
def quick(installed, few):
    return few


def same(local, other):
    """The global tensors are equal to the bit, and so are the records except for seconds.

    If clients evaluate models of their own, they are sent the result of the round for it, and these bytes count. The
    embedded engine, whose clients share one model, sends it in the next round instead, and never sends the last one.
    """
    same_model(local, other)
    follow = "client_test" in local.history[-1]["metrics"]
    for a, b in zip(local.history, other.history, strict=True):
        for key in a.keys() - {"seconds", "client_seconds"}:
            assert (follow and "downlink" in key) or a[key] == b[key], key
        assert a["client_seconds"].keys() == b["client_seconds"].keys()
    assert local.final == other.final and local.best == other.best and local.before == other.before
    for name in ("adapter_best", "model_best"):
        saved = [(p.name, p.read_bytes()) for p in sorted((local.outdir / name).rglob("*.safetensors"))]
        assert saved == [(p.name, p.read_bytes()) for p in sorted((other.outdir / name).rglob("*.safetensors"))]
        assert not local.best or (name in local.saved) == (name in other.saved) == bool(saved)
    if follow:
        a, b = ([record["downlink_bytes"] for record in result.history] for result in (local, other))
        assert sum(a) < sum(b)
        for record in local.history:
            assert "evaluation_downlink_bytes" not in record
        assert all(0 < record["evaluation_downlink_bytes"] <= record["downlink_bytes"] for record in other.history)
        if all(len(record["selected"]) == len(local.facts["clients"]) for record in local.history):
            assert a[1:] == b[:-1]


def test_an_engine_takes_at_most_120_lines():
    assert len(ENGINE.read_text().splitlines()) <= 120, "what it lacks should be in fs_lowrank/rounds"


@pytest.mark.slow
@pytest.mark.parametrize("method, keys", [*((m, {}) for m in METHODS), *VARIANTS])
def test_the_result_is_that_of_the_embedded_engine(quick, method, keys):
    rounds = 1 if ".one_shot." in get_method_class(method).__module__ else 2
    few = {"federate.total_round_num": rounds, "federate.sample_client_num": 3 if keys else 2}
    keys = {"federate.method": method, **few, **keys}
    same(fs_lowrank.run(quick("local", keys)), fs_lowrank.run(quick("files", keys), "files"))


@pytest.mark.slow
@pytest.mark.parametrize("method", FOR_CAUSAL)
def test_causal_models(quick, causal_settings, method):
    keys = {"federate.method": method, "federate.sample_client_num": 2}
    same(
        fs_lowrank.run(quick("local", keys, causal_settings)),
        fs_lowrank.run(quick("files", keys, causal_settings), "files"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", FOR_IMAGES)
def test_methods_for_images_alone(quick, vision_settings, method):
    keys = {"federate.method": method, "model.type": "lenet", "model.use_bias": False, "lowrank.width": 0.5}
    if "generator_steps" in get_method_class(method).Params.__dataclass_fields__:
        keys |= {"lowrank.epochs": 2, "lowrank.generator_steps": 2, "lowrank.images": 8, "lowrank.channels": 4}
    keys |= {"federate.total_round_num": 1}
    same(
        fs_lowrank.run(quick("local", keys, vision_settings)),
        fs_lowrank.run(quick("files", keys, vision_settings), "files"),
    )


@pytest.mark.slow
def test_clients_that_come_late(quick):
    keys = {"federate.method": "fedloru", "lowrank.tau": 2, "federate.sample_client_num": 1, "seed": 5}
    keys |= {"federate.total_round_num": 5, "eval.freq": 0, "lowrank.checkpoint_freq": 0}
    local = fs_lowrank.run(quick("local", keys))
    assert len({c for r in local.history for c in r["selected"]}) > 1, "the seed must let clients come late"
    same(local, fs_lowrank.run(quick("files", keys), "files"))


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed(quick):
    """Clients go on from what they have on their disks."""
    keys = {"federate.method": "pfedloru", "lowrank.tau": 1, "federate.client_num": 2}
    local, config = fs_lowrank.run(quick("local", keys)), quick("files", keys)
    fs_lowrank.run(config, "files", on_round=lambda record: True)
    same(local, fs_lowrank.run(config, "files", resume=True))


@pytest.mark.more
def test_a_client_that_is_killed(quick, monkeypatch):
    """The round continues without it, and the record says why."""
    import files_engine

    config = quick("files", {"federate.method": "fedlora", "federate.total_round_num": 2})
    started, start = [], files_engine.start

    def killed(path, order):
        process = start(path, order)
        if path.endswith("000001/order_2"):
            started.append(path)
            process.kill()
        return process

    monkeypatch.setattr(files_engine, "start", killed)
    first, second = fs_lowrank.run(config, "files").history
    assert started and first["clients"] == [1, 3] and second["clients"] == [1, 2, 3]
    assert first["failed"] == [{"client": 2, "kind": "failed", "reason": "its process ended with exit code -9"}]
    # What it was sent in round 1 is not on its disk, so it is sent again in round 2.
    assert len(set(second["client_downlink_bytes"].values())) == 1


@pytest.mark.more
def test_the_engine_of_the_documentation(quick, tmp_path, monkeypatch):
    """One that starts a command for each order, as the page has it; a client that fails is left out of its round."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(code.splitlines()) <= 60
    (tmp_path / "commands_engine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = importlib.import_module("commands_engine")
    keys = {"federate.method": "pfedlora", "federate.client_num": 2, "federate.total_round_num": 2}
    config = quick("commands", keys)
    engine.run(config, on_round=lambda record: True)
    there = Path(config.outdir) / "clients"
    assert sorted(place.name for place in there.iterdir()) == ["1", "2"]
    shutil.rmtree(there / "1")
    resumed = engine.run(config, resume=True)
    assert not any(record["failed"] for record in resumed.history)
    local = fs_lowrank.run(quick("local", keys))
    lost = local.history[1]["client_downlink_bytes"]
    assert resumed.history[1]["client_downlink_bytes"]["1"] > lost["1"], "its copy is gone, so it is sent everything"


@pytest.mark.slow
def test_too_few_clients_and_what_cannot_be_resumed(quick):
    keys = {"federate.method": "fedlora", "lowrank.drop_rate": 0.5, "lowrank.min_clients": 3, "seed": 1}
    config = quick("files", keys)
    with pytest.raises(fs_lowrank.RunFailed, match="round 1: .*lowrank.min_clients is 3.*start again"):
        fs_lowrank.run(config, "files")
    config = config.replace({"lowrank.min_clients": 1})
    same(fs_lowrank.run(quick("local", {**keys, "lowrank.min_clients": 1})), fs_lowrank.run(config, "files"))
    with pytest.raises(fs_lowrank.UserError, match="holds a run already"):
        fs_lowrank.run(config, "files")
    with pytest.raises(fs_lowrank.UserError, match="train.optimizer.lr"):
        fs_lowrank.run(config.replace({"train.optimizer.lr": 0.5}), "files", resume=True)
    with pytest.raises(fs_lowrank.UserError, match="federate.mode = 'distributed'"):
        fs_lowrank.run(quick("other", {"federate.mode": "distributed"}), "files")


@pytest.mark.slow
def test_a_client_that_lost_its_disk(quick):
    """It reports that it is at the start of the run, is sent everything, and the record counts the bytes."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.client_num": 2, "federate.total_round_num": 3}
    whole, config = fs_lowrank.run(quick("whole", keys), "files"), quick("lost", keys)

    def lose(record):
        if record["round"] == 2:
            shutil.rmtree(Path(config.outdir) / "mail" / "clients" / "1")

    lost = fs_lowrank.run(config, "files", on_round=lose)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), lost.model.parameters(), strict=True))
    assert not any(r["failed"] for r in lost.history)
    down = [r["client_downlink_bytes"] for r in lost.history]
    assert down[:2] == [r["client_downlink_bytes"] for r in whole.history][:2]
    assert down[2]["2"] == whole.history[2]["client_downlink_bytes"]["2"] < down[2]["1"]


@pytest.mark.federatedscope
@pytest.mark.parametrize("method", ["rolora", "fedloru"])
def test_quantised_messages(quick, method):
    """The result is that of the framework's engine, which quantises messages too."""
    keys = {"federate.method": method, "quantization.method": "uniform", "quantization.nbits": 8}
    keys |= {"lowrank.tau": 1} if method == "fedloru" else {}
    other, files = fs_lowrank.run(quick("other", keys), "federatedscope"), fs_lowrank.run(quick("files", keys), "files")
    for (name, a), b in zip(other.model.named_parameters(), files.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for key in ("client_uplink_bytes", "client_downlink_bytes", "selected", "clients"):
        assert [r[key] for r in files.history] == [r[key] for r in other.history]
