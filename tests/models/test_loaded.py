"""Checkpoints that lack weights, tokenizers and lengths that do not suit the model: errors of one line."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import fs_lowrank
from fs_lowrank.config import load_config
from fs_lowrank.errors import ROWS_LOGGER, UserError
from fs_lowrank.models.build import build_model, build_skeleton, build_tokenizer, positions
from tests.cases import small_config

#: architecture -> its own keys, the modules of its head, the number of tokens that it accepts
CLASSIFIERS = {
    "bert": ({}, {"classifier"}, 20),
    "electra": ({}, {"classifier"}, 20),
    "roberta": ({"max_position_embeddings": 22, "pad_token_id": 1}, {"classifier"}, 20),
    "mpnet": ({"max_position_embeddings": 22}, {"classifier"}, 20),
    "deberta-v2": ({"position_biased_input": False, "relative_attention": True}, {"classifier", "pooler"}, None),
    "distilbert": ({}, {"pre_classifier", "classifier"}, 20),
    "gpt2": ({}, {"score"}, 20),
    "opt": ({}, {"score"}, 20),
    "llama": ({}, {"score"}, 20),
    "qwen2": ({}, {"score"}, 20),
    "bloom": ({}, {"score"}, None),
}


def plain_model(kind):
    return AutoModel.from_config(small_config(kind, **{"max_position_embeddings": 20, **CLASSIFIERS[kind][0]}))


def saved(model, folder):
    torch.manual_seed(1)
    model.save_pretrained(str(folder))
    return folder


def a_config(folder, suffix="transformers", **keys):
    return load_config({"federate.client_num": 2, "model.type": f"{folder}@{suffix}", **keys})


def copied(folder, to, **keys):
    """Copy ``folder`` to ``to``, with ``keys`` in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **keys}))
    return to


