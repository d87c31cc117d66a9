"""Verdicts of the rules, checked by hand, against scipy, and by simulation."""

import dataclasses
import math
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from benchmark.conditions import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    STALE,
    UNTESTED,
    adjust,
    check_rule,
    judge,
    verdict,
    with_margins,
)
from benchmark.intervals import Estimate, Figure, estimate, pooled, right_rows, rows_of
from benchmark.job import at_the_end
from benchmark.metrics import of_test_data, scale_of
from benchmark.results import ExperimentResults, figure_text, value
from benchmark.suite import load_suite
from benchmark.verdicts import gap_text
from fs_lowrank.settings import Origin

FIGURES = {
    ("lora", "3"): [0.80, 0.82, 0.81],
    ("lora", "50"): [0.60, 0.62, 0.61],
    ("rolora", "3"): [0.802, 0.798, 0.80],
    ("rolora", "50"): [0.792, 0.79, 0.788],
    ("noisy", "3"): [0.9, 0.5, 0.7],
    ("noisy", "50"): [0.8, 0.4, 0.7],
}
FALL = {"along": "clients", "from": 3, "to": 50}


def by_seed(values):
    """As of images, which are paired by seed."""
    figure = Figure(dict(enumerate(values)))
    return dataclasses.replace(figure, splits={seed: f"split {seed}" for seed in figure.by_seed})


def of_text(values):
    return Figure(dict(enumerate(values))) if len(values) else None


def look(method, labels, metric):
    if metric.startswith("majority"):
        return Figure({0: 0.5}, exact=True)
    return of_text(FIGURES.get((method, labels["clients"]), []))


def judged(rule, look=look):
    (condition,) = judge([rule], look)
    return condition


def test_intervals_are_equal_to_scipys():
    first, second = [0.80, 0.50, 0.60, 0.70], [0.77, 0.46, 0.57, 0.71]
    one, oracle = estimate([(1, of_text(first))]), stats.ttest_1samp(first, 0.2)
    ci = oracle.confidence_interval(0.95)
    assert one.ends == pytest.approx((ci.low, ci.high)) and one.p(0.2, math.inf) == pytest.approx(oracle.pvalue)
    for make, oracle in (
        (by_seed, stats.ttest_rel(first, second)),
        (of_text, stats.ttest_ind(first, second, equal_var=False)),
    ):
        gap, ci = estimate([(1, make(first)), (-1, make(second))]), oracle.confidence_interval(0.95)
        assert gap.ends == pytest.approx((ci.low, ci.high)) and gap.p(0, math.inf) == pytest.approx(oracle.pvalue)


def test_only_seeds_that_both_have_are_paired():
    def drawn(values):
        return dataclasses.replace(Figure(values), splits={seed: str(seed) for seed in values})

    one = drawn({0: 0.80, 1: 0.50, 2: 0.60, 7: 0.1})
    other = drawn({0: 0.77, 1: 0.46, 2: 0.57, 5: 0.9})
    gap = estimate([(1, one), (-1, other)])
    assert (
        gap.centre == pytest.approx((0.03 + 0.04 + 0.03) / 3) and gap.degrees == pytest.approx(2) and gap.error < 0.01
    )
    apart = [dataclasses.replace(other, splits={**other.splits, 1: "another"}), drawn({0: 0.7, 9: 0.2})]
    assert all(estimate([(1, one), (-1, figure)]).error > 0.1 for figure in apart)  # Welch
    assert estimate([(1, drawn({0: 0.8})), (-1, drawn({0: 0.7}))]).error is None


def test_a_spread_of_rounding_errors_gives_no_interval():
    gap = estimate([(1, by_seed([0.1 + 0.2, 0.4 + 0.2])), (-1, by_seed([0.2, 0.5]))])
    assert np.std([0.1 + 0.2 - 0.2, 0.4 + 0.2 - 0.5]) > 0 and gap.error is None
    assert estimate([(1, by_seed([0.7, 0.7]))]).error is None
    equal = judged({"is": "value", "methods": ["a"], "at_least": 0.1}, lambda *place: by_seed([0.7, 0.7]))
    assert equal.verdict == INCONCLUSIVE and "the seeds agree to rounding" in equal.text
    assert estimate([(1, Figure({0: 0.7, 1: 0.7}, exact=True))]).error == 0.0


def recorded(right, test_set="t"):
    """The figure of runs, (seeds, rows) bool, that have recorded which rows were right."""
    figure = Figure(dict(enumerate(right.mean(axis=1))))
    return dataclasses.replace(figure, right={s: rows_of(right_rows(test_set, row)) for s, row in enumerate(right)})


def test_the_rows_are_a_part_of_an_interval_where_they_are_recorded():
    """By hand: the variance over seeds and that of the rows' differences, over their numbers; the rows of other tests
    are drawn by themselves."""
    a = np.array([[1, 1, 1, 0, 1, 0, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1, 1, 0]], bool)
    b = np.array([[0, 1, 1, 0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0, 0, 0, 1]], bool)
    seeds = sum(x.mean(axis=1).var(ddof=1) / 2 for x in (a, b))
    shared = (a.mean(axis=0) - b.mean(axis=0)).var(ddof=1) / 9
    apart = sum(x.mean(axis=0).var(ddof=1) / 9 for x in (a, b))
    for test_set, rows in (("t", shared), ("other", apart)):
        found = estimate([(1, recorded(a)), (-1, recorded(b, test_set))])
        assert found.error == pytest.approx(math.sqrt(seeds + rows))
    assert estimate([(1, recorded(a))]).error ** 2 == pytest.approx(
        a.mean(axis=1).var(ddof=1) / 2 + a.mean(axis=0).var(ddof=1) / 9
    )
    old = dataclasses.replace(recorded(b), right={0: recorded(b).right[0]})
    assert estimate([(1, recorded(a)), (-1, old)]).error == pytest.approx(math.sqrt(seeds))


