"""A model by name or path, from a configuration."""

from transformers import AutoModelForSequenceClassification

from fs_lowrank.config import load_config
from fs_lowrank.models.build import build_model


def test_a_classifier_is_saved_with_the_names_of_its_classes(tiny_encoder, tmp_path):
    config = load_config(
        {"federate.client_num": 2, "federate.method": "fedlora", "model.type": f"{tiny_encoder}@transformers"}
    )
    build_model(config, 3, label_names=["bad", "so so", "good"]).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == {0: "bad", 1: "so so", 2: "good"} and loaded.config.num_labels == 3
    assert loaded.config.label2id == {"bad": 0, "so so": 1, "good": 2}
    assert build_model(config, 2).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