def change(folder, to, edit):
    """Copy ``folder`` to ``to``, with its tensors changed in place by ``edit``."""
    copied(folder, to)
    tensors = load_file(to / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tiny_encoder):
    """A classifier of three classes."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(tiny_encoder, folder, dirs_exist_ok=True)
    return saved(AutoModelForSequenceClassification.from_pretrained(str(tiny_encoder), num_labels=3), folder)


@pytest.mark.more
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_only_the_head_may_be_new(kind, tmp_path, caplog):
    _, heads, _ = CLASSIFIERS[kind]
    caplog.set_level(logging.INFO, ROWS_LOGGER)
    base = saved(plain_model(kind), tmp_path / "base")
    model = build_model(a_config(base), 3)
    assert {n.split(".")[0] for n in model.new_weights} == heads
    assert f"{str(base)!r} has no weights for {sorted(heads)[0]}" in caplog.text
    whole = saved(model, tmp_path / "whole")
    caplog.clear()
    assert build_model(a_config(whole), 3).new_weights == [] and not caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_has_no_new_weights(tmp_path, tied):
    config = small_config("llama", tie_word_embeddings=tied)
    whole = saved(AutoModelForCausalLM.from_config(config), tmp_path / "whole")
    assert ("lm_head.weight" in load_file(whole / "model.safetensors")) is not tied
    assert build_model(a_config(whole, "huggingface_llm"), None).new_weights == []
    base = saved(AutoModel.from_config(config), tmp_path / "base")
    if tied:
        assert build_model(a_config(base, "huggingface_llm"), None).new_weights == []
    else:
        with pytest.raises(UserError, match=r"lacks 1 of the model's 21 weights \(lm_head.weight\)"):
            build_model(a_config(base, "huggingface_llm"), None)


def test_an_encoder_may_come_without_its_pooler_but_not_with_half_of_it(tiny_encoder, tmp_path):
    def edit(tensors, names):
        for name in names:
            del tensors[name]

    both = ["pooler.dense.bias", "pooler.dense.weight"]
    folder = change(tiny_encoder, tmp_path / "none", lambda t: edit(t, both))
    assert {f"bert.{n}" for n in both} < set(build_model(a_config(folder), 2).new_weights)
    folder = change(tiny_encoder, tmp_path / "half", lambda t: edit(t, both[:1]))
    with pytest.raises(UserError, match="lacks 1 of .*bert.pooler.dense.bias"):
        build_model(a_config(folder), 2)


@pytest.mark.more
def test_a_missing_weight_is_named(tuned, tmp_path):
    for i, name in enumerate(sorted(load_file(tuned / "model.safetensors"))):
        folder = change(tuned, tmp_path / str(i), lambda t, name=name: t.pop(name))
        with pytest.raises(UserError, match=rf"lacks 1 of the model's \d+ weights \({name}\), which would be random"):
            build_model(a_config(folder), 3)


@pytest.mark.parametrize("suffix", ["transformers", "huggingface_llm"])
@pytest.mark.parametrize("prefix", ["module.", "encoder.model."])
def test_names_under_a_prefix(tiny_encoder, tiny_causal, tmp_path, suffix, prefix):
    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    folder = change(tiny_encoder if suffix == "transformers" else tiny_causal, tmp_path / "named", rename)
    with pytest.raises(UserError) as raised:
        build_model(a_config(folder, suffix), 2)
    message = str(raised.value)
    assert "lacks" in message and f"of other names ({prefix}" in message and "\n" not in message


def test_another_number_of_classes(tuned):
    with pytest.raises(
        UserError, match=r"is a classifier of 3 classes \(classifier.*\), the data has 2; take data of 3"
    ):
        build_model(a_config(tuned), 2)


def test_a_shape_that_differs_from_the_configuration(tiny_encoder, tmp_path):
    folder = copied(tiny_encoder, tmp_path / "wide", intermediate_size=64)
    with pytest.raises(UserError, match=r"is \(48,\) in the checkpoint and \(64,\) by its config.json"):
        build_model(a_config(folder), 2)


def test_unused_layers_of_a_checkpoint_are_reported(tiny_encoder, tmp_path, caplog):
    folder = copied(tiny_encoder, tmp_path / "short", num_hidden_layers=2)
    for _ in range(2):
        build_model(a_config(folder), 2)
    assert caplog.text.count("has 16 tensors that the model has no place for; they are left out: ") == 1


@pytest.mark.parametrize("left", [0.0, 0.001, 0.3, 0.999])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_weights(tiny_encoder, tmp_path, left, name):
    folder = copied(tiny_encoder, tmp_path / "cut")
    if name.endswith(".bin"):
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        (folder / "model.safetensors").unlink()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(left * len(content))])
    with pytest.raises(UserError, match="cannot load the weights of") as raised:
        build_model(a_config(folder), 2)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model_type": "bert", "hidden_size": "wide"}', '{"model_type": 3}']
)
def test_an_invalid_model_configuration(tiny_encoder, tmp_path, content):
    folder = copied(tiny_encoder, tmp_path / "bad")
    (folder / "config.json").write_text(content)
    for build in (lambda: build_tokenizer(a_config(folder)), lambda: build_model(a_config(folder), 2)):
        with pytest.raises(UserError, match="model.type: cannot load the") as raised:
            build()
        assert "\n" not in str(raised.value)


# -- lengths and vocabularies --------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_positions_are_what_the_model_takes(kind, tmp_path):
    _, _, room = CLASSIFIERS[kind]
    folder = saved(plain_model(kind), tmp_path)
    assert positions(build_skeleton(a_config(folder))) == room
    model = AutoModel.from_pretrained(str(folder)).eval()
    run = lambda length: model(input_ids=torch.full((1, length), 5))  # noqa: E731
    run(room or 30)
    if kind not in ("llama", "qwen2", "deberta-v2", "bloom"):  # rotary positions have no limit, but were not trained
        with pytest.raises((IndexError, RuntimeError)):
            run(room + 1)


def test_a_length_above_the_positions(settings, tmp_path):
    for keys, key in (({"llm.tok_len": 65}, "llm.tok_len"), ({"data.args": [{"max_len": 65}]}, "max_len of data.args")):
        config = load_config({**settings, **keys})
        with pytest.raises(UserError, match=f"{key} = 65: the model at .* has 64 positions; set {key} to 64 or less"):
            build_tokenizer(config)
    assert build_tokenizer(load_config({**settings, "llm.tok_len": 64}))
    with pytest.raises(UserError, match="llm.tok_len = 65"):
        fs_lowrank.run(load_config({**settings, "llm.tok_len": 65}))
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_a_vocabulary_above_the_embedding(tiny_encoder, tmp_path):
    folder = copied(tiny_encoder, tmp_path / "more")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    rows = len(tokenizer)
    assert build_tokenizer(a_config(folder, **{"llm.tok_len": 24}))
    tokenizer.add_tokens(["tapir"])
    tokenizer.save_pretrained(str(folder))
    with pytest.raises(UserError, match=rf"has {rows + 1} tokens, the model's embedding {rows} rows"):
        build_tokenizer(a_config(folder, **{"llm.tok_len": 24}))


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", "qwen2"])
def test_missing_tokenizer_files(kind, settings, tmp_path):
    folder = saved(plain_model(kind), tmp_path / "bare")
    with pytest.raises(UserError, match="does not know 100% of the tokens of the training text; its vocabulary has"):
        fs_lowrank.run(load_config({**settings, "model": {"type": f"{folder}@transformers"}, "llm": {"tok_len": 16}}))


def test_a_run_reports_and_records_its_new_head(settings, tmp_path, caplog, no_curves):
    caplog.set_level(logging.INFO, ROWS_LOGGER)
    settings["federate"]["total_round_num"] = 1
    fs_lowrank.run(load_config(settings))
    assert caplog.text.count("has no weights for classifier.bias, classifier.weight; they are new") == 1
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert recorded["new_weights"] == ["classifier.bias", "classifier.weight"]


def test_a_pointer_of_git_lfs_is_called_one(tiny_causal, tmp_path):
    for name in ("model.safetensors", "tokenizer.json"):
        folder = copied(tiny_causal, tmp_path / name)
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        config = a_config(folder, "huggingface_llm")
        with pytest.raises(UserError, match=f"{name}: a pointer of Git LFS.*git lfs pull"):
            build_tokenizer(config), build_model(config, None)


def test_code_that_a_model_brings_is_refused_and_nobody_is_asked(tiny_causal, tmp_path, monkeypatch):
    brought = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    folder = copied(tiny_causal, tmp_path / "m", model_type="own", auto_map=brought)
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for load in (build_skeleton, build_tokenizer, lambda config: build_model(config, None)):
        with pytest.raises(UserError, match="it brings code of its own, which is not run here; take a model"):
            load(a_config(folder, "huggingface_llm"))


class Ran:
    """What a pickle can do when it is read."""

    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


def test_a_bin_file_that_would_run_code(tiny_causal, tmp_path):
    folder = copied(tiny_causal, tmp_path / "m")
    config, tensors = a_config(folder, "huggingface_llm"), load_file(folder / "model.safetensors")
    torch.save({**tensors, "x": Ran()}, folder / "pytorch_model.bin")
    assert build_model(config, None)  # from safetensors
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="take the model's .safetensors files") as caught:
        build_model(config, None)
    assert "weights_only" not in str(caught.value)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert build_model(config, None)
