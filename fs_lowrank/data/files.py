"""Strict readers of tables (CSV, TSV, JSON, JSON Lines); errors name the file and the line."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.errors import UserError, nearest, say_once, user_errors
from fs_lowrank.settings import show

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
#: types of nested values of a table
NESTED = (list, tuple, set, np.ndarray, Mapping)


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort names by, with the numbers in them compared as numbers: ``client_2`` before ``client_10``."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def require_columns(where: str | Path, columns: Collection[Any], names: Iterable[str], advice: str = "") -> None:
    """Raise ``UserError`` if one of ``names`` is not among the ``columns`` of a table.

    Args:
        where: the name of the table, for the message. columns: a table, or a mapping by their names.
        advice: what the user can do, for the message.
    """
    for name in names:
        if name not in columns:
            present = [str(column) for column in columns]
            raise UserError(
                f"{where}: no column {name!r}{nearest(name, present)}{advice and f'; {advice}'}; there are: "
                f"{', '.join(present) or 'none'}"
            )


def as_text(value: Any) -> str:
    """A value of a table as text; empty for a missing one."""
    return "" if value is None or value != value else str(value)


def as_texts(where: str | Path, column: str, values: pd.Series) -> pd.Series:
    """The ``values`` of a column as texts; their index holds the numbers of the rows.

    Args:
        where: the name of the table, for messages.
    Raises:
        UserError: a value is a list, a mapping or bytes, whose text is not known; names the row.
    """
    for row, value in values.items():
        if isinstance(value, (*NESTED, bytes)):
            raise UserError(
                f"{where}, row {row + 1}: {show(value)} in column {column!r}: expected text; write the text itself "
                "into the column, or name another one in data.args"
            )
    return pd.Series([as_text(value) for value in values], index=values.index, dtype=object)


def read_bytes(path: Path) -> bytes:
    """The content of a file; decompressed if its first bytes, not its name, say that gzip compressed it.

    Raises:
        UserError: no such file, or it cannot be read.
    """
    try:
        raw = path.read_bytes()
        refuse_pointer(path, raw)
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except FileNotFoundError as error:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"no file {path}{nearest(path.name, names, 0.75)}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; decompressed if gzip compressed it.

    Raises:
        UserError: no such file, an empty file, or a byte that is not UTF-8 (the message has its line).
    """
    raw = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8: byte 0x{raw[error.start]:02x}; save the file as UTF-8"
        ) from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text


def refuse_pointer(path: Path, content: bytes | None = None) -> None:
    """Raise ``UserError`` if ``path`` is a pointer that git leaves for a file of Git LFS; ``content``: of the file."""
    if content is None and path.is_file():
        with path.open("rb") as file:
            content = file.read(64)
    if (content or b"").startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: a pointer of Git LFS, not the file itself; get that with: git lfs pull")


def read_tsv(path: Path, header: list[str] | None = None) -> tuple[pd.DataFrame, int]:
    """Read a tab-separated file in which quotes are ordinary characters, as in GLUE.

    Args:
        header: the column names, if the file has no header line.

    Returns:
        the rows as text, and the number of lines that were left out because they have too few columns (as in QQP).
    """
    # Not splitlines(): it would also break at the Unicode separators that occur inside sentences.
    lines = [line.removesuffix("\r").split("\t") for line in read_text(path).split("\n") if line.strip()]
    if header is None:
        header, *lines = lines
    complete = [line[: len(header)] for line in lines if len(line) >= len(header)]
    if not complete:
        raise UserError(f"{path}: the file holds no row of {len(header)} tab-separated columns ({', '.join(header)})")
    return pd.DataFrame(complete, columns=header, dtype=object), len(lines) - len(complete)


def read_table(path: Path, quoting: bool | None = None) -> pd.DataFrame:
    """Read a table by the suffix of its file. Text is ``str``; a missing value of a JSON row is None.

    Args:
        quoting: whether double quotes enclose fields; by default True for ``.csv`` and False for ``.tsv``.

    Raises:
        UserError: the file is unreadable, truncated or invalid (the message names the line), or has no row.
    """
    text = read_text(path)
    suffix = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    if suffix in (".csv", ".tsv"):
        rows = _delimited(path, text, suffix, suffix == ".csv" if quoting is None else quoting)
    else:
        rows = _json(path, text, suffix == ".json" and text.lstrip().startswith("["))
        if quoting is not None:
            say_once(f"data.args.0.quoting = {quoting} has no effect on {path.name}: it is for .csv and .tsv")
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    # dtype object, because pandas turns a column of integers with a missing value into floats
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in columns})


def _delimited(path: Path, text: str, suffix: str, quoting: bool) -> list[dict[str, Any]]:
    delimiter = "\t" if suffix == ".tsv" else ","
    form: Any = {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE, "strict": quoting}
    reader = csv.reader(io.StringIO(text, newline=""), **form)
    rows: list[dict[str, Any]] = []
    start = 1
    limit = csv.field_size_limit(len(text) + 1)  # long texts are valid; the limit is global
    try:
        header = [cell.strip() for cell in next(reader)]
        if len(header) == 1 and (actual := next((d for d in (";", "\t", ",") if d in header[0]), None)):
            raise UserError(
                f"{path}: the header is one column, {show(header[0])}: separated by {actual!r}? expected {delimiter!r}"
            )
        if len(set(header)) < len(header):
            raise UserError(f"{path}: the header names a column twice: {', '.join(header)}")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                raise UserError(f"{path}, line {start}: {len(cells)} columns came, the header has {len(header)}")
            if cells:
                rows.append(dict(zip(header, cells)))
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start}: {error}; a quotation may not be closed, or the file is cut") from error
    finally:
        csv.field_size_limit(limit)
    return rows


def _json(path: Path, text: str, is_list: bool) -> list[dict[str, Any]]:
    """The objects in the one list of the text (``is_list``), or one object of each line."""
    rows: list[dict[str, Any]] = []
    for line, chunk in enumerate([text] if is_list else text.split("\n"), start=1):
        if not chunk.strip():
            continue
        where = str(path) if is_list else f"{path}, line {line}"
        with user_errors(f"{where}: reading it as JSON", "expected a list of objects, or one object a line"):
            value = json.loads(chunk, object_pairs_hook=_unique_keys)
            json.dumps(value, ensure_ascii=False).encode()  # half of a UTF-16 pair is no character
        objects = value if is_list else [value]
        rows += objects
        if not all(isinstance(row, dict) for row in objects):
            raise UserError(f"{where}: expected objects, as a list of them, or one a line; got {show(value)}")
    return rows


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ``ValueError`` if it has a key twice, since only the last would count."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return row
