"""Figures over seeds; the estimate of a sum of them, with its standard error; and the pool of several estimates.

Methods are compared by Welch's formula. For images the same seed gives all methods the same split, which moves them
together, so there the values are paired by seed; for text a pair's variance is 0.93 of the sum's, which buys nothing
and costs degrees of freedom. Two equal methods are told apart in 5 % of cases where errors are normal (in up to 7 %
with two seeds of which one method's spread is far larger); ``conditions`` says what is done where they are not.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEVEL = 0.95
#: relative to the figures; a smaller spread over seeds is due to rounding, in float32 perhaps, and gives no interval
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Figure:
    """A metric over seeds.

    Attributes:
        by_seed: the values. exact: it is counted or computed, not measured, so that it has no spread.
        collapsed: the values at or below the ``majority`` class. failed: the seeds whose run failed or diverged, which
            have no value; with ``n`` = 0 no seed has one. missed: the seeds that did not reach the target of
            ``bytes_to`` or ``rounds_to``, which have no value either. stale: the seeds whose only run is of an earlier
            revision of the method.
        at_end: its learning rate is at the end of the grid that was searched.
        splits: by seed, a fingerprint of the clients' images, where figures are paired by seed.
        right: of an accuracy, by seed the name of a test set and for each of its rows 1 or 0, float64 ``(n,)``, where
            that is recorded.
        versions, processors: of the runs; an empty processor is not known.
    """

    by_seed: Mapping[int, float]
    exact: bool = False
    collapsed: tuple[float, ...] = ()
    majority: float | None = None
    failed: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()
    at_end: bool = False
    splits: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)
    right: Mapping[int, tuple[str, Any]] = field(default_factory=dict, compare=False, repr=False)
    versions: frozenset[str] = frozenset()
    processors: frozenset[str] = frozenset()

    @property
    def n(self) -> int:
        return len(self.by_seed)

    @property
    def mean(self) -> float:
        """Not a number (NaN) without a value."""
        return statistics.fmean(self.by_seed.values() or [math.nan])

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None with fewer than two values."""
        return statistics.stdev(self.by_seed.values()) if self.n > 1 else None

    def __str__(self) -> str:
        if not self.n:
            return "no value"
        return f"{self.mean:.4g}" + (f" ± {self.std:.2g}" if self.std is not None else "") + f" (n={self.n})"

    @property
    def complete(self) -> bool:
        """Whether no seed collapsed, failed or missed the target."""
        return not (self.collapsed or self.failed or self.missed)

    @property
    def notes(self) -> list[str]:
        """Remarks for a reader besides the mean and spread."""
        seeds = self.n + len(self.failed) + len(self.missed)
        values = ", ".join(f"{value:.4g}" for value in self.collapsed)
        majority = f"({values}; majority {self.majority or 0.0:.4g})"
        counted = (
            (self.collapsed, f"of {self.n} seeds collapsed to the majority class {majority}"),
            (self.failed, f"of {seeds} seeds failed"),
            (self.missed, f"of {seeds} seeds did not reach the target"),
            (self.stale, "seeds are of an earlier revision of the method and left out"),
        )
        notes = [f"{len(affected)} {words}" for affected, words in counted if affected]
        return notes + ["its rate won at the end of the grid"] * (self.at_end and not self.exact)


