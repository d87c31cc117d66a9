"""Verdicts on the papers' claims, by the rules in the suites. ``RULES`` has all conditions.

A verdict is ``holds``, ``does not hold``, or ``not tested at this size``. A claim is not tested if a figure is missing
and no other refutes the claim, or if there is only one seed, so that the spread is unknown.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fs_lowrank.settings import Key, Origin, check_keys, check_value

HOLDS, FAILS, UNTESTED = "holds", "does not hold", "not tested at this size"

#: condition -> required keys besides ``metric`` and ``where``, and its meaning
RULES = {
    "drops": (
        ("methods", "along", "from", "to", "by"),
        "the mean falls by more than `by` from one label of the axis to the other, and by more than the spread",
    ),
    "keeps": (("methods", "along", "from", "to", "within"), "the mean falls by no more than `within`"),
    "above": (
        ("better", "than", "by"),
        "the mean of `better` is above that of each of `than` by more than `by` and more than the spread",
    ),
    "close": (("methods", "to", "within"), "the means differ by no more than `within`"),
    "ratio": (("of", "to", "about", "within"), "the quotient of the means is `about`, give or take `within`"),
    "learns": (
        ("methods", "by"),
        "the mean accuracy is above the majority class by more than `by`; else the claim is "
        "not tested, for nothing was learned that could be lost",
    ),
    "value": (("methods",), "the mean is at least `at_least`, at most `at_most`"),
}
_NAME, _NUMBER, _NAMES = Key(str), Key(float), Key(list)
_KEYS = {
    **dict.fromkeys(("is", "along", "better", "of", "metric"), _NAME),
    **dict.fromkeys(("methods", "than"), _NAMES),
    **dict.fromkeys(("by", "within", "about", "at_least", "at_most"), _NUMBER),
    **dict.fromkeys(("from", "to"), Key(Any)),
    "where": Key(dict),
    **dict.fromkeys(("lower_is_better", "spread"), Key(bool)),
}
_OPTIONAL = ("metric", "where", "at_least", "at_most", "lower_is_better", "spread")


@dataclass(frozen=True)
class Condition:
    """A condition of a rule with its result."""

    verdict: str
    text: str
    #: if it is not met, the claim is not tested, regardless of the other conditions
    first: bool = False


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, sample standard deviation (None for one seed), and the values by seed, if known."""

    mean: float
    std: float | None
    n: int
    by_seed: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + (f" ± {self.std:.2g}" if self.std is not None else "") + f" (n={self.n})"


def spread(values: Sequence[float] | Mapping[int, float]) -> Spread | None:
    """Mean and standard deviation of values, or of values by seed; None for no value."""
    if not values:
        return None
    by_seed = dict(values) if isinstance(values, Mapping) else {}
    values = list(by_seed.values()) or values
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values), by_seed)


def noise(*found: Spread) -> float:
    """The spread that a difference of means must exceed: the square root of the sum of the variances."""
    return math.sqrt(sum((f.std or 0.0) ** 2 for f in found))


def paired_noise(first: Spread, second: Spread) -> float:
    """The spread that the difference of two methods in one setting must exceed.

    Both methods have the same split, clients and batches for a seed, so this is the standard deviation of the
    differences by seed. If the seeds differ or there is only one, it is ``noise``.
    """
    if len(first.by_seed) < 2 or first.by_seed.keys() != second.by_seed.keys():
        return noise(first, second)
    return statistics.stdev(value - second.by_seed[seed] for seed, value in first.by_seed.items())


#: (method, labels by axis, metric) -> figure
Lookup = Callable[[str, Mapping[str, str], str], Spread | None]


def check_rule(condition: Any, origin: Origin, at: str) -> dict:
    """Check the condition at ``at`` in the file of a suite.

    Raises:
        UserError: an unknown condition, an unknown or missing key, a value of the wrong type.
    """
    if not isinstance(condition, Mapping):
        origin.wrong(at, condition, "a mapping, such as {is: drops, …}")
    kind = check_value(f"{at}.is", condition.get("is"), str, {"choices": tuple(RULES)}, origin)
    needs = RULES[kind][0]
    keys = {key: dataclasses.replace(_KEYS[key], required=key in needs) for key in ("is", *needs, *_OPTIONAL)}
    return check_keys(condition, keys, origin, at)


def judge(rule: Sequence[Mapping], look: Lookup) -> list[Condition]:
    """The results of all conditions of a rule, separately for each method."""
    found: list[Condition] = []
    for condition in rule:
        found += _JUDGES[condition["is"]](condition, look)
    return found


def verdict(conditions: Sequence[Condition]) -> str:
    """The verdict on all conditions together."""
    verdicts = {c.verdict for c in conditions}
    if any(c.first and c.verdict == UNTESTED for c in conditions) or not verdicts:
        return UNTESTED
    return next((v for v in (FAILS, UNTESTED) if v in verdicts), HOLDS)


def _where(condition: Mapping) -> dict[str, str]:
    return {str(k): str(v) for k, v in condition.get("where", {}).items()}


def _metric(condition: Mapping) -> str:
    return condition.get("metric", "test_acc")


def _condition(ok: bool, text: str) -> Condition:
    return Condition(HOLDS if ok else FAILS, text)


def _missing(what: str, first: bool = False) -> Condition:
    return Condition(UNTESTED, f"no figure for {what}", first)


