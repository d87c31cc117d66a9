"""Test rows that are also training rows: found, said, and refused where they are the same file."""

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

from fs_lowrank import UserError
from fs_lowrank.data import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, RawData, build_data, load_raw
from fs_lowrank.data.duplicates import normalised, row_keys


def test_normalised():
    assert normalised("  It\u2019s  GREAT,\tisn't it?!") == "it s great isn t it"
    assert normalised("\ufb01ne \u00c4pfel") == "fine \u00e4pfel" and normalised("...") == ""


@pytest.mark.parametrize("own_test_set", [True, False])
def test_repeated_rows_are_counted_wherever_the_test_set_is_from(own_test_set, tiny_encoder, config):
    texts = [f"the film number {chr(97 + i % 26)}{chr(97 + i // 26)} was bad" for i in range(60)]
    texts[50:] = [f" The FILM, {text[9:]}! " for text in texts[:5]] + [":-)", ":-(", ":-)", "good tea", "day"]
    frame = pd.DataFrame({"text": texts, "label": [i % 2 for i in range(60)]})
    raw = RawData(CLASSIFICATION, frame, None, None, ["no", "yes"], [], "here")
    if own_test_set:
        raw = RawData(CLASSIFICATION, frame[:50], None, frame[50:], ["no", "yes"], [], "here")
    splits = [1.0, 0.0, 0.0] if own_test_set else [0.5, 0.0, 0.5]
    data = build_data(config("own.csv", splits=splits), AutoTokenizer.from_pretrained(tiny_encoder), raw)
    train = {normalised(texts[i]) or texts[i] for i in data.rows["train"]}
    expected = sum((normalised(texts[i]) or texts[i]) in train for i in data.rows["test"])
    assert data.repeated == {"test": expected} and 0 < expected < len(data.test)
    assert f"{expected} of test are training rows as well" in data.describe()
    if own_test_set:
        assert expected == 5


def talk(*turns):
    return {"messages": [{"role": "user", "content": turn} for turn in turns]}


@pytest.mark.parametrize(
    "one, same, other",
    [
        ({"text": "a", "text_pair": "b"}, {"text": "A.", "text_pair": "b!"}, {"text": "a", "text_pair": "c"}),
        ({"text": "a b", "text_pair": "c"}, {"text": "a, b", "text_pair": "c"}, {"text": "a", "text_pair": "b c"}),
        *(
            [dict(zip(("instruction", "input", "output"), row)) for row in rows]
            for rows in (["abx", "abz", "acx"], ["  x", "  X", "  y"])  # the answer counts only without a prompt
        ),
        (talk("a", "b", "c"), talk("A", "b", "d"), talk("a", "c", "c")),
        (talk("", "c"), talk(" ", "C"), talk("", "d")),
    ],
)
def test_what_makes_two_rows_alike(one, same, other):
    first, second, third = row_keys(pd.DataFrame([one, same, other]), CLASSIFICATION if "text" in one else CAUSAL_LM)
    assert first == second != third


def test_images_are_compared_byte_by_byte():
    images = np.zeros((3, 1, 4, 4), np.uint8)
    images[1, 0, 3, 3] = 1
    first, second, third = row_keys(
        pd.DataFrame({"image": [0, 1, 2], "label": [0, 0, 1]}), IMAGE_CLASSIFICATION, images
    )
    assert first == third != second


@pytest.mark.parametrize("data, test", [("rows.csv", "rows.csv"), ("*.csv", "d/rows.csv"), ("rows.csv", "../d/r*.csv")])
def test_a_file_of_training_rows_is_no_test_file(tmp_path, config, data, test):
    (tmp_path / "d").mkdir()
    for name in ("rows", "more"):
        (tmp_path / "d" / f"{name}.csv").write_text("text,label\ngood,1\nbad,0\n")
    with pytest.raises(UserError, match=r"data.args: test: .*rows.csv is a file of the training rows"):
        load_raw(config(tmp_path / "d" / data, args=[{"test": test}]).data)
