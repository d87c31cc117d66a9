"""Adapters on real small models, tensors of any rank, merges on every kind of weight."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError, user_errors
from fs_lowrank.models import quantised
from fs_lowrank.models.accumulated import accumulate_pair, add_accumulated, one_adapter
from fs_lowrank.models.adapters import (
    add_adapter,
    base_weight_name,
    layer_stack,
    load_tensors,
    target_modules,
)
from fs_lowrank.models.build import positions
from fs_lowrank.models.merging import merge_pair
from fs_lowrank.models.names import all_tensors, named_tensors, pairs, select, tags
from fs_lowrank.models.saved import save_adapter
from fs_lowrank.settings import AdapterSpec

SPEC = AdapterSpec(r=3, lora_alpha=5, target_modules=("query", "intermediate.dense"), layers=(1, 2))


def encoder(folder):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(str(folder), num_labels=3).eval()


def causal(folder):
    return AutoModelForCausalLM.from_pretrained(str(folder)).eval()


def test_only_the_chosen_layers_and_modules(tiny_encoder):
    model = add_adapter(encoder(tiny_encoder), SPEC, seed=1)
    layers = {a.split(".lora_A.")[0].split("encoder.layer.")[1] for _, a in pairs(named_tensors(model, ("adapter",)))}
    assert layers == {f"{i}.{m}" for i in (1, 2) for m in ("attention.self.query", "intermediate.dense")}
    down = named_tensors(model, ("lora_A",))
    up = named_tensors(model, ("lora_B",))
    assert {tuple(t.shape) for t in down.values()} == {(3, 32)}
    assert {tuple(t.shape) for t in up.values()} == {(32, 3), (48, 3)}
    assert not any(t.any() for t in up.values()) and all(t.any() for t in down.values())


def test_a_causal_model_needs_no_head(tiny_causal):
    spec = AdapterSpec(r=2, lora_alpha=4, target_modules=("q_proj", "v_proj"))
    model = add_adapter(causal(tiny_causal), spec, seed=1)
    assert {tuple(t.shape) for t in named_tensors(model, ("lora_B",)).values()} == {(32, 2), (16, 2)}
    assert not named_tensors(model, ("head",))
    assert model.peft_config["default"].task_type == "CAUSAL_LM"


def test_lora_a_depends_only_on_the_seed(tiny_encoder):
    def drawn(seed):
        torch.manual_seed(seed * 77)  # numbers drawn before must not matter
        model = encoder(tiny_encoder)
        torch.rand(seed + 3)
        return named_tensors(add_adapter(model, SPEC, seed=seed % 2), ("lora_A",))

    first, again, other = drawn(1), drawn(3), drawn(2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"target_modules": ("qury",)}, "no module 'qury'; did you mean 'query'.*it has: .*value"),
        ({"target_modules": ("query",), "layers": (0, 3)}, r"no layer 3; the model's 3 layers are 0 … 2"),
        ({"target_modules": ("query",), "layers": (-1,)}, "no layer -1"),
        (
            {"target_modules": ("query",), "r": 33},
            "rank 33 is above the width of .*query: its weight is 32 × 32; choose r ≤ 32",
        ),
        ({"target_modules": ("intermediate.dense",), "r": 40}, "rank 40 .* 48 × 32; choose r ≤ 32"),
        (
            {"target_modules": ("query",), "r": 4, "extra": {"rank_pattern": {"query": 33}}},
            "rank 33 is above the width of .*query: its weight is 32 × 32; choose r ≤ 32",
        ),
        (
            {"target_modules": ("query",), "r": 4, "extra": {"rank_pattern": {"query": 10**9}}},
            "rank 1000000000 is above the width of every layer",
        ),
        ({"target_modules": ("query",), "r": 10**18}, "rank 10{18} is above the width of every layer; the longest has"),
        ({"target_modules": ("classifier",)}, "llm.adapter.args: PEFT raises .*: No modules were targeted"),
        ({"target_modules": ("LayerNorm",)}, "llm.adapter.args: PEFT raises .*is not supported"),
        ({"target_modules": ("query",), "extra": {"init_lora_weights": "foo"}}, "llm.adapter.args: .*'foo'"),
        (
            {"target_modules": ("query",), "extra": {"rank_pattern": 5}},
            "llm.adapter.args.0.rank_pattern = 5: expected a mapping or nothing",
        ),
        (
            {"target_modules": ("query",), "extra": {"modules_to_save": ["pooller"]}},
            "modules_to_save: this model has no module 'pooller'; did you mean",
        ),
        ({"target_modules": ("query",), "extra": {"rank_pattern": {"(": 2}}}, "PEFT raises .*: missing \\)"),
        ({"target_modules": ("query",), "extra": {"foo": 1}}, "unknown key 'llm.adapter.args.0.foo'; there are: .*"),
    ],
)
def test_wrong_adapters_are_named(tiny_encoder, spec, message):
    with pytest.raises(UserError, match=message):
        add_adapter(encoder(tiny_encoder), AdapterSpec(**spec), seed=0)


def test_a_rank_that_no_layer_takes_is_not_compared_with_their_widths(tiny_encoder):
    spec = AdapterSpec(r=40, target_modules=("query",), extra={"rank_pattern": {"query": 3}})
    model = add_adapter(encoder(tiny_encoder), spec, seed=0)
    assert {len(t) for t in named_tensors(model, ("lora_A",)).values()} == {3}


@pytest.mark.more
@pytest.mark.parametrize("layers", [None, [1]])
def test_all_linear_modules_but_the_head(tiny_encoder, tmp_path, layers):
    args = {"r": 2, "modules": "all-linear", **({} if layers is None else {"layers": layers})}
    config = load_config(
        {
            "federate.client_num": 1,
            "federate.method": "fedlora",
            "llm.adapter.args": [args],
            "model.type": "x@transformers",
        }
    )
    assert load_config(config.to_dict()).adapter == config.adapter  # config.yaml says the same
    plain = encoder(tiny_encoder)
    linear = {n for n, m in plain.named_modules() if isinstance(m, nn.Linear) and n != "classifier"}
    wanted = linear if layers is None else {n for n in linear if ".layer.1." in n}
    assert set(target_modules(plain, config.adapter)) == wanted and len(wanted) > 5
    model = add_adapter(plain, config.adapter, seed=1)
    held = {name.split(".lora_A")[0].removeprefix("base_model.model.") for _, name in pairs(all_tensors(model))}
    assert {name.split(".lora_B")[0] for name in held} == wanted
    for tensor in named_tensors(model, ("lora_B",)).values():
        tensor.data.normal_()
    model.save_pretrained(tmp_path)
    ids = torch.arange(4, 12)[None]
    again = PeftModel.from_pretrained(encoder(tiny_encoder), str(tmp_path)).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_all_linear_leaves_out_layers_that_give_more_than_a_product():
    """PhiMoE's router is a linear layer whose output is a tuple, to which PEFT cannot add a pair."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    config = AutoConfig.for_model("phimoe", **sizes, **heads, pad_token_id=0, bos_token_id=2, eos_token_id=3)
    model = add_adapter(AutoModelForCausalLM.from_config(config), AdapterSpec(r=1, target_modules=("all-linear",)), 0)
    adapted = {a.split(".lora_A.")[0].rpartition(".")[2] for _, a in pairs(named_tensors(model, ("adapter",)))}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert model(input_ids=torch.arange(4, 12)[None]).logits.isfinite().all()
    with pytest.raises(UserError, match="router is a PhimoeTopKRouter, which gives more than a product"):
        add_adapter(AutoModelForCausalLM.from_config(config), AdapterSpec(r=1, target_modules=("router",)), 0)


