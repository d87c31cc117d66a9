"""Runs with cached outputs of the frozen layers, compared with runs that compute them each time."""

import pytest
import torch
from transformers import AutoTokenizer, FNetConfig, FNetModel

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


def close(one, other, tolerance=1e-6):
    assert one.ledger.state.keys() == other.ledger.state.keys()
    for name, value in one.ledger.state.items():
        torch.testing.assert_close(value, other.ledger.state[name], atol=tolerance, rtol=tolerance)
    for a, b in zip(one.recorder.history, other.recorder.history):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["metrics"]["test"]["loss"] == pytest.approx(b["metrics"]["test"]["loss"], abs=1e-5)


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
    close(kept, computed)


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


@pytest.mark.slow
def test_clients_beyond_the_budget_are_not_cached(make):
    whole = make("encoder", {})
    whole.run()
    assert whole.workspace.prefix.parts
    # Without room for keys and values, the layer's input is kept alone.
    sizes = {owner: len(states) * 32 * 4 for owner, (states, _) in whole.workspace.prefix.cached.items()}
    partly = make("encoder", {"train.cache_frozen_bytes": sum(sizes.values()) - 1})
    partly.run()
    assert 0 < len(partly.workspace.prefix.cached) < len(sizes) and set(partly.workspace.prefix.cached) == {
        o for o, kept in partly.workspace.prefix.budget.items() if kept
    }
    close(partly, whole)
    nothing = make("encoder", {"train.cache_frozen_bytes": 0})
    nothing.run()
    assert not nothing.workspace.prefix.cached
    close(nothing, whole)


def test_clients_that_train_on_few_of_their_samples_are_cached_if_the_key_says_all(make):
    few = {"federate.total_round_num": 1, "train.batch_or_epoch": "batch", "dataloader.batch_size": 1}
    runs = {value: make("encoder", {**few, "train.cache_frozen": value}) for value in ("auto", "all", "off")}
    for engine in runs.values():
        engine.run()
    cached = {value: sum("client" in o for o in engine.workspace.prefix.cached) for value, engine in runs.items()}
    assert cached["auto"] == cached["off"] == 0 < cached["all"]
    close(runs["all"], runs["off"])


def test_nothing_is_cached_if_all_weights_train(make):
    assert make("encoder", {"federate.method": "fedavg"}).workspace.prefix is None
    first, last = (make("encoder", {"llm.adapter.args.0.layers": layers}).workspace.prefix for layers in ([0, 2], [2]))
    assert first is None and last.depth == 2


def test_half_precision(make):
    kept, computed = (make("encoder", {"lowrank.dtype": "bfloat16", "train.cache_frozen": c}) for c in ("auto", "off"))
    for engine in (kept, computed):
        engine.run()
    assert {states.dtype for states, _ in kept.workspace.prefix.cached.values()} == {torch.bfloat16}
    for name, value in kept.ledger.state.items():
        torch.testing.assert_close(value, computed.ledger.state[name], atol=0.02, rtol=0.05)


def resumed(make, task, keys, folder):
    """A run that was stopped after its first round, and has gone on."""
    stopped, engine = (make(task, {**keys, "outdir": str(folder / "stopped")}) for _ in range(2))
    stopped.on_round = lambda record: True
    stopped.run()
    engine.run(resume=True)
    return engine


@pytest.mark.slow
def test_a_resumed_run_with_the_cache(make, tmp_path):
    whole = make("causal", {})
    whole.run()
    engine = resumed(make, "causal", {}, tmp_path)
    assert engine.workspace.prefix.cached
    assert all(torch.equal(value, engine.ledger.state[n]) for n, value in whole.ledger.state.items())


@pytest.mark.slow
def test_a_model_whose_scores_depend_on_padding(make, tiny_encoder, tmp_path, caplog):
    """Its texts are computed by length, without the cache, also after resuming."""
    folder, tokenizer = str(tmp_path / "fnet"), AutoTokenizer.from_pretrained(str(tiny_encoder))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "max_position_embeddings": 64}
    FNetModel(FNetConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    adapter = {"r": 2, "modules": ["intermediate.dense"], "layers": [1, 2]}
    keys = {"model.type": f"{folder}@transformers", "llm.adapter.args": [adapter]}
    kept = make("encoder", keys)
    assert "FNetForSequenceClassification gives a text another score where it is padded" in caplog.text
    computed = make("encoder", {**keys, "train.cache_frozen": "off"})
    for engine in (kept, computed):
        engine.run()
    further = resumed(make, "encoder", keys, tmp_path)
    assert kept.workspace.prefix is None and further.workspace.prefix is None
    for engine in (computed, further):
        assert all(torch.equal(value, engine.ledger.state[n]) for n, value in kept.ledger.state.items())
