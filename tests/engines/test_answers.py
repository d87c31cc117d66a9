"""Answers while a language model trains: what it says, how it is scored, and that nothing else changes."""

import json

import pytest

import fs_lowrank
from fs_lowrank import UserError
from fs_lowrank.callbacks.answers import exact_match

pytestmark = pytest.mark.more

RUN = {"federate.total_round_num": 5, "lowrank.pictures": False}
ASKED = {"eval.generate": {"freq": 2, "prompts": 3, "max_tokens": 5}}


@pytest.fixture
def run(causal_settings, tmp_path):
    def go(name, keys=ASKED, **options):
        config = fs_lowrank.load_config(causal_settings, {**RUN, **keys}, outdir=str(tmp_path / name))
        result = fs_lowrank.run(config, progress=False, **options)
        path = tmp_path / name / "answers.jsonl"
        return result, [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []

    return go


def test_the_global_model_answers_and_training_stays_the_same(run):
    plain, nothing = run("plain", {})
    asked, answers = run("asked")
    assert [line["round"] for line in answers] == [2, 4, 5] and not nothing
    assert [r["loss"] for r in asked.history] == [r["loss"] for r in plain.history]
    assert ["answers" in r for r in asked.history] == [False, True, False, True, True]
    for line in answers:
        assert len(line["answers"]) == 3 and all(each["prompt"] and each["reference"] for each in line["answers"])
        mean = sum(exact_match(each["answer"], each["reference"]) for each in line["answers"]) / 3
        assert line["exact_match"] == mean == asked.history[line["round"] - 1]["answers"]["exact_match"]


def test_a_run_that_ends_early_has_answers_after_its_last_round(run):
    """They are made once, however often it is resumed, and a run that goes on has none after that round."""
    result, answers = run("whole")
    ended, early = run("early", on_round=lambda record: record["round"] == 3)
    assert [line["round"] for line in early] == [2, 3] and early[0] == answers[0]
    assert "answers" not in ended.history[-1]
    few = {"eval.generate": {**ASKED["eval.generate"], "freq": 10}}
    stalled = {
        **few,
        "early_stop.patience": 1,
        "early_stop.delta": 9.0,
        "eval.best_res_update_round_wise_key": "val_loss",
    }
    ended, first = run("stalled", stalled)
    assert [line["round"] for line in first] == [len(ended.history)] and len(ended.history) < 5
    assert run("stalled", stalled, resume=True)[1] == first
    assert run("early", resume=True)[1] == answers


@pytest.mark.slow
def test_a_resumed_run_has_the_answers_of_an_uninterrupted_one(run, tmp_path):
    sampled = {"eval.generate": {"freq": 1, "prompts": 2, "max_tokens": 4, "temperature": 1.0}}
    _, whole = run("whole", sampled)
    run("parts", sampled, on_round=lambda record: record["round"] == 3)
    path = tmp_path / "parts" / "answers.jsonl"
    path.write_text(path.read_text() + '{"round": 4, "answers": []}\n{"round": 5, "ans')
    _, parts = run("parts", sampled, resume=True)
    assert parts == whole and len({json.dumps(line["answers"]) for line in whole}) > 1


def test_damaged_lines_of_answers_are_left_out_and_the_run_goes_on(run, tmp_path, caplog):
    asked = {"eval.generate": {"freq": 1, "prompts": 2, "max_tokens": 3}, "federate.total_round_num": 3}
    run("damaged", asked, on_round=lambda record: record["round"] == 2)
    path = tmp_path / "damaged" / "answers.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    wrong = [first[:9] + b"\xff" + first[10:], b"[" * 100_000 + b"\n", b"null\n", b'{"round": "1", "answers": []}\n']
    path.write_bytes(b"".join(wrong) + second)
    _, lines = run("damaged", asked, resume=True)
    assert [line["round"] for line in lines] == [2, 3] and lines[0] == json.loads(second)
    for number in range(1, 5):
        assert f"answers.jsonl: line {number} is not the answers of a round (" in caplog.text
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="answers.jsonl cannot be read: Is a directory; restore the file"):
        run("damaged", asked, resume=True)


def test_an_own_score_and_rouge(run, tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text(
        "def length(answer, reference):\n    return len(answer) / 100\n\n"
        "def nothing(answer, reference):\n    return None\n\n"
        "def lonely(answer):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    once = {"federate.total_round_num": 1}
    _, (line,) = run("own", {**once, "eval.generate": {"freq": 1, "score": "my_scores:length"}})
    assert all(each["length"] == len(each["answer"]) / 100 for each in line["answers"])
    with pytest.raises(UserError, match="my_scores:nothing' gave None: expected a finite number"):
        run("nothing", {**once, "eval.generate": {"freq": 1, "score": "my_scores:nothing"}})
    with pytest.raises(UserError, match="my_scores:lonely': called with .* raises TypeError: lonely.. takes 1"):
        run("lonely", {**once, "eval.generate": {"freq": 1, "score": "my_scores:lonely"}})
    assert not (tmp_path / "lonely" / "rounds.jsonl").exists()
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    _, (line,) = run("rouge", {**once, "eval.generate": {"freq": 1, "score": "rouge_l"}})
    for each in line["answers"]:
        found = rouge.RougeScorer(["rougeL"]).score(each["reference"], each["answer"])["rougeL"].fmeasure
        assert each["rouge_l"] == found


def test_what_counts_as_a_match():
    assert exact_match(" Paris ", "paris") == exact_match("a\n b", "a b") == 1.0
    assert exact_match("Paris.", "Paris") == exact_match("", "Paris") == 0.0


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"freq": 1, "score": "rougel"}, "expected exact_match, rouge_l, or a function"),
        ({"freq": 1, "score": "no_such_module:f"}, "no_such_module.*must be on the path"),
        ({"freq": 1, "score": "json:no_such_function"}, "no_such_function"),
        ({"freq": 1, "split": "val"}, "the run has no val data"),
        ({"freq": 1, "split": "train"}, "eval.generate.split"),
        ({"frek": 1}, "frek.*freq"),
    ],
)
def test_what_cannot_be_is_refused(run, keys, said):
    with pytest.raises(UserError, match=said):
        run("refused", {"data.splits": [0.8, 0.0, 0.2], "eval.split": ["test"], "eval.generate": keys})


def test_a_classifier_has_no_answers(settings):
    from fs_lowrank.methods import get_method_class
    from fs_lowrank.settings.effects import without_effect

    config = fs_lowrank.load_config(settings, {"eval.generate.freq": 2})
    told = without_effect(config, "local", get_method_class("fedlora"))
    assert ("eval.generate.freq", 2) in [(name, value) for name, value, _ in told]
