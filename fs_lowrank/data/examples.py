"""Tokenized examples of unequal length, padded when a batch is made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fs_lowrank.data.ragged import Ragged

__all__ = ["Examples", "IGNORED_LABEL"]

_CHUNK = 1 << 16

IGNORED_LABEL = -100
"""The label of a token without loss: the ``ignore_index`` of PyTorch's cross entropy."""


@dataclass
class Examples:
    """``n`` examples.

    Attributes:
        columns: name to ``n`` integer arrays of shape ``(length_i,)``: ``input_ids``, perhaps ``token_type_ids``, and
            for a causal language model ``labels`` (``-100`` for tokens without loss). All rows lie in one array.
        labels: int64 ``(n,)``, the classes; None for a causal language model.
        pad_id: the padding token.
        pad_token_type_id: the same for ``token_type_ids``.
        truncated: how many texts were cut to the maximum length when these examples were made.
    """

    columns: dict[str, Ragged]
    labels: np.ndarray | None = None
    pad_id: int = 0
    pad_token_type_id: int = 0
    truncated: int = 0
    _lengths: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if "input_ids" not in self.columns:
            raise ValueError(f"examples need a column 'input_ids'; there are: {sorted(self.columns)}")
        self.columns = {
            name: rows if isinstance(rows, Ragged) else Ragged.of(rows).narrowed()
            for name, rows in self.columns.items()
        }
        self._lengths = self.columns["input_ids"].lengths
        for name, rows in self.columns.items():
            if not np.array_equal(rows.lengths, self._lengths):
                raise ValueError(f"column {name!r} does not have the shape of 'input_ids'")
        if self.labels is not None:
            self.labels = np.asarray(self.labels, dtype=np.int64)
            if self.labels.shape != self._lengths.shape:
                raise ValueError(f"{len(self._lengths)} examples came with labels of shape {self.labels.shape}")
            if "labels" in self.columns:
                raise ValueError("examples have either one label each or one label a token, not both")

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, int64 ``(n,)``."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return sum(rows.values.nbytes for rows in self.columns.values())

    def select(self, indices: Sequence[int] | np.ndarray) -> Examples:
        """The examples at ``indices``, in that order; the token arrays are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Examples(
            {name: rows.select(chosen) for name, rows in self.columns.items()},
            None if self.labels is None else self.labels[chosen],
            self.pad_id,
            self.pad_token_type_id,
        )

    @classmethod
    def together(cls, parts: Iterable[tuple[Examples, np.ndarray]]) -> Examples:
        """Of several sets of the same columns the examples at some indices, set after set, copied."""
        chosen = [examples.select(indices) for examples, indices in parts]
        first = chosen[0]
        return cls(
            {name: Ragged.join(part.columns[name] for part in chosen) for name in first.columns},
            None if first.labels is None else np.concatenate([part.labels for part in chosen]),
            first.pad_id,
            first.pad_token_type_id,
        )

    def losses(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How many losses each of the examples at ``indices`` has: one, or one for each labelled token but the first,
        which nothing predicts."""
        rows = self.columns.get("labels")
        if rows is None:
            return np.ones(len(indices), dtype=np.int64)
        return np.array([int((rows[i][1:] != IGNORED_LABEL).sum()) for i in indices], dtype=np.int64)

    def batch(
        self, indices: Sequence[int] | np.ndarray, augment: np.random.Generator | None = None
    ) -> dict[str, torch.Tensor]:
        """A batch, padded on the right to its longest example.

        Args:
            augment: generator for the augmentation of images; not used for text.
        Returns:
            int64 tensors: ``input_ids``, ``attention_mask`` and, if the examples have it, ``token_type_ids``, each
            ``(batch, longest)``; ``labels`` is ``(batch,)`` for classes and ``(batch, longest)`` for a causal
            language model.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if not chosen.size:
            raise ValueError("a batch needs at least one example")
        lengths = self._lengths[chosen]
        # The mask is made from the lengths, because the padding token may also be the end-of-sequence token.
        mask = np.arange(lengths.max())[None, :] < lengths[:, None]
        fill = {"input_ids": self.pad_id, "labels": IGNORED_LABEL, "token_type_ids": self.pad_token_type_id}
        out = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        for name, rows in self.columns.items():
            padded = np.full(mask.shape, fill.get(name, 0), dtype=np.int64)
            padded[mask] = rows.select(chosen).flat()
            out[name] = torch.from_numpy(padded)
        if self.labels is not None:
            out["labels"] = torch.from_numpy(self.labels[chosen])
        return out

    def fingerprint(self) -> str:
        """SHA-256 in hex over tokens and labels, independent of the machine."""
        digest = hashlib.sha256(self._lengths.astype("<i8").tobytes())
        for name in sorted(self.columns):
            digest.update(name.encode() + b"\0")
            for start in range(0, len(self), _CHUNK):
                digest.update(self.columns[name][start : start + _CHUNK].flat().astype("<i8").tobytes())
        if self.labels is not None:
            digest.update(b"classes\0" + self.labels.astype("<i8").tobytes())
        return digest.hexdigest()
