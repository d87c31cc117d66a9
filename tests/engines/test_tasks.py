"""Regression, sets of classes and encoder-decoder models on the embedded engine, and metrics beyond accuracy."""

import json
import math

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

import fs_lowrank
from fs_lowrank import UserError
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.rounds.evaluator import Evaluator, best_record
from fs_lowrank.rounds.workspace import Workspace
from fs_lowrank.training.local import loss_of
from fs_lowrank.training.metrics import measure
from tests.cases import same_model

FEW = {"federate.client_num": 3, "train.local_update_steps": 4}


@pytest.fixture
def regression(few, task_files):
    keys = {
        "data.type": str(task_files / "scores.csv"),
        "data.args": [{"label": "score"}],
        "model.task": "SequenceRegression",
    }
    return lambda name, more=None: few(name, {**keys, **(more or {})})


@pytest.fixture
def multi(few, task_files):
    keys = {"data.type": str(task_files / "sets.jsonl"), "model.task": "MultiLabelClassification"}
    return lambda name, more=None: few(name, {**keys, **(more or {})})


@pytest.fixture
def t5(few, task_files, causal_settings):
    adapter = [{"r": 2, "alpha": 6, "modules": ["q", "v"]}]
    keys = {"model.type": f"{task_files}@huggingface_llm", "model.task": "Seq2SeqLM", "llm.adapter.args": adapter}
    return lambda name, more=None: few(name, {**keys, **(more or {})}, causal_settings)


def outputs(result, examples):
    """Logits and labels, one sample at a time."""
    result.model.eval()
    batches = [examples.batch([i]) for i in range(len(examples))]
    with torch.no_grad():
        logits = [result.model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches]
    return torch.cat(logits).numpy(), torch.cat([b["labels"] for b in batches]).numpy()


def ranks(values):
    return np.argsort(np.argsort(values))


def test_metrics_by_hand():
    labels, predicted = np.array([0, 1, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1, 1])
    tp, fp, fn, tn = 3, 1, 1, 1
    found = measure(["f1", "matthews"], predicted, labels, 2)
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / root)
    three = measure(["f1"], np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2]), 3)["f1"]
    assert three == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    # A class that does not occur counts as one of which nothing was found: the mean is over all classes.
    absent = measure(["f1"], np.array([0, 1, 1]), np.array([0, 1, 0]), 3)["f1"]
    assert absent == pytest.approx((2 / 3 + 2 / 3) / 2)
    x, y = np.array([0.1, 0.4, 0.3, 2.0]), np.array([1.0, 2.0, 1.5, 2.5])
    found = measure(["pearson", "spearman"], x, y, 1)
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1]) and found["spearman"] == pytest.approx(1.0)
    constant = measure(["pearson", "spearman"], np.ones(4), y, 1)
    assert all(math.isnan(value) for value in constant.values())


@pytest.mark.more
def test_a_regression(regression):
    result = fs_lowrank.run(regression("run", {"eval.before": True, "eval.client_scores": True}))
    workspace = Workspace(regression("site"))
    data = workspace.data
    assert data.task == "regression" and data.majority is None and data.test.labels.dtype == np.float32
    logits, labels = outputs(result, workspace.data.test)
    predicted = logits[:, 0].astype(np.float64)
    assert result.final["test_loss"] == pytest.approx(np.mean((predicted - labels) ** 2), rel=1e-5)
    assert result.final["test_pearson"] == pytest.approx(np.corrcoef(predicted, labels)[0, 1], rel=1e-5)
    assert result.final["test_spearman"] == pytest.approx(np.corrcoef(ranks(predicted), ranks(labels))[0, 1], abs=1e-3)
    assert result.final["test_loss"] < result.before["test_loss"], "it learns"
    assert not any("acc" in name for name in result.final)
    batch = workspace.data.train.batch(range(8))
    assert torch.allclose(loss_of(workspace.model, batch), workspace.model(**batch).loss, atol=1e-6)
    worst = max(score["loss"] for score in result.client_scores.values())
    assert result.final["client_test_loss_worst_decile"] == pytest.approx(worst)
    loaded = AutoModelForSequenceClassification.from_pretrained(result.save_model(result.outdir / "again"))
    assert loaded.config.problem_type == "regression" and loaded.config.id2label == {0: "score"}


