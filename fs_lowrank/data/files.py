"""Strict readers of tables (CSV, TSV, JSON, JSON Lines); errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.errors import UserError, nearest
from fs_lowrank.settings import show

__all__ = ["NESTED", "SUFFIXES", "as_text", "as_texts", "natural", "read_bytes", "read_table", "read_text", "read_tsv"]

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
#: values of a table that hold others
NESTED = (list, tuple, set, np.ndarray, Mapping)


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort names by, with the numbers in them compared as numbers: ``client_2`` before ``client_10``."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def as_text(value: Any) -> str:
    """A value of a table as text; empty for a missing one."""
    return "" if value is None or value != value else str(value)


def as_texts(where: str | Path, column: str, values: pd.Series) -> pd.Series:
    """The ``values`` of a column as texts; their index are the numbers of the rows.

    Args:
        where: what the table is called, for messages.
    Raises:
        UserError: one is a list, a mapping or bytes, of which it is not known what the text is; names the row.
    """
    for row, value in values.items():
        if isinstance(value, (*NESTED, bytes)):
            raise UserError(
                f"{where}, row {row + 1}: {show(value)} in column {column!r}: expected text; write the text itself "
                "into the column, or name another one in data.args"
            )
    return pd.Series([as_text(value) for value in values], index=values.index, dtype=object)


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path, named_by: str = "data.root and data.type") -> bytes:
    """What is in a file; of one that is compressed by gzip, by its first bytes and not its name, what it holds.

    Args:
        named_by: the config keys that give the path, for messages.

    Raises:
        UserError: no such file, or it cannot be read.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        folder = path.parent
        try:
            names = [entry.name for entry in folder.iterdir()]
        except OSError:
            raise UserError(f"no file {path}: there is no folder {folder}; check {named_by}") from error
        raise UserError(f"no file {path}{nearest(path.name, names)}; check {named_by}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    refuse_pointer(path, raw)
    try:
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file: {error}") from error


def read_text(path: Path, named_by: str = "data.root and data.type") -> str:
    """The text of a UTF-8 file, without a byte order mark; of a file compressed by gzip, what it holds.

    Args:
        named_by: as for ``read_bytes``.

    Raises:
        UserError: no such file, an empty file, or a byte that is not UTF-8 (the message has its offset and line).
    """
    raw = read_bytes(path, named_by)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The decoder does not count the byte order mark.
        start = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        line = raw.count(b"\n", 0, start) + 1
        raise UserError(
            f"{path}: not UTF-8: byte 0x{raw[start]:02x} at offset {start}, line {line}; save the file as UTF-8"
        ) from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text


def refuse_pointer(path: Path, content: bytes | None = None) -> None:
    """Raise ``UserError`` if ``path`` is what git leaves for a file of Git LFS; ``content`` is what it holds."""
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
    whole = [line[: len(header)] for line in lines if len(line) >= len(header)]
    if not whole:
        raise UserError(f"{path}: the file holds no row of {len(header)} tab-separated columns ({', '.join(header)})")
    return pd.DataFrame(whole, columns=header, dtype=object), len(lines) - len(whole)


def read_table(path: Path, quoting: bool | None = None, named_by: str = "data.root and data.type") -> pd.DataFrame:
    """Read a table by the suffix of its file. Text is ``str``; a missing value of a JSON row is None.

    Args:
        quoting: whether double quotes enclose fields; by default True for ``.csv`` and False for ``.tsv``.
        named_by: as for ``read_text``.

    Raises:
        UserError: the file is unreadable, truncated or invalid (the message names the line), or has no row.
    """
    text = read_text(path, named_by)
    suffix = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    if suffix in (".csv", ".tsv"):
        rows = _delimited(
            path, text, "\t" if suffix == ".tsv" else ",", suffix == ".csv" if quoting is None else quoting
        )
    elif suffix == ".jsonl":
        rows = _json_lines(path, text)
    elif suffix == ".json":
        rows = _json_objects(path, text) if text.lstrip().startswith("{") else _json(path, text)
    else:
        raise UserError(f"{path}: unknown file type {suffix!r}; expected one of {', '.join(SUFFIXES)}")
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    # dtype object, because pandas turns a column of integers with a missing value into floats
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in columns})


def _delimited(path: Path, text: str, delimiter: str, quoting: bool) -> list[dict[str, Any]]:
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE,
        strict=quoting,
    )
    rows: list[dict[str, Any]] = []
    header: list[str] | None = None
    start = 1
    limit = csv.field_size_limit(len(text) + 1)  # long texts are valid; the limit is global
    try:
        for cells in reader:
            if header is None:
                header = [cell.strip() for cell in cells]
                _check_delimiter(path, header, delimiter)
                if len(set(header)) < len(header):
                    raise UserError(f"{path}: the header names a column twice: {', '.join(header)}")
            elif cells:
                if len(cells) != len(header):
                    raise UserError(f"{path}, line {start}: {len(cells)} columns came, the header has {len(header)}")
                rows.append(dict(zip(header, cells, strict=True)))
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {start}: {error}; a quotation may not be closed, or the file is truncated"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return rows


def _check_delimiter(path: Path, header: list[str], delimiter: str) -> None:
    """Refuse a header of one column in which there is what separates columns in other files."""
    other = next((d for d in (";", "\t", ",") if len(header) == 1 and d != delimiter and d in header[0]), None)
    if other:
        write = "name it .tsv" if other == "\t" else f"write it with {delimiter!r}"
        raise UserError(
            f"{path}: the header is one column, {show(header[0])}: separated by {other!r}? expected {delimiter!r}; "
            f"{write}"
        )


def _json(path: Path, text: str) -> list[dict[str, Any]]:
    data = _loads(path, text)
    if not isinstance(data, list):
        raise UserError(f"{path}: expected a list of objects, got {type(data).__name__}")
    return [_object(path, f"entry {number}", row) for number, row in enumerate(data, start=1)]


def _json_objects(path: Path, text: str) -> list[dict[str, Any]]:
    """Read a ``.json`` file of one object per line. A single object must be a row, not a table of columns."""
    try:
        row = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return _json_lines(path, text)
    if not {"messages", "conversations"} & row.keys() and any(
        isinstance(value, (list, dict)) for value in row.values()
    ):
        keys = ", ".join(map(repr, list(row)[:10]))
        raise UserError(
            f"{path}: expected a list of objects, or one object a line; got one object with "
            f"{'keys' if len(row) > 1 else 'key'} {keys}"
        )
    return [_object(path, "line 1", row)]


def _json_lines(path: Path, text: str) -> list[dict[str, Any]]:
    return [
        _object(path, f"line {number}", _loads(path, line, number))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _loads(path: Path, text: str, line: int | None = None) -> Any:
    """The JSON value in ``text``, which is line ``line`` of the file, or all of it."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        truncated = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        raise UserError(
            f"{path}, line {line or error.lineno}: invalid JSON: {error.msg}"
            f"{'; the file may be truncated' if truncated else ''}"
        ) from error
    except RecursionError as error:
        raise UserError(f"{path}, line {line or 1}: nested too deep: expected objects of texts and numbers") from error
    except ValueError as error:  # a key given twice, or a number of more digits than Python converts
        raise UserError(f"{path}{f', line {line}' if line else ''}: invalid JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ``ValueError`` if it has a key twice, of which the last would count."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return row


def _object(path: Path, where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{path}, {where}: expected an object, got {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path}, {where}: {error.object[error.start : error.end]!a} is half of a UTF-16 pair (a surrogate), which "
            "is not a character; correct the text"
        ) from error
    return row