@pytest.mark.more
@pytest.mark.parametrize(
    "n, of_seeds, of_rows", [(3, 0.0, 1.0), (3, 0.02, 1.0), (5, 0.01, 0.5), (3, 0.02, 0.0), (2, 0.01, 1.0)]
)
def test_equal_methods_are_told_apart_in_5_percent_at_most_over_seeds_and_rows(n, of_seeds, of_rows):
    """They are equal over all rows that could be drawn. Each has rows that suit it, and seeds move all its rows."""
    rng, times, rows, told = np.random.default_rng(1), 2000, 400, 0
    for _ in range(times):
        ease = 1.0 + rng.normal(0, 1, rows)
        runs = []
        for _ in range(2):
            own = ease + of_rows * rng.normal(0, 1, rows)
            chance = stats.norm.cdf(own / math.sqrt(1 + of_rows**2))
            moved = np.clip(chance + of_seeds * rng.normal(0, 1, (n, 1)), 0, 1)
            runs.append(recorded(rng.random((n, rows)) < moved))
        p = estimate([(1, runs[0]), (-1, runs[1])]).p(0, math.inf)
        told += p is not None and p <= 0.05
    assert told / times <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / times)


def test_several_settings_together():
    """By hand: variances 1, 1 and 4 are 1/4, 1/4 and 1/16 of the weights with 3 between the settings, and so on."""
    alike = pooled([Estimate(1.0, 0.1, 2), Estimate(1.0, 0.1, 4)])
    assert (alike.centre, alike.error, alike.degrees) == pytest.approx((1.0, 0.1 / math.sqrt(2), 1))
    centres, errors = np.array([0.0, 4.0, 8.0]), np.array([1.0, 1.0, 2.0])
    weights = 1 / errors**2
    fixed = np.average(centres, weights=weights)
    spare = (weights * (centres - fixed) ** 2).sum() - 2
    between = spare / (weights.sum() - (weights**2).sum() / weights.sum())
    weights = 1 / (errors**2 + between)
    centre = np.average(centres, weights=weights)
    error = math.sqrt((weights * (centres - centre) ** 2).sum() / 2 / weights.sum())
    found = pooled([Estimate(c, e, 2) for c, e in zip(centres, errors)])
    assert between > 0 and found.centre == pytest.approx(centre) and found.degrees == 2
    assert found.error == pytest.approx(max(error, math.sqrt(1 / weights.sum())))


def test_two_settings_are_shown_in_place_of_an_interval_that_says_nothing():
    settings = [Estimate(0.02, 0.005, 4), Estimate(-0.01, 0.004, 4), Estimate(0.01, 0.004, 4)]
    condition = SimpleNamespace(unit="test_acc")
    two = gap_text("a above b", pooled(settings[:2]), settings[:2], condition)
    assert re.fullmatch(r"a above b: 0\.\d\d \(2\.00 and −1\.00\) points, 2 settings", two)
    assert re.search(r" to .* points, 3 settings$", gap_text("a above b", pooled(settings), settings, condition))
    assert gap_text("a above b", settings[0], [], condition).endswith("(0.61 to 3.39) points")


def test_p_values_are_corrected_for_all_conditions():
    gaps = np.array([-0.030, -0.028, -0.020])

    def look(method, labels, metric):
        values = {"a": [0.8, 0.7, 0.6], "near": np.array([0.8, 0.7, 0.6]) - gaps, "far": [1.01, 0.90, 0.81]}
        return Figure({0: 0.5}, exact=True) if metric.startswith("majority") else by_seed(list(values[method]))

    learns = {"is": "learns", "methods": ["a"], "by": 0.01}
    rule = [learns, *({"is": "above", "better": "a", "than": [b], "by": 0} for b in ("far", "near", "near", "near"))]
    found = judge(rule, look)
    assert [c.verdict for c in found[1:]] == [FAILS] * 4
    adjust(found)
    expected = stats.false_discovery_control([c.p for c in found[1:]])
    assert found[0].adjusted is None and [c.adjusted for c in found[1:]] == pytest.approx(expected.tolist())
    assert f"{expected[0]:.2g} among all conditions" in found[1].text
    weak = dataclasses.replace(found[1], adjusted=0.2)
    assert weak.verdict == INCONCLUSIVE


def of_paper(reference, axes):
    return SimpleNamespace(reference=reference, axes=dict.fromkeys(axes))


def test_the_margin_of_a_task_is_the_papers_own():
    """Of RoLoRA 0.69 points and twice the standard deviation of the difference; of a single figure, nothing more."""
    row = {3: [95.49, 0.16], 50: [94.80, 0.17]}
    reference = {"values": {"rolora": row, "fedlora": {3: [95.62, 0.17], 50: 93.0}, "ffa_lora": {3: 95.0}}}
    keeps = {"is": "keeps", "along": "clients", "from": 3, "to": 50, "within": "paper"}
    keeps["methods"] = ["flora", "rolora", "fedlora", "ffa_lora"]
    close = {"is": "close", "methods": ["rolora"], "to": "fedlora", "within": "paper", "where": {"clients": 3}}
    found = with_margins([keeps, close], of_paper(reference, ["clients"]))
    assert [c["methods"] for c in found] == [["rolora"], ["fedlora"], ["rolora"]]  # the paper has no other at both ends
    both = 2 * math.hypot(0.16, 0.17)
    margins = [0.69 + both, 2.62 + 2 * 0.17, 0.13 + both]
    assert [100 * c["within"] for c in found] == pytest.approx(margins, abs=1e-2)
    assert with_margins([keeps], of_paper(None, ["clients"])) == []
    assert with_margins([{**close, "within": 0.1}], of_paper(None, [])) == [{**close, "within": 0.1}]


