"""From a quantity's interval to a verdict on the condition that it lies between two bounds, and on all of a rule.

Nothing holds in favour of a method with a seed that collapsed to the majority class, failed, or missed the target of a
metric, and nothing is refuted in favour of one with a seed that failed or missed it, which is not in its mean. With two
seeds nothing is decided where one collapsed: errors are not normal there, and two equal methods may differ in it by
chance. Nothing is decided by a method whose learning rate is at the end of the grid that was searched. Where one of
these stands in the way, the text names it and no number of seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .intervals import LEVEL, Figure, Interval

HOLDS, FAILS, UNTESTED, INCONCLUSIVE = "holds", "does not hold", "not tested at this size", "inconclusive"


@dataclass(frozen=True)
class Met:
    """By how much a condition is met, below 0 if it is not: ``centre``, and its 95 % interval from ``low`` to ``high``.

    Attributes:
        low, high: None if the spread is not known.
        what: the condition in some words. unit: what it is measured in.
    """

    what: str
    centre: float
    low: float | None
    high: float | None
    unit: str = ""


@dataclass(frozen=True)
class Condition:
    """A condition of a rule with its result."""

    verdict: str
    text: str
    #: if it is not met, the claim is not tested, regardless of the other conditions
    first: bool = False
    #: None if a figure is missing
    met: Met | None = None
    #: the quantity and its two bounds, where chance plays a part
    compared: tuple[Interval, float, float] | None = None
    #: whether something other than chance stands in the way of a verdict
    barred: bool = False


def _met(interval: Interval, low: float, high: float, what: str) -> Met:
    """How far a quantity is inside of two bounds."""

    def inside(value: float) -> float:
        return min(value - low, high - value)

    if interval.half is None:
        return Met(what, inside(interval.centre), None, None)
    first, last = interval.ends
    middle = min(max((low + high) / 2, first), last) if math.isfinite(low + high) else first
    values = [inside(value) for value in (first, last, middle)]
    return Met(what, inside(interval.centre), min(values), max(values))


def decide(
    interval: Interval,
    low: float,
    high: float,
    what: str,
    text: str,
    figures: Mapping[str, Figure],
    favours: Sequence[str] = (),
    refuted_for: Sequence[str] | None = None,
) -> Condition:
    """Whether a quantity is between two bounds.

    Args:
        what: the condition in some words, for a figure.
        text: begins the explanation. figures: name -> figure, of all that the quantity is made of.
        favours: the names of the figures in whose favour the condition holds. refuted_for: those in whose favour it is
            refuted; by default the others.
    """
    notes = [f"{name}: {note}" for name, figure in figures.items() for note in figure.notes]
    if not all(figure.n for figure in figures.values()):
        return Condition(INCONCLUSIVE, "; ".join([text, *notes]))
    if refuted_for is None:
        refuted_for = [name for name in figures if name not in favours]
    first, last = interval.ends
    if interval.half is None:
        alone = any(figure.n < 2 for figure in figures.values() if not figure.exact)
        why = "the spread is not known with one seed" if alone else "the seeds agree to rounding: no sign of the spread"
        result = INCONCLUSIVE
    else:
        result = HOLDS if low <= first and last <= high else FAILS if last < low or first > high else INCONCLUSIVE
        why = "" if interval.half == 0 else f"95 % interval {first:.4g} to {last:.4g}"
    decided = result != INCONCLUSIVE
    ahead = HOLDS if low <= interval.centre <= high else FAILS  # the verdict of more seeds, if the centre stayed
    bar = _bars(figures, favours, refuted_for, few=decided)[result if decided else ahead]
    if interval.half is None and not bar:
        why += "; more seeds would decide"
    if bar:
        notes.append(f"so {bar}" if decided else "so more seeds alone would not decide")
        result = INCONCLUSIVE
    met, compared = _met(interval, low, high, what), (interval, low, high) if interval.half else None
    text = "; ".join([f"{text} ({why})" if why else text, *notes])
    return Condition(result, text, met=met, compared=compared, barred=bool(bar))


def _bars(
    figures: Mapping[str, Figure], favours: Sequence[str], refuted_for: Sequence[str], few: bool
) -> dict[str, str]:
    """What stands in the way of ``holds`` and ``does not hold``, whatever the interval is; empty if nothing does.

    Args:
        few: whether collapses among two seeds do, which they do no longer when there are more.
    """
    open_end = any(figure.at_end and not figure.exact for figure in figures.values())
    few = few and any(figure.collapsed and figure.n < 3 for figure in figures.values())
    lost = {name for name, figure in figures.items() if figure.failed or figure.missed}
    holds = few or any(not figures[name].whole for name in favours)
    fails = few or lost & {*refuted_for}
    beyond = "a better rate may lie beyond" if open_end else ""
    return {
        HOLDS: "this does not count as holding" if holds else beyond,
        FAILS: "this does not count as refuted" if fails else beyond,
    }


def together(conditions: Sequence[Condition]) -> list[Condition]:
    """The conditions of one rule; what would be refuted alone, but not as one of several, is inconclusive. A ``first``
    one refutes nothing, and is not among the several.

    Where the interval is too wide to decide, the text says how many seeds would do: to meet the condition, if the
    quantity meets it now, and otherwise to refute it as one of several.
    """
    several = sum(c.compared is not None and not c.first for c in conditions)
    of_several, found = 1 - (1 - LEVEL) / max(several, 1), []
    for c in conditions:
        if c.compared and c.verdict in (FAILS, INCONCLUSIVE):
            interval, low, high = c.compared
            inside = low <= interval.centre <= high
            level = LEVEL if inside or c.first else of_several
            first, last = interval.at(level).ends
            if not (low <= first and last <= high if inside else last < low or first > high):
                text = c.text
                if c.verdict == FAILS:
                    text += f"; one of {several} conditions is refuted by chance more often than one alone, so its "
                    text += f"{100 * level:.3g} % interval counts, {first:.4g} to {last:.4g}"
                text += "" if c.barred else f"; {interval.seeds_to_decide(low, high, level)}"
                c = dataclasses.replace(c, verdict=INCONCLUSIVE, text=text)
        found.append(c)
    return found


def verdict(conditions: Sequence[Condition]) -> str:
    """The verdict on all conditions together."""
    for ground in (UNTESTED, INCONCLUSIVE):
        if any(c.first and c.verdict == ground for c in conditions):
            return ground
    verdicts = {c.verdict for c in conditions}
    return next((v for v in (FAILS, UNTESTED, INCONCLUSIVE, HOLDS) if v in verdicts), UNTESTED)
