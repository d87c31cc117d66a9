"""Cached states are equal to those that the frozen layers would compute."""

import copy
import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fs_lowrank.data import Examples
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.shortcuts import frozen
from fs_lowrank.models.shortcuts.frozen import FrozenPrefix
from fs_lowrank.models.shortcuts.states import SharedStates
from fs_lowrank.models.shortcuts.trials import samples_to_try
from fs_lowrank.settings import AdapterSpec
from tests.cases import enlarge, small_config

pytestmark = pytest.mark.more


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


def logits(prefix, data, batch, kept):
    inputs = {k: v for k, v in data.batch(batch).items() if k != "labels"}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        if kept:
            with prefix.states_of([("a", data, batch)], torch.device("cpu")):
                found = prefix.model(**inputs).logits
        else:
            found = prefix.model(**inputs).logits
    return found[real] if found.ndim == 3 else found


def test_the_layers_below_do_not_run(tiny_encoder):
    model, data = model_of(tiny_encoder, (2,)), examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)}, data)
    runs = {i: 0 for i in range(3)}
    for i, layer in enumerate(prefix.layers):
        layer.attention.self.query.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    for _ in range(4):
        logits(prefix, data, np.arange(9), True)
    assert runs == {0: 1, 1: 1, 2: 4}


def test_a_model_that_trains_below_has_no_prefix(tiny_encoder):
    model = model_of(tiny_encoder, (2,))
    assert not FrozenPrefix(model, {"base", "head"}, 1e9)
    assert FrozenPrefix(model, {"head"}, 1e9).depth == 2, "all but the last block are below"
    assert not FrozenPrefix(torch.nn.Linear(2, 2), {"base"}, 1e9)


def test_an_embedding_that_trains_is_below_the_blocks(tiny_encoder):
    model = AutoModelForSequenceClassification.from_pretrained(str(tiny_encoder))
    for saved, depth in (("word_embeddings", 0), ("pooler", 2)):
        spec = AdapterSpec(
            r=2, lora_alpha=4, target_modules=("query",), layers=(2,), extra={"modules_to_save": [saved]}
        )
        prefix = FrozenPrefix(add_adapter(copy.deepcopy(model), spec, 0), {"adapter", "head"}, 1e9)
        prefix.plan({"a": (examples(), 5)}, examples())
        assert prefix.depth == depth, "states that depend on a trained embedding cannot be cached"


@pytest.mark.parametrize("shared", [None, 0, 1, 1e9])
@pytest.mark.parametrize(
    "uses, limit, fewest, kept",
    [
        ((0.9, 1, 9, 9), 2, 0.5, "bd"),  # c alone is larger
        ((0.5, 0.9, 0, 1), 2, 0.5, "ad"),  # those with less than a pass take what the others leave
        ((0.49, 0.5, 9, 1), 1e9, 0.5, "bcd"),
        ((0.01, 0, 9, 1), 1e9, 0.0, "acd"),  # of samples that are never used nothing is cached
    ],
)
def test_the_budget_goes_by_order_and_use(tiny_encoder, tmp_path, uses, limit, fewest, kept, shared):
    sets = {name: examples(count) for name, count in zip("abcd", (4, 4, 400, 4))}
    size = int(sets["a"].lengths.sum()) * 32 * 4
    store = None if shared is None else SharedStates(tmp_path / "shared", shared)
    prefix = FrozenPrefix(model_of(tiny_encoder, (1,)), {"adapter", "head"}, limit * size, store, fewest=fewest)
    prefix.plan({name: (sets[name], use) for name, use in zip("abcd", uses)}, sets["a"])
    assert prefix.budget == {name: name in kept for name in "abcd"}
    others = [(name, sets[name], np.arange(2)) for name in "abcd" if name not in kept]
    with prefix.states_of(others, torch.device("cpu")):
        pass
    assert not prefix.cached, "states beyond the budget are not cached"


def test_a_further_owner_takes_what_the_others_leave(tiny_encoder):
    data = examples(4)
    size = int(data.lengths.sum()) * 32 * 4
    for limit, planned, cached in ((3, True, True), (1, True, False), (3, False, False)):
        prefix = FrozenPrefix(model_of(tiny_encoder, (1,)), {"adapter", "head"}, limit * size)
        prefix.plan({"a": (data, 9 * planned)}, data)
        prefix.add("test", data)
        assert prefix.budget.get("test", False) == cached and prefix.planned == (planned + cached) * size


def test_an_error_in_the_context_restores_the_model(tiny_encoder):
    model, data = model_of(tiny_encoder, (1,)), examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)}, data)
    before = logits(prefix, data, np.arange(3), False)
    with pytest.raises(RuntimeError, match="stop"):
        with prefix.states_of([("a", data, np.arange(3))], torch.device("cpu")):
            raise RuntimeError("stop")
    assert torch.equal(logits(prefix, data, np.arange(3), False), before)


