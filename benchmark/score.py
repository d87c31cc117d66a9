"""``fs-lowrank benchmark score RUN --tasks A,B``: lm-eval's tasks on a run; ``fs-lowrank evaluate`` hands them on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fs_lowrank import UserError
from fs_lowrank.commands.finished import BASE, BEST
from fs_lowrank.jobs import shell, tables
from fs_lowrank.jobs.files import to_json, write_text
from fs_lowrank.jobs.shell import say


def add(commands: Any) -> None:
    """Give ``score`` a parser below ``commands``."""
    parser = commands.add_parser("score", help="score a finished run of a language model on lm-eval's tasks")
    parser.example = "fs-lowrank benchmark score runs/smollm2 --tasks arc_easy"
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a finished run")
    parser.add_argument("--tasks", required=True, metavar="A,B", help="tasks, groups or tags of lm-eval")
    parser.add_argument(
        "--data",
        default=os.environ.get("FS_LOWRANK_DATA", "."),
        metavar="FOLDER",
        help="local copies of the tasks' data, as docs/guides/evaluation.md says (default: $FS_LOWRANK_DATA, or here)",
    )
    parser.add_argument("--limit", type=shell.at_least(2), metavar="N", help="only the first samples of each task")
    parser.add_argument(
        "--num-fewshot", type=shell.at_least(0), metavar="N", help="examples in the prompt (default: the task's)"
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    parser.add_argument("--best", action="store_true", help=BEST)
    parser.add_argument("--base", default="", metavar="FOLDER", help=BASE)
    tables.option(parser, scores=True)
    parser.set_defaults(do=_score)


def _score(args: argparse.Namespace) -> None:
    from fs_lowrank.finished import load_run

    from . import scorers

    spec: dict[str, Any] = {"scorer": "lm_eval", "tasks": list(shell.names(args.tasks)), "chat": args.chat}
    spec |= {k: v for k in ("limit", "num_fewshot") if (v := getattr(args, k)) is not None}
    run = load_run(args.run, args.best, args.base)
    if run.labels or run.paired:
        kind = "an encoder-decoder model" if run.paired else "labelled texts"
        raise UserError(f"--tasks: {args.run} is a run of {kind}; lm-eval's tasks are for causal language models")
    say(f"model: {run.which}")
    results = scorers.score(run.model, run.tokenizer, spec, args.data)
    if args.json:
        write_text(args.json, to_json({"run": str(run.saved), **spec, "scores": results}, indent=1))
    lines = [("task", "samples", "score", "value")]
    for task, values in results.items():
        scores = {k: v for k, v in values.items() if k != "version" and isinstance(v, float)}  # the task's, not a score
        for metric, value in scores.items():
            if metric.endswith("_stderr"):
                continue
            spread = values.get(f"{metric}_stderr")
            lines.append((task, str(values["n"]), metric, f"{value:.4f}" + (f" ± {spread:.4f}" if spread else "")))
    tables.show(shell.console, lines, args.table, right=("samples", "value"))
    say("± is one standard error, lm-eval's; majority: the score of an answer that never changes")
