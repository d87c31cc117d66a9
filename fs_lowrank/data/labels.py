"""Labels as numbers: values to predict, and sets of classes, whose classes are the bits of a whole number."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.errors import UserError, nearest, say_once

#: bits of a set that a whole number of 64 bits has room for
MOST_IN_SETS = 62
_FLAGS = {"0": False, "1": True, "False": False, "True": True, "false": False, "true": True}
#: labels that look like a missing value
_MISSING = {"na", "n/a", "null", "none", "nil", "missing", "unlabelled", "unlabeled", "?", "-"}
#: numbers are divided into so many parts of equal size where classes would be
PARTS = 10


def label_text(value: Any) -> str:
    """A label as text. 1, "1", 1.0 and "1.0" are the same label, since pandas and JSON may convert them."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)
    text = str(value).strip()
    return text.split(".")[0] if re.fullmatch(r"-?[0-9]+\.0+", text) else text


def unique(labels: Any) -> list[Any]:
    """The distinct labels in order: by number, if all are whole numbers."""
    kinds = sorted({label_text(value) for value in labels})
    try:
        return sorted(kinds, key=int)
    except ValueError:
        return kinds


def without_label(labels: pd.Series) -> pd.Series:
    """A mask of the rows without a label, bool. pandas may write a missing value as "nan"."""
    return labels.map(lambda value: value is None or str(value).strip().lower() in ("", "nan")).astype(bool)


def warn_alike(where: str, column: str, names: Sequence[str]) -> None:
    """Warn of classes that differ in case, blanks or width only, and of classes that look like a missing value."""
    same: dict[str, list[str]] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        same.setdefault("".join(c for c in folded if c.isprintable() and not c.isspace()), []).append(name)
    notes = [f"{', '.join(map(repr, dups))} differ in case, blanks or width only" for dups in same.values() if dups[1:]]
    missing = [name for key in _MISSING & same.keys() for name in same[key]]
    notes += [f"{', '.join(map(repr, sorted(missing)))} may mean no label"] * bool(missing)
    if notes:
        say_once(f"{where}: each is a class of its own in column {column!r}: {'; '.join(notes)}")


def numbers(where: str, column: str, labels: pd.Series) -> pd.Series:
    """Labels as float64.

    Raises:
        UserError: one is not a finite number.
    """
    values = []
    for row, value in labels.items():
        try:
            values.append(float(value))
        except (TypeError, ValueError):
            values.append(math.nan)
        if not math.isfinite(values[-1]):
            raise UserError(f"{where}, row {row + 1}: label {value!r} in column {column!r}: expected a number")
    return pd.Series(values, index=labels.index, dtype=np.float64)


def check_lists(where: str, column: str, labels: pd.Series) -> None:
    """Raise ``UserError`` if a label is no list of classes."""
    for row, value in labels.items():
        is_list = hasattr(value, "__iter__") and not isinstance(value, (str, Mapping))
        if not is_list or any(hasattr(kind, "__iter__") and not isinstance(kind, str) for kind in value):
            raise UserError(
                f"{where}, row {row + 1}: label {value!r} in column {column!r}: expected a list of classes; columns of "
                "0 and 1 are named by data.args [{label: [COLUMN, …]}]"
            )


def coded(where: str, column: str, labels: pd.Series, names: Sequence[str], several: bool) -> pd.Series:
    """Labels as whole numbers: indices into the classes ``names``, or sets of them.

    Args:
        several: labels are lists of classes, and become sets.
    Raises:
        UserError: a class is none of ``names``, or there are more than ``MOST_IN_SETS`` of which to make sets.
    """
    if several and not 1 < len(names) <= MOST_IN_SETS:
        raise UserError(f"{where}: column {column!r} has {len(names)} classes in all; expected 2 to {MOST_IN_SETS}")
    index = {label_text(name): i for i, name in enumerate(names)} | {name: i for i, name in enumerate(names)}
    codes = []
    for row, value in labels.items():
        kinds = list(value) if several else [value]
        positions = [index.get(kind, index.get(label_text(kind), -1)) for kind in kinds]
        if -1 in positions:
            kind = kinds[positions.index(-1)]
            noun, nouns = ("class", "classes") if several else ("label", "labels")
            raise UserError(
                f"{where}, row {row + 1}: {noun} {kind!r} does not occur in training{nearest(str(kind), names)}; "
                f"its {nouns} are {', '.join(names[:10])}"
            )
        codes.append(sum(1 << position for position in set(positions)) if several else positions[0])
    return pd.Series(codes, index=labels.index, dtype=np.int64)


def from_flags(where: str, table: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Lists of the classes of each row, from a column of 0 and 1 for each class.

    Raises:
        UserError: another value.
    """
    flags = {}
    for name in columns:
        texts = table[name].map(label_text)
        if len(invalid := texts[~texts.isin(_FLAGS)]):
            raise UserError(
                f"{where}, row {invalid.index[0] + 1}: {invalid.iloc[0]!r} in column {name!r} of data.args: label: "
                "expected 0 or 1"
            )
        flags[name] = texts.map(_FLAGS).to_numpy(bool)
    lists = [[name for name in columns if flags[name][i]] for i in range(len(table))]
    return pd.Series(lists, index=table.index, dtype=object)


def bits(coded: np.ndarray, classes: int) -> np.ndarray:
    """Sets as zeros and ones, float32 ``(n, classes)``."""
    return (np.asarray(coded)[:, None] >> np.arange(classes) & 1).astype(np.float32)


def edges(labels: np.ndarray) -> np.ndarray:
    """The bounds that divide numbers into ``PARTS`` of equal size."""
    return np.unique(np.quantile(labels, np.linspace(0, 1, PARTS + 1)[1:-1])) if len(labels) else np.empty(0)


def as_classes(labels: np.ndarray, bounds: np.ndarray | None = None) -> np.ndarray:
    """Labels as whole numbers, to stratify rows by; a number becomes the index of its interval of ``bounds``."""
    if labels.dtype.kind != "f":
        return labels
    return np.digitize(labels, edges(labels) if bounds is None else bounds).astype(np.int64)
