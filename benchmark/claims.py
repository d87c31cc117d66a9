"""Verdicts on the papers' claims, by the rules in the suites.

A condition compares a quantity, such as the difference of two means over seeds, with the margin that the claim states,
by the quantity's 95 % confidence interval (``intervals``):

* ``holds``: the whole interval meets the condition; ``does not hold``: no part of it does.
* ``inconclusive``: anything else; with one seed the interval is not known. The text says how many seeds would decide.
* ``not tested at this size``: a figure is missing.

A claim does not hold if one of its conditions does not. The more conditions there are, the more often one is not met by
chance, so where there are k of them, each is refuted by its interval at the level 1 - 0.05 / k (Bonferroni). A claim
that is true is then refuted in at most 2.5 % of cases, however many conditions it has.

What else keeps a condition from being decided is in ``decide``, and the kinds of conditions in ``conditions``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fs_lowrank.settings import Key, Origin, check_keys, check_value

from .conditions import JUDGES, UNITS, Looked
from .decide import Condition, together
from .intervals import Figure
from .metrics import better

#: condition -> required keys, and optional ones; ``docs/guides/benchmark.md`` says what each condition means
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
        for unit in [UNITS.get(condition["is"], condition.get("metric", "test_acc"))]
        for result in JUDGES[condition["is"]](condition, _looking(condition, look))
    ]
    return together(results)


def used(rule: Sequence[Mapping], look: Lookup) -> list[tuple[str, Mapping[str, str]]]:
    """The (method, labels) of all figures that a rule looks up."""
    seen: list[tuple[str, Mapping[str, str]]] = []

    def noting(method: str, labels: Mapping[str, str], metric: str) -> Figure | None:
        seen.append((method, labels))
        return look(method, labels, metric)

    judge(rule, noting)
    return seen


def _looking(condition: Mapping, look: Lookup) -> Looked:
    """A function of a method, and of a metric and further labels, in the setting of a condition."""
    where = {str(k): str(v) for k, v in condition.get("where", {}).items()}
    asked = condition.get("metric", "test_acc")

    def figure(method: str, metric: str = asked, **labels: Any) -> Figure | None:
        found = look(method, {**where, **{k: str(v) for k, v in labels.items()}}, metric)
        return found if found is None or condition.get("spread", True) else dataclasses.replace(found, exact=True)

    return figure
