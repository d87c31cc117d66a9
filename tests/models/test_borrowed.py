"""Uses of other libraries beyond their documented interfaces.

If a test fails here, a library has changed; the message names the place that relies on it.
"""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel

import fs_lowrank
from fs_lowrank.models import convolution
from fs_lowrank.models.adapters import layer_stack


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize("config", [LoraConfig, LoHaConfig, LoKrConfig])
def test_pefts_convolutions_are_those_that_ours_replace(config):
    place = "fs_lowrank/models/convolution.py exchanges the class of PEFT's layer"
    layer = get_peft_model(Net(), config(r=2, target_modules=["conv"])).base_model.model.conv
    assert type(layer) in convolution._FORMS, f"{place}; PEFT puts a {type(layer)} there now"
    ours = convolution._FORMS[type(layer)]
    assert issubclass(ours, type(layer)) and "__slots__" not in vars(type(layer)), f"{place}; it has slots now"
    assert list(inspect.signature(type(layer).forward).parameters)[1] == "x", f"{place}; its forward takes others now"
    for name in ("active_adapters", "disable_adapters", "merged", "r", "get_base_layer"):
        assert hasattr(layer, name), f"{place} and reads {name}, which is gone"
    for name in (
        ("lora_A", "lora_B", "lora_dropout", "scaling", "lora_variant")
        if config is LoraConfig
        else (
            "module_dropout",
            "rank_dropout",
            "get_delta_weight",
        )
    ):
        assert hasattr(layer, name), f"{place} and reads {name}, which is gone"


def test_a_module_s_class_can_be_replaced_by_one_of_its_kind():
    net, x = Net(), torch.ones(1, 3, 4, 4)
    before = net(x)
    net.__class__ = type("Net", (Net,), {"forward": lambda self, x: 2 * Net.forward(self, x)})
    assert torch.equal(net(x), 2 * before) and set(net.state_dict()) == {"conv.weight", "conv.bias"}, (
        "fs_lowrank/models/given.py gives a copy of the user's module a class with another forward, which fails now"
    )


def test_a_module_s_forward_can_be_replaced_on_the_instance():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    x = torch.ones(1, 2)
    assert torch.equal(layer(x), x), (
        "frozen.py and reads.py in fs_lowrank/models/shortcuts replace forward on the instance, which torch ignores now"
    )
    del layer.forward
    assert not torch.equal(layer(x), x)


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "qwen2", "gpt2"])
def test_a_layer_hands_keys_and_values_to_the_cache_that_it_is_given(kind):
    place = "fs_lowrank/models/shortcuts/reads.py computes the last layer for what is read by a cache of its own"
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, num_hidden_layers=1))
    layer = layer_stack(model)[1][0]
    takes = inspect.signature(layer.forward).parameters
    assert "hidden_states" in takes, f"{place}; a {type(layer).__name__}'s input has another name now"
    assert "past_key_values" in takes, f"{place}; a {type(layer).__name__} takes it by another name now"
    causal = [m.is_causal for m in layer.modules() if hasattr(m, "is_causal")]
    assert causal == [kind not in ("bert", "roberta")], f"{place}; attention says by another name if it is causal"

    class Cache:
        def update(self, keys, values, *_, **__):
            assert keys.shape[2] == values.shape[2] == 5, f"{place}; keys have another form now"
            raise KeyboardInterrupt

    states = torch.zeros(2, 5, model.config.hidden_size, device="meta")
    turns = {}
    if hasattr(model, "rotary_emb"):
        turns = {"position_embeddings": model.rotary_emb(states, torch.arange(5, device="meta")[None])}
    with pytest.raises(KeyboardInterrupt):
        layer(states, attention_mask=None, past_key_values=Cache(), **turns)
        pytest.fail(f"{place}; a {type(layer).__name__} does not call its update now")


@pytest.mark.parametrize("kind, layer", [("bert", "BertLayer"), ("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block")])
def test_a_model_names_the_layers_that_stay_on_one_device(kind, layer):
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, num_hidden_layers=1))
    assert layer in model._no_split_modules, "fs_lowrank/models/placing.py asks by this name"


#: names with an underscore that are documented: ``os._exit`` and a method of named tuples
DOCUMENTED = {"_exit", "_replace"}
#: private names of other libraries that are used, by file; the reason is given there or here
BORROWED = {
    # the version of the framework is pinned, and checked when it is imported (engines/locate_federatedscope.py)
    # a value of a new key is read as yacs reads all others
    "fs_lowrank/engines/federatedscope/config.py": {"_decode_cfg_value", "_immutable"},
    # the process of an executor of one, whose exit code says how it died
    "fs_lowrank/jobs/pool.py": {"_processes"},
    # the type that argparse's add_subparsers returns has no public name; it is used as a type hint only
    "fs_lowrank/commands/__init__.py": {"_SubParsersAction"},
    # the commands of a parser with their help, for the overview; the options that it has
    "fs_lowrank/jobs/shell.py": {"_choices_actions", "_SubParsersAction"},
    # the id by which a heartbeat is recorded: Optuna records the first one too late (hpo/worker.py)
    "hpo/worker.py": {"_trial_id"},
    # what accelerate must not divide, as transformers' own from_pretrained(device_map=…) asks its models
    "fs_lowrank/models/placing.py": {"_no_split_modules"},
    # torch has no public way to ask whether a module has hooks; if it has, PEFT's own forward runs
    "fs_lowrank/models/convolution.py": {"_forward_hooks"},
}


#: attributes of a library's objects that decide what they run, and the only files that replace them
REPLACED = {
    "fs_lowrank/models/convolution.py": {"__class__"},
    "fs_lowrank/models/given.py": {"__class__"},
    "fs_lowrank/models/padding.py": {"__class__"},
    "fs_lowrank/models/shortcuts/reads.py": {"forward"},
}


@pytest.mark.more
def test_nothing_else_of_a_library_s_own_is_used_or_replaced():
    """Looks in the code for attributes and imports with a leading underscore that are not ours, and for assignments."""
    root = Path(fs_lowrank.__file__).parent.parent
    ours, private, imported, replaced = set(), {}, [], {}
    for path in (path for room in ("fs_lowrank", "benchmark", "hpo") for path in (root / room).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
                if node.attr in ("__class__", "forward"):
                    replaced.setdefault(name, set()).add(node.attr)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    private.setdefault(name, set()).add(node.attr)
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
                parts = (getattr(node, "module", None) or "").split(".")
                parts += [part for alias in node.names for part in alias.name.split(".")]
                imported += [f"{name}: {part}" for part in parts if part.startswith("_") and not part.startswith("__")]
    used = {name: names - ours - DOCUMENTED for name, names in private.items()}
    assert {name: names for name, names in used.items() if names} == BORROWED
    assert not imported
    assert replaced == REPLACED, "give the reason in the code, test what it relies on above, and add the file here"
