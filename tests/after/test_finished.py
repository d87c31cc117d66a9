"""Finished runs: evaluation on a file, predictions for a file, and the card of the adapter."""

import json
import re
import shutil
import warnings

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

import fs_lowrank
from fs_lowrank import UserError, cli
from fs_lowrank.config import load_config
from fs_lowrank.data.files import SUFFIXES
from fs_lowrank.draw.panels import digits
from fs_lowrank.finished import answers, evaluate_rows, load_run, predict_rows, read_rows, write_table
from fs_lowrank.finished import run as finished_run
from fs_lowrank.models import quantised
from fs_lowrank.models.build import hub_name
from fs_lowrank.rounds import workspace
from fs_lowrank.runs.card import model_card
from fs_lowrank.runs.split import read_split
from fs_lowrank.runs.summary import for_people
from fs_lowrank.settings.metrics import standard_error
from fs_lowrank.testing import small


@pytest.fixture
def test_rows(runs, reviews_csv, tmp_path):
    """The test set of the run, as a file."""
    rows = read_split(runs["classes"].outdir)["test"]["rows"]
    path = tmp_path / "test.csv"
    pd.read_csv(reviews_csv).iloc[rows].to_csv(path, index=False)
    return path


def test_the_scores_on_the_test_set_are_those_of_the_run(runs, test_rows, tmp_path):
    result = runs["classes"]
    run = load_run(result.outdir)
    scores = evaluate_rows(run, read_rows(run, test_rows))
    passed = []
    run.model.register_forward_hook(lambda module, args, output: passed.append(len(output.logits)))
    assert evaluate_rows(run, read_rows(run, test_rows)) == scores and sum(passed) == scores["rows"], "each row once"
    assert scores["acc"] == result.final["test_acc"] and scores["majority"] == pytest.approx(result.facts["majority"])
    assert scores["loss"] == pytest.approx(result.final["test_loss"], abs=1e-6)
    found = sum(of["rows"] * of["recall"] for of in scores["classes"].values())
    assert found / scores["rows"] == pytest.approx(scores["acc"])
    assert scores["trained_on"] == run.summary["rows"]["repeated"]["test"] < scores["rows"]
    passed_on = shutil.copytree(result.outdir, tmp_path / "without_rows", ignore=lambda *_: ["rows.npz"])
    others = load_run(passed_on)
    assert evaluate_rows(others, read_rows(others, test_rows)) == {**scores, "trained_on": 0}
    assert standard_error(1, 60) > 0 and scores["acc_error"] == standard_error(scores["acc"], scores["rows"])


@pytest.mark.more
def test_a_table_in_memory_is_read_as_the_file_is(runs, test_rows, tmp_path):
    """A data frame, whose own index and values stay, and a data set whose labels have names, also as a Parquet file."""
    run, whole = load_run(runs["classes"].outdir), pd.read_csv(test_rows)
    wanted = evaluate_rows(run, read_rows(run, test_rows))
    said = predict_rows(run, read_rows(run, test_rows, labelled=False))["prediction"]
    frame = whole.assign(stars=whole["label"].astype(float)).drop(columns="label").set_index(np.arange(len(whole)) % 7)
    frame.loc[2, "text"] = None  # several rows have this index
    left = int((frame.index == 2).sum())
    rows = read_rows(run, frame, {"label": "stars"})
    assert rows.left_out == {"empty text": left} and evaluate_rows(run, rows)["rows"] == len(frame) - left
    table = predict_rows(run, read_rows(run, frame, labelled=False))
    assert table.index.equals(frame.index) and table["stars"].equals(frame["stars"]) and "prediction" not in frame
    assert list(table["prediction"]) == [t if i != 2 else "" for t, i in zip(said, frame.index)]
    named = whole.assign(label=whole["label"].astype(str).map(run.labels.index))
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=run.labels)})
    stored = datasets.Dataset.from_pandas(named[["text", "label"]], features=features, preserve_index=False)
    stored.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    for rows in (stored, tmp_path / "rows.parquet"):
        assert evaluate_rows(run, read_rows(run, rows)) == wanted
        assert list(predict_rows(run, read_rows(run, rows, labelled=False))["prediction"]) == list(said)


