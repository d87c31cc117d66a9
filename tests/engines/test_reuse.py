"""Trained clients are reused: which settings decide whether they can be, and what a comparison records."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank import load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.errors import RunFailed, UserError
from fs_lowrank.methods import Phase
from fs_lowrank.rounds import trainer
from fs_lowrank.rounds.reuse import Reuse

pytestmark = pytest.mark.more


FEW = {"federate.client_num": 3, "federate.total_round_num": 1, "train.local_update_steps": 3}


@pytest.fixture
def trained(monkeypatch):
    """The owners of all data that were trained on."""
    owners, real = [], trainer.train_client

    def spy(*args, **options):
        owners.append(options["owner"])
        return real(*args, **options)

    monkeypatch.setattr(trainer, "train_client", spy)
    return owners


@pytest.fixture
def run(few, tmp_path, trained):
    """``run(method, keys)``: a one-round run whose clients are kept; (the result, how many were trained)."""
    counter = iter(range(100))

    def run(method="fedavg", keys=None):
        before, kept = len(trained), {"lowrank.reuse_clients": str(tmp_path / "clients")}
        result = fs_lowrank.run(few(str(next(counter)), {"federate.method": method, **kept, **(keys or {})}))
        return result, len(trained) - before

    return run


def params(result):
    return {n: p.detach().clone() for n, p in result.model.named_parameters()}


def test_methods_whose_clients_train_alike_share_them(run):
    (first, trained), (again, none) = run(), run()
    assert (trained, none) == (3, 0)
    a, b = params(first), params(again)
    assert all(torch.equal(a[n], b[n]) for n in a)
    record = again.history[0]
    seconds = [r["client_seconds"] for r in (first.history[0], record)]
    assert [c["reused"] for c in seconds[0].values()] == [False] * 3 and all(c["reused"] for c in seconds[1].values())
    assert all(seconds[1][c]["training"] == seconds[0][c]["training"] > 0 for c in seconds[0]), "the original seconds"
    assert record["seconds"]["training"] > 0.99 * sum(c["training"] for c in seconds[0].values())
    assert record["loss"] == first.history[0]["loss"] and record["uplink_bytes"] == first.history[0]["uplink_bytes"]
    for method in ("fedfisher", "fisher_merge", "regmean"):
        assert run(method)[1] == 0
    assert run("fedfisher", {"lowrank.fisher": "kfac"})[1] == 0
    assert run("fedlora")[1] == 3 and run("fedlora")[1] == 0, "with an adapter the training is another"


def test_a_training_under_another_s_name_is_not_taken(tmp_path, caplog):
    reuse, model = Reuse(tmp_path), torch.nn.Linear(2, 2)
    for name in ("a", "b"):
        reuse.keep(name, model, [Phase(train=("head",))], {"loss": 1.0})
    assert reuse.find("b") is not None
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    assert reuse.find("b") is None and "b.safetensors is damaged" in caplog.text


@pytest.mark.parametrize(
    "keys",
    [
        {"train.optimizer.lr": 0.01},
        {"train.local_update_steps": 2},
        {"seed": 4},
        {"dataloader.batch_size": 4},
        {"train.optimizer.weight_decay": 0.0},
        {"data.splitter_args": [{"alpha": 5.0}]},
        {"grad.grad_clip": 1.0},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_settings_that_change_the_training_change_the_key(run, keys):
    run()
    assert run(keys=keys)[1] == 3


def test_another_configuration_of_the_model_changes_the_key(run, tiny_encoder, tmp_path):
    base = Path(shutil.copytree(tiny_encoder, tmp_path / "base"))
    run(keys={"model.type": f"{base}@transformers"})
    content = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**content, "layer_norm_eps": 1e-3}))
    assert run(keys={"model.type": f"{base}@transformers"})[1] == 3


def test_settings_of_the_server_do_not_change_the_key(run):
    run()
    of_server = {"lowrank.min_clients": 2, "federate.ignore_weight": True, "lowrank.validation_samples": 7}
    assert run(keys={**of_server, "eval.split": ["test"]})[1] == 0
    assert run(keys={"federate.total_round_num": 2})[1] == 3, "round 2 starts from another model"


@pytest.fixture
def key(settings):
    """``key(keys)``: of one training under this configuration, on the machine as it is."""
    model = torch.nn.Linear(3, 5)

    class Data:
        def fingerprint(self):
            return "x"

    def made(keys=None):
        config = load_config(settings, {"federate.method": "fedlora", **(keys or {})})
        return Reuse.key(config, model, Data(), [Phase(("head",))], lr=0.1, seed=1)

    return made


@pytest.mark.parametrize(
    "keys",
    [{"train.blocks": 1}, {"train.only_read": "off"}, {"train.cache_frozen": "off"}, {"train.cache_frozen_bytes": 1e3}],
    ids=lambda keys: next(iter(keys)),
)
def test_settings_that_change_rounding_change_the_key(key, keys):
    assert key() == key({"train.cache_frozen_dir": "elsewhere"}) != key(keys)


@pytest.mark.parametrize(
    "where, name, value",
    [
        (torch, "get_num_threads", 2),
        (torch, "get_float32_matmul_precision", "high"),
        (torch.backends.cpu, "get_cpu_capability", "another"),
    ],
)
def test_the_machine_changes_the_key(key, monkeypatch, where, name, value):
    before = key()
    monkeypatch.setattr(where, name, lambda: value)
    assert key() != before


def test_a_client_is_trained_again_if_its_entry_is_damaged(run, tmp_path, caplog):
    first, _ = run()
    entry = sorted((tmp_path / "clients").glob("*.safetensors"))[0]
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    entry.write_bytes(content)
    again, trained = run()
    assert trained == 1 and "is damaged" in caplog.text
    a, b = params(first), params(again)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_folder_that_cannot_be_used(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="lowrank.reuse_clients: could not store a client in .*file: .*; make room"):
        run(keys={"lowrank.reuse_clients": str(tmp_path / "file")})


@pytest.mark.slow
def test_a_comparison_of_one_round_trains_its_clients_once(few, trained, tmp_path):
    results = fs_lowrank.compare(few("all", {"federate.method": "fedavg"}), ["fedavg", "fedfisher", "regmean"])
    assert len(trained) == 3 and len(list((tmp_path / "all" / "clients").iterdir())) == 3
    comparison = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert len({results[m].facts["config"] for m in results}) == 3
    times = [comparison[m]["seconds"]["training"] for m in results]
    assert min(times) > 0.9 * times[0], "all methods report the time of the shared training"
    # With two rounds, the second one starts from each method's own model, so clients are not stored.
    fs_lowrank.compare(few("two", {"federate.method": "fedavg", "federate.total_round_num": 2}), ["fedavg"])
    assert len(trained) == 3 + 6 and not (tmp_path / "two" / "clients").exists()


# -- validation data of the server ---------------------------------------------------------------------------


def test_all_methods_select_on_the_same_held_out_samples(few):
    drawn = []
    for method, keys in (("regmean", {}), ("fedfisher", {"lowrank.solver": "adam"}), ("regmean", {"seed": 9})):
        engine = LocalEngine(few("x", {"federate.method": method, "lowrank.validation_samples": 12, **keys}))
        validation, batches = engine.workspace.data.validation, list(engine.method.workbench.validation())
        rows = {tuple(r[r != 0].tolist()) for b in batches for r in b["input_ids"]}
        held_out = {tuple(r[r != 0].tolist()) for r in validation.batch(range(len(validation)))["input_ids"]}
        labels = torch.cat([b["labels"] for b in batches]).tolist()
        assert len(labels) == 12 and rows <= held_out
        drawn.append((sorted(rows), labels))
    assert drawn[0] == drawn[1] != drawn[2]
    assert LocalEngine(few("plain", {"federate.method": "fedfisher"})).method.workbench is None


def test_without_a_validation_split(few):
    keys = {"data.splits": [0.8, 0.0, 0.2], "eval.split": ["test"]}
    said = "regmean chooses among models by validation data, and there are none; give data.splits a share"
    with pytest.raises(UserError, match=f"federate.method = {said}"):
        LocalEngine(few("x", {"federate.method": "regmean", **keys}))
    LocalEngine(few("x", {"federate.method": "fedfisher", **keys}))


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["diag", "kfac"])
def test_fedfisher_on_adapters(few, fisher):
    keys = {"federate.method": "fedfisher", "llm.adapter.use": True, "lowrank.fisher": fisher}
    result = fs_lowrank.run(few("run", keys))
    assert set(result.saved) == {"adapter", "adapter_best", "curves"} and not result.history[0]["failed"]
    assert all("lora_" in n or "classifier" in n for n, p in result.model.named_parameters() if p.requires_grad)
