"""Finished runs of the other tasks: numbers, sets of classes, and encoder-decoder models, on a file."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import fs_lowrank
from fs_lowrank import UserError, cli
from fs_lowrank.draw.report import write_page
from fs_lowrank.finished import evaluate_rows, load_run, predict_rows, read_rows
from fs_lowrank.runs.shown import read_runs
from fs_lowrank.runs.split import read_split
from fs_lowrank.testing import small


@pytest.fixture(scope="module")
def made(tiny_encoder, tmp_path_factory, instructions_jsonl, reviews_csv, task_files):
    """Results by task, and the file that each has learned from."""
    folder = tmp_path_factory.mktemp("runs")
    tasks = {
        "numbers": ("scores.csv", "SequenceRegression", {"data.args": [{"label": "score"}]}),
        "sets": ("sets.jsonl", "MultiLabelClassification", {"eval.metrics": ["acc", "f1"]}),
        "flags": ("flags.csv", "MultiLabelClassification", {"data.args": [{"label": ["good", "tea"]}]}),
        "val": (reviews_csv, "", {"data.splits": [0.8, 0.2, 0.0], "eval.split": ["val"]}),
        "t5": (instructions_jsonl, "Seq2SeqLM", {"model.type": f"{task_files}@huggingface_llm"}),
    }
    found = {}
    for name, (file, task, more) in tasks.items():
        path = task_files / file
        make = small.causal_settings if name == "t5" else small.encoder_settings
        keys = {"model.task": task, "federate.total_round_num": 2, "lowrank.pictures": False, "data.splitter": "iid"}
        keys |= {"data.splitter_args": [], "federate.client_num": 3, "train.optimizer.lr": 0.02, **more}
        if name == "t5":
            keys["llm.adapter.args"] = [{"r": 2, "alpha": 6, "modules": ["q", "v"]}]
        found[name] = fs_lowrank.run(fs_lowrank.load_config(make(tiny_encoder, path, folder / name), keys)), path
    return found


def held_out(result, path, to):
    """The rows of the run's test set as a file."""
    rows = read_split(result.outdir)["test"]["rows"]
    if path.suffix == ".csv":
        pd.read_csv(path).iloc[rows].to_csv(to, index=False)
    else:
        lines = path.read_text().splitlines()
        to.write_text("".join(lines[i] + "\n" for i in rows))
    return to


@pytest.mark.parametrize(
    "task, metric", [("numbers", "loss"), ("sets", "accuracy"), ("val", "accuracy"), ("t5", "loss")]
)
@pytest.mark.more
def test_page_and_curves_are_judged_by_the_metric_of_the_task(made, tmp_path, task, metric):
    """Sets of classes have no counts by class, and a classifier without a test set has no majority class."""
    result, split = made[task][0], "val" if task == "val" else "test"
    page = write_page(read_runs([result.outdir]), tmp_path / "report.html").read_text(encoding="utf-8")
    titles = [axes.get_title("left") for axes in result.plot().axes]
    assert f"fedlora has a {split} {metric} of" in page and titles[0] == f"{split} {metric} by round"
    assert ("next-token" in page) == any("next-token" in title for title in titles) == (task == "t5")


