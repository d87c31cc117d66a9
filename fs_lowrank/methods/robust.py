"""Robust means, in place of the weighted mean of any averaging method.

================ =====================================================================================================
``median``       of every coordinate, the median
``trimmed_mean`` of every coordinate, the mean without the ``f`` largest and ``f`` smallest values
``norm_bound``   the weighted mean of changes that are scaled down to a norm of at most ``norm``
``krum``         the update with the lowest score: the sum of squared distances to its ``n − f − 2`` nearest others
``multi_krum``   the weighted mean of the ``n − f`` updates with the lowest scores
================ =====================================================================================================

``f`` is ``malicious``. The sources are with the functions in ``algebra.robust``. ``median``, ``trimmed_mean`` and
``krum`` do not weight clients by samples, as in their papers: a client could claim any number.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..algebra import (
    bounded_mean,
    krum_scores,
    median,
    norm_of_change,
    squared_distances,
    trimmed_mean,
    weighted_mean,
)
from ..settings import Lowrank, robust_needs


class TooFewUpdates(RuntimeError):
    """A round has fewer updates than its robust mean needs."""


@dataclass(frozen=True)
class RobustMean:
    """A robust mean over clients.

    Attributes:
        rule: one of the names above.
        malicious: ``f``, for ``trimmed_mean``, ``krum`` and ``multi_krum``.
        norm: the bound for ``norm_bound``; 0: the median of the round's norms, the lower of two.
    """

    rule: str
    malicious: int = 1
    norm: float = 0.0

    @classmethod
    def from_config(cls, config: Lowrank) -> RobustMean | None:
        """From ``lowrank.robust``, ``robust_malicious`` and ``robust_norm``; None if there is none."""
        return None if config.robust == "none" else cls(config.robust, config.robust_malicious, config.robust_norm)

    def mean(
        self, tensors: Mapping[int, Mapping[str, Tensor]], weights: Sequence[float], start: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[int, str]]:
        """The mean, and what was done to the updates of single clients.

        Args:
            tensors: by client, with equal names, shapes and dtypes.
            weights: ``p_k``, in the order of ``tensors``.
            start: the tensors by name before the round; may hold more.
        Returns:
            New tensors by name; and by client why its update was left out or scaled down.
        Raises:
            TooFewUpdates: fewer than ``settings.robust_needs``.
        """
        if len(tensors) < (needed := robust_needs(self.rule, self.malicious)):
            raise TooFewUpdates(
                f"lowrank.robust = {self.rule} with robust_malicious = {self.malicious} needs {needed} updates, "
                f"got {len(tensors)}"
            )
        parts = list(tensors.values())
        if self.rule == "median":
            return median(parts), {}
        if self.rule == "trimmed_mean":
            return trimmed_mean(parts, self.malicious), {}
        if self.rule == "norm_bound":
            norms = {client: norm_of_change(part, start) for client, part in tensors.items()}
            bound = self.norm or statistics.median_low(norms.values())
            factors = {client: min(1.0, bound / norm) if norm else 1.0 for client, norm in norms.items()}
            scaled = {
                client: f"the norm of its change, {norms[client]:.6g}, was scaled down to {bound:.6g}"
                for client, factor in factors.items()
                if factor < 1
            }
            return bounded_mean(parts, weights, start, list(factors.values())), scaled
        scores = krum_scores(squared_distances(parts), self.malicious).tolist()
        count = 1 if self.rule == "krum" else len(parts) - self.malicious
        ranked = sorted(range(len(parts)), key=lambda k: scores[k])
        chosen = sorted(ranked[:count])
        total = sum(weights[k] for k in chosen)
        left_out = {
            client: f"left out by {self.rule}: its score, {scores[k]:.6g}, is not among the {count} smallest"
            for k, client in enumerate(tensors)
            if k not in chosen
        }
        return weighted_mean([parts[k] for k in chosen], [weights[k] / total for k in chosen]), left_out
