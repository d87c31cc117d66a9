"""A file, or a table in memory, read as a run read its data."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..data import CAUSAL_LM, Examples
from ..data.duplicates import row_keys
from ..data.files import require_columns
from ..data.framework_sets import SETS, worded
from ..data.objects import as_table
from ..data.sources import data_args, framework_set
from ..data.tables import MULTI_LABEL, REGRESSION, conversation_column, instructions, labelled, text_columns
from ..data.template import SYNONYMS, is_custom
from ..data.tokenize import tokenize_classification, tokenize_instructions
from ..data.user_data import SUFFIXES, read_file
from ..errors import UserError, say_once
from ..runs.split import ROWS, read_split
from ..settings import Origin
from .run import FinishedRun

#: for a missing column, with its role
_ADVICE = "name it with {}='COLUMN'"


@dataclass
class Rows:
    """A file, or a table, as examples.

    Attributes:
        table: the file or table. positions: those in ``table``, from 0, of the rows that were not left out.
        examples: of these rows.
        left_out: number of rows by reason. cut: rows of which a text, or the answer, was cut to the run's length.
        trained_on: number of rows at ``positions`` that the run was trained on, up to case, punctuation and blanks; 0
            if its ``rows.npz`` is missing, or has no ``keys``.
    """

    table: pd.DataFrame
    examples: Examples
    positions: np.ndarray
    left_out: dict[str, int]
    cut: int
    trained_on: int


def read_rows(run: FinishedRun, data: Any, columns: dict[str, str] | None = None, labelled: bool = True) -> Rows:
    """Read a file, or a table in memory, as the run read its data.

    Args:
        data: the path of a file as ``data.type`` names one; or a ``DataFrame``, a ``datasets.Dataset`` or a torch
            dataset, as ``fs_lowrank.run`` takes them.
        columns: names of columns by role (``text``, ``label``, …) that differ from those of the run's data.
        labelled: the classes, numbers or answers are needed.
    Raises:
        UserError: an unreadable file, an object of another kind, a missing column (a second sentence, too, where the
            run has one, or one where it has none), a class that the run does not know, a label that is no number, or
            no row left.
    """
    set_name, args = framework_set(run.config.data), data_args(run.config.data, Origin())
    args = {**SETS.get(set_name, {}).get("columns", {}), **args}
    if isinstance(data, (str, os.PathLike)):
        where = os.fspath(data)
        if not where.lower().endswith(SUFFIXES):
            raise UserError(f"{where}: expected a file that ends with {', '.join(SUFFIXES)}")
        table = read_file(Path(data), args.get("quoting"))["train"]
    else:
        where, table = "data", as_table(data)
    wanted = {k: v for k, v in (columns or {}).items() if v}
    if run.task != CAUSAL_LM:
        flags = args["label"] if isinstance(args.get("label"), list) and not wanted.get("label") else []
        # runs of before version 0.2.0 do not say which columns they read
        names = run.summary.get("columns") or text_columns({**args, **wanted}, table)
        if wanted.get("text_pair") and not names.get("text_pair"):
            raise UserError(
                f"text_pair={wanted['text_pair']!r}: the run in {run.folder} learned from one text in a row"
            )
        rows = _labelled(run, where, table, {**names, **wanted}, flags, labelled)
    else:
        rows = _instructed(run, where, worded(set_name, table), {**args, **wanted}, labelled)
    return replace(rows, table=data if isinstance(data, pd.DataFrame) else table)


def _labelled(
    run: FinishedRun, where: str, table: pd.DataFrame, names: dict[str, str | None], flags: list[str], answered: bool
) -> Rows:
    texts = {role: name for role in ("text", "text_pair") if (name := names.get(role))}
    label = "label" if flags else str(names["label"])
    for role, name in (texts | ({} if flags or not answered else {"label": label})).items():
        require_columns(where, table, [name], _ADVICE.format(role))
    wanted = {*texts.values(), *(flags or [label])} if answered else {*texts.values()}
    frame = table[[name for name in table if name in wanted]]
    if not answered:  # a column of fillers, whose name no column of the frame has
        filler = {REGRESSION: 0.0, MULTI_LABEL: run.labels[:1]}.get(run.task, run.labels[0])
        label = "".join(texts.values()) + "label"
        frame = frame.assign(**{label: pd.Series([filler] * len(table), index=table.index, dtype=object)})
    columns = {**texts, "label": flags if flags and answered else label}
    raw = labelled({"train": (where, frame)}, columns, where, run.task, run.labels, trained=False)
    examples = tokenize_classification(raw.train, run.tokenizer, run.tok_len)
    if run.task == MULTI_LABEL:
        examples.sets = len(run.labels)
    trained_on = _trained_on(run, raw.train)
    return Rows(table, examples, raw.train.index.to_numpy(), raw.skipped, examples.truncated, trained_on)


def _instructed(run: FinishedRun, where: str, table: pd.DataFrame, args: dict[str, Any], labelled: bool) -> Rows:
    if not is_custom(args.get("template", "auto")) and not conversation_column(table):
        for role in ("instruction", "output")[: 1 + labelled]:
            name = args.get(role) or next((n for n in SYNONYMS[role] if n in table), role)
            require_columns(where, table, [name], _ADVICE.format(role))
    columns = {name: value for name, value in args.items() if name != "category"}
    frame, _, left_out = instructions(table, where, columns, answered=labelled)
    positions = frame.index.to_numpy()
    # Without answers the labels say where the prompt ends.
    options = {key: args[key] for key in ("template", *(["loss_on"] if labelled else [])) if key in args}
    examples, complete = tokenize_instructions(frame, run.tokenizer, run.tok_len, **options, paired=run.paired)
    if not complete.all():
        left_out["prompt too long"] = int((~complete).sum())
    trained_on = _trained_on(run, frame[complete])
    return Rows(table, examples, positions[complete], left_out, examples.truncated if labelled else 0, trained_on)


def _trained_on(run: FinishedRun, frame: pd.DataFrame) -> int:
    """How many rows the run was trained on; 0 for a run that was passed on without its ``rows.npz``."""
    if not (run.folder / ROWS).exists():
        say_once(f"{run.folder / ROWS} is missing, so rows that the run was trained on are not counted")
        return 0
    return int(np.isin(row_keys(frame, run.task), read_split(run.folder).get("keys", ())).sum())
