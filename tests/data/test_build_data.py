import json
from types import SimpleNamespace

import numpy as np
import pytest

from fs_lowrank.config import load_config
from fs_lowrank.data import build_data, load_raw
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.runs.split import read_split, write_split


@pytest.fixture
def reviews(tmp_path):
    """100 rows: 30 of class 0, 70 of class 1, in two shops."""
    path = tmp_path / "reviews.csv"
    words = "a b c d e f".split()
    lines = [
        f"{words[i % 6]} {words[i // 6 % 6]} {words[i // 36]},{int(i % 10 > 2)},{'xy'[i % 4 > 2]}" for i in range(100)
    ]
    path.write_text("text,label,shop\n" + "\n".join(lines) + "\n")
    return path


def recorded(built, folder):
    """What a run with these data writes into ``folder``, read again."""
    write_split(folder, built)
    return read_split(folder)


def rows_of(examples):
    return sorted(zip([tuple(row) for row in examples.columns["input_ids"]], examples.labels.tolist(), strict=True))


def test_splits_cover_every_row_once_and_keep_the_classes(reviews, config, encoder_tokenizer):
    built = build_data(config(reviews, clients=4), encoder_tokenizer)
    assert [len(client) for client in built.clients] == [20] * 4
    assert len(built.validation) == len(built.test) == 10
    for part in (built.validation, built.test):
        assert np.bincount(part.labels).tolist() == [3, 7]
    parts = [*built.clients, built.validation, built.test]
    everything = sorted(row for part in parts for row in rows_of(part))
    whole = build_data(config(reviews, splits=(1, 0, 0), clients=1), encoder_tokenizer).clients[0]
    assert everything == rows_of(whole)
    assert built.majority == 0.7 and built.num_labels == 2 and built.task == "classification"


def test_test_seed_fixes_the_test_set(reviews, config, encoder_tokenizer):
    def held_out(seed, test_seed):
        settings = config(reviews, seed=seed)
        settings.lowrank = SimpleNamespace(test_seed=test_seed)
        built = build_data(settings, encoder_tokenizer)
        return rows_of(built.test), rows_of(built.validation)

    (first, seen), (second, also_seen) = held_out(1, 7), held_out(2, 7)
    assert first == second and seen != also_seen
    assert not set(first) & {*seen, *also_seen}  # validation data of one run are not in the test set of another
    assert held_out(7, -1) == held_out(7, 7) and held_out(1, -1)[0] != first


def test_a_share_of_zero_gives_no_examples(reviews, config, encoder_tokenizer):
    built = build_data(config(reviews, splits=(0.9, 0, 0.1)), encoder_tokenizer)
    assert built.validation is None and len(built.test) == 10
    built = build_data(config(reviews, splits=(0.9, 0.1, 0)), encoder_tokenizer)
    assert built.test is None and built.majority is None and len(built.validation) == 10


def test_record_lists_the_file_rows_of_each_client(reviews, config, encoder_tokenizer):
    lines = reviews.read_text().splitlines()
    lines[4:4] = ["", ",0,x", " ,1,y"]  # empty lines are not counted, but rows without text are
    reviews.write_text("\n".join(lines) + "\n")
    table = [line.split(",") for line in lines[1:] if line]
    built = build_data(config(reviews, clients=3, subsample=0.5, splitter="lda"), encoder_tokenizer)
    record = recorded(built, reviews.parent)
    assert record["skipped"] == {"empty text": 2} and record["validation"]["from"] == record["test"]["from"] == "train"
    parts = [*record["clients"], record["validation"], record["test"]]
    everyone = [row for part in parts for row in part["rows"]]
    assert len(everyone) == len(set(everyone)) == 40 + 10 + 10 and not {3, 4} & set(everyone)
    for part, examples in zip(parts, [*built.clients, built.validation, built.test], strict=True):
        words = encoder_tokenizer([table[row][0] for row in part["rows"]])["input_ids"]
        assert [list(ids) for ids in examples.columns["input_ids"]] == words
        assert [int(table[row][1]) for row in part["rows"]] == examples.labels.tolist()
    for number, client in enumerate(record["clients"], start=1):
        assert client["client"] == number and client["size"] == len(client["rows"]) == sum(client["labels"].values())
        assert client["labels"]["1"] == sum(table[row][1] == "1" for row in client["rows"])


