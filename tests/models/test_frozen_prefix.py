"""The kept states are those that the frozen layers would have given."""
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fs_lowrank.config import AdapterSpec
from fs_lowrank.data import Examples
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.frozen import FrozenPrefix


def examples(count=9, causal=False, seed=0):
    draw = np.random.default_rng(seed)
    rows = [draw.integers(4, 30, draw.integers(2, 12)) for _ in range(count)]
    columns = {"input_ids": rows, **({"labels": rows} if causal else {})}
    return Examples(columns, None if causal else draw.integers(0, 2, count))


def model_of(folder, layers, causal=False, head_only=False):
    torch.manual_seed(0)
    loader = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    model = loader.from_pretrained(str(folder))
    modules = ("v_proj",) if causal else ("value",)
    return add_adapter(model, AdapterSpec(r=2, target_modules=modules, layers=layers), seed=0).eval()


@pytest.fixture(params=["encoder", "causal"])
def kind(request, tiny_encoder, tiny_causal):
    return request.param == "causal", tiny_causal if request.param == "causal" else tiny_encoder


@pytest.mark.parametrize("layers, depth", [((0,), 0), ((1,), 1), ((1, 2), 1), ((2,), 2)])
@pytest.mark.parametrize("folder", [False, True])
def test_the_same_logits(kind, layers, depth, folder, tmp_path):
    causal, place = kind
    model, data = model_of(place, layers, causal), examples(causal=causal)
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9, tmp_path / "states" if folder else None)
    assert prefix.depth == depth and bool(prefix) == (depth > 0)
    prefix.plan({"a": (data, 5)})
    for batch in (np.arange(9), np.array([3, 0]), np.array([7]), np.array([2, 2])):
        inputs = {k: v for k, v in data.batch(batch).items() if k != "labels"}
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            plain = model(**inputs).logits
            with prefix.states("a", data, batch):
                kept = model(**inputs).logits
        if causal:  # what a padded position says is nobody's business
            plain, kept = plain[mask], kept[mask]
        torch.testing.assert_close(kept, plain, atol=1e-5, rtol=1e-5)
    assert not folder or not list((tmp_path / "states").iterdir()) if depth else True
    # And the model is as it was.
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits[mask] if causal else model(**inputs).logits, plain)


def test_the_layers_below_do_not_run(tiny_encoder):
    model, data = model_of(tiny_encoder, (2,)), examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)})
    runs = {i: 0 for i in range(3)}
    for i, layer in enumerate(prefix.layers):
        layer.attention.self.query.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    inputs = {k: v for k, v in data.batch(np.arange(9)).items() if k != "labels"}
    for _ in range(4):
        with prefix.states("a", data, np.arange(9)):
            model(**inputs)
    assert runs == {0: 1, 1: 1, 2: 4}


def test_no_gradient_reaches_below_and_training_is_the_same(kind):
    causal, place = kind
    data = examples(causal=causal)
    gradients = []
    for limit in (1e9, 0):
        model = model_of(place, (1, 2), causal)
        prefix = FrozenPrefix(model, {"adapter", "head"}, limit)
        prefix.plan({"a": (data, 5)})
        model.train()
        prefix.eval_below()
        torch.manual_seed(3)  # dropout above the prefix draws the same with and without it
        with prefix.states("a", data, np.arange(5)):
            model(**data.batch(np.arange(5))).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-6, rtol=1e-4)


def test_a_model_that_trains_below_has_no_prefix(tiny_encoder):
    model = model_of(tiny_encoder, (2,))
    assert not FrozenPrefix(model, {"base", "head"}, 1e9)
    assert FrozenPrefix(model, {"head"}, 1e9).depth == 2, "with a head alone, all but the last block is kept"
    assert not FrozenPrefix(torch.nn.Linear(2, 2), {"base"}, 1e9)


def test_the_budget_goes_by_order_and_use(tiny_encoder):
    model = model_of(tiny_encoder, (1,))
    sets = {name: examples(4, seed=i) for i, name in enumerate("abcd")}
    size = {n: int(e.lengths.sum()) * 32 * 4 for n, e in sets.items()}
    prefix = FrozenPrefix(model, {"adapter", "head"}, size["b"] + size["d"])
    prefix.plan({"a": (sets["a"], 1), "b": (sets["b"], 2), "c": (examples(400), 9), "d": (sets["d"], 9)})
    assert prefix.budget == {"a": False, "b": True, "c": False, "d": True}
    with prefix.states("c", sets["c"], np.arange(2)):
        pass
    assert not prefix.kept, "what is not planned for is not kept"


def test_an_error_inside_leaves_the_model_whole(tiny_encoder):
    model, data = model_of(tiny_encoder, (1,)), examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)})
    inputs = {k: v for k, v in data.batch(np.arange(3)).items() if k != "labels"}
    with torch.no_grad():
        before = model(**inputs).logits
        with pytest.raises(RuntimeError, match="stop"):
            with prefix.states("a", data, np.arange(3)):
                raise RuntimeError("stop")
        assert torch.equal(model(**inputs).logits, before)


def test_states_in_half_precision(tiny_encoder):
    model, data = model_of(tiny_encoder, (2,)).to(torch.bfloat16), examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)})
    inputs = {k: v for k, v in data.batch(np.arange(5)).items() if k != "labels"}
    with torch.no_grad(), prefix.states("a", data, np.arange(5)):
        kept = model(**inputs).logits
    assert kept.dtype == torch.bfloat16 and prefix.kept["a"][0].dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(kept, model(**inputs).logits, atol=0.05, rtol=0.05)
