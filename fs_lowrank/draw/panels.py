"""Pictures as data: panels with lines and intervals, bars, or a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def digits(value: float) -> str:
    """A figure with three digits, as people are shown it: ``0.650``, ``27.7``, ``1,936``; a whole number as it is."""
    integral = isinstance(value, int) or not value or abs(value) >= 999.5
    return f"{value:,.0f}" if integral else f"{value:#.3g}".removesuffix(".")


@dataclass(frozen=True)
class Line:
    """Points in their order, each perhaps with an interval.

    Attributes:
        name: in the legend, where lines of the same name have one entry; empty: no entry.
        x, y: as many of each. low, high: the ends of the intervals, as many; or none.
        colour: a number in the palette, or a colour. style: of the line, as matplotlib writes it; empty: points alone.
        marker: of a point, as matplotlib writes it; empty: none. None: the one that goes with the colour.
        hollow: the points are drawn hollow. means: the meaning of ``style`` or a hollow point, for the legend.
        band: draw the intervals as a band and not as bars.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int | str = 0
    style: str | tuple[float, tuple[float, ...]] = "-"
    marker: str | None = None
    hollow: bool = False
    means: str = ""
    band: bool = True

    def __str__(self) -> str:
        points = [f"{y:.4g} at {x:.4g}" for x, y in zip(self.x, self.y)]
        text = ", ".join(points) if len(points) < 13 else f"{points[0]} to {points[-1]}"
        return f"{' '.join(filter(None, (self.name, self.means)))}: {text}".removeprefix(": ")


@dataclass(frozen=True)
class Bars:
    """Bars at the places 0, 1, …; ``parts`` has by name the sizes of at most ten that are on top of each other."""

    parts: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        return "; ".join(f"{name}: {', '.join(f'{size:.4g}' for size in sizes)}" for name, sizes in self.parts.items())


@dataclass(frozen=True)
class Matrix:
    """Values in rows and columns as shades.

    Attributes:
        values: by row. scale: its name. largest: of the scale; None: the largest value.
        texts: in the cells, by row, or none.
    """

    values: Sequence[Sequence[float]]
    scale: str
    largest: float | None = None
    texts: Sequence[Sequence[str]] = ()

    def __str__(self) -> str:
        rows = "; ".join(f"row {i + 1}: {', '.join(row)}" for i, row in enumerate(self.texts))
        return rows or f"{len(self.values)} rows and {len(self.values[0])} columns, {self.scale}"


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        key: its name in a page. title: above it. x, y: labels of the axes, with units. marks: lines, bars or a matrix.
        main: it is larger than panels that are not. whole: x has whole numbers. log: the axis of x, which has
            ``ticks``, is logarithmic.
        share: y is a share, so that its axis ends at 0 and 1. least: the least length of the axis of y, so that noise
            does not fill it.
        ticks: by place on the axis of x, the texts there in place of numbers. rows: the same on the axis of y.
        sideways: x goes down, and y to the right; not with bars. tall: its height, relative to others.
    """

    key: str
    title: str
    x: str
    y: str
    marks: Sequence[Line | Bars | Matrix]
    main: bool = False
    whole: bool = False
    log: bool = False
    share: bool = False
    least: float = 0.0
    ticks: Mapping[Any, str] = field(default_factory=dict)
    rows: Mapping[Any, str] = field(default_factory=dict)
    sideways: bool = False
    tall: float = 1.0

    def __str__(self) -> str:
        """The picture in words, for those who do not see it."""
        return f"{self.title}: {self.y} against {self.x}. {'. '.join(map(str, self.marks))}"
