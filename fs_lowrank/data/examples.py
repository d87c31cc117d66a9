"""Tokenized examples of unequal length, padded when a batch is made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fs_lowrank.data.labels import bits
from fs_lowrank.data.ragged import Ragged

_CHUNK = 1 << 12
#: the type of token ids, of which there may be very many
TOKENS = np.int32

IGNORED_LABEL = -100
"""The label of a token without loss: the ``ignore_index`` of PyTorch's cross entropy."""


def rows_alike(lengths: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Batches of at most ``size`` rows of equal length, so that none is padded; images stay in order."""
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        yield from np.split(rows, range(size, len(rows), size))


@dataclass
class Examples:
    """``n`` examples.

    Attributes:
        columns: name to ``n`` integer arrays of shape ``(length_i,)``: ``input_ids``, perhaps ``token_type_ids``, and
            for a causal language model ``labels`` (``-100`` for tokens without loss). All rows lie in one array.
        labels: ``(n,)``: int64, the classes; float32, numbers to predict; None for a language model.
        sets: the number of classes, where labels are sets of them as bits (``labels.sets``); else 0.
        paired: ``labels`` among the columns is a separate text, which a decoder writes, not that of ``input_ids``.
        pad_id: the padding token.
        pad_token_type_id: the same for ``token_type_ids``.
        truncated: how many texts were cut to the maximum length when these examples were made.
    """

    columns: dict[str, Ragged]
    labels: np.ndarray | None = None
    pad_id: int = 0
    pad_token_type_id: int = 0
    truncated: int = 0
    sets: int = 0
    paired: bool = False

    def __post_init__(self) -> None:
        columns = self.columns.items()
        self.columns = {n: rows if isinstance(rows, Ragged) else Ragged.of(rows, TOKENS) for n, rows in columns}
        if self.labels is not None:
            self.labels = np.asarray(self.labels)
            self.labels = self.labels.astype(np.float32 if self.labels.dtype.kind == "f" else np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, int64 ``(n,)``."""
        return self.columns["input_ids"].lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return sum(rows.values.nbytes for rows in self.columns.values())

    def select(self, indices: Sequence[int] | np.ndarray) -> Examples:
        """The examples at ``indices``, in that order, copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        columns = {name: rows.select(chosen) for name, rows in self.columns.items()}
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, columns=columns, labels=labels, truncated=0)

    @staticmethod
    def together(selections: Iterable[tuple[Examples, np.ndarray]]) -> Examples:
        """The examples at some indices of several sets with the same columns, set after set, copied."""
        chosen = [examples.select(indices) for examples, indices in selections]
        first = chosen[0]
        columns = {name: Ragged.join(examples.columns[name] for examples in chosen) for name in first.columns}
        labels = None if first.labels is None else np.concatenate([examples.labels for examples in chosen])
        return replace(first, columns=columns, labels=labels)

    def losses(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How many losses each of the examples at ``indices`` has: one; or one for each labelled token but, where it is
        a token of the input, the first, which nothing predicts."""
        rows, first = self.columns.get("labels"), 0 if self.paired else 1
        if rows is None:
            return np.ones(len(indices), dtype=np.int64)
        return np.array([int((rows[i][first:] != IGNORED_LABEL).sum()) for i in indices], dtype=np.int64)

    def batch(
        self, indices: Sequence[int] | np.ndarray, augment: np.random.Generator | None = None
    ) -> dict[str, torch.Tensor]:
        """A batch, padded on the right to its longest example.

        Args:
            augment: generator for the augmentation of images; not used for text.
        Returns:
            int64 tensors: ``input_ids``, ``attention_mask`` and, if the examples have it, ``token_type_ids``, each
            ``(batch, longest)``; ``labels`` is ``(batch,)`` for classes and numbers, float32 ``(batch, classes)`` for
            sets of classes, and ``(batch, longest)`` for a language model.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[chosen]
        # The mask is made from the lengths, because the padding token may also be the end-of-sequence token.
        mask = np.arange(lengths.max())[None, :] < lengths[:, None]
        fill = {"input_ids": self.pad_id, "labels": IGNORED_LABEL, "token_type_ids": self.pad_token_type_id}
        tensors = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        for name, rows in self.columns.items():
            positions = mask
            if self.paired and name == "labels":
                positions = np.arange(max(rows.lengths[chosen].max(), 1))[None, :] < rows.lengths[chosen][:, None]
            padded = np.full(positions.shape, fill.get(name, 0), dtype=np.int64)
            padded[positions] = rows.select(chosen).values
            tensors[name] = torch.from_numpy(padded)
        if self.labels is not None:
            labels = self.labels[chosen]
            tensors["labels"] = torch.from_numpy(bits(labels, self.sets) if self.sets else labels)
        return tensors

    def fingerprint(self) -> str:
        """SHA-256 in hex over tokens and labels, independent of the machine."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for name in sorted(self.columns):
            digest.update(name.encode() + b"\0")
            for start in range(0, len(self), _CHUNK):
                digest.update(self.columns[name][start : start + _CHUNK].values.astype("<i8").tobytes())
        if self.paired:
            digest.update(b"paired\0" + self.columns["labels"].lengths.astype("<i8").tobytes())
        if self.labels is not None and self.labels.dtype.kind == "f":
            digest.update(b"numbers\0" + self.labels.astype("<f4").tobytes())
        elif self.labels is not None:
            kind = f"sets of {self.sets}" if self.sets else "classes"
            digest.update(kind.encode() + b"\0" + self.labels.astype("<i8").tobytes())
        return digest.hexdigest()
