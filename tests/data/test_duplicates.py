"""Test rows that are also in the training data."""

import numpy as np
import pandas as pd
import pytest

from fs_lowrank import load_config
from fs_lowrank.data import CLASSIFICATION, RawData, build_data
from fs_lowrank.data.duplicates import normalised, repeated


def test_normalised():
    assert normalised("  It\u2019s  GREAT,\tisn't it?!") == "it s great isn t it"
    assert normalised("\ufb01ne \u00c4pfel") == "fine \u00e4pfel" and normalised("...") == ""


@pytest.mark.parametrize("own_test_set", [True, False])
def test_repeated_rows_are_found_wherever_the_test_set_is_from(own_test_set, tiny_encoder):
    from transformers import AutoTokenizer

    texts = [f"the film number {chr(97 + i % 26)}{chr(97 + i // 26)} was bad" for i in range(60)]
    texts[50:] = [f" The FILM, {text[9:]}! " for text in texts[:5]] + [":-)", ":-(", ":-)", "good tea", "day"]
    frame = pd.DataFrame({"text": texts, "label": [i % 2 for i in range(60)]})
    raw = RawData(CLASSIFICATION, frame, None, None, ["no", "yes"], [], "here")
    if own_test_set:
        raw = RawData(CLASSIFICATION, frame[:50], None, frame[50:], ["no", "yes"], [], "here")
    splits = [1.0, 0.0, 0.0] if own_test_set else [0.5, 0.0, 0.5]
    keys = {"federate.client_num": 2, "data.type": "own.csv", "data.splits": splits, "llm.tok_len": 16}
    data = build_data(load_config(keys), AutoTokenizer.from_pretrained(tiny_encoder), raw)
    held = data.rows["test"]
    train = {normalised(texts[i]) or texts[i] for i in data.rows["train"]}
    expected = [i for i in held if (normalised(texts[i]) or texts[i]) in train]
    assert repeated(raw, data).tolist() == expected and 0 < len(expected) < len(held)
    if own_test_set:
        assert expected == [50, 51, 52, 53, 54]


def test_nothing_to_compare():
    images = RawData("image_classification", pd.DataFrame({"image": [0], "label": [0]}), None, None, ["a"], [], "")

    class Data:
        test, rows, cut = object(), {"train": np.array([0]), "test": np.array([0])}, ()

    assert repeated(images, Data()) is None
