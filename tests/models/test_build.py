"""A model by name or path, from a configuration."""

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, T5Config

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.models.build import build_model, build_skeleton, build_tokenizer


def a_config(encoder):
    keys = {"federate.client_num": 2, "federate.method": "fedlora", "llm.tok_len": 32}
    return load_config({**keys, "model.type": f"{encoder}@transformers"})


def test_a_saved_tokenizer_does_not_tell_whether_a_hub_could_be_asked(tiny_encoder, tmp_path, monkeypatch):
    written = []
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert AutoTokenizer.from_pretrained(tiny_encoder).init_kwargs["local_files_only"] == offline
        build_tokenizer(a_config(tiny_encoder)).save_pretrained(tmp_path / str(offline))
        written.append({path.name: path.read_bytes() for path in (tmp_path / str(offline)).iterdir()})
    assert written[0] == written[1]


def test_a_classifier_is_saved_with_the_names_of_its_classes(tiny_encoder, tmp_path):
    config = a_config(tiny_encoder)
    build_model(config, 3, label_names=["bad", "so so", "good"]).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == {0: "bad", 1: "so so", 2: "good"} and loaded.config.num_labels == 3
    assert loaded.config.label2id == {"bad": 0, "so so": 1, "good": 2}
    assert build_model(config, 2).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


def test_an_adapter_and_a_model_of_another_hub_are_refused(tiny_encoder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter in PEFT's format; expected a whole model"):
        build_tokenizer(a_config(tmp_path))
    keys = {"federate.client_num": 2, "federate.method": "fedlora"}
    with pytest.raises(UserError, match="not looked for on ModelScope; download it, and name the folder"):
        build_tokenizer(load_config({**keys, "model.type": "some/llama@modelscope_llm"}))
    keys |= {"model.type": f"{tiny_encoder}@modelscope_llm", "model.task": "SequenceClassification", "llm.tok_len": 32}
    assert build_tokenizer(load_config(keys)).name_or_path == str(tiny_encoder)


@pytest.mark.more
def test_an_encoder_decoder_names_its_task(tmp_path):
    T5Config(vocab_size=20, d_model=4, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    keys = {"federate.client_num": 2, "federate.method": "fedlora", "model.type": f"{tmp_path}@huggingface_llm"}
    with pytest.raises(UserError, match="encoder-decoder model .t5., .*; set model.task Seq2SeqLM"):
        build_skeleton(load_config(keys))
    assert build_skeleton(load_config({**keys, "model.task": "Seq2SeqLM"})).config.is_encoder_decoder