def test_the_papers_figures_are_found_by_the_axes_in_their_order():
    values = {"rolora": {"2 / 4": 10, "2 / 8": 40, "4 / 2": 90, "8 / 2": 86}}
    keeps = {"is": "keeps", "methods": ["rolora"], "along": "clients", "from": 4, "to": 8, "where": {"rank": 2}}
    (found,) = with_margins([{**keeps, "within": "paper"}], of_paper({"values": values}, ["clients", "rank"]))
    assert found["within"] == 0.04


def test_who_falls_by_less():
    """LoRA falls by 0.2, RoLoRA by 0.01."""
    rule = {"is": "above", "better": "rolora", "than": ["lora"], "by": 0, **FALL}
    found = judged(rule)
    assert found.verdict == HOLDS and found.estimate.centre == pytest.approx(0.19)
    assert judged({**rule, "better": "lora", "than": ["rolora"]}).verdict == FAILS


def test_versions_and_processors_are_said():
    """On images a difference clears its margin by what processors add, unless all runs are of one processor."""

    def look_at(first, second):
        of = {"a": (np.array([0.8015, 0.7012, 0.6013]), first), "b": (np.array([0.8, 0.7, 0.6]), second)}
        return lambda method, labels, metric: dataclasses.replace(
            by_seed(of[method][0]), processors=frozenset([of[method][1]]), versions=frozenset(["0.1.0", "0.2.0"])
        )

    above = {"is": "above", "better": "a", "than": ["b"], "by": 0}
    same, other, unknown = (judged(above, look_at("x", processor)) for processor in ("x", "y", ""))
    assert same.verdict == HOLDS and "of versions 0.1.0 and 0.2.0" in same.text
    assert other.verdict == unknown.verdict == INCONCLUSIVE and "0.2 points are allowed for processors" in other.text
    at_loss = judged({**above, "metric": "test_loss"}, look_at("x", "y"))
    assert at_loss.verdict == HOLDS


def test_of_a_quantity_between_two_bounds_the_middle_is_met_most():
    def spread(method, labels, metric):
        return by_seed([0.4, 0.5, 0.9] if method == "wide" else [0.5, 0.5, 0.5])

    centre, low, high = judged({"is": "value", "methods": ["wide"], "at_least": 0.5, "at_most": 0.7}, spread).met
    assert (centre, high) == pytest.approx((0.1, 0.1)) and low < -0.3
    alone = judged({"is": "value", "methods": ["one"], "at_least": 0.4}, lambda *_: by_seed([0.5]))
    assert alone.met == (pytest.approx(0.1), None, None)


def test_no_seed_is_judged_by_what_it_has_chosen():
    """By all seeds together the second rate is best; without the last seed, whose validation says so, the first is."""
    held = {"1.0": [0.8, 0.8, 0.5], "10.0": [0.7, 0.7, 0.95]}
    tested = {"1.0": [0.81, 0.82, 0.5], "10.0": [0.7, 0.71, 0.9]}

    def look_at(method, labels, metric):
        values = (held if metric == "val_acc" else tested)[labels["rate"]] if method == "a" else [0.5, 0.52, 0.51]
        of = "new" if method == "a" and labels["rate"] == "10.0" else "old"
        return dataclasses.replace(by_seed(values), processors=frozenset([of]), versions=frozenset([of]))

    rule = {"is": "best", "better": "a", "than": ["other"], "along": "rate", "points": [1.0, 10.0], "by": 0}
    found = judged({**rule, "chosen_by": "val_acc"}, look_at)
    assert [*found.available["a at 1 or 10"].by_seed.values()] == [0.7, 0.71, 0.5]
    assert found.slack > 0 and "of versions new and old" in found.text  # of both points


def normal(rng, n, first=1.0, second=1.0):
    return first * rng.normal(size=n), second * rng.normal(size=n)


def of_few_rows(rng, n, rows=100):
    return rng.binomial(rows, 0.7, n) / rows, rng.binomial(rows, 0.7, n) / rows


@pytest.mark.more
@pytest.mark.parametrize("n", [2, 3, 5, 10])
@pytest.mark.parametrize(
    "draw, paired",
    [
        (normal, True),
        (normal, False),
        (partial(normal, second=3.0), False),
        (partial(normal, second=0.05), False),
        (of_few_rows, True),
        (of_few_rows, False),
        (partial(of_few_rows, rows=8), True),
    ],
)
def test_equal_methods_are_told_apart_in_5_percent_at_most(n, draw, paired):
    """1,000 pairs of methods that are equal; three standard errors of the count are allowed."""
    rng, times, told = np.random.default_rng(n), 1000, 0
    for _ in range(times):
        first, second = map(by_seed if paired else of_text, draw(rng, n))
        p = estimate([(1, first), (-1, second)]).p(0, math.inf)
        told += p is not None and p <= 0.05
    few = n == 2 and not paired  # Welch's formula is not exact where one spread is far larger
    assert told / times <= 0.05 + 0.02 * few + 3 * math.sqrt(0.05 * 0.95 / times)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("chance", [0.2, 0.5])
def test_equal_methods_whose_seeds_collapse_are_told_apart_in_5_percent_at_most(n, chance):
    """Each seed of both is at the majority class with the same probability, which is no normal error."""
    rng, times, told = np.random.default_rng(n), 400, 0
    rule = {"is": "above", "better": "a", "than": ["b"], "by": 0}

    def figure(*_):
        values = np.where(rng.random(n) < chance, 0.5, 0.8 + 0.01 * rng.normal(size=n))
        return dataclasses.replace(by_seed(values), collapsed=tuple(values[values == 0.5]), majority=0.5)

    for _ in range(times):
        told += judged(rule, figure).verdict != INCONCLUSIVE
    assert told / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


