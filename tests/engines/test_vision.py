"""Image networks trained from scratch: layers without adapter, running statistics, augmentation, resuming."""

import json

import pytest
import torch

from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.errors import UserError
from fs_lowrank.models.names import all_tensors, is_statistic
from fs_lowrank.testing import checks

FEW = {"federate.client_num": 3, "train.local_update_steps": 3}


@pytest.fixture
def make(few, vision_settings):
    return lambda name, keys=None: LocalEngine(few(name, keys, vision_settings))


METHODS = ("fedavg", "ffa_lora", "rolora")


def same(a, b):
    a, b = all_tensors(a.model), all_tensors(b.model)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.more
def test_it_learns(make):
    keys = {"federate.total_round_num": 4, "train.local_update_steps": 8, "eval.freq": 0, "federate.client_num": 2}
    result = make("run", {**keys, "data.splitter": "iid", "data.splitter_args": []}).run()
    assert result.final["test_acc"] > 0.8


@pytest.mark.more
@pytest.mark.parametrize("method", ["fedavg", "fedlora"])
def test_layers_without_adapter_are_trained_and_averaged_with_their_statistics(make, method):
    engine = make("run", {"federate.method": method, "federate.total_round_num": 1})
    start = {n: t.clone() for n, t in all_tensors(engine.model).items()}
    _, sent = checks._run_and_keep_uploads(engine)
    sizes = [len(e) for e in engine.workspace.data.clients]
    now, frozen = all_tensors(engine.model), {n for n in start if method == "fedlora" and "base_layer" in n}
    assert sent[1].keys() == start.keys() - frozen and sum(map(is_statistic, sent[1])) == 24
    for name in start:
        if name in frozen:
            assert torch.equal(now[name], start[name])
            continue
        mean = sum(n / sum(sizes) * sent[i][name].double() for i, n in enumerate(sizes, start=1))
        torch.testing.assert_close(now[name].double(), mean, atol=1e-6, rtol=1e-6)
        assert not torch.equal(now[name], start[name]) or "lora_A" in name


@pytest.mark.more
def test_the_parameter_counts_are_reported(make):
    engine = make("run", {"federate.total_round_num": 1})
    counts = engine.workspace.parameters
    assert engine.run().facts["parameters"] == counts
    assert json.loads((engine.recorder.outdir / "summary.json").read_text())["parameters"] == counts
    counts = {m: make(m, {"federate.method": m}).workspace.parameters["trainable"] for m in METHODS}
    total, trains = engine.workspace.parameters["total"], engine.workspace.parameters["trainable"]
    assert counts["fedavg"] == total > trains == counts["rolora"] > counts["ffa_lora"]


@pytest.mark.more
def test_augmentation_is_drawn_in_training_only_and_from_the_seed(make, monkeypatch):
    engine, again = make("a"), make("b")
    data, seen = type(engine.workspace.data.test), []
    batch = data.batch

    def noting(self, indices, augment=None):
        seen.append(augment is not None)
        return batch(self, indices, augment)

    monkeypatch.setattr(data, "batch", noting)
    engine.evaluator.evaluate(engine.ledger.state)
    list(engine.workspace.clients[0].batches())
    assert seen and not any(seen)
    seen.clear()
    first = engine.run()
    assert any(seen) and same(first, again.run())
    plain = make("c", {"data.transform": [["ToTensor"], ["Normalize", {"mean": [0.4], "std": [0.25]}]]}).run()
    assert not same(first, plain)


@pytest.mark.more
def test_both_initialisations_of_the_base(make):
    random, zero = make("random"), make("zero", {"lowrank.base_init": "zero"})
    bases = [n for n in all_tensors(zero.model) if "base_layer" in n]
    assert bases and not any(all_tensors(zero.model)[n].any() for n in bases)
    assert all(all_tensors(random.model)[n].any() for n in bases)
    assert all(zero.ledger.state[n].any() != random.ledger.state[n].any() for n in zero.ledger.state if "lora_B" in n)
    result = zero.run()
    assert not any(all_tensors(result.model)[n].any() for n in bases)


@pytest.mark.more
def test_from_given_weights_norms_and_stem_stay_frozen(make, tmp_path):
    start = make("start", {"federate.method": "fedavg"}).run()
    weights = start.save_model(tmp_path / "net") / "model.safetensors"
    engine = make("tuned", {"lowrank.weights": str(weights)})
    before = {n: t.clone() for n, t in all_tensors(engine.model).items()}
    assert torch.equal(before["base_model.model.bn1.running_mean"], all_tensors(start.model)["bn1.running_mean"])
    result = engine.run()
    moved = {n for n, t in all_tensors(result.model).items() if not torch.equal(t, before[n])}
    assert moved and all("lora_" in n or ".fc." in n for n in moved)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["Adam", "Yogi"])
def test_a_server_optimizer_leaves_statistics_to_the_mean(make, kind):
    optimizer = {"fedopt.use": True, "fedopt.optimizer": {"type": kind, "lr": 1.0}}
    engine = make("run", {"federate.method": "fedavg", **optimizer})
    engine.run()
    variances = [t for n, t in all_tensors(engine.model).items() if n.endswith("running_var")]
    assert variances and all((t > 0).all() for t in variances)
    assert not any(is_statistic(n) and ":" in n for n in engine.ledger.state)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"model.type": "lenet", "data.transform": [["Resize", {"size": 8}]]}, "images of 8 × 8 are too small"),
        ({"data.transform": [["RandomCrop", {"size": 20}]]}, "RandomCrop: maximum size for tensor"),
        ({"data.transform": [["Normalise"]]}, "did you mean 'Normalize'"),
        ({"lowrank.weights": "nowhere.safetensors"}, "reading weights from nowhere.safetensors raises"),
    ],
)
def test_errors_are_raised_before_the_run(make, keys, message):
    with pytest.raises(UserError, match=message):
        make("run", keys)


def test_text_for_a_network_for_images_and_the_other_way_round(make, reviews_csv, tiny_encoder):
    with pytest.raises(UserError, match="model.type = resnet10 takes images, but .* holds text"):
        make("run", {"data.type": str(reviews_csv), "data.transform": []})
    with pytest.raises(UserError, match="takes text, but .* holds images"):
        make("run", {"model.type": f"{tiny_encoder}@transformers", "lowrank.width": 1.0, "llm.tok_len": 24})


@pytest.mark.more
def test_flexlora_where_a_rank_is_above_a_layers_inputs(make):
    # A 1 × 1 convolution from 4 to 8 channels at rank 8: its A has more rows than there are directions.
    engine = make("run", {"federate.method": "flexlora", "llm.adapter.args.0.r": 8, "eval.freq": -1})
    assert any(a.shape[0] > a[0].numel() for n, a in engine.ledger.state.items() if ".lora_A." in n)
    result = engine.run()
    assert len(result.history) == 2 and all(t.isfinite().all() for t in engine.ledger.state.values())