def test_states_in_half_precision(tiny_encoder):
    model, data = model_of(tiny_encoder, (2,)).to(torch.bfloat16), examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)}, data)
    kept, plain = (logits(prefix, data, np.arange(5), kept) for kept in (True, False))
    assert kept.dtype == torch.bfloat16 and prefix.cached["a"][0].dtype == torch.bfloat16
    torch.testing.assert_close(kept, plain, atol=0.05, rtol=0.05)


# -- keys and values of the first trained layer --------------------------------------------------------


def with_parts(place, changing=(), limit=1e9):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(str(place))
    spec = AdapterSpec(r=2, lora_dropout=0.2, target_modules=("query", "value"), layers=(2,))
    model = add_adapter(model, spec, seed=0).eval()
    enlarge(model, 0.3, "lora_B")
    data = examples()
    prefix = FrozenPrefix(model, {"adapter", "head"}, limit, changing=changing)
    prefix.plan({"a": (data, 5)}, data)
    return model, data, prefix


def gradients(prefix, data, kept):
    """Of a step with dropout, with or without what is kept of ``a``."""
    prefix.model.train()
    prefix.eval_below()
    prefix.model.zero_grad()
    torch.manual_seed(3)
    prefix.budget["a"] = kept
    with prefix.states_of([("a", data, np.array([4, 0, 7]))], torch.device("cpu")):
        loss = prefix.model(**data.batch(np.array([4, 0, 7]))).loss
    loss.backward()
    return {n: p.grad.clone() for n, p in prefix.model.named_parameters() if p.grad is not None}


def test_a_base_weight_that_changes_is_not_kept(tiny_encoder):
    name = "base_model.model.bert.encoder.layer.2.attention.self.value.base_layer.weight"
    model, _, prefix = with_parts(tiny_encoder, changing=[name])
    assert name in dict(model.named_parameters()) and list(prefix.parts) == ["attention.self.key"]


def test_keys_and_values_are_kept_only_where_all_fit(tiny_encoder):
    tokens = int(examples().lengths.sum())
    assert with_parts(tiny_encoder, limit=tokens * 96 * 4)[2].parts
    model, data, prefix = with_parts(tiny_encoder, limit=tokens * 96 * 4 - 1)
    assert not prefix.parts and prefix.budget == {"a": True}


def test_keys_and_values_of_other_weights_have_another_name(tiny_encoder, monkeypatch):
    keys = set()
    for change in (None, "attention.self.key.weight", "attention.self.value.lora_A.default.weight"):
        model, data, prefix = with_parts(tiny_encoder)
        if change:
            prefix.layers[2].get_parameter(change).data.add_(0.1)
        keys.add(prefix._key(data))
    assert len(keys) == 2
    monkeypatch.setattr(frozen, "_FORMAT", frozen._FORMAT + 1)
    assert with_parts(tiny_encoder)[2]._key(data) not in keys


# -- architectures -------------------------------------------------------------------------------------

_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
_BUCKETS = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}
#: name -> (model type, keys of its own, adapted module)
ARCHITECTURES = {
    "bert": ("bert", {}, "value"),
    "llama": ("llama", {}, "v_proj"),
    "roberta": ("roberta", {}, "value"),
    "qwen2": ("qwen2", {}, "v_proj"),
    "gpt2": ("gpt2", {}, "c_attn"),
    "deberta": ("deberta", _RELATIVE, "in_proj"),
    "deberta-v2": ("deberta-v2", {**_RELATIVE, "conv_kernel_size": 3, "conv_act": "gelu"}, "value_proj"),
    "deberta-v3": ("deberta-v2", {**_RELATIVE, **_BUCKETS}, "value_proj"),
    "xlm": ("xlm", {"pad_index": 0}, "v_lin"),
    "fnet": ("fnet", {}, "dense"),
    "convbert": ("convbert", {"conv_kernel_size": 3}, "value"),
    "longformer": ("longformer", {"attention_window": 4}, "value"),
    "xlnet": ("xlnet", {}, "layer_1"),
    "rwkv": ("rwkv", {}, "value"),
}
KEPT, COMPUTED = (
    ["bert", "llama", "roberta", "qwen2", "gpt2", "deberta", "deberta-v2", "deberta-v3"],
    ["xlm", "fnet", "convbert", "longformer", "xlnet", "rwkv"],
)
CAUSAL = ("llama", "qwen2", "gpt2", "rwkv")
#: what is kept of the first adapted layer beside its input; GPT-2 has one matrix for queries, keys and values
KEYS_AND_VALUES = {
    **dict.fromkeys(("bert", "roberta"), {"attention.self.key": 32, "attention.self.value.base_layer": 32}),
    **dict.fromkeys(("llama", "qwen2"), {"self_attn.k_proj": 16, "self_attn.v_proj.base_layer": 16}),
    "gpt2": {"attn.c_attn.base_layer": 96},
}


