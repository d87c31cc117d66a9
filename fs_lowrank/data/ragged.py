"""Sequences for data of very many clients: arrays of unequal length in one, and items made on access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """``count`` items; ``make(i)`` gives number ``i`` on every access, and nothing is stored."""

    def __init__(self, count: int, make: Callable[[int], T]):
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        chosen = range(self._count)[index]
        return [self._make(i) for i in chosen] if isinstance(chosen, range) else self._make(chosen)


class Ragged(Sequence[np.ndarray]):
    """Arrays of unequal length, one after the other in ``values``.

    Args:
        values: one-dimensional. lengths: int64 ``(rows,)``.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray):
        self.values, self.lengths = values, np.asarray(lengths, dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | np.ndarray], dtype: type = np.int64) -> Ragged:
        """From rows of integers, copied into ``dtype``; a ``Ragged`` is returned unchanged."""
        if isinstance(rows, Ragged):
            return rows
        arrays: list[np.ndarray] = [np.asarray(row, dtype) for row in rows]
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype), np.array([len(a) for a in arrays]))

    @classmethod
    def join(cls, parts: Iterable[Ragged]) -> Ragged:
        """The rows of all ``parts``, copied."""
        parts = list(parts)
        values = [part.values for part in parts] or [np.empty(0, np.int64)]
        lengths = [part.lengths for part in parts] or [np.empty(0, np.int64)]
        return cls(np.concatenate(values), np.concatenate(lengths))

    @classmethod
    def by_owner(cls, owners: np.ndarray, count: int) -> Ragged:
        """For each owner ``0 … count - 1`` its positions in ``owners``, in order."""
        return cls(np.argsort(owners, kind="stable"), np.bincount(owners, minlength=count))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index):
        """Row ``index``, a view; or for a slice, a ``Ragged`` of its rows, copied."""
        if isinstance(index, slice):
            return self.select(index)
        start = self.starts[index]
        return self.values[start : start + self.lengths[index]]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start, length in zip(self.starts.tolist(), self.lengths.tolist()):
            yield self.values[start : start + length]

    def select(self, chosen: np.ndarray | slice) -> Ragged:
        """Some rows, in that order, copied."""
        lengths = self.lengths[chosen]
        moved = self.starts[chosen] - (np.cumsum(lengths) - lengths)
        return Ragged(self.values[np.repeat(moved, lengths) + np.arange(lengths.sum())], lengths)

    def owners(self) -> np.ndarray:
        """For every one of ``values``, the number of its row."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def sums(self, summands: np.ndarray) -> np.ndarray:
        """For each row, the sum of ``summands[value]`` over its values, int64."""
        totals = np.concatenate([[0], np.cumsum(summands[self.values], dtype=np.int64)])
        return totals[self.starts + self.lengths] - totals[self.starts]