@pytest.mark.more
@pytest.mark.parametrize(
    "data, words",
    [
        (3, "data = int: expected a datasets.Dataset, a DataFrame"),
        (pd.DataFrame({"text": [], "label": []}), "no rows"),
        (
            pd.DataFrame({"texts": ["good"], "label": [1]}),
            "no column 'text'; did you mean 'texts'?; name it with text='COLUMN'",
        ),
        (
            pd.DataFrame({"text": ["good"], "label": [7]}),
            "data, row 1: label 7 does not occur in training",
        ),
    ],
)
def test_a_table_in_memory_that_does_not_fit_is_refused(runs, data, words):
    with pytest.raises(UserError, match=re.escape(words)):
        read_rows(load_run(runs["classes"].outdir), data)


@pytest.mark.quantised
@pytest.mark.parametrize("task, dtype", [("classes", "int8"), ("instructions", "nf4")])
def test_a_quantised_base_scores_and_answers_as_in_the_run(
    tiny_encoder, tiny_causal, reviews_csv, instructions_jsonl, tmp_path, task, dtype
):
    """By the adapter over the quantised base, and by the merged model, which is not quantised."""
    if task == "classes":
        settings = small.encoder_settings(tiny_encoder, reviews_csv, tmp_path / "run")
    else:
        settings = small.causal_settings(tiny_causal, instructions_jsonl, tmp_path / "run")
    settings["data"]["splits"] = [0.7, 0.1, 0.2]
    keys = {"train.optimizer.lr": 0.03, "federate.total_round_num": 2, "lowrank.dtype": dtype}
    result = fs_lowrank.run(fs_lowrank.load_config(settings, {**keys, "lowrank.save_merged": True}))
    rows, test = read_split(result.outdir)["test"]["rows"], tmp_path / "test.jsonl"
    table = pd.read_csv(reviews_csv) if task == "classes" else pd.read_json(instructions_jsonl, lines=True)
    table.iloc[rows].to_json(test, orient="records", lines=True)
    said = []
    for kind, bits in (("adapter", True), ("model", False)):
        run = load_run(result.outdir)
        assert run.saved.name == kind and bool(quantised.layers(run.model)) == bits
        off = 1e-6 if bits or dtype == "nf4" else 0.01  # of 8 bits, activations are quantised as well
        scores = evaluate_rows(run, read_rows(run, test))
        assert scores["loss"] == pytest.approx(result.final["test_loss"], abs=off)
        said.append(list(predict_rows(run, read_rows(run, test, labelled=False), tokens=8)["prediction"]))
        shutil.rmtree(result.outdir / kind)
    assert len(said[0]) == len(rows) and said[0] == said[1]