def random_model(name):
    kind, own, module = ARCHITECTURES[name]
    torch.manual_seed(0)
    loader = AutoModelForCausalLM if name in CAUSAL else AutoModelForSequenceClassification
    model = loader.from_config(small_config(kind, layers=4, **own))
    return add_adapter(enlarge(model, 0.3), AdapterSpec(r=2, target_modules=(module,), layers=(2, 3)), seed=0).eval()


def planned(name, data):
    prefix = FrozenPrefix(random_model(name), {"adapter", "head"}, 1e9)
    prefix.plan({"a": (data, 5)}, data)
    assert prefix.depth == 2
    return prefix


@pytest.mark.parametrize("name", KEPT + COMPUTED)
def test_every_architecture_gives_equal_results_with_the_cache(name, caplog):
    data = examples(causal=name in CAUSAL)
    with caplog.at_level(logging.WARNING, "fs_lowrank"):
        prefix = planned(name, data)
    assert prefix.budget == {"a": name in KEPT}
    said = [r.getMessage() for r in caplog.records if r.name == "fs_lowrank"]
    inner = type(prefix.model.get_base_model()).__name__
    assert [s.partition(" (")[0] for s in said] == (
        [] if name in KEPT else [f"train.cache_frozen: the cache cannot be used with {inner}"]
    )
    for batch in (np.arange(9), np.array([3, 0]), np.array([7]), np.array([2, 2])):
        plain, kept = logits(prefix, data, batch, False), logits(prefix, data, batch, True)
        torch.testing.assert_close(kept, plain, atol=1e-5 * float(plain.abs().max()), rtol=1e-5)
    assert bool(prefix.cached) == (name in KEPT)


@pytest.mark.parametrize("name", KEYS_AND_VALUES)
def test_keys_and_values_of_every_family(name):
    model, data = enlarge(random_model(name), 0.3, "lora_B"), examples(causal=name in CAUSAL)
    prefix = FrozenPrefix(model, {"adapter", "head"}, 1e9, changing=())
    prefix.plan({"a": (data, 5)}, data)
    assert prefix.depth == 2 and prefix.budget == {"a": True} and prefix.parts == KEYS_AND_VALUES[name]
    for batch in (np.arange(9), np.array([3, 0]), np.array([7]), np.array([2, 2])):
        plain, kept = logits(prefix, data, batch, False), logits(prefix, data, batch, True)
        torch.testing.assert_close(kept, plain, atol=1e-5 * float(plain.abs().max()), rtol=1e-5)
    assert prefix.cached["a"][0].shape[1] == 32 + sum(prefix.parts.values())
    kept, computed = (gradients(prefix, data, k) for k in (True, False))
    assert kept.keys() == computed.keys() and kept
    largest = max(float(gradient.abs().max()) for gradient in computed.values())
    for n, gradient in kept.items():
        torch.testing.assert_close(gradient, computed[n], atol=1e-5 * largest, rtol=1e-4)


@pytest.mark.parametrize("name", ["xlm", "fnet", "convbert"])
def test_the_cache_is_refused_only_where_results_would_differ(name):
    data = examples()
    prefix = planned(name, data)
    prefix.budget["a"] = True
    plain, kept = (logits(prefix, data, np.arange(9), k) for k in (False, True))
    assert (plain - kept).abs().max() > 0.01 * plain.abs().max()


def test_the_samples_that_are_tried_need_not_be_those_of_one_owner():
    """FNet mixes padding into its results, which shows once two lengths are in a batch."""
    draw = np.random.default_rng(0)
    data = [Examples({"input_ids": [draw.integers(4, 30, n)] * 3}, np.zeros(3, dtype=int)) for n in (5, 6)]
    for tried, kept in ((data[:1], True), (data, False)):
        prefix = FrozenPrefix(random_model("fnet"), {"adapter", "head"}, 1e9)
        prefix.plan({"a": (data[0], 5), "b": (data[1], 5)}, samples_to_try(tried))
        assert prefix.budget == {"a": kept, "b": kept}


@pytest.mark.parametrize("name", ["bert", "xlm", "xlnet"])
def test_the_check_restores_mode_and_random_state(name):
    model, data = random_model(name), examples()
    model.train()
    list(model.modules())[-1].eval()
    modes = [m.training for m in model.modules()]
    numbers, state = torch.get_rng_state(), {n: t.clone() for n, t in model.state_dict().items()}
    FrozenPrefix(model, {"adapter", "head"}, 1e9).plan({"a": (data, 5)}, data)
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