@pytest.mark.more
def test_numbers_are_divided_like_classes(regression):
    """Held-out rows have the scores of all rows, and a skewed splitter gives clients scores of their own."""
    data = Workspace(
        regression("site", {"data.splitter": "shards", "data.splitter_args": [{"shards_per_client": 1}]})
    ).data
    everything = np.concatenate([part.labels for part in data.splits()])
    assert abs(np.median(data.test.labels) - np.median(everything)) < 0.4
    labels = sorted((data.clients[i].labels for i in range(3)), key=np.median)
    assert max(labels[0]) <= np.median(labels[1]) <= min(labels[2]) and data.partition.labels is None


@pytest.mark.parametrize("task", ["regression", "multi", "t5"])
@pytest.mark.more
def test_cohorts_and_processes_have_the_same_result(task, request):
    config = request.getfixturevalue(task)
    alone = fs_lowrank.run(config("alone", {"train.blocks": 1}))
    together = fs_lowrank.run(config("together", {"train.cohort": 3, "train.blocks": 1}))
    same_model(alone, together, atol=2e-5)
    apart = fs_lowrank.run(config("apart", {"federate.process_num": 2, "train.blocks": 1}))
    same_model(alone, apart)
    assert alone.final == apart.final


@pytest.mark.more
def test_sets_of_classes(multi, task_files):
    result = fs_lowrank.run(multi("run", {"eval.metrics": ["acc", "f1"], "federate.total_round_num": 3}))
    workspace = Workspace(multi("site"))
    assert workspace.data.label_names == ["good", "tea"] and workspace.data.num_labels == 2
    logits, labels = outputs(result, workspace.data.test)
    predicted = logits > 0
    assert result.final["test_acc"] == pytest.approx(np.mean((predicted == labels).all(1)))
    per_class = [2 * (p & t).sum() / max(p.sum() + t.sum(), 1) for p, t in zip(predicted.T, labels.T == 1)]
    assert result.final["test_f1"] == pytest.approx(np.mean(per_class))
    sigmoid = 1 / (1 + np.exp(-logits.astype(np.float64)))
    loss = -np.log(np.where(labels == 1, sigmoid, 1 - sigmoid)).mean()
    assert result.final["test_loss"] == pytest.approx(loss, rel=1e-4)
    flags = {"data.type": str(task_files / "flags.csv"), "data.args": [{"label": ["good", "tea"]}]}
    assert Workspace(multi("flags", flags)).data.fingerprint == workspace.data.fingerprint
    batch = workspace.data.train.batch(range(8))
    assert torch.allclose(loss_of(workspace.model, batch), workspace.model(**batch).loss, atol=1e-6)


@pytest.mark.more
def test_perplexity_in_the_records(few, causal_settings):
    keys = {"eval.metrics": ["perplexity"], "eval.best_res_update_round_wise_key": "val_perplexity"}
    result = fs_lowrank.run(few("run", keys, causal_settings))
    for record in result.history:
        for scores in record["metrics"].values():
            assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    values = [r["metrics"]["val"]["perplexity"] for r in result.history]
    assert result.best["round"] == values.index(min(values)) + 1
    apart = fs_lowrank.run(few("apart", {**keys, "federate.process_num": 2}, causal_settings))
    assert apart.final == result.final


@pytest.mark.more
@pytest.mark.parametrize("by", ["val_f1", "val_matthews", "test_f1"])
def test_the_best_round_is_that_of_the_metric(few, by):
    keys = {"eval.metrics": ["acc", "f1", "matthews"], "eval.best_res_update_round_wise_key": by}
    config = few("run", {**keys, "federate.total_round_num": 3, "eval.save_best": True})
    result = fs_lowrank.run(config)
    name = by.partition("_")[2]
    values = [r["metrics"]["val"][name] for r in result.history]
    assert result.best["round"] == values.index(max(values)) + 1 and result.best["by"] == f"val_{name}"
    assert (result.outdir / "adapter_best").is_dir()
    for split in ("val", "test"):
        records = [{"round": i, "metrics": {split: {name: v}}} for i, v in enumerate((0.2, 0.6, 0.4), 1)]
        if split == by.partition("_")[0]:
            assert best_record(records, *config.watched)["round"] == 2
    stopped = few("stop", {**keys, "early_stop.patience": 1})
    falling = [{"round": i, "metrics": {by.partition("_")[0]: {name: v}}} for i, v in enumerate((0.5, 0.4), 1)]
    assert Evaluator(Workspace(stopped)).stalled(falling) and not Evaluator(Workspace(stopped)).stalled(falling[::-1])


