"""Every argument of PEFT's configs changes what is trained or computed, or is refused, or is said to have no effect."""

import dataclasses

import peft
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.methods import get_method_class
from fs_lowrank.models.adapters import add_adapter, target_modules
from fs_lowrank.models.kinds import CLASSES
from fs_lowrank.models.names import tags
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.settings.adapter import OF_PEFT, OTHER_DEFAULTS, PROMPTS, TRAINED
from fs_lowrank.settings.effects import without_effect

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
#: a model, and the names of two modules
MODELS = {
    "encoder": (BertForSequenceClassification, BertConfig, ["query", "intermediate.dense"]),
    "causal": (LlamaForCausalLM, LlamaConfig, ["q_proj", "up_proj"]),
}
#: arguments with names of our own
NAMED = ("r", "alpha", "lora_alpha", "lora_dropout", "vera_dropout", "use_rslora", "target_modules")
#: a value that differs from the default, where that does not follow from its type
VALUES = {
    "bias": "all",
    "init_lora_weights": "gaussian",
    "layers_pattern": "layer",
    "layers_to_transform": [1],
    "loftq_config": {"loftq_bits": 4},
    "modules_to_save": ["dense"],
    "layer_replication": [[0, 1], [0, 2]],
    "target_parameters": ["q_proj.weight"],
    "alora_invocation_tokens": [1, 2],
    "trainable_token_indices": [1],
    "tokenizer_kwargs": {"revision": "main"},
}
#: what PEFT itself says, what depends on a draw or on the sizes of the model, what another of PEFT's arguments
#: switches on, and what PEFT's prompts take from the model
ELSEWHERE = ("fan_in_fan_out", "ensure_weight_tying", "decompose_both", "module_dropout", "target_parameters")
ELSEWHERE += ("megatron_core", "loftq_config", "qalora_group_size", "eps", "prompt_tuning_init_text")
ELSEWHERE += ("encoder_hidden_size", "encoder_num_layers", "encoder_dropout", "num_attention_heads", "num_layers")
ELSEWHERE += ("tokenizer_name_or_path",)


def build(kind):
    cls, config, _ = MODELS[kind]
    torch.manual_seed(0)
    return cls(config(**SIZES))


def arguments(method, kind):
    modules = MODELS[kind][2]
    args = {"adapter_method": method}
    if method in PROMPTS:
        return {**args, "num_virtual_tokens": 3}
    args |= {"target_modules": modules, **({"feedforward_modules": modules[1:]} if method == "ia3" else {})}
    return {**args, **{name: {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2}[name] for name in TRAINED[method]}}