@pytest.mark.more
def test_a_run_of_another_machines_gpu_is_used_on_what_is_here(settings, monkeypatch, no_curves, caplog):
    keys = {"use_gpu": True, "device": 1, "federate.total_round_num": 1}
    with monkeypatch.context() as patch:  # stands for the machine with two GPUs
        patch.setattr(workspace, "device_of", lambda config: torch.device("cpu"))
        result = fs_lowrank.run(load_config(settings, keys))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert {p.device.type for p in load_run(result.outdir).model.parameters()} == {"cpu"}
    assert "the run computed on cuda:1, which torch does not find here; its model is on the CPU" in caplog.text
    for count, device in ((1, -1), (2, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=count: n)
        here = finished_run._on_device(load_run(result.outdir).config)
        assert here.use_gpu and here.device == device
    assert "its model is on the first GPU" in caplog.text


def test_predictions_are_those_of_peft_alone(runs, tiny_encoder, test_rows):
    result = runs["classes"]
    run = load_run(result.outdir)
    table = predict_rows(run, read_rows(run, test_rows, labelled=False))
    base = AutoModelForSequenceClassification.from_pretrained(str(tiny_encoder), num_labels=2)
    model = PeftModel.from_pretrained(base, str(result.outdir / "adapter")).eval()
    for text, said, chance in zip(table["text"], table["prediction"], table["prediction_probability"]):
        with torch.no_grad():
            wanted = model(**run.tokenizer(text, return_tensors="pt")).logits[0].softmax(0)
        assert said == run.labels[int(wanted.argmax())] and chance == pytest.approx(float(wanted.max()), abs=1e-5)


def test_the_traceback_of_an_error_of_the_package_is_in_the_folder_of_the_run(
    runs, test_rows, tmp_path, monkeypatch, capsys
):
    def broken(*_, **__):
        raise KeyError("lost")

    folder = shutil.copytree(runs["classes"].outdir, tmp_path / "run")
    for module, command in (
        ("finished.evaluate_rows", ["evaluate", str(folder), "--data", str(test_rows)]),
        ("finished.predict_rows", ["predict", str(folder), "--data", str(test_rows), "--out", str(tmp_path / "o.csv")]),
        ("runs.shown.read_runs", ["report", str(folder)]),
        ("api.run", ["run", "--cfg", str(folder / "config.yaml"), "outdir", str(folder)]),
        (
            "api.compare",
            ["compare", "--cfg", str(folder / "config.yaml"), "--methods", "rolora", "outdir", str(folder)],
        ),
    ):
        monkeypatch.setattr(f"fs_lowrank.{module}", broken)
        assert cli.main(command) == 1
        (place,) = folder.glob("traceback-*.txt")
        assert str(place) in capsys.readouterr().err and "KeyError: 'lost'" in place.read_text()
        place.unlink()


@pytest.fixture(scope="module")
def pairs(tiny_encoder, tmp_path_factory):
    """Two runs over pairs, by their files: an own one with a column `text_pair`, and GLUE's RTE."""
    folder = tmp_path_factory.mktemp("pairs")
    table = small.make_reviews(80).rename(columns={"text": "sentence1"})
    table["sentence2"], table["label"] = table["sentence1"][::-1].to_numpy(), table["label"].map({0: "no", 1: "yes"})
    own = table.rename(columns={"sentence1": "text", "sentence2": "text_pair"})
    own.to_csv(folder / "own.csv", index=False)
    (folder / "RTE").mkdir()
    rte = table.assign(label=table["label"].map({"no": "not_entailment", "yes": "entailment"}))
    for name in ("train", "dev"):
        rte.to_csv(folder / "RTE" / f"{name}.tsv", sep="\t", index=False)
    found = {}
    for name, data in (("own.csv", str(folder / "own.csv")), ("RTE/dev.tsv", "rte@glue")):
        settings = small.encoder_settings(tiny_encoder, data, folder / f"run {name[:3]}")
        settings["data"] |= {"root": str(folder), "splitter": "iid", "splitter_args": [], "splits": [0.7, 0.1, 0.2]}
        keys = {"federate.total_round_num": 1, "lowrank.pictures": False}
        found[folder / name] = fs_lowrank.run(fs_lowrank.load_config(settings, keys))
    return found


@pytest.mark.more
def test_a_pair_is_read_as_the_run_read_it(pairs, tmp_path, capsys):
    """The scores on the test rows are those of the run; without the second sentence they cannot be."""
    for path, result in pairs.items():
        table = pd.read_csv(path, sep=None, engine="python")
        rows = read_split(result.outdir)["test"]["rows"]
        test = tmp_path / f"{path.stem}.csv"
        table.iloc[rows].to_csv(test, index=False)
        run = load_run(result.outdir)
        read = read_rows(run, test)
        assert evaluate_rows(run, read)["loss"] == pytest.approx(result.final["test_loss"], abs=1e-6)
        first, second = list(table)[0], next(c for c in table if c in ("text_pair", "sentence2"))
        table.drop(columns=second).to_csv(tmp_path / "alone.csv", index=False)
        assert cli.main(["predict", str(result.outdir), "--data", str(tmp_path / "alone.csv")]) == 2
        err = capsys.readouterr().err
        assert f"no column {second!r}" in err and "name it with --text-pair COLUMN" in err
        table.rename(columns={second: "other"}).to_csv(tmp_path / "other.csv", index=False)
        named = read_rows(run, tmp_path / "other.csv", {"text_pair": "other"})
        assert len(named.examples) == len(table) and first in table


def test_a_run_without_pairs_reads_no_second_sentence(runs, test_rows):
    pd.read_csv(test_rows).assign(text_pair="good good good").to_csv(test_rows.with_name("more.csv"), index=False)
    run = load_run(runs["classes"].outdir)
    alone, more = (
        read_rows(run, test_rows.with_name(name)).examples.fingerprint() for name in ("test.csv", "more.csv")
    )
    assert alone == more
    with pytest.raises(UserError, match="text_pair='domain': the run in .* learned from one text in a row"):
        read_rows(run, test_rows, {"text_pair": "domain"})


def test_what_is_cut_is_counted_as_the_run_counts_it(runs, test_rows):
    """A text that just fits is not cut."""
    run = load_run(runs["classes"].outdir)
    fits, longer = " ".join(["good"] * run.tok_len), " ".join(["good"] * (run.tok_len + 1))
    pd.DataFrame({"text": [fits, longer, "bad"], "label": [0, 1, 0]}).to_csv(test_rows, index=False)
    assert read_rows(run, test_rows).cut == 1


def test_prompts_of_a_run_with_a_loss_on_all_tokens(runs, instructions_jsonl, tmp_path):
    """What is asked does not depend on what the loss was on."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in instructions_jsonl.read_text().splitlines()[:3]))
    run = load_run(runs["instructions"].outdir)
    wanted = answers(run, read_rows(run, few, labelled=False), 4)
    run.config = run.config.replace({"data.args": [{"loss_on": "all"}]})
    assert answers(run, read_rows(run, few, labelled=False), 4) == wanted
    with pytest.raises(UserError, match="read rows with labelled=False"):
        answers(run, read_rows(run, few), 4)


@pytest.mark.more
def test_a_language_model(runs, instructions_jsonl, tmp_path):
    run = load_run(runs["instructions"].outdir)
    rows = read_rows(run, instructions_jsonl)
    scores = evaluate_rows(run, rows)
    assert scores["perplexity"] == pytest.approx(torch.tensor(scores["loss"]).double().exp().item())
    labels = rows.examples.columns["labels"]
    assert scores["tokens"] == sum(int((row != -100).sum()) for row in labels)  # the first token belongs to the prompt
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in instructions_jsonl.read_text().splitlines()[:3]))
    said = predict_rows(run, read_rows(run, few, labelled=False), tokens=4)["prediction"]
    assert len(said) == 3 and all(len(text.split()) <= 4 for text in said)


def test_answers_are_by_the_most_likely_token(runs, instructions_jsonl, tmp_path, caplog):
    """Also of a model whose own generation settings punish repetition, as Qwen's do. Those that are cut are counted."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in instructions_jsonl.read_text().splitlines()[:5]))
    run = load_run(runs["instructions"].outdir)
    rows = read_rows(run, few, labelled=False)
    base = run.model.get_base_model() if hasattr(run.model, "get_base_model") else run.model
    base.generation_config.repetition_penalty = 9.0
    ends = base.generation_config.eos_token_id
    wanted, cut = [], 0
    for ids in rows.examples.columns["input_ids"]:
        text, made = torch.from_numpy(np.asarray(ids)).long()[None], []
        while len(made) < 6 and (not made or made[-1] != ends):
            with torch.no_grad():
                made.append(int(run.model(input_ids=text).logits[0, -1].argmax()))
            text = torch.cat([text, torch.tensor([made[-1:]])], 1)
        wanted.append(run.tokenizer.decode(made, skip_special_tokens=True).strip())
        cut += made[-1] != ends
    assert answers(run, rows, 6) == wanted and base.generation_config.repetition_penalty == 9.0
    assert cut and f"{cut} of 5 answers were cut at 6 tokens" in caplog.text


def test_the_accuracy_of_a_language_model_is_called_what_it_is(runs):
    """In tables, in what a result shows of itself, and in the model card; beside it is the perplexity."""
    result = runs["instructions"]
    header, *_ = (result.outdir / "summary.csv").read_text(encoding="utf-8").splitlines()
    card = (result.outdir / "adapter" / "README.md").read_text(encoding="utf-8")
    for said, blank in ((header, " "), (repr(result), "_"), (result._repr_html_(), "_"), (card, "_")):
        assert f"test{blank}token{blank}acc" in said and f"test{blank}perplexity" in said
        assert not re.search(r"test.acc", said)
    assert for_people(result.final, False) == result.final and not runs["classes"].language


@pytest.mark.more
def test_the_commands(runs, test_rows, reviews_csv, tmp_path, capsys):
    folder = str(runs["classes"].outdir)
    assert cli.main(["evaluate", folder, "--data", str(test_rows), "--json", str(tmp_path / "scores.json")]) == 0
    assert f"{runs['classes'].final['test_acc']:.4f} ±" in capsys.readouterr().out
    assert json.loads((tmp_path / "scores.json").read_text())["rows"] == 60
    assert cli.main(["evaluate", folder, "--data", str(test_rows), "--json"]) == 0
    assert {"acc", "loss"} <= {entry["score"] for entry in json.loads(capsys.readouterr().out)}
    partly = pd.read_csv(test_rows).astype({"label": object})
    partly.loc[3, "label"] = ""
    partly.to_csv(tmp_path / "partly.csv", index=False)
    assert cli.main(["evaluate", folder, "--data", str(tmp_path / "partly.csv")]) == 0
    assert "60 rows, 1 left out (empty label)" in capsys.readouterr().out
    assert cli.main(["evaluate", folder, "--data", str(reviews_csv)]) == 0
    assert "the run was trained on 2" in capsys.readouterr().out
    assert cli.main(["predict", str(tmp_path / "none"), "--data", str(test_rows)]) == 2
    assert "none holds no run" in " ".join(capsys.readouterr().err.split())
    with_gap = pd.read_csv(test_rows).head(4).drop(columns="label")
    with_gap.loc[1, "text"] = " "
    with_gap.to_csv(tmp_path / "new.csv", index=False)
    assert cli.main(["predict", folder, "--data", str(tmp_path / "new.csv"), "--column", "guess"]) == 0
    assert "4 rows, 1 left out (empty text)" in capsys.readouterr().out
    written = pd.read_csv(tmp_path / "new.predicted.csv", keep_default_na=False)
    assert list(written) == ["text", "domain", "guess", "guess_probability"] and written["guess"][1] == ""
    assert set(written["guess"].astype(str)) <= {"0", "1", ""}


@pytest.mark.more
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["evaluate", "{empty}", "--data", "{data}"], "holds no run: there is no config.yaml"),
        (["evaluate", "{run}", "--data", "{data}", "--output", "text"], "--output: "),
        (["evaluate", "{asked}", "--data", "{data}", "--label", "domain"], "is a run over instructions"),
        (["predict", "{run}", "--data", "{data}", "--out", "{data}"], "exists; remove it"),
        (["predict", "{run}", "--data", "{data}", "--out", "{empty}/no/x.csv"], "x.csv cannot be written: there is no"),
        (
            ["predict", "{run}", "--data", "{data}", "--tokens", "0"],
            "--tokens: '0': expected a whole number",
        ),
        (["evaluate", "{run}", "--data", "{run}"], "expected a file that ends with"),
        (["predict", "{run}"], "--data"),
    ],
)
def test_wrong_use_is_one_line(runs, test_rows, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    places = {name: runs[task].outdir for name, task in (("run", "classes"), ("asked", "instructions"))}
    places |= {"data": test_rows, "empty": tmp_path / "empty"}
    assert cli.main([a.format(**places) for a in arguments]) == 2
    told = capsys.readouterr().err
    lines = [line for line in told.splitlines() if "Warning" not in line and not line.startswith("  ")]
    assert said in told and len(lines) == 1, told


def test_the_adapter_has_a_card(runs, tiny_encoder, capsys):
    result = runs["classes"]
    card = (result.outdir / "adapter" / "README.md").read_text(encoding="utf-8")
    _, header, body = card.split("---\n", 2)
    about = yaml.safe_load(header)
    assert about["library_name"] == "peft" and "base_model" not in about, "a folder of this machine"
    assert str(tiny_encoder) not in header and f"`{tiny_encoder.name}`" in body and result.facts["model"] in body
    assert about["pipeline_tag"] == "text-classification" and {"rolora", "lora"} <= set(about["tags"])
    acc, error = result.final["test_acc"], standard_error(result.final["test_acc"], result.facts["held_out"]["test"])
    assert f"| test_acc | {digits(acc)} ± {digits(error)} |" in body and "| clients | 5, of " in body
    scope: dict = {}
    exec(body.split("```python\n")[1].split("```")[0], scope)
    assert capsys.readouterr().out.strip() in result.facts["labels"]
    assert type(scope["model"]).__name__.startswith("PeftModel")
    classes = result.facts["labels"]
    assert scope["model"].config.id2label == dict(enumerate(classes)) and len(classes) > 1
    assert scope["model"].config.label2id == {name: i for i, name in enumerate(classes)}
    assert f"fs-lowrank run --cfg {result.outdir / 'config.yaml'} outdir again" in body
    config = load_config(result.outdir / "config.yaml", **{"model.task": "SequenceRegression"})
    numbers = model_card(config, {**result.facts, "labels": ["score"]}, {}, "adapter")
    assert "| a number | score |" in numbers and "| classes |" not in numbers


def test_the_card_of_a_fetched_model_names_its_place_on_the_hub(runs):
    """The name under which it was fetched is known here only; and paths are those of the folder of the command."""
    result = runs["instructions"]
    config = load_config(result.outdir / "config.yaml", **{"model.type": "smollm2@huggingface_llm", "outdir": "out"})
    hub = hub_name(config)
    facts = {**result.facts, "hub": hub, "source": "<img src=x> a|b"}
    card = model_card(config, facts, {}, "adapter")
    assert f'from_pretrained("{hub[0]}")' in card and f"base_model: {hub[0]}\n" in card
    assert "as `fs-lowrank fetch smollm2` gives it" in card and "&lt;img src=x&gt; a\\|b" in card
    assert 'from_pretrained(base, "out/adapter")' in card and "--cfg out/config.yaml outdir again" in card


def test_the_adapter_of_a_snapshot_names_its_place_on_the_hub(runs, tiny_encoder, tmp_path):
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "0123abc"
    shutil.copytree(tiny_encoder, snapshot)
    assert hub_name(load_config(runs["classes"].outdir / "config.yaml")) == ("", ""), "a folder"
    keys = {"model.type": f"{snapshot}@transformers", "outdir": str(tmp_path / "run"), "federate.total_round_num": 1}
    result = fs_lowrank.run(load_config(runs["classes"].outdir / "config.yaml", **keys))
    for folder in (result.save_adapter(tmp_path / "saved"), tmp_path / "run" / "adapter"):
        about = json.loads((folder / "adapter_config.json").read_text())
        assert (about["base_model_name_or_path"], about["revision"]) == ("someone/tiny", "0123abc")
    assert load_run(tmp_path / "run").model
    assert 'from_pretrained("someone/tiny", revision="0123abc"' in (tmp_path / "run/adapter/README.md").read_text()


def test_a_wrong_file_is_refused_before_the_model_is_loaded(runs, test_rows, monkeypatch, capsys):
    monkeypatch.setattr("fs_lowrank.finished.run.build_model", None)
    table = pd.read_csv(test_rows)
    table.rename(columns={"text": "said"}).to_csv(test_rows.with_name("renamed.csv"), index=False)
    table.assign(prediction="").to_csv(test_rows.with_name("predicted.csv"), index=False)
    for command, name, said in (
        ("evaluate", "tests.csv", "did you mean 'test.csv'"),
        ("evaluate", "renamed.csv", "no column 'text'"),
        ("predict", "predicted.csv", "has a column 'prediction' already"),
    ):
        file = str(test_rows.with_name(name))
        assert cli.main([command, str(runs["classes"].outdir), "--data", file]) == 2
        assert said in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_read(runs, test_rows, monkeypatch, capsys):
    monkeypatch.setattr("fs_lowrank.finished.load_run", None)
    folder, there = str(runs["classes"].outdir), sorted(test_rows.parent.iterdir())
    arguments = ["--data", str(test_rows), "--out", str(test_rows.with_name("x.xlsx"))]
    assert cli.main(["predict", folder, *arguments]) == 2
    assert "expected a file that ends with" in capsys.readouterr().err
    table = pd.DataFrame({"text": ["a", "b\udcff"]}, dtype=object)
    for suffix in SUFFIXES:
        with pytest.raises(UserError, match="cannot be written: "):
            write_table(table, test_rows.with_name(f"out{suffix}"))
    assert sorted(test_rows.parent.iterdir()) == there


def test_nothing_is_said_of_what_the_adapter_replaces(runs, test_rows, caplog):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FutureWarning)
        assert cli.main(["evaluate", str(runs["classes"].outdir), "--data", str(test_rows)]) == 0
    assert not caplog.records and not said


