"""The share of hits, and that of an answer that never changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from fs_lowrank.settings.metrics import standard_error


def share(hits: Sequence[bool], metric: str) -> dict[str, float]:
    """The fraction of True and its standard error."""
    p = sum(hits) / len(hits)
    return {metric: p, f"{metric}_stderr": standard_error(p, len(hits))}


def majority(answers: Sequence[Hashable]) -> float:
    """The share of the most frequent of the right ``answers``: the score of a model that always gives it."""
    return max(Counter(answers).values()) / len(answers)