@pytest.mark.more
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_claim_with_many_conditions_is_refuted_by_chance_as_rarely_as_one(n):
    """A shipped rule with six conditions, and methods that are equal, which is as near to true as a claim can be."""
    rule = load_suite("glue", "small").claims["dirichlet"]["rule"]
    rng, times, refuted = np.random.default_rng(n), 400, 0
    for _ in range(times):
        shared, drawn = {}, {}

        def look(method, labels, metric, shared=shared, drawn=drawn):
            where = tuple(sorted(labels.items()))
            common = shared.setdefault(where, rng.normal(size=n))
            if (method, where) not in drawn:
                drawn[method, where] = by_seed(0.7 + 0.01 * (common + rng.normal(size=n)))
            return drawn[method, where]

        conditions = judge(rule, look)
        adjust(conditions)
        assert len(conditions) == 6
        refuted += verdict(conditions) == FAILS
    assert refuted / times <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / times)


@pytest.mark.parametrize(
    "method, drops, keeps",
    [
        ("lora", HOLDS, FAILS),
        ("rolora", FAILS, HOLDS),
        ("noisy", INCONCLUSIVE, INCONCLUSIVE),
        ("absent", UNTESTED, UNTESTED),
    ],
)
def test_drops_and_keeps(method, drops, keeps):
    falls = {"is": "drops", "methods": [method], "by": 0.05, **FALL}
    assert judged(falls).verdict == drops
    assert judged({**falls, "lower_is_better": True}).verdict == (FAILS if drops == HOLDS else drops), "of a loss"
    assert judged({"is": "keeps", "methods": [method], "within": 0.02, **FALL}).verdict == keeps


def test_above():
    above = {"is": "above", "by": 0, "where": {"clients": 50}}
    assert judged({**above, "better": "rolora", "than": ["lora"]}).verdict == HOLDS
    assert judged({**above, "better": "lora", "than": ["rolora"]}).verdict == FAILS
    assert judged({**above, "better": "lora", "than": ["rolora"], "lower_is_better": True}).verdict == HOLDS
    noisy = judged({**above, "better": "rolora", "than": ["noisy"]})
    assert noisy.verdict == INCONCLUSIVE and "; p 0." in noisy.text
    for other, beside in (("lora", HOLDS), ("noisy", INCONCLUSIVE)):
        two = judge([{**above, "better": "rolora", "than": [other, "absent"]}], look)
        assert [c.verdict for c in two] == [beside, UNTESTED] and verdict(two) == UNTESTED


def test_a_method_that_learned_nothing_decides_no_claim():
    at = {"is": "learns", "methods": ["rolora"], "where": {"clients": 3}}
    assert judged({**at, "by": 0.02}).verdict == HOLDS
    assert judged({**at, "by": 0.35}).verdict == UNTESTED
    keeps = {"is": "keeps", "methods": ["rolora"], "within": 0.02, **FALL}
    assert verdict(judge([{**at, "by": 0.3}, keeps], look)) == INCONCLUSIVE


def test_close_ratio_value():
    """Equivalence holds if the whole interval is inside the margin, and is refuted if the whole interval is outside."""
    close = {"is": "close", "methods": ["rolora"], "to": "lora"}
    near = {**close, "where": {"clients": 3}}
    assert (
        judged({**near, "within": 0.05}).verdict == HOLDS and judged({**near, "within": 0.015}).verdict == INCONCLUSIVE
    )
    for name, other in (("rolora", "lora"), ("lora", "rolora")):
        apart = {"is": "close", "methods": [name], "to": other, "within": 0.05, "where": {"clients": 50}}
        assert judged(apart).verdict == FAILS
    assert "asked: at most 0.05 (5 points) apart" in judged({**near, "within": 0.05}).text
    ratio = {"is": "ratio", "of": "rolora", "to": "lora", "where": {"clients": 3}}
    assert judged({**ratio, "about": 1, "within": 0.1}).verdict == HOLDS
    assert judged({**ratio, "about": 0.5, "within": 0.1}).verdict == FAILS
    assert judged({**ratio, "about": 1, "within": 0.001}).verdict == INCONCLUSIVE
    at_least = {"is": "value", "methods": ["rolora"], "where": {"clients": 3}}
    found = judged({**at_least, "at_least": 0.7, "at_most": 0.9})
    assert found.verdict == HOLDS and "asked: at least 0.7 and at most 0.9" in found.text
    assert judged({**at_least, "at_least": 0.85}).verdict == FAILS
    assert judged({**at_least, "at_least": 0.80}).verdict == INCONCLUSIVE


@pytest.mark.parametrize("bound", [0.001, 0.01, 0.05, 0.1, 0.2, 0.3])
def test_by_how_much_a_condition_is_met_agrees_with_its_verdict(bound):
    at = {"where": {"clients": 3}}
    rules = [
        {"is": "above", "better": "rolora", "than": ["lora", "noisy"], "by": bound, "where": {"clients": 50}},
        {"is": "close", "methods": ["rolora", "noisy"], "to": "lora", "within": bound, **at},
        {"is": "ratio", "of": "rolora", "to": "lora", "about": 1, "within": bound, **at},
        {"is": "value", "methods": ["rolora", "noisy"], "at_least": 0.81 - bound, "at_most": 0.81 + bound, **at},
        {"is": "learns", "methods": ["rolora", "noisy"], "by": bound, **at},
        {"is": "drops", "methods": ["lora", "rolora"], "by": bound, **FALL},
        {"is": "keeps", "methods": ["lora", "rolora"], "within": bound, **FALL},
    ]
    conditions = judge(rules, look)
    assert len(conditions) == 13 and {c.unit for c in conditions} == {"test_acc", "quotient"}
    for condition in conditions:
        centre, low, high = condition.met
        assert low <= centre <= high
        if condition.verdict == HOLDS:
            assert low >= -1e-12
        elif condition.verdict == INCONCLUSIVE:
            assert low < 0 <= high
        else:
            assert high < 0


