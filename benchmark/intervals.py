"""Figures over seeds, and the confidence intervals of their means, differences and quotients.

Intervals are two-sided at 95 %, with Student's t quantiles. Two methods in one setting have the same split, clients and
batches with the same seed, so the interval of their difference is that of the differences by seed, over the seeds that
both have; so is that of two settings in which the clients have the same data for each seed. Otherwise the two variances
are added, with the degrees of freedom of the smaller number of seeds. (Welch's formula gives more, which are too many
if one spread is far larger.) Two equal methods are therefore told apart in at most 5 % of cases, for any number of
seeds, where errors are normal; ``claims`` says what is done where they are not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

LEVEL = 0.95
#: relative to the figures; a smaller spread over seeds is due to rounding, in float32 perhaps, and gives no interval
_ROUNDING = 1e-6
#: the report names no larger number of seeds that would decide
_MANY = 1000


@dataclass(frozen=True)
class Figure:
    """A metric over seeds.

    Attributes:
        std: sample standard deviation; None for one seed. by_seed: the values, if known by seed.
        exact: it is counted or computed, not measured, so that it has no spread.
        collapsed: the values at or below the ``majority`` class. failed: the seeds whose run failed or diverged, which
            have no value; with ``n`` = 0 no seed has one. missed: the seeds that did not reach the target of
            ``bytes_to`` or ``rounds_to``, which have no value either.
        at_end: its learning rate is at the end of the grid that was searched.
        splits: by seed, a fingerprint of the clients' data.
    """

    mean: float
    std: float | None
    n: int
    by_seed: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    exact: bool = False
    collapsed: tuple[float, ...] = ()
    majority: float | None = None
    failed: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()
    at_end: bool = False
    splits: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        if not self.n:
            return "no value"
        return f"{self.mean:.4g}" + (f" ± {self.std:.2g}" if self.std is not None else "") + f" (n={self.n})"

    @property
    def whole(self) -> bool:
        """Whether no seed collapsed, failed or missed the target."""
        return not (self.collapsed or self.failed or self.missed)

    @property
    def seeds(self) -> int:
        """How many there are, with and without a value."""
        return self.n + len(self.failed) + len(self.missed)

    def pairs_with(self, other: Figure) -> bool:
        """Whether the clients' data are known and the same in both, for each seed that both have."""
        common = self.by_seed.keys() & other.by_seed.keys()
        return bool(common) and all(s in self.splits and self.splits[s] == other.splits.get(s) for s in common)

    @property
    def notes(self) -> list[str]:
        """What a reader must know besides the mean and spread."""
        notes = []
        if self.collapsed:
            values = ", ".join(f"{value:.4g}" for value in self.collapsed)
            notes.append(
                f"{len(self.collapsed)} of {self.n} seeds collapsed to the majority class ({values}; majority "
                f"{self.majority:.4g})"
            )
        if self.failed:
            notes.append(f"{len(self.failed)} of {self.seeds} seeds failed")
        if self.missed:
            notes.append(f"{len(self.missed)} of {self.seeds} seeds did not reach the target")
        if self.at_end and not self.exact:
            notes.append("its rate won at the end of the grid")
        return notes

    def scaled(self, factor: float) -> Figure:
        """All values multiplied by ``factor``, without the notes."""
        std = None if self.std is None else abs(factor) * self.std
        by_seed = {seed: factor * value for seed, value in self.by_seed.items()}
        return Figure(factor * self.mean, std, self.n, by_seed, self.exact, splits=self.splits)


def figure_of(values: Sequence[float] | Mapping[int, float]) -> Figure | None:
    """Mean and standard deviation of values, or of values by seed; None for no value."""
    if not values:
        return None
    by_seed = dict(values) if isinstance(values, Mapping) else {}
    listed = list(by_seed.values()) or list(values)
    return Figure(statistics.fmean(listed), statistics.stdev(listed) if len(listed) > 1 else None, len(listed), by_seed)


@dataclass(frozen=True)
class Interval:
    """``centre`` ± ``half`` at 95 %.

    Attributes:
        half: None if the spread is not known; 0 if the quantity is exact.
        std: of the quantity with one seed. degrees: of freedom of Student's t distribution.
    """

    centre: float
    half: float | None
    std: float = 0.0
    degrees: int = 0

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value; the centre alone if the spread is not known."""
        return self.centre - (self.half or 0.0), self.centre + (self.half or 0.0)

    def plus(self, shift: float) -> Interval:
        return replace(self, centre=self.centre + shift)

    def times(self, factor: float) -> Interval:
        half = None if self.half is None else abs(factor) * self.half
        return replace(self, centre=factor * self.centre, half=half, std=abs(factor) * self.std)

    def at(self, level: float) -> Interval:
        """The interval at ``level`` instead of 95 %."""
        if not self.half:
            return self
        return replace(self, half=self.half * quantile(self.degrees, level) / quantile(self.degrees))

    def seeds_to_decide(self, low: float, high: float, level: float = LEVEL) -> str:
        """In words, how many seeds would decide at ``level`` whether the quantity is between two bounds.

        With that many the interval just clears the nearer bound if centre and spread stay, which is as likely as not.
        """
        distance = min(abs(self.centre - bound) for bound in (low, high) if math.isfinite(bound))
        for n in range(2, _MANY + 1):
            if quantile(n - 1, level) * self.std < distance * math.sqrt(n):
                return f"about {n} seeds would decide"
        return f"more than {_MANY} seeds would be needed to decide"


@cache
def quantile(degrees: float, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, degrees))


def of_mean(figure: Figure) -> Interval:
    """The interval of a mean over seeds."""
    return _interval(figure.mean, figure, figure.n)


def difference(first: Figure, second: Figure, paired: bool = True) -> Interval:
    """The interval of ``first.mean - second.mean``: by seed if they are ``paired`` and share two seeds.

    The centre of a paired one is over the seeds that both have.
    """
    common = sorted(first.by_seed.keys() & second.by_seed.keys()) if paired else []
    if len(common) > 1 and not (first.exact or second.exact):
        gaps = figure_of([first.by_seed[seed] - second.by_seed[seed] for seed in common])
        assert gaps is not None
        scale = max(abs(value) for figure in (first, second) for value in figure.by_seed.values())
        return _interval(gaps.mean, gaps, gaps.n, scale)
    centre = first.mean - second.mean
    arms = [figure for figure in (first, second) if not figure.exact]
    if len(arms) < 2:
        return _interval(centre, arms[0], arms[0].n) if arms else Interval(centre, 0.0)
    variances = [(figure.std or 0.0) ** 2 for figure in arms]
    std = math.sqrt(sum(variances))
    if None in (first.std, second.std) or std <= _ROUNDING * max(abs(first.mean), abs(second.mean)):
        return Interval(centre, None)
    error = math.sqrt(sum(variance / figure.n for variance, figure in zip(variances, arms)))
    degrees = min(figure.n for figure in arms) - 1
    return Interval(centre, quantile(degrees) * error, std, degrees)


def _interval(centre: float, figure: Figure, n: int, scale: float | None = None) -> Interval:
    """Around ``centre``, by the spread of ``figure``: unknown with one seed, or if it is only rounding at ``scale``."""
    if figure.exact:
        return Interval(centre, 0.0)
    if figure.std is None or figure.std <= _ROUNDING * (abs(figure.mean) if scale is None else scale):
        return Interval(centre, None)
    return Interval(centre, quantile(n - 1) * figure.std / math.sqrt(n), figure.std, n - 1)
