"""A method's curve over an axis of numbers, such as the learning rate: by seed, and the range around its best."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .intervals import Figure


def learned(curve: Mapping[float, float], within: float, sign: int, majority: float | None) -> bool:
    """Whether the best point of a curve did not fail, and is above a majority class by more than ``within``."""
    best = max(sign * value for value in curve.values())
    return best > (-math.inf if majority is None else majority + within)


def span_of_best(
    curve: Mapping[float, float], within: float, sign: int, majority: float | None = None
) -> tuple[float, bool]:
    """How many powers of ten the unbroken range of points around the best spans in which the curve is at most
    ``within`` below it, and whether it touches an end of the curve.

    It is 0 if nothing was learned: the range would otherwise be the wider, the less a method learns.
    """
    if not learned(curve, within, sign, majority):
        return 0.0, False
    points = sorted(curve)
    best = first = last = max(range(len(points)), key=lambda i: sign * curve[points[i]])
    enough = sign * curve[points[best]] - within
    while first > 0 and sign * curve[points[first - 1]] >= enough:
        first -= 1
    while last < len(points) - 1 and sign * curve[points[last + 1]] >= enough:
        last += 1
    return math.log10(points[last] / points[first]), first == 0 or last == len(points) - 1


def by_seed(curve: Mapping[float, Figure], sign: int) -> dict[int, dict[float, float]]:
    """The curve of each seed that has a value at every point, or failed there, which is worse than any value."""
    seeds: dict[int, dict[float, float]] = {}
    for point, found in curve.items():
        for seed, value in {**dict.fromkeys(found.failed, -sign * math.inf), **found.by_seed}.items():
            seeds.setdefault(seed, {})[point] = value
    return {seed: values for seed, values in sorted(seeds.items()) if len(values) == len(curve)}


def majority_of(curve: Mapping[float, Figure]) -> float | None:
    """The majority class, from the first point that has one: a point at which all seeds failed has none."""
    return next((found.majority for found in curve.values() if found.majority is not None), None)
