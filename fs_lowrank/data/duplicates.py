"""Rows that occur again, up to case, punctuation and blanks: test rows that are also training rows."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np

from fs_lowrank.data.stored import CHUNK

#: what a model reads of a row, beside the turns of a conversation
_ASKED = ("text", "text_pair", "instruction", "input")


def normalised(text: str) -> str:
    """``text`` in lower case and compatible Unicode, with one blank for all that is no letter or digit."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def row_keys(frame: Any, images: np.ndarray | None = None) -> np.ndarray:
    """A hash of what a model reads of each row, int64 from 0 ``(rows,)``; rows that are alike have the same.

    Texts are normalised; those without a letter or digit are compared as they are. The answer of a language model
    counts only where it has no prompt. Images are compared byte by byte.

    Args:
        frame: rows as in ``RawData``. images: those of ``RawData``.
    """
    if images is not None:
        return np.array([_hash(images[i].tobytes()) for i in frame["image"]], dtype=np.int64)
    names = [name for name in (*_ASKED, "messages", "output") if name in frame]
    parts = (frame.iloc[start : start + CHUNK][names] for start in range(0, len(frame), CHUNK))
    return np.array([_hash(_read(row)) for part in parts for row in part.to_dict("records")], dtype=np.int64)


def _read(row: Mapping[Any, Any]) -> bytes:
    *turns, answer = [turn["content"] for turn in row["messages"]] if "messages" in row else [row.get("output", "")]
    asked = [row[name] for name in _ASKED if name in row] + turns
    texts = asked if "".join(asked).strip() else [answer]
    return "\0".join(normalised(text) or text for text in texts).encode(errors="surrogatepass")


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
