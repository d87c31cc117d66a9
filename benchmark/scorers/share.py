"""The share of hits, and that of an answer that never changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def share(hits: Sequence[bool], metric: str) -> dict[str, float]:
    """The fraction of True and its standard error (of the mean of n samples, with n - 1)."""
    n, p = len(hits), sum(hits) / len(hits)
    return {metric: p, f"{metric}_stderr": (p * (1 - p) / (n - 1)) ** 0.5 if n > 1 else 0.0}


def majority(answers: Sequence[Hashable]) -> float:
    """The share of the most frequent of the right ``answers``: the score of a model that always gives it."""
    return max(Counter(answers).values()) / len(answers)