@pytest.mark.more
def test_an_encoder_decoder_model(t5):
    config = t5("run", {"federate.method": "rolora", "federate.total_round_num": 4})
    result = fs_lowrank.run(config)
    workspace = Workspace(config.replace(outdir=str(config.outdir) + "_site"))
    assert workspace.data.train.paired and workspace.data.train.columns["labels"][0][-1] == 3
    batch = workspace.data.test.batch(range(len(workspace.data.test)))
    result.model.eval()
    with torch.no_grad():
        assert result.final["test_loss"] == pytest.approx(float(result.model(**batch).loss), rel=1e-4)
    assert result.final["test_loss"] < result.history[0]["metrics"]["test"]["loss"]
    base = AutoModelForSeq2SeqLM.from_pretrained(config.model.type.partition("@")[0])
    loaded = PeftModel.from_pretrained(base, str(result.saved["adapter"])).eval()
    said = loaded.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=3)
    assert said.shape[0] == len(workspace.data.test)
    with torch.no_grad():
        assert torch.allclose(loaded(**batch).loss, result.model(**batch).loss, atol=1e-6)
    assert {"uplink_bytes", "loss"} <= json.loads((result.outdir / "rounds.jsonl").read_text().splitlines()[0]).keys()


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"model.task": "SequenceRegression"}, "labels in column 'label'|'label' in column|expected a number|numbers"),
        (
            {"eval.metrics": ["pearson"]},
            "eval.metrics.0 = 'pearson': it is for SequenceRegression; model.task is Sequence",
        ),
    ],
)
def test_what_does_not_fit_classes_is_refused(few, keys, said, task_files):
    more = {"data.type": str(task_files / "sets.jsonl")} if "model.task" in keys else {}
    with pytest.raises(UserError, match=said) as caught:
        LocalEngine(few("run", {**keys, **more}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys, said",
    [
        (
            {"data.args": [{"template": "chat"}]},
            "and chat templates are for decoders",
        ),
        ({"data.args": [{"template": "alpca"}]}, "did you mean 'alpaca'"),
        ({"data.args": [{"loss_on": "all"}]}, "loss_on = all: an encoder-decoder model writes the answer alone"),
        ({"federate.method": "fedfisher"}, "fedfisher': it is not for model.type = .* \\(Seq2SeqLM\\)"),
    ],
)
def test_what_does_not_fit_an_encoder_decoder_is_refused(t5, keys, said):
    with pytest.raises(UserError, match=said):
        LocalEngine(t5("run", keys))


def test_labels_that_do_not_fit_are_refused(few, task_files, multi):
    scores = {"data.type": str(task_files / "scores.csv"), "data.args": [{"label": "score"}]}
    with pytest.raises(UserError, match="which is a regression: set model.task SequenceRegression; or write classes"):
        Workspace(few("run", scores))
    with pytest.raises(UserError, match="scores.csv, row 1: label .* in column 'score': expected a list of classes"):
        Workspace(multi("run", scores))
    flags = {"data.type": str(task_files / "flags.csv"), "data.args": [{"label": ["good", "tea"]}]}
    with pytest.raises(UserError, match="expected one class; for sets of classes set model.task MultiLabelClassif"):
        Workspace(few("run", flags))


def test_a_search_goes_by_what_is_measured(few):
    from hpo.objectives import check_config

    check_config(few("run", {"eval.metrics": ["f1"]}), ["val_f1", "uplink_bytes"])
    with pytest.raises(
        UserError, match="objective val_f1: it is not measured with model.task = SequenceClassification"
    ):
        check_config(few("run"), ["val_f1"])