def test_the_head_of_a_language_model_is_not_linear(tiny_causal):
    names = target_modules(causal(tiny_causal), AdapterSpec(target_modules=("all-linear",)))
    assert names and not any("lm_head" in name for name in names)


def test_a_model_without_usual_modules_names_those_it_has():
    model = nn.Sequential()
    model.add_module("first", nn.Linear(3, 4))
    model.add_module("then", nn.Sequential(nn.Linear(4, 2)))
    for make in (lambda: add_adapter(model, AdapterSpec(r=1), seed=0), lambda: target_modules(model, AdapterSpec(r=1))):
        with pytest.raises(UserError, match="no usual choice for this model; name some of 0, first, or all-linear$"):
            make()
    assert target_modules(model, AdapterSpec(r=1, target_modules=("all-linear",))) == ["first", "then.0"]


def test_layers_of_a_model_without_layers():
    with pytest.raises(UserError, match="no list of layers"):
        add_adapter(nn.Sequential(nn.Linear(3, 4)), AdapterSpec(r=1, target_modules=("0",), layers=(0,)), seed=0)
    assert layer_stack(nn.Linear(3, 4)) is None


@pytest.mark.more
@pytest.mark.parametrize("rank", [1, 3, 7])
@pytest.mark.parametrize("rslora", [False, True])
def test_one_model_holds_pairs_of_any_rank(tiny_encoder, rank, rslora):
    spec = {"lora_alpha": 5, "target_modules": SPEC.target_modules, "layers": SPEC.layers, "use_rslora": rslora}
    other = add_adapter(encoder(tiny_encoder), AdapterSpec(r=rank, **spec), seed=2)
    generator = torch.Generator().manual_seed(0)
    for tensor in named_tensors(other, ("lora_B",)).values():
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    model = add_adapter(encoder(tiny_encoder), AdapterSpec(r=3, **spec), seed=1)
    ids = torch.randint(4, 30, (2, 9), generator=generator)
    with torch.no_grad():
        start = model(input_ids=ids).logits
        load_tensors(model, named_tensors(other, ("adapter", "head")))
        # It computes the same function as a model built with that rank, including the scale.
        torch.testing.assert_close(model(input_ids=ids).logits, other.eval()(input_ids=ids).logits)
        assert not torch.allclose(start, model(input_ids=ids).logits)


