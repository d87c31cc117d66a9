"""HumanEval by lm-eval's task: pass@1 of one greedy solution to each problem, and pass@k of several sampled ones.

Chen et al., "Evaluating Large Language Models Trained on Code", 2021. Prompt, stop words, tests and the estimate of
pass@k are those of lm-eval's task ``humaneval``. Its judge is the metric ``code_eval`` of the library evaluate, which
runs every solution with its tests in a process with a time limit of 3 seconds. That is no sandbox. The metric is a
local folder beside the problems, or comes from the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fs_lowrank.errors import UserError
from fs_lowrank.seeds import drawing

from ..intervals import right_rows
from . import lm_eval_tasks
from .share import share


@dataclass(frozen=True)
class Options:
    """``limit``: number of problems, from the first; none for all. ``samples``: number of solutions sampled for each
    problem, at ``temperature``, beside the greedy one; ``k``: the ``k`` of pass@k, at most ``samples``."""

    run_unsafe_code: bool = False
    limit: int | None = field(default=None, metadata={"min": 2})
    batch_size: int = field(default=8, metadata={"min": 1})
    max_new_tokens: int = field(default=512, metadata={"min": 1})
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
    with _permission(root):
        _task(options)


def score(model, tokenizer, options: Options, root: Path) -> dict[str, dict]:
    """``humaneval`` → ``pass@1`` of the greedy solution with its standard error, ``n``, ``version``; ``pass@1_right``,
    which were solved; ``decoding``. With ``samples``: the unbiased ``sampled_pass@k`` with lm-eval's standard error,
    and ``sampling``.
    """

    def run(**sampling) -> dict[str, Any]:
        task = _task(options, **sampling)
        return lm_eval_tasks.evaluated(model, tokenizer, [task], options, confirm_run_unsafe_code=True)

    with _permission(root):
        greedy = run()
        hits = [bool(sample["pass@1"]) for sample in greedy["samples"]["humaneval"]]
        result = {
            **share(hits, "pass@1"),
            "pass@1_right": right_rows(f"first {len(hits)}", hits),
            "n": len(hits),
            "version": greedy["versions"]["humaneval"],
            "decoding": f"greedy, at most {options.max_new_tokens} new tokens, batches of {options.batch_size}",
        }
        if options.samples:
            full = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
            with drawing(options.seed):
                values = run(repeats=options.samples, k=options.k, **full)["results"]["humaneval"]
            result |= {f"sampled_{k.partition(',')[0]}": float(v) for k, v in values.items() if k.startswith("pass@")}
            result["sampling"] = (
                f"{options.samples} samples a problem, temperature {options.temperature:g}, seed {options.seed}"
            )
    return {"humaneval": result}


def _task(options: Options, repeats: int = 1, k: Sequence[int] = (1,), **sampling) -> Any:
    """lm-eval's task with its pass@k of ``repeats`` solutions to each problem."""
    task = lm_eval_tasks.manager().load("humaneval")["tasks"]["humaneval"]
    overrides = {
        "repeats": repeats,
        "metric_list": [{**metric, "k": [*k]} for metric in task.config.metric_list],
        "generation_kwargs": {**task.config.generation_kwargs, "max_gen_toks": options.max_new_tokens, **sampling},
    }
    return type(task)(config={**vars(task.config), **overrides})


@contextmanager
def _permission(root: Path) -> Iterator[None]:
    """A context in which lm-eval's task may run programs, on local copies of problems and metric if there are any.

    Raises:
        UserError: the metric cannot be loaded.
    """
    lm_eval_tasks.manager()  # says what to install
    import evaluate  # type: ignore[import-untyped]

    local = root / "humaneval" / "code_eval"
    with lm_eval_tasks.local_first(root):
        try:
            metric = evaluate.load(str(local) if local.is_dir() else local.name)
        except Exception as error:  # whatever the library or the hub raises
            raise UserError(
                f"the metric code_eval cannot be loaded ({error}); HumanEval needs it from the hub or as a local copy "
                f"of its folder, {local}"
            ) from error
        allowed = patch.dict(os.environ, HF_ALLOW_CODE_EVAL="1")  # the permission is run_unsafe_code
        with allowed, patch.object(evaluate, "load", lambda name: metric):
            yield