@pytest.mark.parametrize(
    "rule, blamed",
    [
        ({"is": "drops", "methods": ["lora"], "by": 0.05, **FALL}, {("lora", "3")}),
        ({"is": "keeps", "methods": ["rolora"], "within": 0.02, **FALL}, {("rolora", "3"), ("rolora", "50")}),
        (
            {"is": "close", "methods": ["rolora"], "to": "lora", "within": 0.05, "where": {"clients": 3}},
            {("rolora", "3"), ("lora", "3")},
        ),
        (
            {"is": "above", "better": "rolora", "than": ["lora"], "by": 0, "where": {"clients": 50}},
            {("rolora", "50")},
        ),
    ],
)
@pytest.mark.parametrize("flaw", [{"collapsed": (0.5,), "majority": 0.5}, {"failed": (3,)}])
def test_a_collapsed_or_failed_seed_holds_nothing_that_it_favours(rule, blamed, flaw):
    """Where the flawed figure is not the one in whose favour the condition is, the condition still holds."""
    assert judged(rule).verdict == HOLDS
    for place in FIGURES:

        def flawed(method, labels, metric, place=place):
            figure = look(method, labels, metric)
            return dataclasses.replace(figure, **flaw) if (method, labels["clients"]) == place else figure

        assert judged(rule, flawed).verdict == (INCONCLUSIVE if place in blamed else HOLDS), place


def test_what_was_learned_stands_at_the_end_of_a_grid_and_what_was_not_is_open():
    """A better rate beyond the end could only add to what was learned."""

    def at_end(method, labels, metric):
        return dataclasses.replace(look(method, labels, metric), at_end=not metric.startswith("majority"))

    learns = {"is": "learns", "methods": ["rolora"], "where": {"clients": 3}}
    assert judged({**learns, "by": 0.02}, at_end).verdict == HOLDS
    assert judged({**learns, "by": 0.35}, at_end).verdict == INCONCLUSIVE


@pytest.mark.more
@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_a_ratio_at_a_bound_holds_and_is_refuted_by_chance_in_2_5_percent_each(ratio):
    rng, draws = np.random.default_rng(0), 2000
    rule = {"is": "ratio", "of": "a", "to": "b", "about": 1.0, "within": 0.5}
    found = Counter()
    for _ in range(draws):
        drawn = {"a": by_seed(ratio + 1e-3 * rng.standard_normal(10)), "b": by_seed(1 + 0.3 * rng.standard_normal(10))}
        found[judged(rule, lambda method, *_, drawn=drawn: drawn[method]).verdict] += 1
    chance = 0.025 + 3 * math.sqrt(0.025 * 0.975 / draws)
    assert found[HOLDS] / draws <= chance and found[FAILS] / draws <= chance


def test_a_ratio_has_its_interval_on_its_own_scale():
    drawn = {"a": by_seed([5_200, 5_000, 4_800]), "b": by_seed([10_000] * 3)}
    ratio = judged({"is": "ratio", "of": "a", "to": "b", "about": 0.6, "within": 0.2}, lambda m, *_: drawn[m])
    assert ratio.verdict == HOLDS and "0.5 (0.4503 to 0.5497)" in ratio.text


@pytest.mark.parametrize(
    "metric, bound, refuted, held",
    [
        ("test_acc", {"at_least": 0.95}, FAILS, INCONCLUSIVE),
        ("test_acc", {"at_most": 0.6}, INCONCLUSIVE, HOLDS),
        ("test_loss", {"at_most": 0.6}, FAILS, INCONCLUSIVE),
        ("test_loss", {"at_least": 0.95}, INCONCLUSIVE, HOLDS),
        ("generate:boolq:acc", {"at_least": 0.95}, FAILS, INCONCLUSIVE),
        ("rounds_to:val_acc:0.7", {"at_most": 0.6}, FAILS, INCONCLUSIVE),
        ("client_test_acc_std", {"at_most": 0.6}, INCONCLUSIVE, INCONCLUSIVE),
        ("a figure of a study", {"at_most": 0.6}, INCONCLUSIVE, INCONCLUSIVE),
    ],
)
def test_a_value_is_judged_in_favour_of_no_method_with_failed_seeds(metric, bound, refuted, held):
    """The mean is that of the seeds that did not fail, so it is better than that of all."""
    (key, limit), rule = next(iter(bound.items())), {"is": "value", "methods": ["a"], "metric": metric, **bound}
    beyond = limit + (0.3 if key == "at_most" else -0.3)
    for centre, expected in ((beyond, refuted), (2 * limit - beyond, held)):
        figure = dataclasses.replace(by_seed([centre - 0.01, centre, centre + 0.01]), failed=(3, 4))
        assert judged(rule, lambda *_, figure=figure: figure).verdict == expected


def test_counted_figures_need_no_spread():
    def counted(method, labels, metric):
        return Figure({0: {"half": 5.0, "all": 10.0, "none": 0.0}[method]}, exact=True)

    ratio = {"is": "ratio", "of": "half", "to": "all", "about": 0.5, "within": 0}
    assert judged(ratio, counted).verdict == HOLDS
    assert judged({**ratio, "about": 0.6, "within": 0.05}, counted).verdict == FAILS
    assert judged({**ratio, "to": "none"}, counted).verdict == UNTESTED, "there is no quotient"
    above = {"is": "above", "better": "all", "by": 0}
    assert judged({**above, "than": ["half"]}, counted).verdict == HOLDS
    assert judged({**above, "than": ["all"]}, counted).verdict == FAILS  # equal is not better


def test_one_seed_decides_no_difference():
    def one(method, labels, metric):
        return by_seed([{"a": 0.9, "b": 0.1}[method] - (labels.get("clients") == "50") * 0.5])

    above = {"is": "above", "better": "a", "than": ["b"], "by": 0, "where": {"clients": 3}}
    for rule in (
        above,
        {**above, "better": "b", "than": ["a"]},
        {"is": "drops", "methods": ["a"], "by": 0.02, **FALL},
        {"is": "keeps", "methods": ["a"], "within": 0.9, **FALL},
        {"is": "close", "methods": ["a"], "to": "b", "within": 0.9},
        {"is": "value", "methods": ["a"], "at_least": 0.1},
    ):
        condition = judged(rule, one)
        assert condition.verdict == INCONCLUSIVE and "the spread is not known with one seed" in condition.text
    assert judged({**above, "spread": False}, one).verdict == HOLDS  # the suite says that this figure needs no spread