def _beyond(gap: float, by: float, spread: float, seeds: bool, text: str) -> Condition:
    """Whether a gap exceeds ``by`` and the spread, which is unknown with one seed."""
    text += f" by {gap:.4g} (asked: more than {by:g}, "
    if not seeds:
        return Condition(UNTESTED, f"{text}spread unknown with one seed)")
    return _condition(gap > by and gap > spread, f"{text}spread {spread:.2g})")


def _fall(condition: Mapping, look: Lookup):
    """For each method: the figures at both ends of the axis, and the difference."""
    for method in condition["methods"]:
        first, last = (
            look(method, {**_where(condition), condition["along"]: str(condition[end])}, _metric(condition))
            for end in ("from", "to")
        )
        if first is None or last is None:
            yield method, None, None, 0.0
        else:
            sign = -1 if condition.get("lower_is_better") else 1
            yield method, first, last, sign * (first.mean - last.mean)


def _drops(condition: Mapping, look: Lookup) -> list[Condition]:
    found = []
    for method, first, last, fall in _fall(condition, look):
        at = f"{method}, {condition['along']} {condition['from']} → {condition['to']}"
        if first is None:
            found.append(_missing(at))
            continue
        found.append(
            _beyond(
                fall,
                condition["by"],
                noise(first, last),
                None not in (first.std, last.std),
                f"{at}: {first} → {last}, falls",
            )
        )
    return found


def _keeps(condition: Mapping, look: Lookup) -> list[Condition]:
    found = []
    for method, first, last, fall in _fall(condition, look):
        at = f"{method}, {condition['along']} {condition['from']} → {condition['to']}"
        found.append(
            _missing(at)
            if first is None
            else _condition(
                fall <= condition["within"],
                f"{at}: {first} → {last}, falls by {fall:.4g} (asked: at most {condition['within']:g})",
            )
        )
    return found


def _above(condition: Mapping, look: Lookup) -> list[Condition]:
    found, where, metric = [], _where(condition), _metric(condition)
    sign = -1 if condition.get("lower_is_better") else 1
    better = look(condition["better"], where, metric)
    at = " ".join(f"{k}={v}" for k, v in where.items())
    for other in condition["than"]:
        worse = look(other, where, metric)
        if better is None or worse is None:
            found.append(_missing(f"{condition['better']} or {other} {at}".strip()))
            continue
        gap = sign * (better.mean - worse.mean)
        asked = condition.get("spread", True)
        found.append(
            _beyond(
                gap,
                condition["by"],
                paired_noise(better, worse) if asked else 0,
                not asked or None not in (better.std, worse.std),
                f"{condition['better']} {better} against {other} {worse} {at}: ahead",
            )
        )
    return found


def _close(condition: Mapping, look: Lookup) -> list[Condition]:
    found, where, metric = [], _where(condition), _metric(condition)
    to = look(condition["to"], where, metric)
    for method in condition["methods"]:
        value = look(method, where, metric)
        if value is None or to is None:
            found.append(_missing(f"{method} or {condition['to']}"))
        else:
            gap = abs(value.mean - to.mean)
            found.append(
                _condition(
                    gap <= condition["within"],
                    f"{method} {value} and {condition['to']} {to}: "
                    f"differ by {gap:.4g} (asked: at most {condition['within']:g})",
                )
            )
    return found


def _ratio(condition: Mapping, look: Lookup) -> list[Condition]:
    where, metric = _where(condition), _metric(condition)
    of, to = look(condition["of"], where, metric), look(condition["to"], where, metric)
    if of is None or to is None or to.mean == 0:
        return [_missing(f"{condition['of']} or {condition['to']}")]
    quotient = of.mean / to.mean
    return [
        _condition(
            abs(quotient - condition["about"]) <= condition["within"],
            f"{metric}: {condition['of']} {of.mean:.5g} / {condition['to']} {to.mean:.5g} = {quotient:.4g} "
            f"(asked: {condition['about']:g} ± {condition['within']:g})",
        )
    ]


def _value(condition: Mapping, look: Lookup) -> list[Condition]:
    found, metric = [], _metric(condition)
    low, high = condition.get("at_least", -math.inf), condition.get("at_most", math.inf)
    for method in condition["methods"]:
        value = look(method, _where(condition), metric)
        bounds = (f"at least {low:g}", low > -math.inf), (f"at most {high:g}", high < math.inf)
        asked = " and ".join(words for words, given in bounds if given)
        found.append(
            _missing(f"{metric} of {method}")
            if value is None
            else _condition(low <= value.mean <= high, f"{metric} of {method}: {value} (asked: {asked})")
        )
    return found


def _learns(condition: Mapping, look: Lookup) -> list[Condition]:
    found, where = [], _where(condition)
    for method in condition["methods"]:
        value, majority = look(method, where, _metric(condition)), look(method, where, "majority")
        if value is None or majority is None:
            found.append(_missing(f"{method} or the majority class", first=True))
            continue
        gap = value.mean - majority.mean
        found.append(
            Condition(
                HOLDS if gap > condition["by"] else UNTESTED,
                f"{method} learns: {value} against {majority.mean:.4g} for the majority class (asked: more than "
                f"{condition['by']:g} above)",
                first=True,
            )
        )
    return found


_JUDGES = {
    "drops": _drops,
    "keeps": _keeps,
    "above": _above,
    "close": _close,
    "ratio": _ratio,
    "learns": _learns,
    "value": _value,
}