def test_record_with_an_official_test_set(reviews, tmp_path, config, encoder_tokenizer):
    (tmp_path / "held.csv").write_text("text,label\n,1\nb,0\nc,1\n")
    built = build_data(config(reviews, args=[{"test": "held.csv"}], splits=(0.8, 0.2, 0)), encoder_tokenizer)
    record = recorded(built, tmp_path)
    assert record["test"] == {"from": "test", "size": 2, "rows": [1, 2], "labels": {"0": 1, "1": 1}}
    parts = [*record["clients"], record["validation"]]
    assert sorted(row for part in parts for row in part["rows"]) == list(range(100))
    assert len(record["validation"]["rows"]) == 20


def test_rows_left_out_and_cut_are_counted_and_reported(tmp_path, config, chat_tokenizer, encoder_tokenizer, caplog):
    caplog.set_level("INFO", "fs_lowrank")
    rows = [("a b " * 20, "c"), ("a", "b " * 20), *[("a", "b")] * 8]
    text = json.dumps([{"instruction": question, "output": answer} for question, answer in rows])
    (tmp_path / "i.json").write_text(text)
    cfg = config("i.json", tmp_path, splits=[1.0, 0.0, 0.0])
    cfg.llm.tok_len, cfg.federate.client_num, cfg.data.max_dropped = 12, 3, 0.1
    say_once.cache_clear()
    data = build_data(cfg, chat_tokenizer)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert data.read == 10 and data.skipped == {"prompt too long": 1} and data.truncated == {"train": 1}
    assert (
        "data: 10 rows read, 1 left out (prompt too long), 1 of train cut to 12 tokens, 9 for training" in caplog.text
    )
    record = data.record()
    assert (record["read"], record["truncated"], record["tok_len"]) == (10, {"train": 1}, 12)
    cfg.data.max_dropped = 0.09
    with pytest.raises(UserError, match="1 of 10 rows of train have a prompt that fills llm.tok_len = 12.*max_dropped"):
        build_data(cfg, chat_tokenizer)
    cfg.llm.tok_len, cfg.data.args = 64, [{"max_len": 12}]
    with pytest.raises(UserError, match="prompt that fills max_len of data.args = 12.*raise max_len of data.args"):
        build_data(cfg, chat_tokenizer)
    cfg.llm.tok_len, cfg.data.max_dropped, cfg.data.args = "auto", 0.0, []
    data = build_data(cfg, chat_tokenizer)
    assert not data.skipped.get("prompt too long") and data.truncated == {"train": 0}
    assert data.tok_len == max(client.lengths.max() for client in data.clients)
    (tmp_path / "a.csv").write_text("text,label\n" + "a b a b a b,x\n" + "a b,y\na,x\n" * 4)
    cfg = config("a.csv", tmp_path, splits=[1.0, 0.0, 0.0])
    cfg.llm.tok_len, cfg.federate.client_num = 4, 2
    assert build_data(cfg, encoder_tokenizer).truncated == {"train": 1}
    cfg.llm.tok_len = "auto"
    data = build_data(cfg, encoder_tokenizer)
    assert data.truncated == {"train": 0} and data.tok_len == 8
    assert caplog.records[-1].levelname == "INFO" and "data: 9 rows read, 9 for training by 2" in caplog.text