def test_one_adapter_of_layers_with_different_ranks(tiny_encoder, tmp_path):
    """Accumulated products may have different ranks in each layer, and some layers have none."""
    model = add_accumulated(add_adapter(encoder(tiny_encoder), SPEC, seed=1), 2)
    pairs = [n for n in all_tensors(model) if ".lora_A.default." in n]
    generator = torch.Generator().manual_seed(0)
    for rank, name in enumerate(pairs):
        down = torch.randn(rank, 32, generator=generator)
        if rank:
            accumulate_pair(
                model,
                name,
                torch.randn(model.get_parameter(name.replace("_A", "_B")).shape[0], rank, generator=generator),
                down,
            )
    assert len(pairs) > 2
    save_adapter(tmp_path, *one_adapter(model))
    again = PeftModel.from_pretrained(encoder(tiny_encoder), tmp_path).eval()
    ids = torch.randint(4, 30, (2, 9), generator=generator)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(again(input_ids=ids).logits, expected)
        assert not torch.allclose(encoder(tiny_encoder).eval()(input_ids=ids).logits, expected)


def test_loading_copies(tiny_encoder):
    model = add_adapter(encoder(tiny_encoder), SPEC, seed=1)
    for rank in (3, 2):
        given = {
            n: torch.ones(*(rank if d == 3 else d for d in t.shape))
            for n, t in named_tensors(model, ("adapter",)).items()
        }
        load_tensors(model, given)
        for tensor in given.values():
            tensor.zero_()
        assert all((t == 1).all() for t in named_tensors(model, ("adapter",)).values())
        model = add_adapter(encoder(tiny_encoder), SPEC, seed=1)


def test_loading_tensors_of_wrong_shapes(tiny_encoder):
    model = add_adapter(encoder(tiny_encoder), SPEC, seed=1)
    head = next(iter(named_tensors(model, ("head",))))
    with pytest.raises(ValueError, match="classifier"):
        load_tensors(model, {head: torch.zeros(1, 1)})
    with pytest.raises(KeyError):
        load_tensors(model, {"nowhere.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    "layer, inputs",
    [
        (nn.Linear(7, 5), (4, 7)),
        # GPT-2's layer keeps its weight transposed: 7 × 5.
        pytest.param(Conv1D(5, 7), (4, 7), marks=pytest.mark.filterwarnings("ignore:fan_in_fan_out")),
        (nn.Conv2d(3, 5, (1, 2)), (4, 3, 6, 6)),
    ],
)
def test_merging_does_not_change_the_output(layer, inputs):
    import peft

    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential()
    net.add_module("layer", layer)
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["layer"])).eval()
    ((b, a),) = pairs(named_tensors(model, ("adapter",)))
    up, down = (dict(model.named_parameters())[n] for n in (b, a))
    up.data.copy_(torch.randn(up.shape, generator=generator))
    x = torch.randn(inputs, generator=generator)
    with torch.no_grad():
        adapted = model(x)
        merge_pair(model, a, 3.0 * up.flatten(1), down.flatten(1))
        up.zero_()
        torch.testing.assert_close(model(x), adapted)
    assert base_weight_name(a) in dict(model.named_parameters())


# -- tags of names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected",
    [
        ("base_model.model.bert.encoder.layer.1.attention.self.query.lora_A.default.weight", {"adapter", "lora_A"}),
        ("base_model.model.bert.encoder.layer.1.attention.self.query.lora_B.default.weight", {"adapter", "lora_B"}),
        ("base_model.model.bert.encoder.layer.1.attention.self.query.lora_A.personal.weight", {"personal"}),
        ("base_model.model.bert.encoder.layer.1.attention.self.query.base_layer.weight", {"base"}),
        ("base_model.model.classifier.modules_to_save.default.weight", {"head"}),
        ("base_model.model.classifier.original_module.weight", set()),
        ("classifier.weight", {"head"}),
        ("score.weight", {"head"}),
        ("lm_head.weight", {"base", "rest"}),
        ("bert.embeddings.word_embeddings.weight", {"base", "rest"}),
        ("base_model.model.layer1.0.conv1.base_layer.bias", {"base", "rest"}),
        ("bn1.running_var", {"base", "rest"}),
        ("merge:3:base_model.model.up.lora_A.default.weight", {"merge"}),
        ("server_optimizer:m:base_model.model.up.lora_A.default.weight", {"server_optimizer"}),
    ],
)
def test_tags(name, expected):
    assert tags(name) == expected


