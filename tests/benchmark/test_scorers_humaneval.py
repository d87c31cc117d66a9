"""HumanEval by lm-eval's task on local files: what it asks and counts, and that code runs only with permission."""

import gzip
import json

import pytest

from benchmark import scorers
from benchmark.intervals import right_rows
from fs_lowrank import UserError

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("manager")
PROBLEM = {
    "task_id": "x/0",
    "prompt": "def double(x):\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}
#: in the place of the hub's metric, with its interface: it has no time limit and no processes
METRIC = """
import os
import datasets
import evaluate

class CodeEval(evaluate.Metric):
    def _info(self):
        kinds = {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(kinds))

    def _compute(self, predictions, references, k):
        assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"
        [programs], [test], passed = predictions, references, []
        for program in programs:
            try:
                exec(program + "\\n" + test, {})
                passed.append(True)
            except BaseException as error:
                passed.append(False)
        return {f"pass@{n}": sum(passed) / len(passed) if n == 1 else float(any(passed)) for n in k}, {}
"""
SPEC = {"scorer": "humaneval", "run_unsafe_code": True}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "humaneval"
    (folder / "code_eval").mkdir(parents=True)
    (folder / "code_eval" / "code_eval.py").write_text(METRIC)
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({**PROBLEM, "task_id": f"x/{i}"}) + "\n" for i in range(3))
    return tmp_path


@pytest.fixture
def model(tiny_causal):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_causal), AutoTokenizer.from_pretrained(tiny_causal)


def test_code_runs_only_with_permission_and_the_metric(root):
    with pytest.raises(UserError, match="run_unsafe_code: true"):
        scorers.check({"scorer": "humaneval"}, root)
    (root / "humaneval" / "code_eval" / "code_eval.py").unlink()
    with pytest.raises(UserError, match="metric code_eval cannot be loaded .* local copy of its folder"):
        scorers.check(SPEC, root)


def test_solutions_are_judged_by_problem_and_in_their_order(model, root, monkeypatch):
    asked = []

    def write(self, requests, **_):
        asked.append([request.args for request in requests])
        return ["    return x + 2\n" if i % 3 else "    return 2 * x\n" for i in range(len(requests))]

    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.generate_until", write)
    result = scorers.score(*model, {**SPEC, "max_new_tokens": 4, "samples": 2, "k": [1, 2]}, root)["humaneval"]
    assert result["pass@1"] == 1 / 3 and result["pass@1_right"] == right_rows("first 3", [True, False, False])
    assert result["sampled_pass@1"] == pytest.approx(1 / 3) and result["sampled_pass@2"] == pytest.approx(2 / 3)
    until = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # of the committed results
    greedy = {"until": until, "max_gen_toks": 4, "do_sample": False}
    sampled = {**greedy, "do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    assert asked == [[(PROBLEM["prompt"], greedy)] * 3, [(PROBLEM["prompt"], sampled)] * 6]


@pytest.mark.more
def test_pass_at_1_and_k_of_a_tiny_model(model, root):
    """A model that writes no code passes nothing, torch's generator is not changed."""
    import torch

    spec = {**SPEC, "limit": 2, "max_new_tokens": 4}
    before = torch.get_rng_state()
    result = scorers.score(*model, {**spec, "samples": 4, "k": [1, 2]}, root)["humaneval"]
    assert torch.equal(torch.get_rng_state(), before)
    assert result["pass@1"] == 0.0 and result["n"] == 2 and result["version"] == 1.0
    assert result["sampled_pass@2"] == 0.0 and "at most 4 new tokens" in result["decoding"]
    for wrong in ({"samples": 2, "k": [3]}, {"k": [2]}):
        with pytest.raises(UserError, match="needs as many samples"):
            scorers.check({**spec, **wrong}, root)


def test_a_damaged_or_missing_file_is_named(root, monkeypatch):
    path = root / "humaneval" / "HumanEval.jsonl.gz"
    for damaged in (gzip.compress(b"{")[:-12], gzip.compress(b'{"prompt": ""}\n'), gzip.compress(b"")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="HumanEval.jsonl.gz"):
            scorers.check(SPEC, root)
    path.unlink()
    monkeypatch.setattr("datasets.load_dataset", None)
    with pytest.raises(UserError, match="there is no .*HumanEval.jsonl.gz, and no hub gave it"):
        scorers.check(SPEC, root)
