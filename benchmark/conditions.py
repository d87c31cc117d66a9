"""The conditions of claims: the figures that are compared, in whose favour, and the verdict.

A condition says that a sum of figures over seeds, such as the difference of two means, lies between two bounds. Its p
value is that of the nearer bound. ``adjust`` corrects the p values of all conditions of a report together (Benjamini
and Hochberg), and a condition is decided if its corrected one is at most 5 %: it *holds* inside of the bounds and *does
not hold* outside of them. Everything else is *inconclusive*, with one seed always.

Nothing holds in favour of a method with a seed that collapsed to the majority class, failed, or missed the target of a
metric, and nothing is refuted in favour of one with a seed that failed or missed it, which is not in its mean. With two
seeds nothing is decided where one collapsed: errors are not normal there, and two equal methods may differ in it by
chance. Nothing is decided by a method whose learning rate is at the end of the grid that was searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fs_lowrank.settings import Key, Origin, check_keys, check_value

from .intervals import LEVEL, Estimate, Figure, estimate
from .metrics import better, of_test_data, scale_of, unknown

HOLDS, FAILS, INCONCLUSIVE = "holds", "does not hold", "inconclusive"
UNTESTED, STALE = "not tested at this size", "stale"
#: by how much an accuracy on images differs between processors with and without AVX-512
_PROCESSORS = 0.002

#: a margin that is the paper's own spread in the experiment's task
PAPER = "paper"
_NAME, _NUMBER, _NAMES = Key(str), Key(float), Key(list, {"filled": True, "once": True})
_KEYS = {
    **dict.fromkeys(("is", "along", "better", "of", "metric", "chosen_by"), _NAME),
    **dict.fromkeys(("methods", "than"), _NAMES),
    "points": Key(list[int | float], _NAMES.meta),
    **dict.fromkeys(("by", "about", "at_least", "at_most"), _NUMBER),
    **dict.fromkeys(("from", "to"), Key(Any)),
    "within": Key(float | str, {"words": f"a number, or {PAPER!r}"}),
    "where": Key(dict),
    **dict.fromkeys(("lower_is_better", "spread"), Key(bool)),
}
#: (method, labels by axis, metric) -> figure
Lookup = Callable[[str, Mapping[str, str], str], Figure | None]
#: a sum: of each figure its factor and its name
Parts = Sequence[tuple[float, str, Figure | None]]
#: gives the figure of a method, for a metric and at labels of axes other than the condition's own
Getter = Callable[..., Figure | None]


def check_rule(condition: Any, origin: Origin, at: str) -> dict:
    """Check the condition at ``at`` in the file of a suite.

    Raises:
        UserError: an unknown condition, an unknown or missing key, a value of the wrong type.
    """
    if not isinstance(condition, Mapping):
        origin.wrong(at, condition, "a mapping, such as {is: drops, …}")
    kind = check_value(f"{at}.is", condition.get("is"), Key(str, {"choices": tuple(_KINDS)}), origin)
    _, required, optional = _KINDS[kind]
    valid = ("is", *required, *optional, "metric", "where", "spread")
    keys = {key: replace(_KEYS[key], required=key in required) for key in valid}
    checked = check_keys(condition, keys, origin, at)
    if isinstance(checked.get("within"), str) and (checked["within"] != PAPER or kind not in ("keeps", "close")):
        origin.wrong(f"{at}.within", checked["within"], f"a number, or of keeps and close {PAPER!r}")
    if kind == "above" and 0 < len({"along", "from", "to"} & checked.keys()) < 3:
        origin.fail(at, "compares changes along an axis: expected all of along, from and to")
    if "chosen_by" in checked and not better(checked["chosen_by"]):
        origin.wrong(f"{at}.chosen_by", checked["chosen_by"], "a metric that is better larger or smaller")
    if kind == "value" and not {"at_least", "at_most"} & checked.keys():
        origin.fail(at, "has no bound: expected at_least, at_most or both")
    return checked


@dataclass
class Condition:
    """That an estimate lies between two bounds, with its figures and its verdict.

    Attributes:
        subject: the condition in some words. where: its setting. requirement: the bounds in words.
        figures: name -> figure, of all terms of the estimate; None if there is none.
        estimate: None if a figure has no value.
        premise: whether the claim is not tested if this is not met, regardless of the other conditions.
        unit: of the estimate. bars: verdict -> an obstacle to it besides chance; empty if there is none.
        adjusted: the p value, corrected for all conditions of a report.
    """

    subject: str
    where: str
    requirement: str
    figures: Mapping[str, Figure | None]
    estimate: Estimate | None
    low: float
    high: float
    premise: bool = False
    unit: str = "test_acc"
    bars: Mapping[str, str] = field(default_factory=dict)
    adjusted: float | None = None

    @property
    def available(self) -> dict[str, Figure]:
        return {name: figure for name, figure in self.figures.items() if figure is not None}

    @property
    def slack(self) -> float:
        """The difference of accuracies on images that processors may cause: 0 if all runs are of the same one."""
        drawn = [figure for figure in self.available.values() if figure.splits and not figure.exact]
        processors = frozenset().union(*(figure.processors for figure in drawn))
        different = len(processors) > 1 or "" in processors
        return _PROCESSORS if drawn and different and scale_of(self.unit)[0] == 100 else 0.0

    @property
    def p(self) -> float | None:
        return None if self.estimate is None else self.estimate.p(self.low, self.high, self.slack)

    @property
    def towards(self) -> str:
        """The verdict of more seeds, if the centre stayed."""
        return HOLDS if self.estimate and self.low <= self.estimate.centre <= self.high else FAILS

    @property
    def verdict(self) -> str:
        if len(self.available) < len(self.figures):
            return UNTESTED
        if any(figure.stale and not figure.n for figure in self.available.values()):
            return STALE
        p = self.p if self.adjusted is None else self.adjusted
        decided = p is not None and p <= 1 - LEVEL and not self.bars.get(self.towards)
        result = self.towards if decided else INCONCLUSIVE
        return UNTESTED if self.premise and result == FAILS else result

    @property
    def met(self) -> tuple[float, float | None, float | None] | None:
        """By how much it is met, below 0 if it is not, and the 95 % interval of that; None if it is not known."""
        if self.estimate is None or not math.isfinite(self.estimate.centre):
            return None
        if (ends := self.estimate.ends) is None:
            return self.inside(self.estimate.centre), None, None
        first, last = ends
        middle = min(max((self.low + self.high) / 2, first), last) if math.isfinite(self.low + self.high) else first
        values = [self.inside(value) for value in (first, last, middle)]
        return self.inside(self.estimate.centre), min(values), max(values)

    def inside(self, value: float) -> float:
        """How far a value is from the nearer bound, below 0 if it is outside."""
        return min(value - self.low, self.high - value)

    @property
    def text(self) -> str:
        """All facts about it, without the verdict."""
        missing = [name for name, figure in self.figures.items() if figure is None]
        subject = ", ".join(filter(None, (self.subject, self.where)))
        if missing:
            return f"{subject}: no figure for {' and '.join(missing)}"
        facts = [f"{subject}: " + ", ".join(f"{name} {figure}" for name, figure in self.available.items())]
        if self.estimate is not None:
            facts[0] += f": {interval_text(self.estimate)}, asked: {self.requirement}"
            if self.estimate.error is None:
                single = any(figure.n < 2 for figure in self.available.values() if not figure.exact)
                reason = "with one seed" if single else "where the seeds agree to rounding"
                facts.append(f"the spread is not known {reason}")
            elif self.estimate.error and self.p is not None:
                corrected = "" if self.adjusted is None else f", {self.adjusted:.2g} among all conditions"
                facts.append(f"p {self.p:.2g}{corrected}")
            if self.slack:
                facts.append(f"{100 * self.slack:g} points are allowed for processors that differ or are not recorded")
        facts += [f"{name}: {note}" for name, figure in self.available.items() for note in figure.notes]
        versions = sorted(frozenset().union(*(figure.versions for figure in self.available.values())))
        facts += [f"the runs are of versions {' and '.join(versions)}"] * (len(versions) > 1)
        bar = self.bars.get(self.towards) if self.estimate else ""
        return "; ".join([*facts, *([f"so {bar}"] if bar else [])])


def interval_text(estimate: Estimate, form: str = ".4g", factor: float = 1.0) -> str:
    """An estimate with its 95 % interval."""
    ends = estimate.ends
    numbers = [format(factor * value, form) for value in (estimate.centre, *(ends or ()))]
    text = numbers[0] if ends is None or not estimate.error else "{} ({} to {})".format(*numbers)
    return text.replace("-", "−")


def verdict(conditions: Sequence[Condition]) -> str:
    """The verdict on all conditions together."""
    for ground in (STALE, UNTESTED, INCONCLUSIVE):
        if any(c.premise and c.verdict == ground for c in conditions):
            return ground
    verdicts = {c.verdict for c in conditions}
    return next((v for v in (FAILS, STALE, UNTESTED, INCONCLUSIVE, HOLDS) if v in verdicts), UNTESTED)


def adjust(conditions: Sequence[Condition]) -> None:
    """Correct the p values for all of the conditions, except exact ones and each ``premise``."""
    from scipy.stats import false_discovery_control

    chance = [c for c in conditions if c.p and not c.premise]
    for condition, p in zip(chance, false_discovery_control([c.p for c in chance]).tolist()):
        condition.adjusted = p


def judge(rule: Sequence[Mapping], look: Lookup) -> list[Condition]:
    """The conditions of a rule, separately for each method."""
    return [condition for entry in rule for condition in _KINDS[entry["is"]][0](entry, _getter(entry, look))]


def used(rule: Sequence[Mapping], look: Lookup) -> list[tuple[str, Mapping[str, str]]]:
    """The (method, labels) of all figures that a rule looks up."""
    seen: list[tuple[str, Mapping[str, str]]] = []

    def noting(method: str, labels: Mapping[str, str], metric: str) -> Figure | None:
        seen.append((method, labels))
        return look(method, labels, metric)

    judge([{**c, "within": 0} if c.get("within") == PAPER else c for c in rule], noting)
    return seen


def with_margins(rule: Sequence[Mapping], experiment: Any) -> list[Mapping]:
    """The rule with numbers for the margins that are the paper's: a method's own gap there and twice the gap's standard
    deviation. Such a condition is one of each of its methods; one whose figures the paper does not have is left out.

    Args:
        experiment: has as ``reference`` the paper's figures, in percent, by the labels of its ``axes``; or None.
    """
    rows = (experiment.reference or {}).get("values", {})
    values = {method: {str(k): v for k, v in row.items()} for method, row in rows.items()}

    def paper(method: str, labels: Mapping[str, str]) -> Sequence:
        """The mean, which is None if there is none, and the standard deviation."""
        key = " / ".join(labels[axis] for axis in experiment.axes if axis in labels)
        cell = next((c for k, c in values.get(method, {}).items() if k == key or k.startswith(f"{key} / ")), None)
        return cell if isinstance(cell, list) else (cell, 0.0)

    conditions: list[Mapping] = []
    for condition in rule:
        if condition.get("within") != PAPER:
            conditions.append(condition)
            continue
        for one in ({**condition, "methods": [method]} for method in condition["methods"]):
            (mean, spread), (other, other_spread) = (paper(*place) for place in used([one], lambda *_: None)[:2])
            if mean is not None and other is not None:
                gap = mean - other if one["is"] == "keeps" else abs(mean - other)
                within = round((gap + 2 * math.hypot(spread, other_spread)) / 100, 4)
                conditions.append({**one, "within": within})
    return conditions


def _getter(condition: Mapping, look: Lookup) -> Getter:
    """A function of a method, and of a metric and further labels, in the setting of a condition."""
    setting = {str(k): str(v) for k, v in condition.get("where", {}).items()}
    default = condition.get("metric", "test_acc")

    def figure(method: str, metric: str = default, **labels: Any) -> Figure | None:
        value = look(method, {**setting, **{k: str(v) for k, v in labels.items()}}, metric)
        return value if value is None or condition.get("spread", True) else replace(value, exact=True)

    return figure


# -- kinds ---------------------------------------------------------------------------------------------


def _difference(condition: Mapping, bound: float) -> str:
    """A bound of a difference, for an accuracy in points, too."""
    points, of_accuracy = f"{100 * bound:g}", scale_of(condition.get("metric", "test_acc"))[0] == 100
    return f"{bound:g}" + f" ({points} point{'s' * (points != '1')})" * (of_accuracy and bound != 0)


def _condition(
    condition: Mapping,
    subject: str,
    requirement: str,
    parts: Parts,
    bounds: tuple[float, float],
    favours: Sequence[str],
    refuted_for: Sequence[str] | None = None,
    shift: float = 0.0,
    unit: str = "",
) -> Condition:
    """A condition on the sum of ``parts``, each a factor, a name and a figure; of its negative if lower is better.

    Args:
        favours: the names of the figures in whose favour the condition holds. refuted_for: those in whose favour it is
            refuted; by default the others.
    """
    figures = {name: figure for _, name, figure in parts}
    sign = -1 if condition.get("lower_is_better") else 1
    measured = [(sign * factor, figure) for factor, _, figure in parts if figure is not None and figure.n]
    total = estimate(measured, shift) if len(measured) == len(parts) else None
    if refuted_for is None:
        refuted_for = [name for name in figures if name not in favours]
    available = {name: figure for name, figure in figures.items() if figure is not None}
    undecidable = any(figure.collapsed and figure.n < 3 for figure in available.values())
    lost = {name for name, figure in available.items() if figure.failed or figure.missed}
    bar = "a better rate may lie beyond" * any(figure.at_end and not figure.exact for figure in available.values())
    barred = undecidable or any(name in available and not available[name].complete for name in favours)
    bars = {
        HOLDS: "this does not count as holding" if barred else bar,
        FAILS: "this does not count as refuted" if undecidable or lost & {*refuted_for} else bar,
    }
    metric = condition.get("metric", "test_acc")
    subject += f" in {metric}" if metric not in ("test_acc", subject) else ""
    setting = ", ".join(f"{axis} {label}" for axis, label in condition.get("where", {}).items())
    return Condition(subject, setting, requirement, figures, total, *bounds, unit=unit or metric, bars=bars)


def _exceeds(condition: Mapping, subject: str, parts: Parts, detail: str = "") -> Condition:
    """A condition that the sum of ``parts`` is above ``by``, and not equal to it."""
    bounds = math.nextafter(condition["by"], math.inf), math.inf
    favours = [name for factor, name, _ in parts if factor > 0]
    requirement = f"more than {_difference(condition, condition['by'])}{detail}"
    return _condition(condition, subject, requirement, parts, bounds, favours)


def _fall(condition: Mapping, figure: Getter, method: str, factor: int) -> Parts:
    """The parts of a factor times the fall of a method along the axis."""
    axis, first, last = (condition[key] for key in ("along", "from", "to"))
    ends = ((factor, first), (-factor, last))
    return [(f, f"{method}, {axis} {label}", figure(method, **{axis: label})) for f, label in ends]


def _falls(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    """``drops`` and ``keeps``: by how much each method falls along an axis."""
    for method in condition["methods"]:
        parts = _fall(condition, figure, method, 1)
        if condition["is"] == "drops":
            yield _exceeds(condition, f"{method} falls", parts)
        else:
            bounds, names = (-math.inf, condition["within"]), [name for _, name, _ in parts]
            requirement = f"at most {_difference(condition, condition['within'])}"
            yield _condition(condition, f"{method} keeps", requirement, parts, bounds, names, names[:1])


def _above(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    """The lead of a method over others; along an axis, the difference of their falls."""
    name = condition["better"]
    for other in condition["than"]:
        if "along" in condition:
            parts = [*_fall(condition, figure, name, -1), *_fall(condition, figure, other, 1)]
            yield _exceeds(condition, f"{name} falls by less than {other}", parts)
        else:
            parts = [(1, name, figure(name)), (-1, other, figure(other))]
            yield _exceeds(condition, f"{name} above {other}", parts)


def _close(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    name, margin = condition["to"], condition["within"]
    for method in condition["methods"]:
        parts = [(1, method, figure(method)), (-1, name, figure(name))]
        subject, names = f"{method} close to {name}", [method, name]
        requirement = f"at most {_difference(condition, margin)} apart"
        yield _condition(condition, subject, requirement, parts, (-margin, margin), names, names)


def _ratio(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    """The quotient of two means, whose error is that of ``of`` minus the nearer bound times ``to`` (Fieller)."""
    name, base, centre, margin = condition["of"], condition["to"], condition["about"], condition["within"]
    dividend, divisor = figure(name), figure(base)
    if divisor is not None and divisor.n and not divisor.mean:
        divisor = None  # there is no quotient
    unit = 1 / divisor.mean if divisor is not None and divisor.n else 0.0
    quotient = dividend.mean * unit if dividend is not None and dividend.n else 0.0
    requirement, bounds = f"{centre:g} ± {margin:g}", (centre - margin, centre + margin)
    nearer = min(bounds, key=lambda bound: abs(quotient - bound))
    parts = [(unit, name, dividend), (-nearer * unit, base, divisor)]
    names = [name, base]
    yield _condition(condition, f"{name} / {base}", requirement, parts, bounds, names, names, nearer, "quotient")


def _value(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    metric = condition.get("metric", "test_acc")
    low, high = condition.get("at_least", -math.inf), condition.get("at_most", math.inf)
    requirement = " and ".join([f"at least {low:g}"] * (low > -math.inf) + [f"at most {high:g}"] * (high < math.inf))
    # A bound on the side of better values is met in the method's favour, one on the other side is missed in it. Which
    # way a script's figures go is not known.
    sign = 0 if unknown(metric) else better(metric)
    good = not sign or ("at_least" if sign > 0 else "at_most") in condition
    bad = not sign or ("at_most" if sign > 0 else "at_least") in condition
    for method in condition["methods"]:
        parts = [(1, method, figure(method))]
        yield _condition(condition, metric, requirement, parts, (low, high), [method] * good, [method] * bad)


def _learns(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    for method in condition["methods"]:
        value, majority = figure(method), figure(method, f"majority:{condition.get('metric', 'test_acc')}")
        if majority is not None:
            majority = replace(majority, exact=True)
        parts = [(1, method, value), (-1, "majority class", majority)]
        result = _exceeds(condition, f"{method} learns", parts)
        # A better rate beyond the end of the grid could only add to what was learned.
        learned = HOLDS if value is not None and value.complete else ""
        bars = {k: "" if k == learned else bar for k, bar in result.bars.items()}
        yield replace(result, premise=True, bars=bars)


def _curve(condition: Mapping, figure: Getter, method: str) -> dict[float, Figure] | None:
    """The figures of ``method`` at all points of an axis of numbers; None if one is missing."""
    curve = {point: figure(method, **{condition["along"]: point}) for point in condition["points"]}
    available = {point: value for point, value in curve.items() if value is not None}
    return available if len(available) == len(curve) else None


def _best(condition: Mapping, figure: Getter) -> Iterator[Condition]:
    """Each method at the point that ``chosen_by`` is best at.

    For each seed the point is that of the mean of the other seeds, so that no seed is judged by what it has chosen.
    Nothing is decided where test data choose.
    """
    name, by = condition["better"], condition["chosen_by"]
    chosen: dict[str, tuple[str, Figure | None]] = {}
    for method in (name, *condition["than"]):
        basis, curve = _curve(condition, partial(figure, metric=by), method), _curve(condition, figure, method)
        chosen[method] = (method, None) if basis is None or curve is None else _best_figure(basis, curve, by, method)
    for other in condition["than"]:
        parts = [(1, *chosen[name]), (-1, *chosen[other])]
        subject = f"{name} at its best above {other} at its own"
        lead = _exceeds(condition, subject, parts, f", each where {by} is best")
        if of_test_data(by):
            lead = replace(lead, bars=dict.fromkeys(lead.bars, "nothing is decided: test data have chosen the points"))
        yield lead


def _best_figure(
    basis: Mapping[float, Figure], curve: Mapping[float, Figure], by: str, method: str
) -> tuple[str, Figure | None]:
    """The figure of a method at the point that the other seeds choose, with a name that has the points."""
    import pandas as pd

    held = pd.DataFrame({point: entry.by_seed for point, entry in basis.items()})
    chosen, at_end = dict[int, float](), False
    for seed in sorted({s for entry in curve.values() for s in (*entry.by_seed, *entry.failed)}):
        means = held.drop(index=seed, errors="ignore").mean().fillna(held.mean())
        scores = (better(by) * means).fillna(-math.inf)
        chosen[seed] = float(scores.idxmax())
        # On a plateau that reaches an end, as of a method that learned nothing at any point, the best point is open.
        at_end |= bool(max(scores[min(curve)], scores[max(curve)]) >= scores.max() - 1e-9)
    points = sorted({*chosen.values()})
    figures = {seed: curve[point] for seed, point in chosen.items()}
    values = {seed: figure.by_seed[seed] for seed, figure in figures.items() if seed in figure.by_seed}
    collapsed = {value for point in points for value in curve[point].collapsed}
    return f"{method} at {' or '.join(f'{point:g}' for point in points)}", replace(
        curve[points[0]] if points else next(iter(curve.values())),
        by_seed=values,
        right={seed: figures[seed].right[seed] for seed in values if seed in figures[seed].right},
        failed=tuple(seed for seed in chosen if seed not in values),
        collapsed=tuple(sorted(value for value in values.values() if value in collapsed)),
        majority=next((f.majority for f in curve.values() if f.majority is not None), None),
        at_end=at_end,
        versions=frozenset().union(*(curve[point].versions for point in points)),
        processors=frozenset().union(*(curve[point].processors for point in points)),
    )


#: condition -> its function, required keys, and optional ones; ``docs/guides/benchmark.md`` says what each means
_KINDS: dict[str, tuple[Callable[[Mapping, Getter], Iterator[Condition]], tuple[str, ...], tuple[str, ...]]] = {
    "drops": (_falls, ("methods", "along", "from", "to", "by"), ("lower_is_better",)),
    "keeps": (_falls, ("methods", "along", "from", "to", "within"), ("lower_is_better",)),
    "above": (_above, ("better", "than", "by"), ("lower_is_better", "along", "from", "to")),
    "close": (_close, ("methods", "to", "within"), ()),
    "ratio": (_ratio, ("of", "to", "about", "within"), ()),
    "learns": (_learns, ("methods", "by"), ()),
    "value": (_value, ("methods",), ("at_least", "at_most")),
    "best": (_best, ("better", "than", "along", "points", "chosen_by", "by"), ("lower_is_better",)),
}