def test_the_length_that_fits_is_that_of_an_encoder_decoder_models_answers_too(tmp_path, config, encoder_tokenizer):
    rows = [{"instruction": "it was", "input": "", "output": "a b " * 6} for _ in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    cfg = config("a.json@llm", tmp_path, splits=[1.0, 0.0, 0.0])
    cfg.model.task, cfg.llm.tok_len = "Seq2SeqLM", "auto"
    encoder_tokenizer.eos_token_id = encoder_tokenizer.sep_token_id
    data = build_data(cfg, encoder_tokenizer)
    assert data.truncated == {"train": 0}
    assert data.tok_len == max(client.columns["labels"].lengths.max() for client in data.clients) > 12


def test_more_empty_rows_than_the_user_allows_are_refused(tmp_path, config, encoder_tokenizer):
    (tmp_path / "a.csv").write_text("text,label\n" + ",x\n" + "a b,y\na,x\n" * 12)
    cfg = config("a.csv", tmp_path, splits=[1.0, 0.0, 0.0])
    cfg.data.max_dropped = 0.03
    with pytest.raises(
        UserError, match=r"1 of 25 rows .*\(empty text\) .*data.max_dropped = 0.03 .*fill or remove them"
    ):
        build_data(cfg, encoder_tokenizer)
    cfg.data.max_dropped = 0.04
    assert build_data(cfg, encoder_tokenizer).skipped == {"empty text": 1}


def test_the_seed_divides_the_same_rows_among_the_clients(reviews, config, encoder_tokenizer):
    def built(seed, raw=None):
        return build_data(config(reviews, splits=(1, 0, 0), seed=seed), encoder_tokenizer, raw)

    first, again, other = (built(seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert all(map(np.array_equal, first.partition.indices, again.partition.indices))
    assert built(1, load_raw(config(reviews).data)).fingerprint == first.fingerprint


def test_the_test_set_does_not_depend_on_settings_of_the_training(reviews, config, encoder_tokenizer):
    plain = build_data(config(reviews), encoder_tokenizer)
    other = build_data(
        config(reviews, clients=5, splitter="lda", splitter_args=[{"alpha": 0.1}], subsample=0.5), encoder_tokenizer
    )
    assert plain.test.fingerprint() == other.test.fingerprint()
    assert plain.validation.fingerprint() == other.validation.fingerprint()
    assert sum(map(len, other.clients)) == 40
    assert np.bincount(np.concatenate([c.labels for c in other.clients])).tolist() == [12, 28]
    assert plain.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"splits": (0, 0.5, 0.5)}, "no row to train on"),
        ({"subsample": 0.001}, "leaves none"),
        ({"splitter_args": [{}, {}]}, "splitter_args = .*: expected a list of one mapping"),
    ],
)
def test_config_errors(reviews, config, encoder_tokenizer, changes, message):
    with pytest.raises(UserError, match=message):
        build_data(config(reviews, **changes), encoder_tokenizer)


def test_causal_language_model(tmp_path, config, chat_tokenizer):
    rows = [{"instruction": "a " * (1 + i % 3), "output": "b", "category": "pq"[i % 2]} for i in range(40)]
    rows.insert(7, {"instruction": "a " * 50, "output": "b", "category": "p"})
    (tmp_path / "i.json").write_text(json.dumps(rows))
    cfg = config("i.json", tmp_path, splits=(1, 0, 0), splitter="lda", splitter_args=[{"alpha": 0.5}], clients=3)
    built = build_data(cfg, chat_tokenizer)
    assert built.task == "causal_lm" and built.num_labels == 0 and built.majority is None
    assert built.skipped == {"prompt too long": 1}
    held = [row for client in recorded(built, tmp_path)["clients"] for row in client["rows"]]
    assert sorted(held) == [row for row in range(41) if row != 7]
    batch = built.clients[0].batch([0])
    assert batch["labels"].shape == batch["input_ids"].shape
    by_field = config("i.json", tmp_path, args=[{"max_len": 64}], splits=(1, 0, 0), splitter="field", clients=2)
    built = build_data(by_field, chat_tokenizer)
    assert [len(client) for client in built.clients] == [21, 20] and built.skipped == {}


def test_wrong_arguments_are_named_with_their_line(tmp_path, reviews, encoder_tokenizer):
    def build(old, new):
        text = f"""\
federate: {{client_num: 3, method: fedlora}}
data:
  type: {reviews}
  args: [{{label: label}}]
  splitter: lda
  splitter_args:
    - alpha: 0.5
"""
        (tmp_path / "run.yaml").write_text(text.replace(old, new))
        return build_data(load_config(tmp_path / "run.yaml"), encoder_tokenizer)

    with pytest.raises(UserError, match="run.yaml, line 4: unknown key 'data.args.0.lable'; did you mean 'label'"):
        build("{label:", "{lable:")
    with pytest.raises(
        UserError, match="run.yaml, line 7: data.splitter_args.0.alpha = -1: expected a number, above 0"
    ):
        build("0.5", "-1")
    with pytest.raises(UserError, match="run.yaml, line 5: data.splitter = 'ldaa': there is no such splitter"):
        build("lda", "ldaa")


def test_fewer_test_rows_are_scored_the_same_for_every_run(reviews, config, encoder_tokenizer):
    def tested(seed, share):
        settings = config(reviews, seed=seed, splits=(0.5, 0, 0.5))
        settings.data.test_subsample = share
        settings.lowrank = SimpleNamespace(test_seed=7)
        return build_data(settings, encoder_tokenizer)

    whole, some = tested(1, 1.0), tested(1, 0.2)
    assert len(whole.test) == 50 and np.bincount(some.test.labels).tolist() == [3, 7]
    assert set(rows_of(some.test)) <= set(rows_of(whole.test)) and rows_of(some.test) == rows_of(tested(2, 0.2).test)
    assert [len(c) for c in some.clients] == [len(c) for c in whole.clients]
    with pytest.raises(UserError, match="data.test_subsample 0.001 of 50 rows leaves none"):
        tested(1, 0.001)


