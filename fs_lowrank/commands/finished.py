"""``fs-lowrank evaluate RUN --data FILE`` and ``fs-lowrank predict RUN --data FILE``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..jobs import shell, tables
from ..jobs.files import to_json, write_text
from ..jobs.shell import console, say
from .extensions import extensions, run_extension

BASE = "where the base model is now, if it was moved"
BEST = "the model of the best round by validation data (adapter_best/, model_best/), not of the last one"
_ROLES = ("text", "text-pair", "label", "instruction", "input", "output")


def add(commands) -> None:
    evaluate = commands.add_parser("evaluate", help="score the model of a finished run on a file")
    _common(evaluate, _ROLES, "CSV, TSV, JSON, JSON Lines, Parquet, Arrow; with --tasks, a folder of the tasks' data")
    evaluate.add_argument("--tasks", metavar="A,B", help="score on tasks of lm-eval: arc_easy, mmlu_stem, …")
    for name in ("limit", "num-fewshot"):
        evaluate.add_argument(f"--{name}", metavar="N", help="with --tasks: see `fs-lowrank benchmark score --help`")
    tables.option(evaluate, scores=True)
    evaluate.set_defaults(do=_evaluate)
    count = shell.at_least(1)
    predict = commands.add_parser("predict", help="add a column with the predictions of a finished run to a file")
    _common(predict, tuple(role for role in _ROLES if role not in ("label", "output")), required=True)
    predict.add_argument("--out", metavar="FILE", type=Path, help="default: NAME.predicted beside --data, as --data is")
    predict.add_argument("--column", default="prediction", metavar="NAME", help="default: prediction")
    predict.add_argument("--tokens", type=count, default=64, metavar="N", help="most tokens of an answer (default: 64)")
    predict.set_defaults(do=_predict)


def _common(
    parser: argparse.ArgumentParser,
    roles: tuple[str, ...],
    data: str = "CSV, TSV, JSON or JSON Lines",
    required: bool = False,
) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a finished run")
    parser.add_argument("--data", metavar="FILE", type=Path, help=data, required=required)
    parser.add_argument("--best", action="store_true", help=BEST)
    parser.add_argument("--base", default="", metavar="FOLDER", help=BASE)
    for role in roles:
        parser.add_argument(
            f"--{role}", default="", metavar="COLUMN", help="where it is not called as in the run's data"
        )


def _read(args: argparse.Namespace, labelled: bool) -> tuple[Any, Any]:
    from ..finished import load_run, read_rows

    if args.data is None:
        raise UserError(f"--data is missing: {args.command} needs a file{' or --tasks' if labelled else ''}")
    run = load_run(args.run, args.best, args.base)
    columns = {r.replace("-", "_"): getattr(args, r.replace("-", "_"), "") for r in _ROLES}
    foreign = ("instruction", "input", "output") if run.labels else ("text", "text_pair", "label")
    for role in foreign:
        if columns[role]:
            content = "labelled texts" if run.labels else "instructions"
            raise UserError(f"--{role.replace('_', '-')}: {args.run} is a run over {content}")
    rows = read_rows(run, args.data, columns, labelled)
    left_out = "".join(f", {count} left out ({reason})" for reason, count in rows.left_out.items())
    cut = f", {rows.cut} cut to {run.tok_len} tokens" if rows.cut else ""
    say(f"{args.data}: {len(rows.table)} rows{left_out}{cut}")
    say(f"model: {run.which}")
    if rows.trained_on:
        say(f"the run was trained on {rows.trained_on} of these rows", style="yellow")
    return run, rows


def _evaluate(args: argparse.Namespace) -> int | None:
    from ..finished import evaluate_rows

    names = ("tasks", "data", "limit", "num-fewshot", "json", "table", "base")
    options = {name: getattr(args, name.replace("-", "_")) for name in names}
    if args.tasks is not None:
        if columns := [f"--{role}" for role in _ROLES if getattr(args, role.replace("-", "_"))]:
            raise UserError(f"{', '.join(columns)}: of a file; the tasks of lm-eval have columns of their own")
        named = {name: value for name, value in options.items() if value not in (None, "", tables.JSON)}
        words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
        words += ["--json"] * (args.table is tables.JSON) + ["--best"] * args.best
        return run_extension(extensions()["benchmark"], ["score", str(args.run), *words])
    if unused := [f"--{name}" for name in ("limit", "num-fewshot") if options[name] is not None]:
        raise UserError(f"{', '.join(unused)}: of --tasks A,B; a file is scored whole")
    run, rows = _read(args, labelled=True)
    scores = evaluate_rows(run, rows)
    if args.json:
        write_text(args.json, to_json({"run": str(run.saved), "data": str(args.data), **scores}, indent=1))
    tables.show(console, _lines(scores, bool(run.labels)), args.table, right=["value"])
    if "acc" not in scores:
        return None
    say("± is one standard error")
    if "majority" in scores and scores["acc"] <= scores["majority"] + 2 * scores["acc_error"]:
        label = "set of classes" if run.config.model.task == "MultiLabelClassification" else "class"
        better = "no better here" if scores["acc"] <= scores["majority"] else "not shown to be better here"
        say(f"the model is {better} than always naming the most frequent {label}")
    return None


def _lines(scores: dict[str, Any], labelled: bool) -> list[tuple[str, str]]:
    """The scores as a table."""
    from ..settings.metrics import METRICS

    lines = [("score", "value")]
    if "acc" in scores:
        lines += [("acc" if labelled else "token acc", f"{scores['acc']:.4f} ± {scores['acc_error']:.4f}")]
    lines += [(name, f"{scores[name]:.4f}") for name in METRICS if name in scores and name != "acc"]
    if "mean_loss" in scores:
        lines += [("loss of always naming the mean", f"{scores['mean_loss']:.4f}")]
    if "majority" in scores:
        lines += [("majority class", f"{scores['majority']:.4f}")]
    for label, counts in scores.get("classes", {}).items():
        recall = "-" if counts["recall"] is None else f"{counts['recall']:.4f} of {counts['rows']}"
        lines += [(f"recall of {label}", recall)]
    return lines


def _predict(args: argparse.Namespace) -> None:
    from ..data.files import SUFFIXES
    from ..data.sources import data_args
    from ..finished import check_table, predict_rows, write_table

    if args.data.suffix.lower() not in SUFFIXES:
        raise UserError(f"--data {args.data}: expected a file that ends with {', '.join(SUFFIXES)}")
    out = args.out or args.data.with_name(f"{args.data.stem}.predicted{args.data.suffix}")
    check_table(out)
    run, rows = _read(args, labelled=False)
    table = predict_rows(run, rows, args.column, args.tokens)
    write_table(table, out, data_args(run.config.data).get("quoting"))
    say(f"{out}: {len(rows.positions)} predictions in the column {args.column}")