def test_a_missing_figure_does_not_hide_a_refutation():
    above = {"is": "above", "by": 0, "where": {"clients": 50}, "better": "lora"}
    assert verdict(judge([{**above, "than": ["rolora", "absent"]}], look)) == FAILS
    learns = {"is": "learns", "methods": ["absent"], "by": 0.02, "where": {"clients": 3}}
    assert verdict(judge([learns, {**above, "than": ["rolora"]}], look)) == UNTESTED  # no figure to compare


def record(seed, acc, majority=0.535, **more):
    return {"seed": seed, "hash": f"{seed}{acc}", "majority": majority, "metrics": {"test_acc": acc}, **more}


def results_of(**records):
    """Results that have one setting alone."""
    alone = SimpleNamespace(axes={})
    return ExperimentResults(None, alone, {(method, ""): listed for method, listed in records.items()})


def test_collapsed_seeds_are_named_and_counted_and_no_claim_holds_by_them():
    found = results_of(
        rolora=[record(s, a) for s, a in enumerate((0.670, 0.716, 0.465))],
        lora=[record(s, a) for s, a in enumerate((0.81, 0.82, 0.80))],
        worse=[record(s, a) for s, a in enumerate((0.40, 0.41, 0.42))],
    )
    figure = found.figure("rolora", "", "test_acc")
    assert figure.collapsed == (0.465,) and not figure.complete
    assert found.cell("rolora", "", "test_acc").endswith("(1 collapsed)")
    assert found.figure("rolora", "", "test_loss") is None

    keeps = judged({"is": "value", "methods": ["rolora"], "at_least": 0.1}, found.look)
    assert keeps.verdict == INCONCLUSIVE
    assert "1 of 3 seeds collapsed to the majority class (0.465; majority 0.535)" in keeps.text
    # a method that collapsed is worse nevertheless
    above = judged({"is": "above", "by": 0, "better": "lora", "than": ["worse"]}, found.look)
    assert above.verdict == HOLDS and "worse: 3 of 3 seeds collapsed" in above.text


@pytest.mark.parametrize("metric", ["test_acc", "test_acc_last5", "client_test_acc", "client_test_acc_last5"])
def test_a_seed_at_the_majority_class_has_collapsed(metric):
    """A mean of five equal accuracies may be above them by rounding."""
    majority = 352 / 872
    last5 = float(np.mean([majority] * 5))
    assert last5 > majority
    found = results_of(a=[record(0, majority, majority), record(1, 0.9, majority)])
    for name in ("test_acc_last5", "client_test_acc", "client_test_acc_last5"):
        found.all_records[0]["metrics"][name] = last5
        found.all_records[1]["metrics"][name] = 0.9
    assert found.figure("a", "", metric).collapsed == pytest.approx((majority,))
    assert found.cell("a", "", metric).endswith("(1 collapsed)")


def test_clients_own_models_are_compared_with_each_clients_own_most_frequent_class():
    """It is more than the majority class of the whole test set, which results of before do not exceed by it."""
    found = results_of(a=[record(s, 0.3, 0.1, client_majority=own) for s, own in enumerate((0.5, 0.6, 0.61))])
    for line, acc in zip(found.all_records, (0.55, 0.6, 0.2)):
        line["metrics"] |= {"client_test_acc": acc, "client_test_acc_worst_decile": 0.1}
    assert found.figure("a", "", "client_test_acc").collapsed == (0.2, 0.6)
    assert not found.figure("a", "", "test_acc").collapsed
    assert found.figure("a", "", "client_test_acc_worst_decile").majority is None


def test_a_scored_task_knows_its_own_majority():
    """That of the test set is of another task."""
    more = {"acc_stderr": 0.1, "unparsed": 0.1, "majority": 0.6}
    scored = {s: {"generate": {"boolq": {"acc": a, **more}}} for s, a in ((0, 0.6), (1, 0.7))}
    found = results_of(a=[record(s, 0.9, 0.95, scores=scores) for s, scores in scored.items()])
    figure = found.figure("a", "", "generate:boolq:acc")
    assert figure.majority == 0.6 and figure.collapsed == (0.6,)
    assert found.cell("a", "", "generate:boolq:acc").endswith("(1 collapsed)")
    assert not any(found.figure("a", "", f"generate:boolq:{name}").collapsed for name in more)
    learns = judged({"is": "learns", "methods": ["a"], "by": 0, "metric": "generate:boolq:acc"}, found.look)
    assert learns.estimate.centre == pytest.approx(0.65 - 0.6)


def test_bytes_are_exact_unless_they_differ_by_seed():
    """A run in which a client failed sends less."""

    def sent(seed, count):
        return record(seed, 0.9, bytes={"per_client_and_round": {"uplink": count}})

    found = results_of(same=[sent(0, 100), sent(1, 100)], other=[sent(0, 100), sent(1, 90)])
    assert found.figure("same", "", "uplink").exact and not found.figure("other", "", "uplink").exact
    assert not found.figure("same", "", "test_acc").exact
    alone = results_of(same=[sent(0, 100)], other=[sent(0, 90)])
    assert not alone.figure("same", "", "uplink").exact  # another seed may send less


def test_failed_seeds_count_against_a_method():
    found = results_of(a=[record(0, 0.9), record(1, 0.91)], b=[record(0, 0.6), record(1, 0.615)])
    found.lost["a", ""] = {2}

    above = judged({"is": "above", "by": 0, "better": "a", "than": ["b"]}, found.look)
    assert above.verdict == INCONCLUSIVE and "a: 1 of 3 seeds failed" in above.text
    # What a lacks is not in its mean, so nothing is refuted in its favour either.
    below = judged({"is": "above", "by": 0, "better": "b", "than": ["a"]}, found.look)
    assert below.verdict == INCONCLUSIVE and "does not count as refuted" in below.text
    assert found.cell("a", "", "test_acc").endswith("(1 failed)")
    found.lost.clear()
    found.lost["b", ""] = {2}
    assert judged({"is": "above", "by": 0, "better": "b", "than": ["a"]}, found.look).verdict == FAILS