# A prompt template of the user's own

ROWS = [{"question": "a b", "hint": "c", "answer": "d"}, {"question": "b", "hint": "", "answer": "e {f}"}]


def own_template(config, tmp_path, template, rows=ROWS, **args):
    (tmp_path / "own.json").write_text(json.dumps(rows))
    cfg = config("own.json", tmp_path, splits=[1.0, 0.0, 0.0])
    cfg.federate.client_num, cfg.data.args = 1, [{"template": template, "output": "answer", **args}]
    return cfg


def test_a_template_with_columns(tmp_path, config, chat_tokenizer):
    cfg = own_template(config, tmp_path, "f {{ {question} e {hint} : {answer} a")
    raw = load_raw(cfg.data)
    assert raw.task == "causal_lm" and raw.train["instruction"].tolist() == ["f { a b e c : ", "f { b e  : "]
    assert raw.train["output"].tolist() == ["d a", "e {f} a"]  # braces in the data are data
    (client,) = build_data(cfg, chat_tokenizer).clients
    learned = [
        [int(t) for t, label in zip(ids, labels) if label != -100]
        for ids, labels in zip(client.columns["input_ids"], client.columns["labels"])
    ]
    ends = [] if chat_tokenizer.eos_token_id is None else [chat_tokenizer.eos_token_id]
    expected = chat_tokenizer("d a", add_special_tokens=False)["input_ids"] + ends
    assert expected in learned
    prompt = chat_tokenizer("f { a b e c : ", add_special_tokens=False)["input_ids"]
    assert any(
        [int(t) for t in ids][-len(prompt + expected) :] == prompt + expected for ids in client.columns["input_ids"]
    )


@pytest.mark.parametrize(
    "template, words",
    [
        (
            "{questoin} {answer}",
            "own.json: data.args: template: no column 'questoin'; did you mean 'question'.; there are: ",
        ),
        ("{question}", "has no field of the answer: {answer}"),
        ("{{answer}}", "has no field of the answer: {answer}"),
        ("{answer} {question}", "must have the answer once, and as its last field: {answer}"),
        ("{answer} {answer}", "must have the answer once"),
        ("{question {answer}", "data.args.0.template = "),
        ("{} {answer}", "expected the name of a column between braces"),
        ("{question:>9} {answer}", "expected the name of a column between braces"),
        ("alpacca", "expected auto, chat, alpaca, or a text with columns in braces.*did you mean 'alpaca'"),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path, config, template, words):
    with pytest.raises(UserError, match=words) as caught:
        load_raw(own_template(config, tmp_path, template).data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["alpaca", "chat", "{question} {answer}"])
def test_a_template_without_an_end_is_refused(tmp_path, config, chat_tokenizer, template):
    """Where the tokenizer has no end-of-sequence token, the template has to end an answer."""
    rows = [
        {"question": "a b", "instruction": "a", "answer": "d"},
        {"question": "b", "instruction": "b", "answer": "e"},
    ]
    cfg = own_template(config, tmp_path, template, rows)
    cfg.llm.tok_len = 200
    build_data(cfg, chat_tokenizer)
    chat_tokenizer.eos_token = None
    chat_tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}{% endfor %}"
    with pytest.raises(
        UserError, match="nothing ends an answer, so a model would not learn to stop.*eos_token"
    ) as said:
        build_data(cfg, chat_tokenizer)
    assert "\n" not in str(said.value)
    chat_tokenizer.chat_template = "{% for m in messages %} {{ m['content'] }} <|bot|>{% endfor %}"
    if template == "chat":
        build_data(cfg, chat_tokenizer)
    build_data(own_template(config, tmp_path, "{question} {answer} <|bot|>", rows), chat_tokenizer)


def test_a_template_by_the_names_of_roles(tmp_path, config):
    cfg = own_template(config, tmp_path, "{instruction}: {output}", instruction="question")
    assert load_raw(cfg.data).train["instruction"].tolist() == ["a b: ", "b: "]
    rows = [{"q": "a", "response": "b"}, {"q": "c", "response": ""}]
    cfg = own_template(config, tmp_path, "{q} ", rows)
    cfg.data.args = [{"template": "{q} {response}"}]
    raw = load_raw(cfg.data)
    assert raw.train["output"].tolist() == ["b"] and sum(raw.skipped.values()) == 1
