"""HumanEval: correct programs count as solved, by lm-eval's metric on local files, and only with permission."""

import gzip
import itertools
import json
from math import comb

import pytest

from benchmark import scorers
from benchmark.scorers import humaneval

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

    def _compute(self, predictions, references, k, timeout):
        assert os.environ["HF_ALLOW_CODE_EVAL"] == "1" and isinstance(timeout, float)
        found = {}
        for i, (programs, test) in enumerate(zip(predictions, references)):
            for j, program in enumerate(programs):
                try:
                    exec(program + "\\n" + test, {})
                    result = "passed"
                except BaseException as error:
                    result = f"failed: {error}"
                found.setdefault(i, []).insert(0, (j, {"result": result}))
        return {}, found
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


@pytest.mark.more
def test_solutions_are_judged_by_problem_and_in_their_order(root):
    texts = [["    return x + 2\n", "    return 2 * x\n"], ["    return (\n", "    return 1 / 0\n"]]
    found = humaneval.judged(root, [PROBLEM, PROBLEM], texts, 5)
    assert [[outcome == "passed" for outcome in of] for of in found] == [[False, True], [False, False]]
    assert found[1][1] == "failed: division by zero"


def test_code_runs_only_with_permission_and_the_metric(root, monkeypatch):
    with pytest.raises(scorers.UserError, match="run_unsafe_code: true"):
        scorers.check({"scorer": "humaneval"}, root)
    (root / "humaneval" / "code_eval" / "code_eval.py").unlink()
    with pytest.raises(scorers.UserError, match="metric code_eval cannot be loaded .* local copy of its folder"):
        scorers.check(SPEC, root)


def test_pass_at_k_is_the_share_of_sets_with_a_solution():
    """The estimate is compared with counting all sets of k of n solutions; 1 - (1 - c/n)^k would be wrong."""
    for n, c, k in ((5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 4, 2), (4, 0, 2), (7, 5, 3)):
        sets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert len(sets) == comb(n, k)
        assert humaneval.pass_at(k, n, c) == pytest.approx(sum(map(any, sets)) / len(sets))


@pytest.mark.more
def test_pass_at_1_and_k_of_a_tiny_model(tiny_causal, root):
    """A model that writes no code passes nothing, counts add up, torch's generator is not changed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = {**SPEC, "limit": 2, "max_new_tokens": 4}
    model = AutoModelForCausalLM.from_pretrained(tiny_causal), AutoTokenizer.from_pretrained(tiny_causal)
    before = torch.get_rng_state()
    result = scorers.score(*model, {**spec, "samples": 4, "k": [1, 2]}, root)["humaneval"]
    assert torch.equal(torch.get_rng_state(), before)
    assert result["pass@1"] == 0.0 and result["n"] == 2 and sum(result["outcomes"].values()) == 2
    assert result["sampled_pass@2"] == 0.0 and "at most 4 new tokens" in result["decoding"]
    for wrong in ({"samples": 2, "k": [3]}, {"k": [2]}):
        with pytest.raises(scorers.UserError, match="needs as many samples"):
            scorers.check({**spec, **wrong}, root)


def test_a_damaged_file_is_named(root):
    path = root / "humaneval" / "HumanEval.jsonl.gz"
    for damaged in (gzip.compress(b"{")[:-12], gzip.compress(b'{"prompt": ""}\n'), gzip.compress(b"")):
        path.write_bytes(damaged)
        with pytest.raises(scorers.UserError, match="is damaged"):
            scorers.check(SPEC, root)
