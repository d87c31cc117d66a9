"""What a checkpoint has no weights for is trained, sent and saved, wherever a classifier has it."""

import pytest
import torch
import transformers as hf
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

from fs_lowrank import UserError, load_config, run
from fs_lowrank.methods import create_method
from fs_lowrank.models.build import build_model
from fs_lowrank.models.kinds import heads_by_place
from fs_lowrank.models.names import is_head, tags
from fs_lowrank.settings import ALL_LINEAR, AdapterSpec
from tests.cases import small_config

pytestmark = pytest.mark.more

#: architecture -> its own keys, the modules for LoRA, and the parts of its head
MODELS = {
    "bert": ({}, ["query"], {"classifier"}),
    "bert, without a pooler": ({}, ["query"], {"classifier", "bert.pooler"}),
    "deberta-v2": ({}, ["query_proj"], {"classifier", "pooler"}),
    "xlnet": ({}, ["layer_1"], {"sequence_summary", "logits_proj"}),
    "bart": ({"decoder_start_token_id": 3}, ["q_proj"], {"classification_head"}),
    "t5": ({"decoder_start_token_id": 0}, ["q"], {"classification_head"}),
}


def new_model(name, folder):
    """A classifier whose base alone is in the folder."""
    torch.manual_seed(1)
    without = {"add_pooling_layer": False} if "without" in name else {}
    kind = name.partition(",")[0]
    AutoModel.from_config(small_config(kind, **MODELS[name][0]), **without).save_pretrained(folder / "base")
    return build_model(load_config({"federate.client_num": 2, "model.type": f"{folder / 'base'}@transformers"}), 3)


@pytest.fixture(params=MODELS)
def case(request, tmp_path):
    """The new model, the modules for LoRA, and the parts of its head."""
    return new_model(request.param, tmp_path), *MODELS[request.param][1:]


def adapted(model, modules, method="fedlora", **further):
    spec = AdapterSpec(r=2, lora_alpha=4, target_modules=tuple(modules))
    made = create_method(method, adapter=spec, rounds=2, **further)
    return made, made.adapt(model)


def test_all_that_is_new_is_trained_sent_and_saved(case, tmp_path):
    model, modules, head = case
    new = list(model.new_weights)
    assert {n for n in head if any(w.startswith(f"{n}.") for w in new)} == head
    model.save_pretrained(tmp_path / "plain")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    method, wrapped = adapted(model, modules)
    state = method.initial_state(wrapped)
    sent = {n for n in method.expected(state, 1, 1) if "head" in tags(n)}
    bare = {n.removeprefix("base_model.model.").replace("modules_to_save.default.", "") for n in sent}
    assert bare == set(new)
    with torch.no_grad():
        for tensor in state.values():
            tensor.normal_(std=0.3)
    method.apply(wrapped, dict(method.view(state)), 1)
    words = {"input_ids": torch.tensor([[5, 6, 7, 3], [8, 9, 10, 3]]), "attention_mask": torch.ones(2, 4).long()}
    wanted = wrapped.eval()(**words).logits
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**words).logits, wanted, atol=1e-6, rtol=1e-6)


def test_a_head_that_is_left_as_it_is_is_saved_too(case, tmp_path):
    model, modules, _ = case
    method, wrapped = adapted(model, modules, train_head=False)
    assert not [n for n in method.initial_state(wrapped) if "head" in tags(n)]
    wrapped.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {n.removeprefix("base_model.model.") for n in names if "lora_" not in n} == set(model.new_weights)


def test_without_an_adapter_the_head_is_what_is_new(case):
    model, _, head = case
    assert {n for n, _ in model.named_parameters() if is_head(n, heads_by_place(model))} == set(model.new_weights)


def test_all_linear_leaves_out_the_head(case):
    model, _, head = case
    _, wrapped = adapted(model, ALL_LINEAR)
    inside = {n.removeprefix("base_model.model.") for n, _ in wrapped.named_parameters() if ".lora_A." in n}
    assert inside and not [n for n in inside if n.startswith(tuple(f"{part}." for part in head))]


def test_byte_figures_of_full_training_set_the_head_apart(settings, tiny_encoder, tmp_path, no_curves):
    tokenizer = hf.AutoTokenizer.from_pretrained(str(tiny_encoder))
    AutoModel.from_config(small_config("deberta-v2", vocab_size=len(tokenizer))).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    keys = {"federate.method": "fedavg", "federate.client_num": 2, "federate.total_round_num": 1}
    keys |= {"model.type": f"{tmp_path / 'base'}@transformers", "llm.adapter.args": [{}]}
    record = run(load_config(settings, keys)).history[0]
    head = 4 * (32 * 32 + 32 + 32 * 2 + 2)  # the pooler and the classifier, float32
    assert record["uplink_bytes"] - record["uplink_bytes_without_head"] == 2 * head
    assert record["drift"].keys() == record["adapter_norm"].keys() == {"base", "head"}
    with pytest.raises(UserError, match="train_head = False without an adapter would train pooler.dense"):
        run(load_config(settings, {**keys, "lowrank.train_head": False}), overwrite=True)


def test_language_models_and_modules_of_ones_own_have_none(tiny_causal):
    assert heads_by_place(hf.AutoModelForCausalLM.from_pretrained(tiny_causal)) == []
    assert heads_by_place(torch.nn.Sequential(torch.nn.Linear(3, 2))) == []


@pytest.mark.parametrize("name", ["deberta-v2", "xlnet", "bart", "t5"])
def test_virtual_tokens_are_refused_or_train_the_head_too(name, tmp_path):
    model, spec = new_model(name, tmp_path), AdapterSpec(method="prompt", extra={"num_virtual_tokens": 3})
    method = create_method("fedlora", adapter=spec, rounds=2)
    if name == "deberta-v2":
        sent = method.initial_state(method.adapt(model))
        assert len(sent) == 1 + len(model.new_weights)
        assert sum("head" in tags(n) for n in sent) == len(model.new_weights)
    else:
        with pytest.raises(UserError, match="adapter_method = prompt cannot be used with .*ForSequenceClassification"):
            method.adapt(model)
