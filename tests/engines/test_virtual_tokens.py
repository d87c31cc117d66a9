"""Virtual tokens before the text (prefix, prompt and p-tuning): what they give on every task, and what is refused."""

import warnings

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModel, AutoModelForCausalLM

import fs_lowrank
from fs_lowrank import UserError, load_config
from fs_lowrank.data import Examples
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.finished import load_run
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.prompts import generating
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.testing import Bench, quietly, small
from fs_lowrank.testing.bench import equal, state_of
from fs_lowrank.training.evaluate import evaluate
from fs_lowrank.training.generate import continue_prompts
from tests.cases import same_end, save_family

pytestmark = pytest.mark.more

KINDS = ("prefix", "prompt", "p-tuning")


def args(kind, **more):
    return {"llm.adapter.args": [{"adapter_method": kind, "num_virtual_tokens": 3, **more}], "lowrank.pictures": False}


@pytest.fixture
def bench(tmp_path):
    with quietly(tmp_path):
        yield Bench(tmp_path / "bench", {"train.optimizer": {"type": "SGD", "lr": 0.5}})


@pytest.fixture
def language_model(tiny_causal):
    """``language_model(kind)``: the tiny Llama with three virtual tokens."""

    def make(kind, **more):
        spec = AdapterSpec.from_args(args(kind, **more)["llm.adapter.args"][0])
        model = add_adapter(AutoModelForCausalLM.from_pretrained(str(tiny_causal)), spec, 0)
        return model.eval()

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_text_after_the_tokens(language_model, kind):
    """PEFT's own loss of a batch with padding; and logits are those of the text's tokens, with padding or without."""
    model = language_model(kind)
    rows = [[4, 5, 6, 7, 8], [9, 10, 11]]
    columns = {"input_ids": rows, "labels": [[-100, -100, 6, 7, 8], [-100, 10, 11]]}
    examples = Examples({name: [np.array(row) for row in value] for name, value in columns.items()})
    batch = examples.batch([0, 1])
    with torch.no_grad():
        out = model(**batch)
        alone = model(**{name: tensor[1:, :3] for name, tensor in batch.items()})
    assert out.logits.shape[:2] == (2, 5)
    torch.testing.assert_close(alone.logits[0], out.logits[1, :3], atol=1e-5, rtol=1e-5)
    assert evaluate(model, examples, 2)["loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert evaluate(model, examples, 1)["loss"] == pytest.approx(float(out.loss), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_who_is_asked_with_them(language_model, kind):
    """Prompts of unequal length; and what PEFT's model says of each alone."""
    model = language_model(kind)
    words = small.PLAIN[:8]
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer(" ".join(words[:n]))["input_ids"] for n in (3, 6, 6, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = continue_prompts(model, tokenizer, prompts, batch_size=3, max_new_tokens=4)
    alone = [continue_prompts(model, tokenizer, [p], batch_size=1, max_new_tokens=4)[0] for p in prompts]
    assert together == alone
    with generating():
        said = model.generate(input_ids=torch.tensor(prompts[:1]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(said[0, len(prompts[0]) :], skip_special_tokens=True) == alone[0]
    with model.disable_adapter():
        ids = torch.tensor(prompts[:1])
        plain = model.get_base_model()(input_ids=ids).logits
    assert not torch.allclose(plain, model(input_ids=ids).logits, atol=1e-3)


def load_tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.get_base_model().name_or_path)


@pytest.mark.parametrize("kind, task", [("prefix", "causal"), ("p-tuning", "encoder")])
def test_processes_give_the_result_of_one(bench, kind, task):
    keys = {**args(kind), "federate.total_round_num": 2}
    one, two = bench.make(task, "fedlora", keys), bench.make(task, "fedlora", {**keys, "federate.process_num": 2})
    one.run(), two.run()
    assert equal(state_of(one), state_of(two))


def test_the_keys_of_the_framework(settings, tmp_path):
    """``llm.adapter.args`` as its own files have it: the method is FedAvg of the adapter."""
    given = {"adapter_package": "peft", "adapter_method": "prefix", "prefix_projection": True, "num_virtual_tokens": 2}
    keys = {"llm.adapter": {"use": True, "args": [given]}, "federate.method": "FedAvg", "federate.total_round_num": 1}
    keys["lowrank.pictures"] = False
    result = fs_lowrank.run(load_config(settings, keys), progress=False)
    assert result.facts["method"] == "fedlora"
    loaded = load_run(result.outdir).model
    assert isinstance(loaded, PeftModel) and loaded.peft_config["default"].prefix_projection
    config = load_config(result.outdir / "config.yaml")
    assert config.adapter.extra["num_virtual_tokens"] == 2 and config.adapter.virtual_tokens == 2


def test_tokens_that_start_as_the_words_of_a_text(tiny_causal, language_model):
    given = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "good film tea"}
    model = language_model("prompt", **given, tokenizer_name_or_path=str(tiny_causal))
    ids = load_tokenizer(model)("good film tea")["input_ids"]
    words = model.get_base_model().get_input_embeddings().weight[ids]
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, words)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_decoder_model(causal_settings, task_files, kind):
    keys = {"model.type": f"{task_files}@huggingface_llm", "model.task": "Seq2SeqLM", **args(kind)}
    keys |= {"federate.total_round_num": 2, "train.optimizer": {"type": "SGD", "lr": 0.5}, "eval.before": True}
    result = fs_lowrank.run(load_config(causal_settings, keys), progress=False)
    assert result.final["test_loss"] < result.before["test_loss"]
    sent = [n for n in result.model.state_dict() if n.startswith("prompt_encoder")]
    assert all(t.shape[0] == 3 for n, t in result.model.state_dict().items() if n in sent and "embedding" in n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["SequenceRegression", "MultiLabelClassification"])
def test_numbers_and_sets_of_classes(settings, task_files, task, kind):
    file, label = ("scores.csv", "score") if task == "SequenceRegression" else ("sets.jsonl", "label")
    keys = {"data.type": str(task_files / file), "data.args": [{"label": label}], "model.task": task, **args(kind)}
    keys |= {"federate.total_round_num": 2, "train.optimizer": {"type": "SGD", "lr": 0.3}, "data.splitter": "iid"}
    result = fs_lowrank.run(
        load_config(settings, {**keys, "data.splitter_args": [], "eval.before": True}), progress=False
    )
    assert result.final["test_loss"] < result.before["test_loss"]


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, keys, said",
    [
        ({"adapter_method": "prefix"}, {}, "num_virtual_tokens is missing; say how many prefix trains, such as 20"),
        ({"num_virtual_tokens": 0}, {}, "num_virtual_tokens = 0: expected"),
        ({"r": 4}, {}, "r is no argument of adapter_method prompt; leave it out"),
        ({"modules": ["query"]}, {}, "modules is no argument of adapter_method prompt"),
        ({"layers": [1]}, {}, "layers is no argument of adapter_method prompt"),
        ({"prefix_projection": True}, {}, "unknown key 'llm.adapter.args.0.prefix_projection'"),
        ({}, {"federate.method": "rolora"}, "adapter_method = 'prompt': it has no halves A and B"),
        ({}, {"federate.method": "fedloru"}, "adapter_method = 'prompt': it does not add to a weight"),
        ({}, {"lowrank.save_merged": True}, "lowrank.save_merged = True: .* cannot be merged into weights"),
        (
            {},
            {"model.device_map": "auto"},
            "model.device_map = 'auto': .* trains virtual tokens before a text, which it keeps on one device",
        ),
        ({}, {"llm.tok_len": 62}, "tok_len = 62: the model at .* has 61 positions left by 3 virtual tokens"),
        (
            {"adapter_method": "prefix"},
            {"train.checkpointing": True},
            "train.checkpointing = True: layers that are computed again take no keys and values",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, given, keys, said):
    adapter = {"adapter_method": "prompt", "num_virtual_tokens": 3, **given}
    if given == {"adapter_method": "prefix"} and not keys:
        del adapter["num_virtual_tokens"]
    with pytest.raises(UserError, match=said) as caught:
        LocalEngine(load_config(settings, {"llm.adapter.args": [adapter], "federate.method": "fedlora", **keys}))
    assert "\n" not in str(caught.value)


def test_images_have_no_text(vision_settings):
    with pytest.raises(
        UserError, match="model.type = 'resnet10': .* trains virtual tokens before a text, and this model is for images"
    ):
        load_config(vision_settings, args("prompt"))


def test_models_that_do_not_compute_with_them(settings, tmp_path):
    """One that takes no keys and values; and one that would read the class at the padding."""
    model = save_family(tmp_path / "distil", "distilbert", AutoModel)
    distil = {"model.type": f"{model}@transformers", "federate.total_round_num": 1}
    with pytest.raises(UserError, match="adapter_method = prefix cannot be used with DistilBertFor.*past key values"):
        LocalEngine(load_config(settings, {**distil, **args("prefix")}))
    fs_lowrank.run(load_config(settings, {**distil, **args("prompt")}), progress=False)
    model = save_family(tmp_path / "llama", "llama", AutoModel)
    llama = {"model.type": f"{model}@transformers", "federate.total_round_num": 1}
    with pytest.raises(UserError, match="prompt cannot be used with LlamaFor.*: padding changes what it gives: logits"):
        LocalEngine(load_config(settings, {**llama, **args("prompt"), "outdir": str(tmp_path / "a")}))
    fs_lowrank.run(load_config(settings, {**llama, **args("prefix"), "outdir": str(tmp_path / "b")}), progress=False)


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
def test_layers_that_are_computed_again_give_the_same(bench, kind):
    runs = [bench.make("causal", "fedlora", {**args(kind), "train.checkpointing": again}) for again in (False, True)]
    for engine in runs:
        engine.run()
    same_end(*runs, tolerance=5e-6)
