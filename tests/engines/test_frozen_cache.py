"""Runs with cached outputs of the frozen layers, compared with runs that compute them each time."""

import pytest
import torch
from transformers import AutoModel

from tests.cases import same_end, save_family

pytestmark = pytest.mark.more


@pytest.fixture
def make(make_engine):
    few = {
        "federate.total_round_num": 2,
        "federate.method": "rolora",
        # An adaptive optimizer would enlarge rounding errors of gradients that are almost zero.
        "train.optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9},
        "train.local_update_steps": 1,
        "train.batch_or_epoch": "epoch",
    }
    return lambda task, keys: make_engine(task, {**few, **keys})


@pytest.mark.parametrize(
    "task, method", [("encoder", "rolora"), ("encoder", "flora"), ("causal", "rolora"), ("causal", "flexlora")]
)
def test_results_with_and_without_the_cache_are_equal(make, task, method):
    keys = {"federate.method": method, **({"lowrank.ranks": [1, 3]} if method != "rolora" else {})}
    kept, computed = make(task, keys), make(task, {**keys, "train.cache_frozen": "off"})
    # Dropout is off below the first adapted layer, and on above it.
    dropouts = [m for m in kept.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    assert task == "causal" or dropouts
    for engine in (kept, computed):
        engine.run()
        assert engine.workspace.prefix.depth == 1
    assert len(kept.workspace.prefix.cached) == 5 and not computed.workspace.prefix.cached
    same_end(kept, computed, tolerance=1e-6)


def test_dropout_above_stays_on(make):
    engine = make("encoder", {})
    engine.run()
    engine.model.train()
    engine.workspace.prefix.eval_below()
    below, above = engine.workspace.prefix.layers[0], engine.workspace.prefix.layers[1]
    assert not any(m.training for m in below.modules()) and all(m.training for m in above.modules())
    with_all = make("encoder", {"train.frozen_dropout": True})
    assert with_all.workspace.prefix is None
    with_all.run()
    assert any(not torch.equal(engine.ledger.state[n], with_all.ledger.state[n]) for n in engine.ledger.state)


@pytest.mark.parametrize("task", ["encoder", "causal"])
def test_in_memory_and_in_files(make, task, tmp_path):
    folder = tmp_path / "states"
    memory, files = make(task, {}), make(task, {"train.cache_frozen_dir": str(folder)})
    memory.run()
    files.run()
    assert files.workspace.prefix.cached and list(folder.glob("*.safetensors"))
    assert all(torch.equal(memory.ledger.state[n], files.ledger.state[n]) for n in memory.ledger.state)


def test_clients_that_train_on_few_of_their_samples_are_cached_if_the_key_says_all(make):
    few = {"federate.total_round_num": 1, "train.batch_or_epoch": "batch", "dataloader.batch_size": 1}
    runs = {value: make("encoder", {**few, "train.cache_frozen": value}) for value in ("auto", "all", "off")}
    for engine in runs.values():
        engine.run()
    cached = {value: sum("client" in o for o in engine.workspace.prefix.cached) for value, engine in runs.items()}
    assert cached["auto"] == cached["off"] == 0 < cached["all"]
    same_end(runs["all"], runs["off"], tolerance=1e-6)


@pytest.mark.slow
def test_a_model_whose_scores_depend_on_padding(make, tmp_path, caplog):
    """Its texts are computed by length, without the cache."""
    folder = save_family(tmp_path / "fnet", "fnet", AutoModel)
    adapter = {"r": 2, "modules": ["intermediate.dense"], "layers": [1]}
    keys = {"model.type": f"{folder}@transformers", "llm.adapter.args": [adapter]}
    kept = make("encoder", keys)
    assert "FNetForSequenceClassification gives a text another score where it is padded" in caplog.text
    computed = make("encoder", {**keys, "train.cache_frozen": "off"})
    for engine in (kept, computed):
        engine.run()
    assert kept.workspace.prefix is None
    assert all(torch.equal(value, computed.ledger.state[n]) for n, value in kept.ledger.state.items())
