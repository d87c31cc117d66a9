"""Test rows that are in the training data as well, up to case, punctuation and blanks."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .tables import RawData

if TYPE_CHECKING:
    from . import FederatedData

#: what a model reads of a row; the answer of a language model is not among it
_READ = ("text", "text_pair", "instruction", "input")


def normalised(text: str) -> str:
    """``text`` in lower case and compatible Unicode, with one blank for all that is no letter or digit."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def repeated(raw: RawData, data: FederatedData) -> np.ndarray | None:
    """The row numbers of the test set, int64, whose normalised text is that of a row of the clients' training data.

    Texts without a letter or digit are compared as they are. None for images, for messages, and without a test set.

    Args:
        data: made from ``raw``.
    """
    columns = [name for name in _READ if name in raw.train]
    if data.test is None or not columns:
        return None
    held_out = raw.train if "test" in data.cut or raw.test is None else raw.test
    known = set(_keys(raw.train.loc[data.rows["train"], columns]))
    rows = data.rows["test"]
    found = [key in known for key in _keys(held_out.loc[rows, columns])]
    return np.asarray(rows, dtype=np.int64)[np.asarray(found, dtype=bool)]


def _keys(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    return [tuple(normalised(str(v)) or str(v) for v in row) for row in frame.itertuples(index=False, name=None)]
