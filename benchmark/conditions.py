"""The conditions of rules, one function for each kind: what is compared with what, and in whose favour.

Each takes the condition and a function that gives the figure of a method, and gives a result for each method.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from .curves import by_seed, learned, majority_of, span_of_best
from .decide import FAILS, HOLDS, INCONCLUSIVE, UNTESTED, Condition, decide
from .intervals import Figure, difference, figure_of, of_mean
from .metrics import better, of_test_data, unknown

#: the figure of a method, for a metric and at labels of axes other than the condition's own
Looked = Callable[..., Figure | None]


def _missing(what: str, first: bool = False) -> Condition:
    return Condition(UNTESTED, f"no figure for {what}", first)


def _above_by(condition: Mapping) -> tuple[float, float]:
    """The bounds of a quantity that must be above ``by``, which is not enough itself."""
    return math.nextafter(condition["by"], math.inf), math.inf


def _ends(condition: Mapping, figure: Looked) -> Iterator[tuple[str, str, Figure, Figure] | str]:
    """For each method: its name, a description, and the figures at both ends of the axis; or what is missing."""
    axis = condition["along"]
    for method in condition["methods"]:
        at = f"{method}, {axis} {condition['from']} → {condition['to']}"
        first, last = (figure(method, **{axis: condition[end]}) for end in ("from", "to"))
        yield at if first is None or last is None else (method, at, first, last)


def _sign(condition: Mapping) -> int:
    return -1 if condition.get("lower_is_better") else 1


def _drops(condition: Mapping, figure: Looked) -> Iterator[Condition]:
    for end in _ends(condition, figure):
        if isinstance(end, str):
            yield _missing(end)
            continue
        _, at, first, last = end
        fall = difference(first, last, paired=first.pairs_with(last)).times(_sign(condition))
        text = f"{at}: {first} → {last}, falls by {fall.centre:.4g}, asked: more than {condition['by']:g}"
        figures = {f"{condition['along']} {condition['from']}": first, f"{condition['along']} {condition['to']}": last}
        yield decide(fall, *_above_by(condition), f"{at} falls", text, figures, list(figures)[:1])


def _keeps(condition: Mapping, figure: Looked) -> Iterator[Condition]:
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
        yield decide(fall, -math.inf, high, f"{at} keeps", text, figures, names, names[:1])


def _above(condition: Mapping, figure: Looked) -> Iterator[Condition]:
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
        yield decide(
            gap, *_above_by(condition), f"{name} above {other}{at}", text, {name: better, other: worse}, [name]
        )


def _close(condition: Mapping, figure: Looked) -> Iterator[Condition]:
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
        yield decide(gap, -within, within, f"{method} close to {name}", text, both, list(both), list(both))


def _ratio(condition: Mapping, figure: Looked) -> Iterator[Condition]:
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
    yield decide(quotient, *bounds, f"{name} / {base}", text, both, list(both), list(both))


def _value(condition: Mapping, figure: Looked) -> Iterator[Condition]:
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
            yield decide(of_mean(value), low, high, what, text, figures, [method] * good, [method] * bad)


def _learns(condition: Mapping, figure: Looked) -> Iterator[Condition]:
    for method in condition["methods"]:
        value, majority = figure(method), figure(method, "majority")
        if value is None or majority is None:
            yield _missing(f"{method} or the majority class", first=True)
            continue
        text = f"{method} learns: {value} against {majority.mean:.4g} for the majority class, asked: more than "
        text += f"{condition['by']:g} above"
        lead, bounds = of_mean(value).plus(-majority.mean), (*_above_by(condition), f"{method} learns")
        # A better rate beyond the end of the grid could only add to what was learned.
        decided = decide(lead, *bounds, text, {method: dataclasses.replace(value, at_end=False)}, [method])
        if decided.verdict != HOLDS:
            decided = decide(lead, *bounds, text, {method: value}, [method])
        result = UNTESTED if decided.verdict == FAILS else decided.verdict
        yield dataclasses.replace(decided, verdict=result, first=True)


def _curve(condition: Mapping, figure: Looked, method: str) -> dict[float, Figure] | None:
    """The figures of ``method`` at all points of an axis of numbers; None if one is missing."""
    at = {point: figure(method, **{condition["along"]: point}) for point in condition["points"]}
    there = {point: found for point, found in at.items() if found is not None}
    return there if len(there) == len(at) else None


def _wider(condition: Mapping, figure: Looked) -> Iterator[Condition]:
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
        decided = decide(gap, *_above_by(condition), f"{name} wider than {other}", text, {name: first, other: second})
        if decided.verdict in (HOLDS, FAILS) and min(first.n, second.n) < 3 and not (first.exact or second.exact):
            text = f"{decided.text}; a range is one of few numbers, in which two seeds may agree by chance"
            decided = dataclasses.replace(decided, verdict=INCONCLUSIVE, text=text)
        # A range that touches an end of the curve is at least as wide as it is seen.
        ends, end = (second_ends, other) if gap.centre > condition["by"] else (first_ends, name)
        if ends:
            text = f"{decided.text}; the range of {end} touches an end of the curve, so it may be wider"
            decided = dataclasses.replace(decided, verdict=INCONCLUSIVE, text=text, barred=True)
        yield decided


def _best(condition: Mapping, figure: Looked) -> Iterator[Condition]:
    """Each method at the point that ``chosen_by`` is best at in the mean over seeds.

    Nothing is decided where test data choose: the best of several noisy scores is too good, and by how much differs.
    """
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
        decided = decide(gap, *_above_by(condition), what, text, {name: first, other: second}, [name])
        if of_test_data(by):
            text = f"{decided.text}; the points are chosen by test data, which decides nothing"
            decided = dataclasses.replace(decided, verdict=INCONCLUSIVE, text=text, barred=True)
        yield decided


#: what conditions are measured in, other than in their metric
UNITS = {"wider": "powers of ten", "ratio": "quotient"}
JUDGES: dict[str, Callable[[Mapping, Looked], Iterator[Condition]]] = {
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