def test_a_method_whose_seeds_all_failed_is_not_untested():
    found = results_of(a=[record(0, 0.9), record(1, 0.91)])
    found.lost["b", ""] = {0, 1}
    for rule in (
        {"is": "above", "by": 0, "better": "a", "than": ["b"]},
        {"is": "close", "methods": ["a"], "to": "b", "within": 1},
        {"is": "ratio", "of": "a", "to": "b", "about": 1, "within": 1},
        {"is": "value", "methods": ["b"], "at_most": 1},
        {"is": "learns", "methods": ["b"], "by": 0},
    ):
        condition = judged(rule, found.look)
        assert condition.verdict == INCONCLUSIVE and "b: 2 of 2 seeds failed" in condition.text and not condition.met
    assert found.look("c", {}, "test_acc") is None and found.cell("b", "", "test_acc") == "– (2 failed)"


@pytest.mark.more
def test_a_method_and_a_setting_of_which_all_seeds_failed_are_shown():
    suite = load_suite("glue", "small")
    found = results_of(a=[record(0, 0.9)])
    found.suite, found.experiment = suite, suite.experiments["sst2"]
    found.records = {("a", "3"): found.records["a", ""]}
    found.lost = {("a", "50"): {0}, ("b", "3"): {0, 1}}
    assert found.methods == ["a", "b"] and found.columns == ["3", "50"] and found.fullest == "3"
    assert found.cell("b", "3", "test_acc") == "– (2 failed)" and found.cell("a", "50", "test_acc") == "– (1 failed)"


def test_a_seed_of_a_study_without_a_number_has_failed():
    study = {"seed": 0, "hash": "s", "metrics": {"x": 0.9}, "by_seed": {"x": {0: 0.9, 1: math.nan, 2: 0.91, 3: 0.905}}}
    found = results_of(study=[study])
    figure = found.figure("study", "", "x")
    assert (figure.n, figure.failed) == (3, (1,))
    held = judged({"is": "value", "methods": ["study"], "metric": "x", "at_least": 0.5}, found.look)
    assert held.verdict == INCONCLUSIVE and "1 of 4 seeds failed" in held.text


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_a_seed_that_diverged_has_failed(nothing):
    found = results_of(a=[record(0, 0.9), record(1, 0.91), record(2, 0.92)])
    for r, loss in zip(found.all_records, (0.3, nothing, 0.4)):
        r["metrics"]["test_loss"] = loss
    figure = found.figure("a", "", "test_loss")
    assert (figure.n, figure.failed, figure.mean) == (2, (1,), pytest.approx(0.35))
    assert found.cell("a", "", "test_loss").endswith("(1 failed)") and found.figure("a", "", "test_acc").n == 3
    found.all_records[0]["metrics"]["test_loss"] = found.all_records[2]["metrics"]["test_loss"] = nothing
    assert found.figure("a", "", "test_loss").n == 0 and found.cell("a", "", "test_loss") == "– (3 failed)"


def search(winner, values, **more):
    tried = [{"lr": v, "value": v == winner} for v in values]
    return {"winner": {"point": {"lr": winner}}, "tried": tried, **more}


def test_a_claim_is_not_decided_by_a_winner_at_the_end_of_a_grid():
    assert at_the_end(search(2, (1, 2))) and at_the_end(search(2, (1, 2), config={"of.another": "version"}))
    assert not at_the_end(search(2, (1, 2), space={"lr": {"grid": [1, 2, 3]}}))  # 3 diverged
    assert not at_the_end(search(2, (1, 2), grown=[{"lr": 4}])) and at_the_end(search(4, (1, 2, 4), grown=[{"lr": 4}]))
    found = results_of(
        a=[record(s, a, at_end=True) for s, a in enumerate((0.8, 0.81))],
        b=[record(s, a) for s, a in enumerate((0.6, 0.615))],
    )

    for better, than in ("ab", "ba"):
        condition = judged({"is": "above", "by": 0, "better": better, "than": [than]}, found.look)
        assert condition.verdict == INCONCLUSIVE and "a: its rate won at the end of the grid" in condition.text
    for r in found.all_records:
        r["at_end"] = False
    assert judged({"is": "above", "by": 0, "better": "a", "than": ["b"]}, found.look).verdict == HOLDS


def test_a_seed_that_missed_the_target_holds_nothing_and_is_no_missing_figure():
    def record(seed, sent):
        reached = {"round": 1, "val_acc": 0.9 if sent else 0.5, "uplink": sent, "downlink": 0}
        return {"seed": seed, "metrics": {}, "history": {"evaluated": [reached]}}

    methods = {"a": (10, 11, 0), "b": (20, 21, 22.5), "c": (0, 0, 0)}
    found = results_of(**{m: [record(s, n) for s, n in enumerate(sent)] for m, sent in methods.items()})
    metric = "bytes_to:val_acc:0.7"
    figure = found.figure("a", "", metric)
    assert (figure.mean, figure.missed, figure.complete) == (10.5, (2,), False) and found.figure("c", "", metric).n == 0
    assert [found.cell(m, "", metric) for m in "abcd"] == ["reached by 2 of 3", "21 B ± 1 B", "not reached", "–"]
    assert results_of(alone=[record(0, 10)]).cell("alone", "", metric) == "10 B"
    assert found.cell("a", "", "bytes_to:val_f1:0.7") == "–" and found.look("a", {}, "bytes_to:val_f1:0.7") is None

    def above(better, other):
        rule = {"is": "above", "metric": metric, "better": better, "than": [other], "by": 0, "lower_is_better": True}
        return judged(rule, found.look)

    assert above("a", "b").verdict == above("b", "a").verdict == INCONCLUSIVE
    assert "a: 1 of 3 seeds did not reach the target" in above("a", "b").text
    assert above("b", "c").verdict == INCONCLUSIVE and "3 of 3 seeds did not reach" in above("b", "c").text
    assert above("b", "d").verdict == UNTESTED
    found.records["a", ""][2] = record(2, 11.5)
    assert above("a", "b").verdict == HOLDS and above("b", "a").verdict == FAILS


