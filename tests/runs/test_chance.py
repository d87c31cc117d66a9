"""The accuracy of a constant prediction: by hand, in ``data.json``, and in the output of ``run`` and ``compare``."""

from __future__ import annotations

import csv
import json
import math
import re

import pytest
import yaml

from fs_lowrank import api, cli
from fs_lowrank.commands import seeds
from fs_lowrank.runs.chance import Chance, run_verdict
from fs_lowrank.runs.summary import for_people

pytestmark = pytest.mark.usefixtures("no_curves")


def test_chance_by_hand():
    chance = Chance.of_counts([30, 60, 10, 0])
    assert chance.share == 0.6 and chance.error == pytest.approx(math.sqrt(0.6 * 0.4 / 100), rel=0.01)
    assert chance.loss == pytest.approx(-(0.3 * math.log(0.3) + 0.6 * math.log(0.6) + 0.1 * math.log(0.1)))
    assert not chance.reached(0.6) and not chance.reached(0.6 + 2 * chance.error) and chance.reached(0.7)
    level = chance.share + 2 * chance.error
    for acc, expected in ((0.1, level), (0.6, level), (level, level), (0.65, level), (0.7, 0.7)):
        assert chance.reported("acc", {"acc": acc, "loss": 1.0}) == expected
    for metrics, expected in (
        ({"acc": 0.6, "loss": 0.2}, chance.loss),  # the majority class, with any confidence
        ({"acc": 0.7, "loss": 2.0}, chance.loss),
        ({"acc": 0.7, "loss": 0.5}, 0.5),
        ({"loss": 0.5}, 0.5),
    ):
        assert chance.reported("loss", metrics) == expected
    for metrics, expected in (
        ({"acc": 0.6, "loss": 0.9, "f1": 0.75}, 0.0),  # of naming always the second of two classes
        ({"acc": 0.7, "loss": 0.9, "f1": 0.4}, 0.4),
        ({"acc": 0.7, "loss": 0.9, "f1": 0.95}, 0.95),
    ):
        assert chance.reported("f1", metrics) == expected
    assert chance.reported("matthews", {"acc": 0.7, "matthews": -0.1}) == 0.0


def test_the_verdict_names_methods_that_are_no_better_than_chance():
    chance = Chance.of_counts([60, 40])
    assert chance.verdict({"val_acc": 0.71, "other": None}) == ""
    gives = "while always predicting the majority class gives 0.600 ± 0.098 (two standard errors)"
    assert chance.verdict({"val_acc": 0.71, "test_acc": 0.6, "worse": 0.3}) == (
        f"nothing was learned: test_acc 0.600, worse 0.300, {gives}"
    )
    assert chance.verdict({"val_acc": 0.66}) == f"nothing was learned that would show: val_acc 0.660, {gives}"


def test_the_verdict_on_a_run_is_by_its_test_set_or_else_by_its_validation_data():
    half = {"labels": {"a": 50, "b": 50}}  # above 0.6, something was learned
    data = {"test": half, "validation": half}
    assert run_verdict(data, {"test_acc": 0.61, "val_acc": 0.5}, {}) == ""
    assert run_verdict(data, {"test_loss": 0.6}, {}) == run_verdict({}, {"test_acc": 0.5}, {}) == ""
    assert run_verdict(data, {"val_acc": 0.5}, {"val_acc": 0.5}).startswith("nothing was learned: val_acc 0.500, while")
    low = run_verdict(data, {"test_acc": 0.5}, {"test_acc": 0.54})
    assert low.startswith("nothing was learned that would show: test_acc 0.500, 0.540 in the best round, while")
    lost = run_verdict(data, {"test_acc": 0.5}, {"test_acc": 0.8})
    assert lost.startswith("what was learned is lost: test_acc 0.500, 0.800 in the best round, while always")


#: a run that learns nothing
FEW = {
    **{"federate.client_num": 2, "federate.total_round_num": 1, "train.local_update_steps": 1},
    "train.optimizer": {"type": "SGD", "lr": 1e-12},
}


