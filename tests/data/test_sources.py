import csv
import gzip
import json
import os
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fs_lowrank.data.sources import data_args, load_raw, user_files
from fs_lowrank.data.tokenize import _turns, tokenize_instructions
from fs_lowrank.errors import UserError


def load(type, root="", args=(), home=None, task="", **more):
    with mock.patch.dict(os.environ, {"FS_LOWRANK_HOME": str(home)} if home else {}):
        return load_raw(SimpleNamespace(type=str(type), root=str(root), args=list(args), **more), task=task)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# GLUE

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2"
)


def mnli(votes, *rows):
    labels = "\t".join(f"label{i + 1}" for i in range(votes))
    lines = [f"{MNLI}\t{labels}\tgold_label"]
    for genre, first, second, gold in rows:
        lines.append("\t".join(["0", "1", "1e", genre, "p", "p", "P", "P", first, second, *[gold] * votes, gold]))
    return "\n".join(lines) + "\n"


def test_sst2_keeps_quotes_and_odd_separators_inside_a_sentence(tmp_path):
    write(tmp_path / "SST-2/train.tsv", 'sentence\tlabel\n"a fine film , \t1\nit "is\u2028bad" \t0\n\'good\t1\n')
    write(tmp_path / "SST-2/dev.tsv", 'sentence\tlabel\r\nso " so\t0\r\nfine\t1\r\n')
    raw = load("sst2@glue", tmp_path)
    assert raw.train["text"].tolist() == ['"a fine film , ', 'it "is\u2028bad" ', "'good"]
    assert raw.train["label"].tolist() == [1, 0, 1] and raw.train["label"].dtype == "int64"
    assert raw.test["text"].tolist() == ['so " so', "fine"] and raw.test["label"].tolist() == [0, 1]
    assert raw.validation is None and raw.label_names == ["negative", "positive"]
    assert "GLUE SST-2" in raw.source and "dev.tsv" in raw.source


@pytest.mark.parametrize(
    "name, folder, header, rows, texts, pairs, labels",
    [
        ("rte", "RTE", "index\tsentence1\tsentence2\tlabel", ["0\ta\tb\tnot_entailment", "1\tc\td\tentailment"],
         ["a", "c"], ["b", "d"], [1, 0]),
        ("qnli", "QNLI", "index\tquestion\tsentence\tlabel", ["0\tq\ts\tentailment", "1\tr\tt\tnot_entailment"],
         ["q", "r"], ["s", "t"], [0, 1]),
        ("qqp", "QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ["0\t1\t2\tp\tq\t0", "3\t4\t5\tr\ts\t1"],
         ["p", "r"], ["q", "s"], [0, 1]),
        ("mrpc", "MRPC", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["1\t9\t8\tx\ty", "0\t7\t6\tu\tv"],
         ["x", "u"], ["y", "v"], [1, 0]),
        ("cola", "CoLA", None, ["gj04\t1\t\tgood", "gj04\t0\t*\tbad is"], ["good", "bad is"], None, [1, 0]),
    ],
)  # fmt: skip
def test_glue_columns(tmp_path, name, folder, header, rows, texts, pairs, labels):
    text = "\n".join(([header] if header else []) + rows)
    for file in ("train.tsv", "dev.tsv"):
        write(tmp_path / folder / file, text)
    raw = load(f"{name}@glue", tmp_path)
    for frame in (raw.train, raw.test):
        assert frame["text"].tolist() == texts and frame["label"].tolist() == labels
        assert (frame["text_pair"].tolist() if pairs else None) == pairs


def test_mnli_has_three_classes_genres_and_rows_without_agreement(tmp_path):
    rows = [("slate", "a", "b", "neutral"), ("fiction", "c", "d", "contradiction"), ("slate", "e", "f", "entailment")]
    write(tmp_path / "MNLI/train.tsv", mnli(1, *rows))
    write(tmp_path / "MNLI/dev_matched.tsv", mnli(5, *rows, ("slate", "g", "h", "-")))
    raw = load("mnli@glue", tmp_path)
    assert raw.label_names == ["entailment", "neutral", "contradiction"] and raw.num_labels == 3
    assert raw.train["label"].tolist() == raw.test["label"].tolist() == [1, 2, 0]
    assert raw.fields == ["genre"] and raw.skipped == {"no agreed label": 1}
    assert "dev_matched.tsv" in raw.source