def test_which_metrics_are_of_test_data():
    tested = ("test_acc", "client_test_acc_mean", "unseen_test_loss", "test_acc_last5", "bytes_to:test_acc:0.7")
    assert all(map(of_test_data, (*tested, "lm_eval:boolq:acc", "generate:boolq:acc")))
    assert not any(map(of_test_data, ("val_acc", "val_loss", "bytes_to:val_acc:0.7", "uplink", "training")))


def test_figures_of_a_result():
    record = {
        "metrics": {"test_acc": 0.7},
        "scores": {"generate": {"boolq": {"acc": 0.5, "version": "1"}}},
        "bytes": {
            "per_client_and_round": {"uplink": 5, "downlink": 7, "uplink_without_head": 1, "downlink_without_head": 2}
        },
        "history": {
            "evaluated": [
                {"round": 1, "val_acc": 0.5, "uplink": 10, "downlink": 0},
                {"round": 2, "val_acc": 0.7, "uplink": 20, "downlink": 15},
            ]
        },
    }
    assert value(record, "test_acc") == 0.7 and value(record, "traffic") == 12
    assert value(record, "formula") == 2 * value(record, "uplink") > 0
    assert value(record, "traffic_without_head") == 3
    assert value(record, "bytes_to:val_acc:0.6") == 35 and value(record, "rounds_to:val_acc:0.6") == 2
    assert value(record, "bytes_to:val_acc:0.9") is None
    assert value(record, "generate:boolq:acc") == 0.5 and value(record, "generate:boolq:version") is None
    assert value(record, "lm_eval:boolq:acc") is None  # results of different scorers are never mixed
    assert (
        figure_text(by_seed([0.7, 0.8]), "test_acc") == "75.00 ± 7.07"
        and figure_text(by_seed([2048]), "uplink") == "2.0 kB"
    )
    assert figure_text(Figure({}), "test_acc") == "–" and scale_of("aggregation")[0] == 1000


RATES = [0.01, 0.1, 1, 10]
#: method -> by seed, the accuracy at each rate
CURVES = {
    "wide": [[0.80, 0.81, 0.80, 0.50], [0.79, 0.80, 0.795, 0.50], [0.81, 0.81, 0.80, 0.52]],
    "narrow": [[0.50, 0.80, 0.60, 0.50], [0.52, 0.79, 0.60, 0.50], [0.50, 0.82, 0.61, 0.50]],
    "low": [[0.5, 0.60, 0.5, 0.5], [0.5, 0.61, 0.5, 0.5], [0.5, 0.62, 0.6, 0.5]],
    "end": [[0.9, 0.5, 0.5, 0.5], [0.91, 0.5, 0.5, 0.5], [0.9, 0.5, 0.5, 0.5]],
    "flat": [[0.5, 0.5, 0.5, 0.5]] * 3,
}


def on_curves(method, labels, metric):
    at = RATES.index(float(labels["rate"]))
    shift = 0.01 if metric == "val_acc" else 0.0
    return by_seed([curve[at] + shift for curve in CURVES[method]])


def along(kind, better, than, **more):
    rule = {"is": kind, "better": better, "than": than, "along": "rate", "points": RATES, "by": 0, **more}
    return judged(check_rule(rule, Origin(), "here"), on_curves)


def test_the_best_point_by_a_metric_that_is_better_when_smaller():
    values = {
        "a": {0.1: [20, 21, 20.5], 1: [10, 11, 10.2], 10: [30, 31, 30]},
        "b": {0.1: [20] * 3, 1: [15, 16.5, 15.2]},
    }
    values["b"][10] = [30, 31, 30]

    def look(method, labels, metric):
        return by_seed(values[method][float(labels["rate"])])

    rule = {"is": "best", "better": "a", "than": ["b"], "along": "rate", "points": [0.1, 1, 10], "by": 0}
    found = judged({**rule, "chosen_by": "val_perplexity", "lower_is_better": True}, look)
    assert found.verdict == HOLDS and "a at 1 10.4" in found.text and "b at 1 15.57" in found.text


def test_best_is_each_at_its_own_point():
    level = along("best", "wide", ["narrow"], chosen_by="val_acc")
    assert level.verdict == INCONCLUSIVE and "narrow at 0.1 " in level.text
    assert along("best", "narrow", ["low"], chosen_by="val_acc").verdict == HOLDS
    assert along("best", "low", ["narrow"], chosen_by="val_acc").verdict == FAILS
    for better, other in (("narrow", "low"), ("low", "narrow")):
        chosen = along("best", better, [other], chosen_by="client_test_acc")
        assert chosen.verdict == INCONCLUSIVE and "nothing is decided: test data have chosen" in chosen.text
    ended = along("best", "end", ["low"], chosen_by="val_acc")
    assert ended.verdict == INCONCLUSIVE and "at the end of the grid" in ended.text
    flat = along("best", "flat", ["narrow"], chosen_by="val_acc")
    assert flat.verdict == INCONCLUSIVE and ": its rate won at the end of the grid" in flat.text


def test_a_stale_figure_reads_stale():
    def look_at(method, labels, metric):
        return Figure({}, stale=(0, 1)) if method == "b" else by_seed([0.8, 0.81])

    found = judged({"is": "above", "better": "a", "than": ["b"], "by": 0}, look_at)
    assert found.verdict == STALE == verdict([found]) and "earlier revision" in found.text