def test_the_version_of_a_task_is_no_score(runs, monkeypatch, capsys):
    scores = {"arc_easy": {"acc": 0.25, "acc_stderr": 0.1, "version": 1.0, "n": 4}}
    monkeypatch.setattr("fs_lowrank.benchmark.scorers.score", lambda *args: scores)
    assert cli.main(["evaluate", str(runs["instructions"].outdir), "--tasks", "arc_easy"]) == 0
    out = capsys.readouterr().out
    assert "0.2500 ± 0.1000" in out and "version" not in out and "1.0000" not in out


def test_a_file_is_read_as_the_set_of_the_framework_that_the_run_read(tiny_causal, instructions_jsonl, tmp_path):
    """GSM8K's ``####`` is "The answer is" where the run read it, so also where its test file is scored."""
    texts = map(json.loads, instructions_jsonl.read_text().splitlines())
    rows = [{"question": row["instruction"], "answer": f"{row['output']} #### good"} for row in texts]

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("gsm8k_train.jsonl", rows)
    settings = small.causal_settings(tiny_causal, "gsm8k@llm", tmp_path / "run")
    settings["data"] |= {"root": str(tmp_path), "splits": [0.8, 0.0, 0.2]}
    result = fs_lowrank.run(fs_lowrank.load_config(settings, {"federate.total_round_num": 1}))
    write("gsm8k_test.jsonl", [rows[i] for i in read_split(tmp_path / "run")["test"]["rows"]])
    run = load_run(tmp_path / "run")
    test = read_rows(run, tmp_path / "gsm8k_test.jsonl")
    assert evaluate_rows(run, test)["loss"] == pytest.approx(result.final["test_loss"], abs=1e-6)
    assert "####" in test.table["answer"][0]