def test_a_number_is_predicted_for_stsb(tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    start = "0\tmain\tMSR\t2012\t1\tnone\tnone\t"
    for file in ("train.tsv", "dev.tsv"):
        write(tmp_path / "STS-B" / file, f"{header}{start}a plane\ta jet\t4.250\n{start}a\tb\t0.000\n{start}short\n")
    raw = load("sts-b@glue", tmp_path)
    assert raw.task == "regression" and raw.label_names == ["score"] and raw.num_labels == 1
    assert raw.test["label"].tolist() == [4.25, 0.0] and raw.skipped == {"too few columns": 2}
    assert raw.train["text_pair"].tolist() == ["a jet", "b"]
    write(tmp_path / "STS-B" / "dev.tsv", f"{header}{start}a plane\ta jet\tmany\n")
    with pytest.raises(UserError, match="dev.tsv, row 1: label 'many' in column 'score': expected a number"):
        load("stsb@glue", tmp_path)


def test_glue_errors(tmp_path):
    with pytest.raises(UserError, match="unknown GLUE task 'sst3'; did you mean 'sst2'"):
        load("sst3@glue", tmp_path)
    with pytest.raises(UserError, match="no file .*train.tsv"):
        load("sst2@glue", tmp_path)
    for file in ("train.tsv", "dev.tsv"):
        write(tmp_path / "SST-2" / file, "sentence\tlabel\na\t1\nb\tgood\n")
    with pytest.raises(UserError, match="row 2: label 'good' does not occur in training; its labels"):
        load("sst2@glue", tmp_path)


# The user's files


def test_csv_with_own_columns_text_labels_and_a_test_file(tmp_path):
    write(tmp_path / "my.csv", 'review,stars,shop\n"good, ""really""\nfine",pos,x\nbad,neg,y\n')
    write(tmp_path / "held.csv", "review,stars,shop\nfine,neg,x\n")
    raw = load("my.csv", tmp_path, [{"text": "review", "label": "stars", "test": "held.csv"}])
    assert raw.train["text"].tolist() == ['good, "really"\nfine', "bad"]
    assert raw.train["label"].tolist() == [1, 0] and raw.label_names == ["neg", "pos"]
    assert raw.test["label"].tolist() == [0] and raw.validation is None
    assert raw.fields == ["shop"] and raw.task == "classification"
    assert load(tmp_path / "my.csv", args=[{"text": "review", "label": "stars"}]).fingerprint != raw.fingerprint


def test_integer_labels_are_sorted_as_numbers(tmp_path):
    write(tmp_path / "a.tsv", 'text\tlabel\na "quote\t10\nb\t2\nc\t-1\n')
    raw = load("a.tsv", tmp_path)
    assert raw.label_names == ["-1", "2", "10"] and raw.train["label"].tolist() == [2, 1, 0]
    write(
        tmp_path / "b.jsonl",
        '{"text": "a", "text_pair": "b", "label": 1}\n\n{"text": "c", "text_pair": "d", "label": 0}\n',
    )
    raw = load("b.jsonl", tmp_path)
    assert raw.train["text_pair"].tolist() == ["b", "d"] and raw.label_names == ["0", "1"]


BROKEN = [
    ("a.csv", "", "the file is empty"),
    ("a.csv", "text,label\n", "has no rows"),
    ("a.csv", "text,label\na,1\nb\n", "line 3: 1 columns came, the header has 2"),
    ("a.csv", 'text,label\na,1\n"b,0\n', "line 3: unexpected end of data; .*the file is cut"),
    ("a.csv", "text,text\na,1\n", "names a column twice"),
    ("a.csv", "text,lable\na,1\n", "no column 'label'; did you mean 'lable'.*there are: text, lable"),
    ("a.csv", "text,label\na,1\nb,1\n", "one class in 2 rows"),
    ("a.csv", "text,label\n,1\n ,0\n", "every row has an empty text"),
    ("a.csv", b"text,label\na,1\nb\xff,0\n", "line 3: not UTF-8: byte 0xff"),
    (
        "a.jsonl",
        '{"text": "a", "label": 1}\n{"text": "b", "la\n',
        "line 2: .* JSONDecodeError: Unterminated",
    ),
    (
        "a.jsonl",
        '{"text": "a", "label": 1}\n[1]\n',
        "line 2: expected objects, as a list of them, or one a",
    ),
    (
        "a.json",
        '[{"text": "a",\n "label": 1},\n {"text"',
        "a.json: reading it as JSON raises .*line 3",
    ),
    ("a.json", '"text"', "expected objects, as a list of them, or one a line; got 'text'"),
    ("a.json", "[]", "has no rows"),
    ("a.json", '[{"text": "a"}, {"text": "b", "label": null}]', "no row has a label"),
    (
        "a.jsonl@llm",
        '{"instruction": "a", "says": "b"}\n',
        "no column is the output .output, response.*instruction, says",
    ),
    ("a.jsonl@llm", '{"instruction": "a", "output": ""}\n', "every row has an empty instruction or answer"),
    ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', "row 1: 'messages' must be"),
    ("a.json", '[{"text": "a", "text": "b", "label": 1}]', "a.json: .*: an object has the key 'text' twice"),
    ("a.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": ["y"]}\n', "row 1: .*set model.task Multi"),
    (
        "a.jsonl",
        '{"text": "a", "label": 1}\n{"text": ["b"], "label": 0}\n',
        "row 2: .'b'. in column 'text': expected te",
    ),
    (
        "a.jsonl@llm",
        '{"instruction": "a", "output": {"text": ["b"]}}',
        "row 1: {'text': .'b'.} in column 'output': exp",
    ),
    (
        "a.csv",
        "text;label\na, b;1\n",
        "header is one column, 'text;label': separated by ';'. expected ','",
    ),
    ("a.tsv", "text,label\na,1\n", r"separated by ','. expected '\\t'"),
    (
        "a.jsonl",
        '{"conversations": [{"from": "me", "value": "a"}, {"from": "gpt", "value": "b"}]}',
        "row 1: 'conversations' must be.*human, gpt, system.* ends with 'gpt'",
    ),
    ("a.json", "[" * 100_000, "a.json: reading it as JSON raises RecursionError: "),
    ("a.jsonl", '{"messages": [{"role": "user", "content": "\\udc00"}]}', r"a.jsonl, line 1: .*'.udc00'"),
    (
        "a.csv",
        "text,label\n" + "".join(f"{i},a review of film {i}\n" for i in range(40)),
        "a.csv: column 'label' has 40 different values in 40 rows; expected classes",
    ),
]


@pytest.mark.parametrize("name, content, message", BROKEN)
def test_invalid_files(tmp_path, name, content, message):
    write(tmp_path / name.split("@")[0], content)
    with pytest.raises(UserError, match=message) as caught:
        load(name, tmp_path)
    assert "\n" not in str(caught.value)


def test_instructions(tmp_path):
    rows = [
        {"instruction": "a", "input": "i", "output": "o", "category": "qa"},
        {"instruction": "b", "output": "p", "category": "chat"},
        {"instruction": "c", "output": " ", "category": "chat"},
        {"instruction": "d", "input": None, "output": "q", "category": "code"},
    ]
    write(tmp_path / "a.json", json.dumps(rows))
    for name in ("a.json", "a.json@llm", "a@llm"):
        raw = load(name, tmp_path)
        assert raw.task == "causal_lm" and raw.label_names == [] and raw.num_labels == 0
        assert raw.train["input"].tolist() == ["i", "", ""] and raw.train["output"].tolist() == ["o", "p", "q"]
        assert raw.train["category"].tolist() == ["qa", "chat", "code"] and raw.fields == ["category"]
        assert raw.skipped == {"empty instruction or output": 1}


@pytest.mark.parametrize("name, file", [("alpaca", "alpaca_data.json"), ("Alpaca_cleaned", "alpaca_data_cleaned.json")])
def test_the_frameworks_names_stand_for_its_files(tmp_path, name, file):
    """``alpaca@llm`` is the file that FederatedScope would download under ``data.root``."""
    with pytest.raises(UserError, match=f"no file {name}.jsonl or {name}.json or {file} under"):
        load(f"{name}@llm", tmp_path)
    write(tmp_path / file, json.dumps([{"instruction": "a", "input": "", "output": "o"}]))
    assert load(f"{name}@llm", tmp_path).train["output"].tolist() == ["o"]


def test_gsm8k_as_the_framework_reads_it(tmp_path):
    row = {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"}
    write(tmp_path / "gsm8k_train.jsonl", json.dumps(row) + "\n")
    raw = load("gsm8k@llm", tmp_path)
    assert raw.train.iloc[0].to_dict() == {
        "instruction": "How many?",
        "input": "",
        "output": "2 + 2 = 4\nThe answer is 4",
    }
    with pytest.raises(UserError, match="no file gsm8k.jsonl or gsm8k.json or gsm8k_train.jsonl under"):
        load("gsm8k@llm", tmp_path / "elsewhere")
    write(tmp_path / "gsm8k.jsonl", json.dumps({"instruction": "a", "output": "#### 1"}))  # a file of one's own
    assert load("gsm8k@llm", tmp_path).train["output"].tolist() == ["#### 1"]


def test_rosetta_alpaca_has_the_language_as_its_category(tmp_path, caplog):
    rows = [{"instruction": "a", "input": "Python", "output": "o"}, {"instruction": "b", "input": "C", "output": "p"}]
    write(tmp_path / "rosetta_alpaca.json", json.dumps(rows))
    raw = load("rosetta_alpaca@llm", tmp_path)
    assert raw.train["category"].tolist() == raw.train["input"].tolist() == ["Python", "C"]
    assert raw.fields == ["category"]
    rows.insert(1, {"instruction": "c", "input": "X86-64 Assembly", "output": "q"})
    write(tmp_path / "rosetta_alpaca.json", json.dumps(rows))
    assert len(load("rosetta_alpaca@llm", tmp_path).train) == 3
    # The framework leaves out this language where it divides by language.
    without = load("rosetta_alpaca@llm", tmp_path, splitter="meta").train
    assert without["category"].tolist() == ["Python", "C"] and without.index.tolist() == [0, 1]
    assert "1 rows of X86-64 Assembly in rosetta_alpaca.json are left out, as in FederatedScope" in caplog.text


def test_code_search_net_as_the_framework_reads_it(tmp_path):
    languages = ("python", "javascript", "java", "ruby", "php", "go")
    with pytest.raises(UserError, match="no file .*python_train_0.jsonl.gz; code_search_net@llm needs"):
        load("code_search_net@llm", tmp_path)
    for language in languages:
        folder = tmp_path / language / "final" / "jsonl" / "train"
        folder.mkdir(parents=True)
        for part in (10, 9):
            row = {"docstring": f"says {part}", "code": f"do({part})", "language": language, "repo": "x"}
            (folder / f"{language}_train_{part}.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    raw = load("code_search_net@llm", tmp_path)
    assert raw.train["instruction"].tolist()[:3] == ["python says 9", "python says 10", "javascript says 9"]
    assert raw.train["output"].tolist()[:2] == ["do(9)", "do(10)"] and raw.fields == ["category"]
    assert raw.train["category"].unique().tolist() == list(languages) and len(raw.train) == 12
    (tmp_path / "go/final/jsonl/train/go_train_9.jsonl.gz").write_bytes(b"\x1f\x8b cut")
    with pytest.raises(UserError, match="cannot read .*go_train_9.jsonl.gz: "):
        load("code_search_net@llm", tmp_path)


def test_dolly_columns_and_own_columns(tmp_path):
    write(tmp_path / "d.jsonl", '{"instruction": "a", "context": "c", "response": "r", "category": "x"}\n')
    raw = load("d@llm", tmp_path)
    assert raw.train.iloc[0].to_dict() == {"instruction": "a", "input": "c", "output": "r", "category": "x"}
    write(tmp_path / "o.jsonl", '{"q": "a", "a": "r", "kind": "x"}\n')
    raw = load("o.jsonl@llm", tmp_path, [{"instruction": "q", "output": "a", "category": "kind"}])
    assert raw.train.iloc[0].to_dict() == {"instruction": "a", "input": "", "output": "r", "category": "x"}


def test_conversations(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write(tmp_path / "m.jsonl", json.dumps({"messages": talk, "category": "x"}))
    raw = load("m.jsonl", tmp_path)
    assert raw.train["messages"].tolist() == [talk] and raw.fields == ["category"]
    silent = [talk[0], {"role": "assistant", "content": " "}]
    write(tmp_path / "m.jsonl", "\n".join(json.dumps({"messages": turns}) for turns in (silent, talk)))
    raw = load("m.jsonl", tmp_path)
    assert raw.train["messages"].tolist() == [talk] and raw.train.index.tolist() == [1]
    assert raw.skipped == {"empty last answer": 1}


@pytest.mark.parametrize("write_to", ["jsonl", "json", "parquet"])
def test_conversations_as_sharegpt_has_them(tmp_path, write_to):
    talk = [("system", "system", "s"), ("human", "user", "a"), ("gpt", "assistant", "b")]
    rows = [
        {"id": 1, "conversations": [{"from": of, "value": said} for of, _, said in talk]},
        {"id": 2, "conversations": [{"from": role, "value": said} for role, _, said in talk]},
    ]
    path = tmp_path / f"s.{write_to}"
    if write_to == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        write(path, json.dumps(rows) if write_to == "json" else "\n".join(map(json.dumps, rows)))
    raw = load(path.name, tmp_path)
    expected = [{"role": role, "content": said} for _, role, said in talk]
    assert raw.train.iloc[[0, 1]]["messages"].tolist() == [expected] * 2 and raw.fields == ["id"]
    write(path.with_suffix(".json"), json.dumps({"conversations": expected}))
    assert load("s.json", tmp_path).train["messages"].tolist() == [expected], "with role and content"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_system_and_history_are_turns_before_those_of_a_row(tmp_path, kind, caplog, chat_tokenizer):
    """As LLaMA-Factory's files have them; in rows without them nothing comes before."""
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    shared = [
        {"system": "e", "conversations": talk, "tools": "[]"},
        {"system": "", "conversations": talk, "tools": "f"},
    ]
    alpaca = [
        {"system_prompt": "e", "instruction": "a", "output": "b", "history": [["c", "d"]], "before": "x"},
        {"system_prompt": None, "instruction": "a", "output": "b", "history": [], "before": "x"},
    ]
    ahead = [[("system", "e"), ("user", "c"), ("assistant", "d")], []]
    own, texts = [("user", "a"), ("assistant", "b")], []
    for rows, expected in ((shared, [[("system", "e"), *own], own]), (alpaca, [[*more, *own] for more in ahead])):
        frame = pd.DataFrame(rows)
        path = tmp_path / f"{rows is alpaca}.{kind}"
        frame.to_parquet(path) if kind == "parquet" else frame.to_json(path, orient="records", lines=True)
        raw = load(path.name, tmp_path)
        part = raw.train.iloc[[0, 1]]
        assert [[(t["role"], t["content"]) for t in turns] for turns in _turns(part)] == expected
        tokens = tokenize_instructions(raw.train, chat_tokenizer, 64)[0].columns["input_ids"]
        texts.append(chat_tokenizer.decode(tokens[0]))
        with pytest.raises(UserError, match="template = alpaca has no place for conversations"):
            tokenize_instructions(raw.train, chat_tokenizer, 64, "alpaca")
    # the words of each, without the marks of the template
    assert [[w for w in text.split() if w.isalpha()] for text in texts] == [[*"eab"], [*"ecdab"]]
    assert [r.getMessage().split(": ")[-1] for r in caplog.records] == ["the column 'tools' is not read"]


def test_what_public_formats_have_beside_a_conversation_is_said(tmp_path, caplog):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    write(tmp_path / "w.jsonl", json.dumps({"messages": talk, "history": "x"}))
    load("w.jsonl", tmp_path)
    assert {r.getMessage().split(": ", 1)[1] for r in caplog.records} == {
        "the column 'history' is not read",
        "the 'weight' of a turn is not read: the model learns the last turn",
    }
    write(tmp_path / "e.jsonl", json.dumps({"instruction": "a", "output": "b", "system": "", "history": []}))
    assert list(load("e.jsonl", tmp_path).train) == ["instruction", "input", "output", "system"]


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"query": "a", "response": "b"}])
def test_columns_of_a_language_model(tmp_path, row):
    write(tmp_path / "q.jsonl", json.dumps(row))
    raw = load("q.jsonl", tmp_path, task="CausalLM")
    assert raw.train[["instruction", "output"]].values.tolist() == [["a", "b"]]
    write(tmp_path / "q.jsonl", json.dumps({"text": "a"}))
    with pytest.raises(UserError, match=r"no column is the instruction .*plain text by \[{template: '{COLUMN}'"):
        load("q.jsonl", tmp_path, task="CausalLM")


def test_columns_that_are_named_say_that_they_are_instructions(tmp_path):
    write(tmp_path / "q.jsonl", '{"question": "a", "answer": "b"}\n')
    raw = load("q.jsonl", tmp_path, [{"instruction": "question", "output": "answer", "loss_on": "all"}])
    assert raw.train[["instruction", "output"]].values.tolist() == [["a", "b"]]


def test_the_frameworks_own_sets_have_alpacas_form():
    def form(name, **args):
        return data_args(SimpleNamespace(type=name, root="", args=[args])).get("template", "auto")

    assert form("gsm8k@llm") == form("Alpaca@llm") == form("code_search_net@llm") == "alpaca"
    assert form("gsm8k@llm", template="chat") == "chat"
    assert form("alpaca_data.json@llm") == form("own.jsonl") == form("own@llm") == "auto"


def test_a_folder_of_tables_is_read_by_a_pattern(tmp_path):
    for number in (1, 2, 10):
        write(tmp_path / "cc" / f"client_{number}.csv", f"text,label\na{number},1\nb{number},0\n")
    with pytest.raises(UserError, match=r"folders with images: none.* a pattern: .*cc/\*.csv"):
        load("cc", tmp_path)
    raw = load("cc/*.csv", tmp_path)
    assert raw.train["file"].unique().tolist() == ["client_1.csv", "client_2.csv", "client_10.csv"]
    (tmp_path / "cc" / "images").mkdir()
    with pytest.raises(UserError, match="folder"):
        load("cc", tmp_path)


# Names


def test_unknown_names_and_missing_files(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="unknown data.type 'sentimant'; did you mean 'sentiment'"):
        load("sentimant", home=tmp_path)
    with pytest.raises(UserError, match="unknown provider 'huggingface_dataset'.*did you mean 'huggingface_datasets'"):
        load("sst2@huggingface_dataset")
    with pytest.raises(UserError, match="'sentiment' has not been fetched: run `fs-lowrank fetch sentiment`"):
        load("sentiment", home=tmp_path)
    write(tmp_path / "reviews.csv", "x")
    with pytest.raises(UserError, match="no file .*review.csv; did you mean 'reviews.csv'"):
        load("review.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no file review.csv; did you mean 'reviews.csv'"):
        load("review.csv", "nowhere")
    with pytest.raises(UserError, match="no file no/review.csv"):
        load("no/review.csv", "nowhere")
    with pytest.raises(UserError, match="nothing is downloaded for alpaca@llm"):
        load("alpaca@llm", tmp_path)


@pytest.mark.parametrize("args", [["x"], [{}, {}], "text"])
def test_args_must_be_one_mapping(tmp_path, args):
    with pytest.raises(UserError, match="data.args = .*: expected a list of one mapping"):
        load_raw(SimpleNamespace(type="a.csv", root=str(tmp_path), args=args))


@pytest.mark.parametrize(
    "args, message",
    [
        ({"text": None}, "data.args.0.text = None: expected the name of a column"),
        ({"label": {"a": 1}}, "data.args.0.label = {'a': 1}: expected the name of a column, or for sets"),
        ({"test": ["a.csv"]}, "test = .'a.csv'.: expected the name of a file"),
        ({"quoting": "maybe"}, "quoting = 'maybe': expected True or False or nothing"),
        ({"max_len": 0}, "max_len = 0: expected a whole number or nothing, at least 1"),
        ({"loss_on": "answers"}, "loss_on = 'answers': expected one of answer, all; did you mean 'answer'"),
    ],
)
def test_args_of_the_wrong_kind(tmp_path, args, message):
    write(tmp_path / "a.csv", "text,label\na,1\nb,0\n")
    with pytest.raises(UserError, match=message):
        load("a.csv", tmp_path, [args])


def test_none_means_the_default_of_an_argument(tmp_path):
    write(tmp_path / "a.csv", "text,label\na,1\nb,0\n")
    assert len(load("a.csv", tmp_path, [{"text_pair": None, "test": None, "quoting": None}]).train) == 2


def test_one_column_for_two_roles(tmp_path):
    write(tmp_path / "a.csv", "label,b\nx,1\ny,0\n")
    with pytest.raises(UserError, match="data.args: text and label are the same column 'label'"):
        load("a.csv", tmp_path, [{"text": "label", "label": "label"}])
    write(tmp_path / "flags.csv", "text,good,bad\nx,1,0\ny,0,1\n")
    with pytest.raises(UserError, match="data.args: label and label are the same column 'good'"):
        load("flags.csv", tmp_path, [{"label": ["good", "good"]}])
    write(tmp_path / "b.csv", "instruction,output\nx,1\ny,0\n")
    with pytest.raises(UserError, match="data.args: instruction and output are the same column 'output'"):
        load("b.csv@llm", tmp_path, [{"instruction": "output"}])


# What a user's file may look like


def test_a_json_file_of_one_object_is_one_row(tmp_path):
    write(tmp_path / "a.json", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n')
    write(tmp_path / "one.json", '{"text": "c", "label": 0}')
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write(tmp_path / "talk.json", json.dumps({"messages": talk}))
    assert load("a.json", tmp_path, [{"test": "one.json"}]).test["text"].tolist() == ["c"]
    assert load("talk.json", tmp_path).train["messages"].tolist() == [talk]


def test_a_long_field(tmp_path):
    limit = csv.field_size_limit()
    write(tmp_path / "a.csv", f'text,label\n"{"good " * 40000}",1\nbad,0\n')
    assert len(load("a.csv", tmp_path).train["text"][0]) == 200000 and csv.field_size_limit() == limit


def test_a_path_with_an_at_sign(tmp_path):
    path = write(tmp_path / "me@lab" / "a.csv", "text,label\na,1\nb,0\n")
    write(tmp_path / "me@lab" / "me@home.csv", "text,label\na,1\nb,0\n")
    assert len(load(path).train) == len(load("me@home.csv", tmp_path / "me@lab").train) == 2
    assert user_files(SimpleNamespace(type=str(path), root="", args=[])).keys() == {"train"}
    assert user_files(SimpleNamespace(type="rte@glue", root=str(tmp_path), args=[])) == {}
    with pytest.raises(UserError, match="no file .*me@lab/b.csv"):
        load(tmp_path / "me@lab" / "b.csv")
    talk = write(tmp_path / "me@lab" / "i.jsonl", '{"instruction": "a", "output": "b"}\n')
    assert load(f"{talk}@llm").task == "causal_lm"


@pytest.mark.parametrize("nothing", ["NaN", "nan", " ", ""])
def test_rows_without_a_label_are_left_out_and_counted(tmp_path, nothing):
    write(tmp_path / "a.csv", f"text,label,site\na,1,x\nb,{nothing},y\nc,0,z\n ,1,z\n")
    raw = load("a.csv", tmp_path)
    assert raw.skipped == {"empty label": 1, "empty text": 1}
    assert raw.train.index.tolist() == [0, 2] and raw.train["site"].tolist() == ["x", "z"]
    write(tmp_path / "a.csv", f"text,label\na,{nothing}\nb,{nothing}\n")
    with pytest.raises(UserError, match="a.csv: no row has a label in column 'label'"):
        load("a.csv", tmp_path)


@pytest.mark.parametrize(
    "labels, said",
    [
        (["Pos", "pos", "neg"], "'Pos', 'pos' differ in case, blanks or width only"),
        (["1", "1\x00", "2"], "'1', '1\\x00' differ in"),
        (["a b", "ab", "\uff41b"], "'a b', 'ab', '\uff41b' differ in"),
        (["NA", "a", "None"], "'NA', 'None' may mean no label"),
        (["a", "b", "unsure"], ""),
    ],
)
def test_labels_that_are_nearly_equal_are_said(tmp_path, labels, said, caplog):
    rows = "\n".join(json.dumps({"text": "t", "label": label}) for label in labels)
    assert load(write(tmp_path / "a.jsonl", rows)).num_labels == 3
    assert said in caplog.text and bool(said) == bool(caplog.records)
    write(tmp_path / "s.jsonl", "\n".join(json.dumps({"text": "t", "label": [label]}) for label in labels))
    caplog.clear()
    load("s.jsonl", tmp_path, task="MultiLabelClassification")
    assert said in caplog.text and bool(said) == bool(caplog.records)


def test_sets_of_classes_as_text_are_called_that(tmp_path):
    write(tmp_path / "a.csv", "text,label\na,\nb,x|y\nc,y\n")
    with pytest.raises(UserError, match="row 2: label 'x.y' .*expected a list of classes"):
        load("a.csv", tmp_path, task="MultiLabelClassification")
    write(tmp_path / "a.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": [["x"]]}\n')
    with pytest.raises(UserError, match="row 2: label .*x.* expected a list of classes"):
        load("a.jsonl", tmp_path, task="MultiLabelClassification")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a/cat/0.png"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path, name):
    for path in {name, name.replace("cat", "dog")}:
        write(tmp_path / path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="a pointer of Git LFS, not the file itself; .*git lfs pull"):
        load("a" if name.endswith("png") else name, tmp_path, home=tmp_path / "home")


@pytest.mark.more
def test_thousands_of_columns_are_read_in_one_piece(tmp_path, recwarn):
    rows = [f"t{i},{i % 2}," + ",".join(["7"] * 3000) for i in range(4)]
    write(tmp_path / "a.csv", "text,label," + ",".join(f"c{i}" for i in range(3000)) + "\n" + "\n".join(rows))
    assert len(load("a.csv", tmp_path).fields) == 3000
    assert not [w for w in recwarn if "fragmented" in str(w.message)]


def test_whole_numbers_are_one_label_however_they_are_written(tmp_path):
    write(tmp_path / "a.csv", "text,label\na,1.0\nb,10.0\nc,2.0\n")
    write(tmp_path / "t.csv", "text,label\na,2\nb,10\n")
    raw = load("a.csv", tmp_path, [{"test": "t.csv"}])
    assert raw.label_names == ["1", "2", "10"] and raw.test["label"].tolist() == [1, 2]
    write(tmp_path / "v.csv", "text,label\na,v1.0\nb,1.5\n")
    assert load("v.csv", tmp_path).label_names == ["1.5", "v1.0"]


def test_numbers_with_fractions_are_no_classes(tmp_path):
    row = '{{"text": "{}", "label": {}}}\n'
    write(tmp_path / "a.jsonl", row.format("a", 0.37) + row.format("b", 1.0))
    with pytest.raises(
        UserError, match="column 'label' are numbers with fractions, such as 0.37, which is a regression"
    ):
        load("a.jsonl", tmp_path)
    write(tmp_path / "a.jsonl", row.format("a", 2.0) + row.format("b", 1.0))
    assert load("a.jsonl", tmp_path).label_names == ["1", "2"]


# Fetched sets


def fetched(monkeypatch, folder):
    monkeypatch.setattr("fs_lowrank.data.sources.usable", lambda name: folder)


def test_sentiment_takes_the_sign_and_drops_zeros_and_repeats(monkeypatch, tmp_path):
    write(tmp_path / "sentiment.csv", "text,rating,domain\na,-0.1,nyt\nb,0.0,nyt\nc,2.5,tweets\na,0.2,nyt\n")
    fetched(monkeypatch, tmp_path)
    raw = load("sentiment")
    assert raw.train["text"].tolist() == ["a", "c"] and raw.train["label"].tolist() == [0, 1]
    assert raw.fields == ["domain"] and raw.skipped == {"rating zero": 1, "repeated text": 1}
    assert raw.test is None and "Hutto" in raw.source


def test_alpaca_demo(monkeypatch, tmp_path):
    write(tmp_path / "alpaca_en_demo.json", json.dumps([{"instruction": "a", "input": "", "output": "b"}]))
    fetched(monkeypatch, tmp_path)
    assert load("alpaca_demo", args=[{"loss_on": "all"}]).task == "causal_lm"


TOPICS = {  # as in the package: three lines about the columns, then an empty row in one form or the other
    "train": 'Category\tText\nd\tstring\nclass\t\n\t\ncocoa\tbahia cocoa "review"\nearn\ta stock split\ntea\tx\n',
    "test": "Category\tText\nd\tstring\nclass\t\n\nearn\tprofits rise \n",
}


@pytest.mark.parametrize("name, stem", [("newsgroups", "20newsgroups"), ("r52", "reuters-r52")])
def test_topics_have_their_own_test_file(monkeypatch, tmp_path, name, stem):
    for role, text in TOPICS.items():
        write(tmp_path / f"{stem}-{role}.tab", text)
    fetched(monkeypatch, tmp_path)
    raw = load(name)
    assert raw.label_names == ["cocoa", "earn", "tea"] and raw.train["label"].tolist() == [0, 1, 2]
    assert raw.train["text"].tolist()[0] == 'bahia cocoa "review"' and raw.test["label"].tolist() == [1]
    assert raw.task == "classification" and not raw.skipped and raw.validation is None and raw.fields == []
    assert stem in raw.source and "its own training and test files" in raw.source
    with pytest.raises(UserError, match="unknown key 'data.args.0.label'"):
        load(name, args=[{"label": "Category"}])


# Hugging Face hub


def hub(monkeypatch, result):
    import datasets

    asked = []

    def load_dataset(*args):
        asked.append(args)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub_glue(monkeypatch):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    part = Dataset.from_dict({"sentence": ["a", "b"], "label": [1, 0]}, features=features)
    hidden = Dataset.from_dict({"sentence": ["c"], "label": [-1]}, features=features)
    asked = hub(monkeypatch, {"train": part, "validation": part, "test": hidden})
    raw = load("sst2@huggingface_datasets", args=[{"max_len": 512}])
    assert asked == [("nyu-mll/glue", "sst2")]
    assert raw.label_names == ["negative", "positive"] and raw.test["label"].tolist() == [1, 0]
    assert raw.validation is None


def test_hub_other_names(monkeypatch):
    from datasets import Dataset

    part = Dataset.from_dict({"body": ["a", "b"], "topic": ["x", "y"]})
    asked = hub(monkeypatch, {"train": part, "test": part})
    raw = load("me/mine@huggingface_datasets", args=[{"text": "body", "label": "topic"}])
    assert asked == [("me/mine",)] and raw.label_names == ["x", "y"] and len(raw.test) == 2
    with pytest.raises(UserError, match="no column 'text'.*there are: body, topic"):
        load("me/mine@huggingface_datasets")


def test_hub_sets_of_classes(monkeypatch):
    from datasets import Dataset

    part = Dataset.from_dict({"text": ["a", "b", "c"], "insult": [1, 0, 1], "threat": [0, 0, 1]})
    hub(monkeypatch, {"train": part, "test": part})
    args = [{"label": ["insult", "threat"]}]
    data = SimpleNamespace(type="me/mine@huggingface_datasets", root="", args=args)
    raw = load_raw(data, task="MultiLabelClassification")
    assert raw.label_names == ["insult", "threat"] and raw.train["label"].tolist() == [1, 0, 3]
    with pytest.raises(UserError, match="row 1: label .* for sets of classes set model.task"):
        load("me/mine@huggingface_datasets", args=args)


def test_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub(monkeypatch, ConnectionError("Couldn't reach 'nyu-mll/glue' on the Hub\nmore"))
    with pytest.raises(UserError, match="cannot load data set 'sst2': the hub is switched off .*HF_HOME"):
        load("sst2@huggingface_datasets")
    with pytest.raises(UserError, match="cannot load data set 'STS-B': the hub is switched off"):
        load("STS-B@huggingface_datasets")


def test_an_error_of_the_hubs_own_client_is_one_line(monkeypatch):
    from huggingface_hub import get_session

    client = next(kind for kind in type(get_session()).__mro__ if kind.__name__ == "Client")
    errors = import_module(client.__module__.partition(".")[0])
    for kind in (errors.RemoteProtocolError, errors.TooManyRedirects):
        hub(monkeypatch, kind("it broke off"))
        with pytest.raises(UserError, match=f"cannot load data set 'sst2': {kind.__name__}: it broke off; load it on"):
            load("sst2@huggingface_datasets")


def test_a_damaged_file_of_a_hub_data_set_is_one_line(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "train.parquet"
    pq.write_table(pa.table({"text": ["good"] * 51, "label": list(range(51))}), file, compression="none")
    raw = file.read_bytes()
    file.write_bytes(raw[:4] + b"\xff" * 60 + raw[64:])
    with pytest.raises(UserError, match="cannot load data set '.*mine': ") as caught:
        load(f"{tmp_path / 'mine'}@huggingface_datasets")
    assert "\n" not in str(caught.value) and not capfd.readouterr().err
