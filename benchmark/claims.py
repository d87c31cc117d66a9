"""Verdicts on the papers' claims, by the rules in the suites.

A condition compares a quantity, such as the difference of two means over seeds, with the margin that the claim states,
by the quantity's 95 % confidence interval (``intervals``):

* ``holds``: the whole interval meets the condition; ``does not hold``: no part of it does.
* ``inconclusive``: anything else; with one seed the interval is not known. The text says how many seeds would decide.
* ``not tested at this size``: a figure is missing.

A claim does not hold if one of its conditions does not. The more conditions there are, the more often one is not met by
chance, so where there are k of them, each is refuted by its interval at the level 1 - 0.05 / k (Bonferroni). A claim
that is true is then refuted in at most 2.5 % of cases, however many conditions it has.

Nothing holds in favour of a method with a seed that collapsed to the majority class, failed, or missed the target of a
metric, and nothing is refuted in favour of one with a seed that failed or missed it, which is not in its mean. Nothing
is decided by a method whose learning rate is at the end of the grid that was searched.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fs_lowrank.settings import Key, Origin, check_keys, check_value

from .curves import by_seed, learned, majority_of, span_of_best
from .intervals import LEVEL, Figure, Interval, difference, figure_of, of_mean
from .metrics import better, unknown

HOLDS, FAILS, UNTESTED, INCONCLUSIVE = "holds", "does not hold", "not tested at this size", "inconclusive"

#: condition -> required keys, and optional ones; ``docs/benchmark.md`` says what each condition means
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "drops": (("methods", "along", "from", "to", "by"), ("lower_is_better",)),
    "keeps": (("methods", "along", "from", "to"), ("within", "share", "lower_is_better")),
    "above": (("better", "than", "by"), ("lower_is_better",)),
    "close": (("methods", "to", "within"), ()),
    "ratio": (("of", "to", "about", "within"), ()),
    "learns": (("methods", "by"), ()),
    "value": (("methods",), ("at_least", "at_most")),
    "wider": (("better", "than", "along", "points", "within", "by"), ("lower_is_better",)),
    "best": (("better", "than", "along", "points", "chosen_by", "by"), ("lower_is_better",)),
}
_NAME, _NUMBER, _NAMES = Key(str), Key(float), Key(list, {"filled": True, "once": True})
_KEYS = {
    **dict.fromkeys(("is", "along", "better", "of", "metric", "chosen_by"), _NAME),
    **dict.fromkeys(("methods", "than", "points"), _NAMES),
    **dict.fromkeys(("by", "within", "share", "about", "at_least", "at_most"), _NUMBER),
    **dict.fromkeys(("from", "to"), Key(Any)),
    "where": Key(dict),
    **dict.fromkeys(("lower_is_better", "spread"), Key(bool)),
}


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


#: (method, labels by axis, metric) -> figure
Lookup = Callable[[str, Mapping[str, str], str], Figure | None]


def check_rule(condition: Any, origin: Origin, at: str) -> dict:
    """Check the condition at ``at`` in the file of a suite.

    Raises:
        UserError: an unknown condition, an unknown or missing key, a value of the wrong type.
    """
    if not isinstance(condition, Mapping):
        origin.wrong(at, condition, "a mapping, such as {is: drops, …}")
    kind = check_value(f"{at}.is", condition.get("is"), str, {"choices": tuple(RULES)}, origin)
    needs, more = RULES[kind]
    known = ("is", *needs, *more, "metric", "where", "spread")
    keys = {key: dataclasses.replace(_KEYS[key], required=key in needs) for key in known}
    checked = check_keys(condition, keys, origin, at)
    if kind == "keeps" and ("within" in checked) == ("share" in checked):
        origin.fail(at, "has both within and share, or none: expected one of them")
    if kind == "keeps" and "share" in checked and checked.get("lower_is_better"):
        origin.fail(at, "has share, which is of an accuracy's lead, and lower_is_better: expected within for a loss")
    if "points" in checked:
        numbers = [point for point in checked["points"] if isinstance(point, (int, float)) and point > 0]
        if len(numbers) < 2 or numbers != sorted(set(checked["points"])):
            origin.wrong(f"{at}.points", checked["points"], "two numbers or more above 0, ascending")
    if "chosen_by" in checked and not better(checked["chosen_by"]):
        origin.wrong(f"{at}.chosen_by", checked["chosen_by"], "a metric that is better larger or smaller")
    if kind == "value" and not {"at_least", "at_most"} & checked.keys():
        origin.fail(at, "has no bound: expected at_least, at_most or both")
    return checked


def judge(rule: Sequence[Mapping], look: Lookup) -> list[Condition]:
    """The results of all conditions of a rule, separately for each method."""
    results = [
        result if result.met is None else dataclasses.replace(result, met=dataclasses.replace(result.met, unit=unit))
        for condition in rule
        for unit in [_UNITS.get(condition["is"], condition.get("metric", "test_acc"))]
        for result in _JUDGES[condition["is"]](condition, _looking(condition, look))
    ]
    return _together(results)


def _together(conditions: Sequence[Condition]) -> list[Condition]:
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
                text += f"; {interval.seeds_to_decide(low, high, level)}"
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


def used(rule: Sequence[Mapping], look: Lookup) -> list[tuple[str, Mapping[str, str]]]:
    """The (method, labels) of all figures that a rule looks up."""
    seen: list[tuple[str, Mapping[str, str]]] = []

    def noting(method: str, labels: Mapping[str, str], metric: str) -> Figure | None:
        seen.append((method, labels))
        return look(method, labels, metric)

    judge(rule, noting)
    return seen


# -- from an interval to a verdict -----------------------------------------------------------------------


def _looking(condition: Mapping, look: Lookup) -> Callable[..., Figure | None]:
    """A function of a method, and of a metric and further labels, in the setting of a condition."""
    where = {str(k): str(v) for k, v in condition.get("where", {}).items()}
    asked = condition.get("metric", "test_acc")

    def figure(method: str, metric: str = asked, **labels: Any) -> Figure | None:
        found = look(method, {**where, **{k: str(v) for k, v in labels.items()}}, metric)
        return found if found is None or condition.get("spread", True) else dataclasses.replace(found, exact=True)

    return figure


def _missing(what: str, first: bool = False) -> Condition:
    return Condition(UNTESTED, f"no figure for {what}", first)


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


def _decide(
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
    if interval.half is None:
        alone = any(figure.n < 2 for figure in figures.values() if not figure.exact)
        unknown = (
            "the spread is not known with one seed" if alone else "the seeds agree to rounding: no sign of the spread"
        )
        result, why = INCONCLUSIVE, f"{unknown}; more seeds would decide"
    else:
        first, last = interval.ends
        result = HOLDS if low <= first and last <= high else FAILS if last < low or first > high else INCONCLUSIVE
        why = "" if interval.half == 0 else f"95 % interval {first:.4g} to {last:.4g}"
    if result == HOLDS and any(not figures[name].whole for name in favours):
        result = INCONCLUSIVE
        notes.append("so this does not count as holding")
    if result == FAILS and any(figures[name].failed or figures[name].missed for name in refuted_for):
        result = INCONCLUSIVE
        notes.append("so this does not count as refuted")
    if result in (HOLDS, FAILS) and any(figure.at_end and not figure.exact for figure in figures.values()):
        result = INCONCLUSIVE
        notes.append("so a better rate may lie beyond")
    met, compared = _met(interval, low, high, what), (interval, low, high) if interval.half else None
    return Condition(result, "; ".join([f"{text} ({why})" if why else text, *notes]), met=met, compared=compared)


def _above_by(condition: Mapping) -> tuple[float, float]:
    """The bounds of a quantity that must be above ``by``, which is not enough itself."""
    return math.nextafter(condition["by"], math.inf), math.inf


# -- conditions ------------------------------------------------------------------------------------------


def _ends(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[tuple[str, str, Figure, Figure] | str]:
    """For each method: its name, a description, and the figures at both ends of the axis; or what is missing."""
    axis = condition["along"]
    for method in condition["methods"]:
        at = f"{method}, {axis} {condition['from']} → {condition['to']}"
        first, last = (figure(method, **{axis: condition[end]}) for end in ("from", "to"))
        yield at if first is None or last is None else (method, at, first, last)


def _sign(condition: Mapping) -> int:
    return -1 if condition.get("lower_is_better") else 1


def _drops(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    for end in _ends(condition, figure):
        if isinstance(end, str):
            yield _missing(end)
            continue
        _, at, first, last = end
        fall = difference(first, last, paired=first.pairs_with(last)).times(_sign(condition))
        text = f"{at}: {first} → {last}, falls by {fall.centre:.4g}, asked: more than {condition['by']:g}"
        figures = {f"{condition['along']} {condition['from']}": first, f"{condition['along']} {condition['to']}": last}
        yield _decide(fall, *_above_by(condition), f"{at} falls", text, figures, list(figures)[:1])


def _keeps(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    for end in _ends(condition, figure):
        if isinstance(end, str):
            yield _missing(end)
            continue
        method, at, first, last = end
        names = [f"{condition['along']} {condition[label]}" for label in ("from", "to")]
        share = condition.get("share")
        if share is None:
            fall, high = (
                difference(first, last, paired=first.pairs_with(last)).times(_sign(condition)),
                condition["within"],
            )
            asked = f"falls by {fall.centre:.4g}, asked: at most {high:g}"
        else:
            majority = figure(method, "majority", **{condition["along"]: condition["from"]})
            if majority is None:
                yield _missing(f"the majority class, {at}")
                continue
            # fall <= share (first - majority), with everything on one side
            rest = first.scaled(1 - share)
            fall, high = difference(rest, last, paired=first.pairs_with(last)).plus(share * majority.mean), 0.0
            learned = first.mean - majority.mean
            asked = f"falls by {first.mean - last.mean:.4g} of {learned:.4g} above the majority class, asked: at most "
            asked += f"the share {share:g}; the fall is that share {fall.centre:+.4g}"
        text, figures = f"{at}: {first} → {last}, {asked}", dict(zip(names, (first, last)))
        yield _decide(fall, -math.inf, high, f"{at} keeps", text, figures, names, names[:1])


def _above(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    name = condition["better"]
    better, at = figure(name), "".join(f" {k}={v}" for k, v in condition.get("where", {}).items())
    for other in condition["than"]:
        worse = figure(other)
        if better is None or worse is None:
            yield _missing(f"{name} or {other}{at}")
            continue
        gap = difference(better, worse).times(_sign(condition))
        text = f"{name} {better} against {other} {worse}{at}: ahead by {gap.centre:.4g}"
        text += f", asked: more than {condition['by']:g}"
        yield _decide(
            gap, *_above_by(condition), f"{name} above {other}{at}", text, {name: better, other: worse}, [name]
        )


def _close(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    name, within = condition["to"], condition["within"]
    to = figure(name)
    for method in condition["methods"]:
        value = figure(method)
        if value is None or to is None:
            yield _missing(f"{method} or {name}")
            continue
        gap = difference(value, to)
        text = f"{method} {value} and {name} {to}: differ by {gap.centre:.4g}, asked: at most {within:g}"
        both = {method: value, name: to}
        yield _decide(gap, -within, within, f"{method} close to {name}", text, both, list(both), list(both))


def _ratio(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    name, base = condition["of"], condition["to"]
    of, to = figure(name), figure(base)
    if of is None or to is None or to.mean == 0:
        yield _missing(f"{name} or {base}")
        return
    about, within = condition["about"], condition["within"]
    text = f"{condition.get('metric', 'test_acc')}: {name} {of.mean:.5g} / {base} {to.mean:.5g} = "
    text += f"{of.mean / to.mean:.4g}, asked: {about:g} ± {within:g}"
    # The quotient is compared with a bound by the difference of `of` and the bound times `to`: beyond the bounds with
    # the nearer one, between them with both, so by the wider interval.
    bounds = about - within, about + within
    common = [to.by_seed[seed] for seed in to.by_seed if seed in of.by_seed]
    unit = statistics.fmean(common) if len(common) > 1 else to.mean  # a paired difference is over the common seeds
    by_bound = [difference(of, to.scaled(bound)).times(1 / unit).plus(bound) for bound in bounds]
    below, above = (interval.centre for interval in by_bound)
    if below < bounds[0]:
        quotient = by_bound[0]
    elif above > bounds[1]:
        quotient = by_bound[1]
    else:
        quotient = max(by_bound, key=lambda interval: math.inf if interval.half is None else interval.half)
    both = {name: of, base: to}
    yield _decide(quotient, *bounds, f"{name} / {base}", text, both, list(both), list(both))


def _value(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    metric = condition.get("metric", "test_acc")
    low, high = condition.get("at_least", -math.inf), condition.get("at_most", math.inf)
    bounds = (f"at least {low:g}", low > -math.inf), (f"at most {high:g}", high < math.inf)
    asked = " and ".join(words for words, given in bounds if given)
    # A bound on the side of better values is met in the method's favour, one on the other side is missed in it. Which
    # way a script's figures go is not known.
    sign = 0 if unknown(metric) else better(metric)
    good = not sign or ("at_least" if sign > 0 else "at_most") in condition
    bad = not sign or ("at_most" if sign > 0 else "at_least") in condition
    for method in condition["methods"]:
        value = figure(method)
        if value is None:
            yield _missing(f"{metric} of {method}")
        else:
            text = f"{metric} of {method}: {value}, asked: {asked}"
            what, figures = f"{metric} of {method}", {method: value}
            yield _decide(of_mean(value), low, high, what, text, figures, [method] * good, [method] * bad)


def _learns(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    for method in condition["methods"]:
        value, majority = figure(method), figure(method, "majority")
        if value is None or majority is None:
            yield _missing(f"{method} or the majority class", first=True)
            continue
        text = f"{method} learns: {value} against {majority.mean:.4g} for the majority class, asked: more than "
        text += f"{condition['by']:g} above"
        lead, bounds = of_mean(value).plus(-majority.mean), (*_above_by(condition), f"{method} learns")
        # A better rate beyond the end of the grid could only add to what was learned.
        decided = _decide(lead, *bounds, text, {method: dataclasses.replace(value, at_end=False)}, [method])
        if decided.verdict != HOLDS:
            decided = _decide(lead, *bounds, text, {method: value}, [method])
        result = UNTESTED if decided.verdict == FAILS else decided.verdict
        yield dataclasses.replace(decided, verdict=result, first=True)


def _curve(condition: Mapping, figure: Callable[..., Figure | None], method: str) -> dict[float, Figure] | None:
    """The figures of ``method`` at all points of an axis of numbers; None if one is missing."""
    at = {point: figure(method, **{condition["along"]: point}) for point in condition["points"]}
    there = {point: found for point, found in at.items() if found is not None}
    return there if len(there) == len(at) else None


def _wider(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    """By seed: each seed has a curve, a best point and a range of its own."""
    name, along, within, sign = condition["better"], condition["along"], condition["within"], _sign(condition)
    widths: dict[str, tuple[Figure, bool, str]] = {}
    for method in (name, *condition["than"]):
        curve = _curve(condition, figure, method)
        if curve is None:
            continue
        majority, curves = majority_of(curve), by_seed(curve, sign)
        spans = {s: span_of_best(values, within, sign, majority) for s, values in curves.items()}
        if found := figure_of({seed: span for seed, (span, _) in spans.items()}):
            lost = sum(any(seed in f.failed for f in curve.values()) for seed in spans)
            idle = sum(not learned(values, within, sign, majority) for values in curves.values())
            said = f"; {method}: {lost} of {len(spans)} seeds failed at a point" if lost else ""
            said += f"; {method}: {idle} of {len(spans)} seeds learned nothing at any point" if idle else ""
            exact = all(f.exact for f in curve.values())
            widths[method] = dataclasses.replace(found, exact=exact), any(end for _, end in spans.values()), said
    for other in condition["than"]:
        if name not in widths or other not in widths:
            yield _missing(f"{name} or {other} at every {along} of {condition['points']}")
            continue
        (first, first_ends, said), (second, second_ends, also) = widths[name], widths[other]
        gap = difference(first, second)
        text = f"{along} within {within:g} of the best: {name} {first} powers of ten, {other} {second}; wider by "
        text += f"{gap.centre:.4g}, asked: more than {condition['by']:g}{said}{also}"
        decided = _decide(gap, *_above_by(condition), f"{name} wider than {other}", text, {name: first, other: second})
        # A range that touches an end of the curve is at least as wide as it is seen.
        if decided.verdict == HOLDS and second_ends or decided.verdict == FAILS and first_ends:
            end = other if decided.verdict == HOLDS else name
            text = f"{decided.text}; the range of {end} touches an end of the curve, so it may be wider"
            decided = dataclasses.replace(decided, verdict=INCONCLUSIVE, text=text)
        yield decided


def _best(condition: Mapping, figure: Callable[..., Figure | None]) -> Iterator[Condition]:
    """Each method at the point that ``chosen_by`` is best at in the mean over seeds."""
    name, along, by = condition["better"], condition["along"], condition["chosen_by"]
    chosen: dict[str, tuple[float, Figure]] = {}
    for method in (name, *condition["than"]):
        held = _curve(condition, partial(figure, metric=by), method)
        curve = _curve(condition, figure, method)
        if curve is None or held is None:
            continue
        sign = better(by)
        worth = {p: sign * held[p].mean if held[p].n else -math.inf for p in held}
        point = max(held, key=worth.__getitem__)
        # Of a plateau that reaches an end, such as that of a method that learned nothing anywhere, the best is open.
        at_end = max(worth[min(held)], worth[max(held)]) >= worth[point] - 1e-9
        chosen[method] = point, dataclasses.replace(curve[point], at_end=at_end)
    for other in condition["than"]:
        if name not in chosen or other not in chosen:
            yield _missing(f"{name} or {other} at every {along} of {condition['points']}")
            continue
        (at, first), (elsewhere, second) = chosen[name], chosen[other]
        gap = difference(first, second).times(_sign(condition))
        text = f"{name} {first} at {along} {at:g} against {other} {second} at {elsewhere:g}, each where {by} is best: "
        text += f"ahead by {gap.centre:.4g}, asked: more than {condition['by']:g}"
        what = f"{name} at its best above {other} at its own"
        yield _decide(gap, *_above_by(condition), what, text, {name: first, other: second}, [name])


#: what conditions are measured in, other than in their metric
_UNITS = {"wider": "powers of ten", "ratio": "quotient"}
_JUDGES: dict[str, Callable[[Mapping, Callable[..., Figure | None]], Iterator[Condition]]] = {
    "drops": _drops,
    "keeps": _keeps,
    "above": _above,
    "close": _close,
    "ratio": _ratio,
    "learns": _learns,
    "value": _value,
    "wider": _wider,
    "best": _best,
}
