"""Repeated rows, up to case, punctuation and blanks: test rows that are also training rows."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Any

import numpy as np

from fs_lowrank.data.tables import CAUSAL_LM, ROLES


def normalised(text: str) -> str:
    """``text`` in lower case and compatible Unicode; each run without letters and digits becomes one blank."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def row_keys(frame: Any, task: str, images: np.ndarray | None = None) -> np.ndarray:
    """A hash of each row's text or image as a model reads it, int64 from 0 ``(rows,)``; equal for rows that are alike.

    Texts are normalised; texts without a letter or digit are compared as they are. The answer of a language model
    counts only where it has no prompt. Images are compared byte by byte.

    Args:
        frame: rows as in ``RawData``. task, images: as in ``RawData``.
    """
    if images is not None:
        return np.array([_hash(images[i].tobytes()) for i in frame["image"]], dtype=np.int64)
    language = task == CAUSAL_LM
    names = [name for name in (ROLES if language else ("text", "text_pair")) if name in frame]
    return np.array([_hash(_read(row, language)) for row in frame[names].to_dict("records")], dtype=np.int64)


def _read(row: dict[Any, Any], language: bool) -> bytes:
    turns = [turn["content"] for name in ("before", "messages") for turn in row.pop(name, ())]
    texts = [*turns, *row.values()]
    if language:  # the last is the answer
        texts = texts[:-1] if "".join(texts[:-1]).strip() else texts[-1:]
    return "\0".join(normalised(text) or text for text in texts).encode(errors="surrogatepass")


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
