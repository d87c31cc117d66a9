"""What a model reaches that has learned nothing: the accuracy and the loss of the best constant prediction."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chance:
    """The accuracy and the loss of the best constant prediction on some held-out data.

    Attributes:
        share: the fraction of the majority class, which is the best accuracy of a constant prediction.
        error: one standard error of that accuracy, √(share (1 − share) / n).
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
        return cls(share, math.sqrt(share * (1 - share) / rows), -sum(p * math.log(p) for p in shares))

    @classmethod
    def of_run(cls, folder: Path, split: str = "validation") -> Chance | None:
        """From the ``data.json`` of a run; None if it names no classes or has no such data.

        Args:
            split: ``validation`` or ``test``.
        """
        path = folder / "data.json"
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        counts = data.get(split, {}).get("labels", {})
        return cls.of_counts(list(counts.values())) if counts else None

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    def reached(self, accuracy: float) -> bool:
        """Whether an accuracy is above the majority class by more than one standard error."""
        return accuracy > self.share + self.error

    def verdict(self, accuracies: Mapping[str, float | None]) -> str:
        """A sentence that names those of some accuracies that did not reach more than chance; empty if all did."""
        low = [f"{name} {acc:.3f}" for name, acc in accuracies.items() if acc is not None and not self.reached(acc)]
        if not low:
            return ""
        level = f"{self.share:.3f} ± {self.error:.3f} (one standard error)"
        return f"nothing was learned: {', '.join(low)}, while always predicting the majority class gives {level}"

    def reported(self, metric: str, metrics: Mapping[str, float]) -> float:
        """The value of ``metric`` (``acc`` or ``loss``) that a pruner is told.

        Everything at or below what a constant prediction reaches counts as the same value, so that a model that always
        predicts the majority class is never ahead of one that has not learned anything yet.
        """
        learned = "acc" not in metrics or self.reached(metrics["acc"])
        if metric == "acc":
            return metrics[metric] if learned else self.share + self.error
        return min(metrics[metric], self.loss) if learned else self.loss