def test_the_tasks_are_scored_on_the_base_that_is_given(runs, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fs_lowrank.benchmark.scorers.score", lambda *args: {})
    command = ["evaluate", str(runs["instructions"].outdir), "--tasks", "arc_easy", "--base", str(tmp_path / "absent")]
    assert cli.main(command) == 2 and str(tmp_path / "absent") in capsys.readouterr().err.replace("\n", "")


def test_a_classifier_has_no_tasks(runs, capsys):
    assert cli.main(["evaluate", str(runs["classes"].outdir), "--tasks", "arc_easy"]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert "a run of labelled texts; lm-eval's tasks are for causal language models" in said


def test_the_base_of_an_adapter_was_moved(runs, tiny_encoder, tiny_causal, tmp_path, monkeypatch, test_rows, capsys):
    """Another place is taken where the weights there are those that the run had."""
    moved = shutil.copytree(runs["classes"].outdir, tmp_path / "run")
    gone = load_config(moved / "config.yaml", **{"model.type": f"{tmp_path / 'gone'}@transformers"})
    monkeypatch.setattr("fs_lowrank.finished.run.load_config", lambda path: gone)
    words = ["evaluate", str(moved), "--data", str(test_rows)]
    assert cli.main(words) == 2
    assert f"no longer at {tmp_path / 'gone'}; say where it is with --base FOLDER" in capsys.readouterr().err
    assert cli.main([*words, "--base", str(tiny_encoder)]) == 0
    assert f"{runs['classes'].final['test_acc']:.4f} ±" in capsys.readouterr().out
    assert cli.main([*words, "--base", str(tiny_causal)]) == 2


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_no_cell_is_a_formula_of_a_spreadsheet(tmp_path, suffix, caplog):
    cells = ["=1+1", "@x", "+a()", "-2+3+cmd", "-5.0", "+ 3", "- a dash", "a=b", ""]
    table = pd.DataFrame({"text": cells, "number": -1.5})
    write_table(table, tmp_path / f"out{suffix}")
    written = (tmp_path / f"out{suffix}").read_text().splitlines()
    escaped = [line.startswith("'") for line in written[1:]]
    wanted = [True] * 4 + [False] * 5 if suffix != ".jsonl" else [False] * 8
    assert escaped == wanted and ("4 cells that a spreadsheet would compute" in caplog.text) == any(wanted)
    assert table["text"].tolist() == cells
