"""The head is recognised by its place at the top of the model, also if modules inside the base have such names."""

import pytest
import torch
import transformers as hf
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers.models.bert.modeling_bert import BertOutput
from transformers.models.llama.modeling_llama import LlamaMLP

import fs_lowrank
from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.names import all_tensors, named_tensors, tags
from fs_lowrank.settings import AdapterSpec

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


class NamedBertConfig(hf.BertConfig):
    model_type = "named_bert"


class NamedLlamaConfig(hf.LlamaConfig):
    model_type = "named_llama"


class Output(BertOutput):
    """The output layer of BERT with a matrix called ``classifier`` and a module ``pre_score``."""

    def __init__(self, config):
        super().__init__(config)
        self.classifier = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dense = nn.Sequential()
        self.dense.pre_score = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense.forward = lambda x: self.dense.pre_score(self.classifier(x))


class Mlp(LlamaMLP):
    """The MLP of Llama with a module ``fc`` whose matrices are called ``score`` and ``classifier``."""

    def __init__(self, config):
        super().__init__(config)
        self.fc = nn.Module()
        self.fc.score, self.fc.classifier = self.gate_proj, self.up_proj
        del self.gate_proj, self.up_proj

    def forward(self, x):
        return self.down_proj(self.act_fn(self.fc.score(x)) * self.fc.classifier(x))


class NamedBert(hf.BertForSequenceClassification):
    config_class = NamedBertConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.bert.encoder.layer:
            layer.output = Output(config)
        self.post_init()


class NamedLlama(hf.LlamaForCausalLM):
    config_class = NamedLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mlp(config)
        self.post_init()


hf.AutoConfig.register("named_bert", NamedBertConfig)
hf.AutoConfig.register("named_llama", NamedLlamaConfig)
hf.AutoModelForSequenceClassification.register(NamedBertConfig, NamedBert)
hf.AutoModelForCausalLM.register(NamedLlamaConfig, NamedLlama)


def classifier(config):
    return hf.AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize(
    "config, heads",
    [
        (hf.BertConfig(**SIZES), {"classifier"}),
        (hf.RobertaConfig(**SIZES, pad_token_id=1), {"classifier"}),
        (
            hf.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
            {"pre_classifier", "classifier"},
        ),
        (hf.LlamaConfig(**SIZES, pad_token_id=0), {"score"}),
        (hf.Qwen2Config(**SIZES, num_key_value_heads=2, pad_token_id=0), {"score"}),
        (hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2), {"score"}),
        (NamedBertConfig(**SIZES), {"classifier"}),
    ],
    ids=lambda value: value.model_type if isinstance(value, hf.PretrainedConfig) else "",
)
def test_the_head_is_the_same_with_and_without_adapters(config, heads):
    model = classifier(config)
    assert {n.split(".")[0] for n in named_tensors(model, ("head",))} == heads
    targets = tuple({"query", "q_lin", "q_proj", "c_attn"} & {n.split(".")[-1] for n, _ in model.named_modules()})
    adapted = add_adapter(model, AdapterSpec(r=2, lora_alpha=4, target_modules=targets), 0)
    found = named_tensors(adapted, ("head",))
    assert {n.removeprefix("base_model.model.").split(".")[0] for n in found} == heads
    assert all(".modules_to_save.default." in n for n in found)
    trains = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert trains == named_tensors(adapted, ("head", "adapter")).keys()


def test_a_language_model_has_no_head_inside():
    model = hf.AutoModelForCausalLM.from_config(NamedLlamaConfig(**SIZES))
    assert not named_tensors(model, ("head",))
    adapted = add_adapter(model, AdapterSpec(r=2, lora_alpha=4, target_modules=("q_proj", "score")), 0)
    assert not named_tensors(adapted, ("head",))
    assert sum(".fc.score.lora_B" in n for n in named_tensors(adapted, ("adapter",))) == 2
    assert tags("base_model.model.model.layers.0.mlp.fc.score.base_layer.weight") == {"base"}
    assert tags("base_model.model.model.layers.0.mlp.fc.classifier.weight") == {"base", "rest"}


@pytest.mark.parametrize("target", ["classifier", "pre_score", "output"])
def test_an_adapter_on_a_module_that_peft_takes_for_the_head(target):
    model = classifier(NamedBertConfig(**SIZES))
    modules = ("query", target) if target != "output" else ("query", "layer.1.output.classifier")
    with pytest.raises(UserError, match="no adapter can go on bert.encoder.layer|PEFT raises"):
        add_adapter(model, AdapterSpec(r=2, lora_alpha=4, target_modules=modules), 0)


def test_what_the_user_names_in_modules_to_save():
    def heads(name):
        spec = AdapterSpec(r=2, lora_alpha=4, target_modules=("query",), extra={"modules_to_save": [name]})
        found = named_tensors(add_adapter(classifier(NamedBertConfig(**SIZES)), spec, 0), ("head",))
        return {n.removeprefix("base_model.model.").partition(".modules_to_save")[0] for n in found}

    assert heads("classifier") == {"classifier"}
    assert heads("layer.1.output.LayerNorm") == {"classifier", "bert.encoder.layer.1.output.LayerNorm"}
    with pytest.raises(UserError, match="modules_to_save: bert.encoder.layer.1.output.classifier is inside the base"):
        heads("layer.1.output.classifier")


@pytest.mark.more
def test_a_run_does_not_change_the_base(settings, tiny_encoder, tmp_path, no_curves):
    tokenizer, folder = hf.AutoTokenizer.from_pretrained(str(tiny_encoder)), tmp_path / "model"
    classifier(NamedBertConfig(**{**SIZES, "vocab_size": len(tokenizer)}, num_labels=2)).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    keys = {"federate.client_num": 3, "federate.total_round_num": 1, "model.type": f"{folder}@transformers"}
    adapter = [{"r": 2, "alpha": 6, "modules": ["query"]}]
    result = fs_lowrank.run(load_config(settings, {**keys, "llm.adapter.args": adapter}))
    sent, without = (result.history[0][f"uplink_bytes{end}"] for end in ("", "_without_head"))
    assert sent - without == 3 * 4 * (16 * 2 + 2)
    assert without == 3 * 4 * 2 * (2 * 16 + 16 * 2)
    before, now = load_file(folder / "model.safetensors"), all_tensors(result.model)
    for name in (n for n in now if {"base"} <= tags(n)):
        plain = (
            name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".modules_to_save.default", "")
        )
        assert torch.equal(now[name], before[plain]), name
    assert len([n for n in now if "base" in tags(n)]) == len(before) - 2
    base = hf.AutoModelForSequenceClassification.from_pretrained(str(folder))
    again = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
    ids = torch.arange(4, 12)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, result.model.eval()(input_ids=ids).logits)