@dataclass(frozen=True)
class Estimate:
    """``centre`` with its standard error.

    Attributes:
        error: None if the spread is not known; 0 if the quantity is exact. degrees: of freedom of Student's t.
    """

    centre: float
    error: float | None
    degrees: float = 0.0

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval; None if the spread is not known."""
        from scipy.stats import t

        if self.error is None:
            return None
        half = self.error * float(t.ppf((1 + LEVEL) / 2, self.degrees)) if self.error else 0.0
        return self.centre - half, self.centre + half

    def p(self, low: float, high: float, slack: float = 0.0) -> float | None:
        """The two-sided p value of the nearer of two bounds, which is 0 for an exact quantity; None if not known.

        Args:
            slack: an allowance, which is subtracted from the distance to the bound.
        """
        from scipy.stats import t

        if not self.error:
            return self.error
        distance = min(abs(self.centre - bound) for bound in (low, high) if math.isfinite(bound))
        return 2 * float(t.sf(max(distance - slack, 0.0) / self.error, self.degrees))


def estimate(parts: Sequence[tuple[float, Figure]], shift: float = 0.0) -> Estimate:
    """The sum of factors times figures, and of ``shift``: paired by seed if all figures have the same ``splits`` for at
    least two seeds that they share, and otherwise by Welch's formula. The variance over seeds and that over test rows
    (``row_variance``) are added.
    """
    shift += sum(factor * figure.mean for factor, figure in parts if figure.exact)
    drawn = [(factor, figure) for factor, figure in parts if not figure.exact]
    if not drawn:
        return Estimate(shift, 0.0)
    first, *peers = [figure for _, figure in drawn]
    common = [seed for seed in first.by_seed if all(seed in other.by_seed for other in peers)]
    paired = peers and len(common) > 1
    paired = paired and all(s in first.splits and first.splits[s] == f.splits.get(s) for f in peers for s in common)
    terms = drawn
    if paired:
        terms = [(1.0, Figure({s: sum(factor * figure.by_seed[s] for factor, figure in drawn) for s in common}))]
    centre = sum(factor * figure.mean for factor, figure in terms)
    error: float | None = None
    degrees: float = 0.0
    if all(figure.n > 1 for _, figure in terms):
        shares = [((factor * (figure.std or 0.0)) ** 2 / figure.n, figure.n) for factor, figure in terms]
        error = math.sqrt(sum(share for share, _ in shares))
        degrees = error**4 / (sum(share**2 / (n - 1) for share, n in shares) or 1.0)
    if error is not None and error <= _ROUNDING * max(abs(factor * figure.mean) for factor, figure in drawn):
        error = None  # the seeds agree to rounding, which is no sign of the spread
    if error:
        rows = row_variance(drawn, common if paired else None)
        error, degrees = math.hypot(error, math.sqrt(rows)), degrees * (1 + rows / error**2) ** 2  # Satterthwaite's
    return Estimate(centre + shift, error, degrees)


def row_variance(parts: Sequence[tuple[float, Figure]], seeds: Sequence[int] | None = None) -> float:
    """The variance of a sum of factors times accuracies by the draw of the test rows: that of the rows' sums, over
    their number. Figures share the rows of one test set. 0 where the right rows are not recorded.

    Args:
        seeds: whose means the accuracies are; None: all.
    """
    sums: dict[str, Any] = {}
    for factor, figure in parts:
        used = figure.by_seed if seeds is None else seeds
        if not used or not figure.right.keys() >= {*used}:
            return 0.0
        for test_set, right in (figure.right[seed] for seed in used):
            sums[test_set] = sums.get(test_set, 0.0) + factor / len(used) * right
    return float(sum(rows.var(ddof=1) / len(rows) for rows in sums.values()))


def right_rows(test_set: str, right: Any) -> dict[str, str | int]:
    """Whether each row of a test set was right, bool ``(n,)``, as an entry of a result: a bit a row."""
    import numpy as np

    return {"of": test_set, "rows": len(right), "bits": base64.b64encode(np.packbits(right).tobytes()).decode()}


def rows_of(entry: Mapping) -> tuple[str, Any]:
    """The inverse of ``right_rows``."""
    import numpy as np

    bits = np.frombuffer(base64.b64decode(entry["bits"]), np.uint8)
    return entry["of"], np.unpackbits(bits, count=entry["rows"]).astype(float)


def pooled(estimates: Sequence[Estimate]) -> Estimate:
    """Several estimates of one quantity in different settings, as random effects.

    DerSimonian and Laird's variance between settings, with the interval of Hartung and Knapp, which has one degree of
    freedom less than there are settings and is not narrower than that of the variances alone.
    """
    import numpy as np

    centres, variances = np.array([(e.centre, (e.error or 0.0) ** 2) for e in estimates]).T
    weights = 1 / variances
    degrees = len(estimates) - 1
    cochran_q = weights @ (centres - weights @ centres / weights.sum()) ** 2
    tau2 = max(0.0, (cochran_q - degrees) / (weights.sum() - weights @ weights / weights.sum()))
    weights = 1 / (variances + tau2)
    centre = weights @ centres / weights.sum()
    spread = max(1.0, weights @ (centres - centre) ** 2 / degrees)
    return Estimate(float(centre), float(math.sqrt(spread / weights.sum())), degrees)