def value_of(field, kind):
    modules = MODELS[kind][2]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    by_name = {**VALUES, "rank_pattern": {modules[0]: 3}, "alpha_pattern": {modules[0]: 3}}
    if field.name in ("exclude_modules", "feedforward_modules"):
        return modules[:1]
    if field.name in by_name:
        return by_name[field.name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default * 2 or type(default)(0.5) or 2
    words = str(field.type)
    return 3 if "int" in words and "list" not in words else "words" if "str" in words else {"a": 1}


def computed(kind, args):
    """The tensors of the model before training, its output while it trains, and the gradients of the adapter."""
    model = add_adapter(build(kind), AdapterSpec.from_args(args), 0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    trained = {n: p.requires_grad_() for n, p in model.named_parameters() if tags(n) & {"adapter", "head"}}
    with torch.no_grad():
        for name in sorted(trained):
            trained[name].add_(torch.randn(trained[name].shape, generator=draw) * 0.3)
    torch.manual_seed(3)
    ids = torch.arange(12).view(2, 6)
    output = model.train()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    output.sum().backward()
    return {**start, "output": output.detach(), **{f"{n} grad": p.grad for n, p in trained.items()}}


def equal(a, b):
    return a.keys() == b.keys() and all(a[n] is b[n] or a[n] is not None and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", CLASSES)
def test_every_argument(method, kind, caplog):
    args = arguments(method, kind)
    usual, silent = computed(kind, args), []
    assert equal(usual, computed(kind, args))
    for field in dataclasses.fields(getattr(peft, CLASSES[method])):
        if field.name in (*args, *NAMED, *ELSEWHERE):
            continue
        given = {**args, field.name: value_of(field, kind)}
        keys = {
            "federate.client_num": 2,
            "model.type": f"x@{'transformers' if kind == 'encoder' else 'huggingface_llm'}",
        }
        say_once.cache_clear()
        caplog.clear()
        try:
            config = load_config({**keys, "federate.method": "fedlora", "llm.adapter.args": [given]})
            same = equal(usual, computed(kind, given))
        except UserError as error:
            assert "did you mean" not in str(error), error
            continue
        said = [name for name, _, _ in without_effect(config, "local", get_method_class("fedlora"))]
        said = f"llm.adapter.args.0.{field.name}" in said or f"llm.adapter.args.0.{field.name} = " in caplog.text
        if said != same:
            silent.append((field.name, given[field.name], said, same))
    assert not silent, silent


def test_a_regular_expression_for_modules():
    """As in PEFT, it has to match whole names, and chooses the layers, too."""
    spec = AdapterSpec.from_args({"r": 2, "target_modules": r".*layer\.1\..*(query|value)"})
    assert spec.pattern and AdapterSpec.from_args(spec.to_args()) == spec
    model = build("encoder")
    found = target_modules(model, spec)
    assert len(found) == 2 and all("layer.1." in name for name in found)
    assert add_adapter(model, spec, 0).peft_config["default"].target_modules == spec.pattern
    for args, said in (
        ({"target_modules": "(query|value)"}, "PEFT raises NoMatching|none of the modules that it names"),
        ({"target_modules": "(query"}, "PEFT raises"),
        ({"target_modules": ".*(query|value)", "layers": [1]}, "PEFT raises"),
    ):
        for use in (target_modules, lambda model, spec: add_adapter(model, spec, 0)):
            with pytest.raises(UserError, match=said):
                use(build("encoder"), AdapterSpec.from_args(args))


def test_an_adapter_leaves_what_asked_for_it_as_it_is():
    """PEFT adds names of heads to the list that it is given, which would be refused the next time."""
    args = {"r": 4, "target_modules": ["query"], "modules_to_save": ["classifier"]}
    spec = AdapterSpec.from_args(args)
    for _ in range(2):
        add_adapter(build("encoder"), spec, 0)
    assert spec.extra == {"modules_to_save": ["classifier"]}


def test_what_peft_says_of_a_saved_adapter():
    """The names in ``OF_PEFT`` are the arguments that all of PEFT's configs have."""
    assert set(OF_PEFT) == {field.name for field in dataclasses.fields(peft.PeftConfig)}


@pytest.mark.parametrize("method", TRAINED)
def test_a_default_that_is_not_pefts_is_known(method):
    """Of the arguments that all kinds have here, by the names that PEFT has for them."""
    theirs = {f.name: f.default for f in dataclasses.fields(getattr(peft, CLASSES[method]))}
    spec = AdapterSpec(method, extra={"num_virtual_tokens": 2} if method in PROMPTS else {})
    names = {"r": "r", "lora_alpha": "lora_alpha" if method == "lora" else "alpha"}
    differ = {
        ours for ours, of_peft in names.items() if ours in TRAINED[method] and getattr(spec, ours) != theirs[of_peft]
    }
    assert differ == {name for name, _ in [OTHER_DEFAULTS[method]]} if method in OTHER_DEFAULTS else not differ
    for name, said in [OTHER_DEFAULTS[method]] if method in OTHER_DEFAULTS else ():
        assert str(theirs["oft_block_size" if method == "oft" else names[name]]) in said


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern", "exclude_modules"])
@pytest.mark.parametrize("module", ["key", "layer.1.attention.self.key", "layer.0.attention.self.query"])
def test_a_pattern_for_modules_without_an_adapter_is_refused(name, module):
    args = {"r": 4, "target_modules": ["query"], "layers_to_transform": [1]}
    value = [module] if name == "exclude_modules" else {module: 3}
    with pytest.raises(UserError, match=f"{name}: '{module}' is of no module with an adapter; there are: query"):
        add_adapter(build("encoder"), AdapterSpec.from_args({**args, name: value}), 0)


def test_patterns_for_modules_with_an_adapter():
    spec = AdapterSpec.from_args(
        {
            "r": 4,
            "target_modules": ["query", "value"],
            "rank_pattern": {"query": 3},
            "alpha_pattern": {"0.*query": 5},
            "exclude_modules": ["value"],
        }
    )
    assert {name.rpartition(".")[2] for name in target_modules(build("encoder"), spec)} == {"query"}
    query = add_adapter(build("encoder"), spec, 0).get_submodule(
        "base_model.model.bert.encoder.layer.0.attention.self.query"
    )
    assert query.r["default"] == 3 and query.lora_alpha["default"] == 5


@pytest.mark.parametrize(
    "args, words",
    [
        ({"adapter_method": "loha", "rank_dropout": 0.1}, "got multiple values for keyword argument 'rank_dropout'"),
        ({"bias": "some"}, "expected one of 'none', 'all', 'lora_only'"),
        (
            {"adapter_method": "prompt", "num_virtual_tokens": 3, "prompt_tuning_init": "TEXTS"},
            "expected one of TEXT, SAMPLE_VOCAB, RANDOM; did you mean 'TEXT'?",
        ),
        (
            {"adapter_method": "prefix", "num_virtual_tokens": 3, "init_weights": "ones"},
            "expected one of 'zero' or nothing",
        ),
        ({"adapter_method": "oft", "r": 5}, "Invalid `r` (5)! Adjusted `r` to (4)"),
        ({"adapter_method": "oft", "oft_block_size": 5}, "Invalid `oft_block_size` (5)! Adjusted"),
    ],
)
def test_values_that_peft_would_take_for_others_are_refused(args, words):
    with pytest.raises(UserError) as caught:
        add_adapter(build("encoder"), AdapterSpec.from_args(args), 0)
    assert words in str(caught.value)
