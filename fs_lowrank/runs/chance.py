"""The figures of a model that has learned nothing: accuracy and loss of the best constant prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..settings.metrics import standard_error


@dataclass(frozen=True)
class Chance:
    """The accuracy and the loss of the best constant prediction on some held-out data.

    Attributes:
        share: the fraction of the majority class, which is the best accuracy of a constant prediction.
        error: one standard error of that accuracy (``standard_error``).
        loss: the best cross-entropy of a constant prediction, −Σ p ln p over the fractions p of the classes.
    """

    share: float
    error: float
    loss: float

    @classmethod
    def of_counts(cls, counts: list[int]) -> Chance:
        """From the number of rows of each class."""
        rows = sum(counts)
        shares = [count / rows for count in counts if count]
        share = max(shares)
        return cls(share, standard_error(share, rows), -sum(p * math.log(p) for p in shares))

    @classmethod
    def of_data(cls, data: Mapping[str, Any], split: str = "validation") -> Chance | None:
        """From the content of a run's ``data.json``; None if it names no classes or has no such data.

        Args:
            split: ``validation`` or ``test``.
        """
        counts = (data.get(split) or {}).get("labels") or {}
        return cls.of_counts(list(counts.values())) if any(counts.values()) else None

    def reached(self, accuracy: float) -> bool:
        """Whether an accuracy is above the majority class by more than two standard errors."""
        return accuracy > self.share + 2 * self.error

    def verdict(self, accuracies: Mapping[str, float | None]) -> str:
        """A sentence that names the accuracies that did not reach more than chance; empty if all did."""
        low = {name: acc for name, acc in accuracies.items() if acc is not None and not self.reached(acc)}
        listed = ", ".join(f"{name} {acc:.3f}" for name, acc in low.items())
        return f"{self.opening(max(low.values()))}: {listed}, while {self}" if low else ""

    def opening(self, accuracy: float) -> str:
        """How a verdict on an ``accuracy`` begins that has not ``reached`` more than chance."""
        return "nothing was learned" if accuracy <= self.share else "nothing was learned that would show"

    def __str__(self) -> str:
        error = 2 * self.error
        return f"always predicting the majority class gives {self.share:.3f} ± {error:.3f} (two standard errors)"

    def reported(self, metric: str, metrics: Mapping[str, float]) -> float:
        """The value of ``metric`` (a metric of classes) for a pruner.

        All values up to those of a constant prediction count as the same one, so that a model that always predicts the
        majority class is never ahead of one that has not learned anything yet. For F1 and Matthews' correlation it is
        0, although the F1 of naming always the second of two classes is larger.
        """
        learned = "acc" not in metrics or self.reached(metrics["acc"])
        if metric == "loss":
            return min(metrics[metric], self.loss) if learned else self.loss
        level = self.share + 2 * self.error if metric == "acc" else 0.0
        return max(metrics[metric], level) if learned else level


def run_verdict(data: Mapping[str, Any], final: Mapping[str, float], best: Mapping[str, Any]) -> str:
    """A sentence about a run whose last round is not above the majority class by more than two standard errors.

    It says whether the best round was. The accuracy on the test set counts, if it is evaluated, else the one on
    validation data. Empty if the run learned, or has no classes.

    Args:
        data: the content of ``data.json``. final, best: as of a ``RunResult``.
    """
    for split, rows in (("test", "test"), ("val", "validation")):
        chance, last = Chance.of_data(data, rows), final.get(f"{split}_acc")
        if chance is None or last is None:
            continue
        if chance.reached(last):
            return ""
        highest = best.get(f"{split}_acc", last)
        learned, also = chance.reached(highest), highest != last
        return (
            f"{'what was learned is lost' if learned else chance.opening(max(last, highest))}: {split}_acc {last:.3f}"
            + (f", {highest:.3f} in the best round" if also else "")
            + f", while {chance}; the training loss, of clients on their own data, may fall all the same"
        )
    return ""