@pytest.mark.more
def test_a_run_without_a_test_set_says_too_that_nothing_was_learned(few, tmp_path):
    result = api.run(few("run", {"eval.split": ["val"]}))
    said = "nothing was learned"
    assert result.verdict.startswith(said) and said in repr(result) and said in result._repr_html_()
    assert cli.main(["report", str(result.outdir), "--out", str(tmp_path / "page.html")]) == 0
    assert said in (tmp_path / "page.html").read_text()


@pytest.mark.more
@pytest.mark.parametrize("command", ["run", "compare"])
def test_run_and_compare_report_that_nothing_was_learned(few, tmp_path, capsys, command):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(few("run").to_dict()))
    methods = ["--methods", "fedlora"] if command == "compare" else []
    assert cli.main([command, "--cfg", str(tmp_path / "run.yaml"), *methods]) == 0
    (folder,) = (path.parent for path in (tmp_path / "run").rglob("data.json"))
    data = json.loads((folder / "data.json").read_text())["test"]
    assert sum(data["labels"].values()) == data["size"] > 0
    chance = Chance.of_counts(list(data["labels"].values()))
    score = json.loads((folder / "summary.json").read_text())["final"]["test_acc"]
    assert not chance.reached(score), "an untrained model"
    said = f"fedlora: nothing was learned: test_acc {score:.3f}, while {chance}; the training loss"
    out = capsys.readouterr().out
    assert said in " ".join(out.split())
    assert all(len(line) <= cli.console.width for line in out.splitlines() if "learned" in line or "trains" in line)


def test_the_names_of_a_language_models_metrics():
    figures = {"test_acc": 0.3, "test_loss": 2.0, "test_acc_last5": 0.2, "client_test_acc_mean": 0.1, "best_round": 4}
    assert for_people(figures, False) == figures
    assert for_people(figures, True) == {
        "test_token_acc": 0.3,
        "test_loss": 2.0,
        "test_perplexity": math.exp(2.0),
        "test_token_acc_last5": 0.2,
        "client_test_token_acc_mean": 0.1,
        "best_round": 4,
    }
    assert for_people({"loss": math.inf}, True)["perplexity"] < math.inf


@pytest.mark.more
def test_a_language_model_has_a_token_acc_and_a_perplexity_wherever_it_is_shown(causal_settings, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(causal_settings))
    few = ["federate.total_round_num", "1", "federate.client_num", "2", "train.local_update_steps", "1"]
    few += ["eval.before", "True"]
    assert cli.main(["compare", "--cfg", str(tmp_path / "run.yaml"), "--methods", "fedlora", *few]) == 0
    out = capsys.readouterr().out
    assert re.search(r"test token acc [\d.]+", out)
    (row,) = csv.DictReader((tmp_path / "run" / "comparison.csv").open())
    assert float(row["test perplexity"]) == pytest.approx(math.exp(float(row["test loss"])), rel=1e-2)
    assert not re.search(r"(?<!token )\bacc\b", out), out
    assert "test perplexity" in out.split("before round 1:")[1].splitlines()[0]
    header = (tmp_path / "run" / "comparison.csv").read_text().splitlines()[0]
    assert "test token acc" in header and "test perplexity" in header
    assert "| test_token_acc |" in (tmp_path / "run" / "fedlora" / "adapter" / "README.md").read_text()
    assert "test_acc" in json.loads((tmp_path / "run" / "fedlora" / "summary.json").read_text())["final"]


def test_the_table_over_seeds_of_a_language_model():
    """The perplexity of a mean is not the mean perplexity."""
    header, row = seeds._table({"fedlora": {"test_acc": [0.2, 0.4], "test_loss": [1.0, 3.0], "b": [1]}}, 2, True)
    assert [word.replace("\n", " ") for word in header] == ["method", "test loss", "test perplexity", "test token acc"]
    assert row == ["fedlora", "2.000 ± 1.414", f"{(math.e + math.e**3) / 2:.3f} ± 12.281", "0.300 ± 0.141"]


def test_the_table_over_seeds_leaves_no_seed_out():
    """With a seed whose loss is not a number, the mean over the seeds is none."""
    header, row = seeds._table({"fedlora": {"test_loss": [0.1, math.nan, 0.3], "test_acc": [0.5, 0.5, 0.5]}}, 3, False)
    assert header[1:] == ["test\nacc", "test\nloss"] and row == ["fedlora", "0.500 ± 0.000", "nan ± nan"]