@pytest.mark.parametrize("task", ["numbers", "sets", "flags", "t5"])
@pytest.mark.more
def test_the_scores_on_the_test_set_are_those_of_the_run(made, tmp_path, task):
    result, path = made[task]
    file = held_out(result, path, tmp_path / f"test{path.suffix}")
    run = load_run(result.outdir)
    scores = evaluate_rows(run, read_rows(run, file))
    own = {n.removeprefix("test_"): v for n, v in result.final.items() if n.startswith("test_") and "last5" not in n}
    own = {name: value for name, value in own.items() if name in scores}
    assert {"loss"} < own.keys()
    for name, value in own.items():
        assert scores[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.more
def test_numbers(made, tmp_path, capsys):
    result, path = made["numbers"]
    run, file = load_run(result.outdir), held_out(result, path, tmp_path / "test.csv")
    scores = evaluate_rows(run, read_rows(run, file))
    table = pd.read_csv(file)
    assert scores["mean_loss"] == pytest.approx(float(np.var(table["score"])), rel=1e-4) and "acc" not in scores
    predicted = predict_rows(run, read_rows(run, file, labelled=False))["prediction"].astype(float)
    assert np.mean((predicted - table["score"]) ** 2) == pytest.approx(scores["loss"], rel=1e-3)
    assert np.corrcoef(predicted, table["score"])[0, 1] == pytest.approx(scores["pearson"], abs=1e-3)
    assert cli.main(["evaluate", str(result.outdir), "--data", str(file), "--json", str(tmp_path / "s.json")]) == 0
    said = capsys.readouterr().out
    assert "pearson" in said and "loss of always naming the mean" in said and "acc" not in said.split("model:")[1]
    assert json.loads((tmp_path / "s.json").read_text())["spearman"] == pytest.approx(scores["spearman"])
    table.assign(score="many").to_csv(tmp_path / "wrong.csv", index=False)
    with pytest.raises(UserError, match="row 1: label 'many' in column 'score': expected a number"):
        read_rows(run, tmp_path / "wrong.csv")


@pytest.mark.more
@pytest.mark.parametrize("task", ["sets", "flags"])
def test_sets_of_classes(made, tmp_path, task, capsys):
    result, path = made[task]
    run, file = load_run(result.outdir), held_out(result, path, tmp_path / f"test{path.suffix}")
    rows = read_rows(run, file)
    scores, table = evaluate_rows(run, rows), predict_rows(run, rows)
    true = rows.examples.batch(range(len(rows.examples)))["labels"].numpy() == 1
    predicted = np.array([[name in cell for name in run.labels] for cell in table["prediction"]])
    assert run.labels == ["good", "tea"]
    assert scores["acc"] == pytest.approx(np.mean((true == predicted).all(1)))
    for i, name in enumerate(run.labels):
        assert scores["classes"][name]["rows"] == true[:, i].sum()
        assert scores["classes"][name]["recall"] == pytest.approx(predicted[true[:, i], i].mean())
        assert ((table[f"prediction_{name}"] > 0.5) == predicted[:, i]).all()
    _, counts = np.unique(true, axis=0, return_counts=True)
    assert scores["majority"] == pytest.approx(counts.max() / len(true))
    out = tmp_path / f"out{path.suffix}"
    assert cli.main(["predict", str(result.outdir), "--data", str(file), "--out", str(out)]) == 0
    cells = pd.read_csv(out)["prediction"].map(json.loads) if out.suffix == ".csv" else pd.read_json(out, lines=True)
    assert list(cells if out.suffix == ".csv" else cells["prediction"]) == list(table["prediction"])
    assert cli.main(["evaluate", str(result.outdir), "--data", str(file)]) == 0
    said = capsys.readouterr().out
    assert "recall of tea" in said and ("f1" in said) == (task == "sets")
    if task == "sets":
        file.write_text(json.dumps({"text": "a film", "label": ["tae"]}) + "\n")
        with pytest.raises(UserError, match="class 'tae' does not occur in training; did you mean 'tea'"):
            read_rows(run, file)
    else:
        pd.read_csv(file).drop(columns="tea").to_csv(file, index=False)
        with pytest.raises(UserError, match="no column 'tea'"):
            read_rows(run, file)


@pytest.mark.more
def test_an_encoder_decoder_model(made, tmp_path, capsys):
    result, path = made["t5"]
    run, file = load_run(result.outdir), held_out(result, path, tmp_path / "test.jsonl")
    rows = read_rows(run, file)
    scores = evaluate_rows(run, rows)
    assert scores["tokens"] == sum(len(row) for row in rows.examples.columns["labels"])
    assert scores["perplexity"] == pytest.approx(np.exp(scores["loss"]))
    said = predict_rows(run, read_rows(run, file, labelled=False), tokens=4)["prediction"]
    ids = torch.from_numpy(np.asarray(rows.examples.columns["input_ids"][0]).astype(np.int64))[None]
    made_of_it = run.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert said[0] == run.tokenizer.decode(made_of_it[0], skip_special_tokens=True).strip() and len(said) == len(
        rows.positions
    )
    assert cli.main(["evaluate", str(result.outdir), "--tasks", "arc_easy"]) == 2
    assert "a run of an encoder-decoder model" in " ".join(capsys.readouterr().err.split())