def test_selecting_does_not_depend_on_order():
    names = ["x.lora_B.default.weight", "classifier.bias", "x.lora_A.default.weight", "x.base_layer.weight"]
    for order in (names, names[::-1]):
        assert select(order, ("adapter", "head")) == [
            "classifier.bias",
            "x.lora_A.default.weight",
            "x.lora_B.default.weight",
        ]
        assert pairs(dict.fromkeys(order)) == [("x.lora_B.default.weight", "x.lora_A.default.weight")]
    assert select(names, ()) == []


@pytest.mark.parametrize(
    "extra, modules, named",
    [
        ({"bias": "all"}, ("query",), "bias"),
        ({}, ("word_embeddings",), "lora_embedding_A"),
    ],
)
def test_tensors_that_no_method_trains_are_refused(tiny_encoder, extra, modules, named):
    with pytest.raises(UserError, match=f"llm.adapter.args: it would train .*{named}"):
        add_adapter(encoder(tiny_encoder), AdapterSpec(r=2, target_modules=modules, extra=extra), seed=1)


def test_only_what_a_library_says_is_called_its_own():
    with pytest.raises(UserError, match="^a sentence of ours$"), user_errors("PEFT"):
        raise UserError("a sentence of ours")
    with pytest.raises(UserError, match="^PEFT raises ValueError: odd"), user_errors("PEFT"):
        raise ValueError("odd")


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_of_several_towers_the_one_that_reads_text_is_adapted(loader):
    """The tower for images has more layers than the language model, modules of the same names, and 4 positions."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    model = loader.from_config(config)
    assert positions(model) == 128
    name, layers = layer_stack(model)
    assert "language_model" in name and len(layers) == 2
    for modules, number in ("all-linear", 14), ("q_proj", 2):
        for at, share in (None, number), ((1,), number // 2):
            found = target_modules(model, AdapterSpec(r=2, layers=at, target_modules=(modules,)))
            assert len(found) == share and all("language_model" in module for module in found)
    wrapped = add_adapter(model, AdapterSpec(r=2, target_modules=("q_proj",)), seed=0)
    trained = [n for n, p in wrapped.named_parameters() if p.requires_grad and "lora" in n]
    assert len(trained) == 4 and layer_stack(wrapped)[1] is layers
    wrapped(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(wrapped.get_parameter(n).grad is not None for n in trained)


@pytest.fixture
def as_quantised(monkeypatch):
    """``as_quantised(model)``: the layers with an adapter count as quantised, without bitsandbytes."""

    def mark(model):
        layers = [m.get_base_layer() for m in model.modules() if hasattr(m, "lora_A")]
        for layer in layers:
            layer.source_cls = nn.Linear
        inner = model.get_base_model()
        inner.hf_quantizer = SimpleNamespace(remove_quantization_config=lambda model: None)
        return model

    monkeypatch.setattr(quantised, "is_quantised", lambda module: hasattr(module, "source_cls"))
    monkeypatch.setattr(quantised, "_dequantised", lambda layer: layer.weight.data.clone())
    return mark


@pytest.mark.parametrize("extra", [{}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_an_adapter_on_a_quantised_base_is_merged_as_peft_does(tiny_encoder, as_quantised, extra):
    model = as_quantised(add_adapter(encoder(tiny_encoder), replace(SPEC, extra=extra), seed=1)).eval()
    torch.manual_seed(0)
    for tensor in named_tensors(model, ("adapter",)).values():
        tensor.data += 0.3 * torch.randn_like(tensor)
    ids = torch.randint(5, 20, (4, 7))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        plain = quantised.dequantised(model).merge_and_unload()
        torch.testing.assert_close(plain(input_ids=ids).logits, logits, atol=1e-6, rtol=1e-5)
        assert not any(hasattr(module, "source_cls") for module in plain.modules())
        torch.testing.assert_close(model(input_ids=ids).logits, logits, atol=0, rtol=0)  # it is left as it was


def test_a_bias_that_no_layer_can_take_is_refused(tiny_causal, as_quantised):
    spec = AdapterSpec(r=2, target_modules=("q_proj",), extra={"lora_bias": True})
    model = as_quantised(add_adapter(causal(tiny_causal), spec, seed=1))
    with pytest.raises(UserError, match="q_proj has no bias to add to; save the adapter alone"):
        quantised.dequantised(model)
