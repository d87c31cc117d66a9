"""Predictions of a finished run for the rows of a file, and the file with them."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..data import CAUSAL_LM
from ..data.examples import IGNORED_LABEL
from ..data.files import SUFFIXES
from ..data.tables import MULTI_LABEL, REGRESSION
from ..errors import UserError
from ..jobs.files import to_json, write_bytes
from ..training.generate import continue_prompts
from .rows import Rows
from .run import FinishedRun
from .scores import outputs, probabilities

logger = logging.getLogger("fs_lowrank")

#: texts that a spreadsheet computes as formulas: = and @, and a sign that is neither of a number nor a dash in a text
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.,\s]*$)\S")


def answers(run: FinishedRun, rows: Rows, tokens: int) -> list[str]:
    """The language model's answer to each prompt, by the most likely token, at most ``tokens`` of them.

    Raises:
        UserError: the end of a prompt is not known, or a prompt is empty.
    """
    prompts = []
    for ids, labels in zip(rows.examples.columns["input_ids"], rows.examples.columns["labels"], strict=True):
        first = len(ids) if run.paired else int(np.argmax(labels != IGNORED_LABEL))
        if not first:
            raise UserError("a row has no prompt of its own; of a run with loss_on: all, read rows with labelled=False")
        prompts.append(ids[:first].tolist())
    size = run.config.eval_batch_size
    texts = continue_prompts(
        run.model,
        run.tokenizer,
        prompts,
        batch_size=size,
        max_new_tokens=tokens,
        on_cut=lambda count: logger.warning(
            "%d of %d answers were cut at %d tokens; allow more with tokens=",
            count,
            len(prompts),
            tokens,
        ),
    )
    return [text.strip() for text in texts]


def predict_rows(run: FinishedRun, rows: Rows, column: str = "prediction", tokens: int = 64) -> pd.DataFrame:
    """The table of ``rows`` with a column of predictions; the table itself stays as it is.

    It has the class, the number, the list of the classes of a set, or the answer. Of classes ``COLUMN_probability`` is
    beside it; of sets there is a column ``COLUMN_CLASS`` with the probability of each class. Rows that were left out
    have empty cells.

    Raises:
        UserError: the table has such a column already.
    """
    suffixes = {CAUSAL_LM: [], REGRESSION: [], MULTI_LABEL: run.labels}.get(run.task, ["probability"])
    names = [column, *(f"{column}_{name}" for name in suffixes)]
    for name in names:
        if name in rows.table:
            raise UserError(f"the table has a column {name!r} already; choose another name with column='NAME'")
    table = rows.table.copy()
    for name, values in zip(names, _predictions(run, rows, tokens), strict=True):
        cells = np.full(len(table), "", dtype=object)
        for row, value in zip(rows.positions, values, strict=True):
            cells[row] = value
        table[name] = pd.Series(cells, index=table.index, dtype=object)
    return table


def _predictions(run: FinishedRun, rows: Rows, tokens: int) -> list[Sequence[Any]]:
    """The cells of each new column, for the rows that were not left out."""
    if run.task == CAUSAL_LM:
        return [answers(run, rows, tokens)]
    if run.task == REGRESSION:
        return [outputs(run, rows.examples)[:, 0].round(6).tolist()]
    chances = probabilities(run, rows.examples)
    if run.task == MULTI_LABEL:
        classes = [[name for name, chance in zip(run.labels, row) if chance > 0.5] for row in chances]
        return [classes, *chances.T.round(6).tolist()]
    return [[run.labels[i] for i in chances.argmax(axis=1)], chances.max(axis=1).round(6).tolist()]


def check_table(path: str | Path) -> None:
    """Raise ``UserError`` if ``write_table`` would not write ``path``: by its suffix, its folder, or as it exists."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends with {', '.join(SUFFIXES)}")
    if os.path.lexists(path):
        raise UserError(f"{path} exists; remove it, or name another file with out='FILE'")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}")


def write_table(table: pd.DataFrame, path: str | Path, quoting: bool | None = None) -> None:
    """Write a table in the format of the file's suffix, whole or not at all; a list in a cell of CSV or TSV is JSON.

    Args:
        quoting: as for ``read_table``. Cells that need quotes have them in any case, with a warning.
    Raises:
        UserError: the file exists, has another suffix, or cannot hold a text of the table.
        RunFailed: it cannot be written.
    """
    path = Path(path)
    check_table(path)
    suffix = path.suffix.lower()
    try:
        if suffix in (".csv", ".tsv"):
            table = table.map(lambda cell: json.dumps(cell) if isinstance(cell, list) else cell)
            computed = table.map(lambda cell: isinstance(cell, str) and bool(_FORMULA.match(cell)))
            if count := int(computed.to_numpy().sum()):
                table = table.mask(computed, "'" + table.astype(str))
                logger.warning("%s: %d cells that a spreadsheet would compute begin with ' now", path, count)
            write = partial(table.to_csv, index=False, sep="," if suffix == ".csv" else "\t", lineterminator="\n")
            try:
                quoted = suffix == ".csv" if quoting is None else quoting
                text = write(quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
            except csv.Error:
                logger.warning("%s: a cell has a line break or the separator, so such cells are in double quotes", path)
                text = write(quoting=csv.QUOTE_MINIMAL)
        else:
            rows = [to_json(row, ensure_ascii=False) for row in table.to_dict("records")]
            text = "".join(f"{row}\n" for row in rows) if suffix == ".jsonl" else "[" + ",\n ".join(rows) + "]\n"
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    write_bytes(path, content)
