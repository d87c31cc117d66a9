"""Verdicts of the rules, checked by hand, against scipy, and by simulation."""

import dataclasses
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
from scipy import stats

from benchmark.claims import check_rule, judge
from benchmark.curves import span_of_best
from benchmark.decide import FAILS, HOLDS, INCONCLUSIVE, UNTESTED, verdict
from benchmark.intervals import Figure, difference, figure_of, of_mean
from benchmark.job import at_the_end, decisive
from benchmark.metrics import of_test_data, scale_of
from benchmark.results import ExperimentResults, best_of, shown, value
from benchmark.suite import load_suite, shipped
from benchmark.verdicts import judged_claims
from fs_lowrank import UserError, load_config
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
    return figure_of(dict(enumerate(values)))


def look(method, labels, metric):
    if metric == "majority":
        return Figure(0.5, None, 1, exact=True)
    return by_seed(FIGURES.get((method, labels["clients"]), []))


def judged(rule, look=look):
    (condition,) = judge([rule], look)
    return condition


def test_intervals_are_equal_to_scipys():
    first, second = [0.80, 0.50, 0.60, 0.70], [0.77, 0.46, 0.57, 0.71]
    paired = difference(by_seed(first), by_seed(second))
    oracle = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (paired.centre - paired.half, paired.centre + paired.half) == pytest.approx((oracle.low, oracle.high))
    alone, oracle = of_mean(by_seed(first)), stats.ttest_1samp(first, 0).confidence_interval(0.95)
    assert (alone.centre - alone.half, alone.centre + alone.half) == pytest.approx((oracle.low, oracle.high))
    apart, oracle = difference(by_seed(first), by_seed(second), False), stats.ttest_ind(first, second, equal_var=False)
    wider = stats.t.ppf(0.975, 3) / stats.t.ppf(0.975, oracle.df)
    welch = oracle.confidence_interval(0.95)
    assert apart.half == pytest.approx((welch.high - welch.low) / 2 * wider) and wider > 1


def test_only_seeds_that_both_have_are_paired():
    one = figure_of({0: 0.80, 1: 0.50, 2: 0.60, 7: 0.1})
    other = figure_of({0: 0.77, 1: 0.46, 2: 0.57, 5: 0.9})
    gap = difference(one, other)
    assert gap.centre == pytest.approx((0.03 + 0.04 + 0.03) / 3) and gap.half < 0.02
    assert difference(one, figure_of({0: 0.7, 9: 0.2})).half > 0.3  # one common seed does not make a pair
    assert difference(figure_of({0: 0.8}), figure_of({0: 0.7})).half is None


def test_two_settings_are_paired_where_the_clients_have_the_same_data():
    first, last = by_seed([0.80, 0.50, 0.60]), by_seed([0.70, 0.41, 0.49])
    rule = {"is": "drops", "methods": ["a"], "by": 0.05, **FALL}

    def judged_with(splits, of_the_last):
        ends = {"3": dataclasses.replace(first, splits=splits), "50": dataclasses.replace(last, splits=of_the_last)}
        return judged(rule, lambda method, labels, metric: ends[labels["clients"]])

    same = {0: "x", 1: "y", 2: "z"}
    oracle = stats.ttest_rel([0.80, 0.50, 0.60], [0.70, 0.41, 0.49]).confidence_interval(0.95)
    paired = judged_with(same, same)
    assert paired.verdict == HOLDS and (paired.met.low, paired.met.high) == pytest.approx(
        (oracle.low - 0.05, oracle.high - 0.05)
    )
    for other in ({}, {**same, 2: "another"}, {0: "x", 1: "y"}):
        assert judged_with(same, other).verdict == INCONCLUSIVE
    assert judged_with({}, {}).verdict == INCONCLUSIVE
    keeps = {"is": "keeps", "methods": ["a"], "within": 0.13, **FALL}
    kept = [
        judged(
            keeps, lambda m, labels, _, s=s: dataclasses.replace(first if labels["clients"] == "3" else last, splits=s)
        )
        for s in (same, {})
    ]
    assert [k.verdict for k in kept] == [HOLDS, INCONCLUSIVE]


def test_a_spread_of_rounding_errors_gives_no_interval():
    gap = difference(by_seed([0.1 + 0.2, 0.4 + 0.2]), by_seed([0.2, 0.5]))
    assert np.std([0.1 + 0.2 - 0.2, 0.4 + 0.2 - 0.5]) > 0 and gap.half is None
    assert of_mean(by_seed([0.7, 0.7])).half is None
    equal = judged({"is": "value", "methods": ["a"], "at_least": 0.1}, lambda *place: by_seed([0.7, 0.7]))
    assert equal.verdict == INCONCLUSIVE and "the seeds agree to rounding" in equal.text
    assert of_mean(Figure(0.7, 0.0, 2, exact=True)).half == 0.0


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
        gap = difference(*map(by_seed, draw(rng, n)), paired)
        told += gap.half is not None and abs(gap.centre) > gap.half
    assert told / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


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
@pytest.mark.parametrize("methods", [2, 3, 8])
def test_bold_among_equal_methods_in_5_percent_at_most(n, methods):
    """Each figure has a part that all methods share for a seed, as with splits, and a part of its own."""
    rng, times, bold = np.random.default_rng(n), 500, 0
    for _ in range(times):
        shared = rng.normal(size=n)
        row = {str(m): by_seed(shared + rng.normal(size=n)) for m in range(methods)}
        bold += best_of(row, "test_acc") is not None
    assert bold / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


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
        assert len(conditions) == 6
        refuted += verdict(conditions) == FAILS
    assert refuted / times <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / times)


def test_a_condition_of_several_is_refuted_by_a_wider_interval():
    """The bound of the wider interval is by scipy; a condition that no interval refutes is as it was."""
    gaps = np.array([-0.030, -0.028, -0.020])

    def look(method, labels, metric):
        values = {"a": [0.8, 0.7, 0.6], "near": np.array([0.8, 0.7, 0.6]) - gaps, "far": [1.01, 0.90, 0.81]}
        return by_seed(list(values[method]))

    def rule(*than):
        return [{"is": "above", "better": "a", "than": list(than), "by": 0}]

    alone, several = judge(rule("far"), look), judge(rule("near", "far", "near", "near"), look)
    assert alone[0].verdict == FAILS and [c.verdict for c in several] == [INCONCLUSIVE, FAILS, *[INCONCLUSIVE] * 2]
    half = stats.t.ppf(1 - 0.05 / 4 / 2, 2) * np.std(gaps, ddof=1) / math.sqrt(3)
    assert f"its 98.8 % interval counts, {np.mean(gaps) - half:.4g} to {np.mean(gaps) + half:.4g}" in several[0].text
    assert verdict(several) == FAILS and verdict(judge(rule(*["near"] * 4), look)) == INCONCLUSIVE


@pytest.mark.parametrize(
    "method, expected", [("lora", HOLDS), ("rolora", FAILS), ("noisy", INCONCLUSIVE), ("absent", UNTESTED)]
)
def test_drops(method, expected):
    assert judged({"is": "drops", "methods": [method], "by": 0.05, **FALL}).verdict == expected


@pytest.mark.parametrize(
    "method, expected", [("lora", FAILS), ("rolora", HOLDS), ("noisy", INCONCLUSIVE), ("absent", UNTESTED)]
)
def test_keeps(method, expected):
    assert judged({"is": "keeps", "methods": [method], "within": 0.02, **FALL}).verdict == expected
    assert judged({"is": "keeps", "methods": [method], "share": 0.2, **FALL}).verdict == expected


def test_keeps_a_share_of_the_lead_over_the_majority():
    """LoRA loses 0.20 of 0.31."""
    lora = {"is": "keeps", "methods": ["lora"], **FALL}
    assert judged({**lora, "share": 0.55}).verdict == FAILS and judged({**lora, "share": 0.75}).verdict == HOLDS
    assert judged({**lora, "share": 0.645}).verdict == INCONCLUSIVE


def test_above():
    above = {"is": "above", "by": 0, "where": {"clients": 50}}
    assert judged({**above, "better": "rolora", "than": ["lora"]}).verdict == HOLDS
    assert judged({**above, "better": "lora", "than": ["rolora"]}).verdict == FAILS
    assert judged({**above, "better": "lora", "than": ["rolora"], "lower_is_better": True}).verdict == HOLDS
    noisy = judged({**above, "better": "rolora", "than": ["noisy"]})
    assert noisy.verdict == INCONCLUSIVE and "95 % interval" in noisy.text
    two = judge([{**above, "better": "rolora", "than": ["lora", "absent"]}], look)
    assert verdict(two) == UNTESTED  # one figure is missing


def test_the_number_of_seeds_that_would_decide():
    """With the number of seeds that is named, and the same mean and spread, the claim is decided; by the quantile."""
    values = {"a": [0.70, 0.74, 0.71], "b": [0.69, 0.70, 0.70]}
    condition = judged(
        {"is": "above", "better": "a", "than": ["b"], "by": 0}, lambda method, labels, metric: by_seed(values[method])
    )
    gaps = np.subtract(values["a"], values["b"])
    enough = next(n for n in range(2, 99) if stats.t.ppf(0.975, n - 1) * gaps.std(ddof=1) / n**0.5 < gaps.mean())
    assert condition.verdict == INCONCLUSIVE and f"about {enough} seeds would decide" in condition.text and enough > 3


@pytest.mark.parametrize(
    "ahead, flaw",
    [
        (0.02, {"at_end": True}),
        (-0.02, {"at_end": True}),
        (0.02, {"collapsed": (0.5,), "majority": 0.5}),
        (0.02, {"failed": (7,)}),
    ],
)
def test_no_number_of_seeds_is_named_where_seeds_alone_would_not_decide(ahead, flaw):
    """The same figures without the flaw name one; with one seed, whose spread is not known, it is said as well."""
    for seeds in (3, 1):
        gaps = np.array([-0.03, 0.03, 0.0])[-seeds:] + ahead
        figures = {"a": by_seed(0.7 + gaps), "b": by_seed([0.7, 0.71, 0.69][-seeds:])}
        rule = {"is": "above", "better": "a", "than": ["b"], "by": 0}
        found = judged(rule, lambda method, labels, metric, figures=figures: figures[method])
        assert found.verdict == INCONCLUSIVE and "seeds would decide" in found.text
        figures["a"] = dataclasses.replace(figures["a"], **flaw)
        found = judged(rule, lambda method, labels, metric, figures=figures: figures[method])
        assert found.verdict == INCONCLUSIVE and "seeds would decide" not in found.text
        assert "so more seeds alone would not decide" in found.text


def test_a_collapse_of_the_other_method_among_two_seeds_is_outweighed_by_more():
    """Two seeds decide nothing then, whatever their interval; the number that is named may."""
    rule = {"is": "above", "better": "a", "than": ["b"], "by": 0}
    for low, said in (([0.5, 0.501], "so this does not count as holding"), ([0.5, 0.62], "seeds would decide")):
        flawed = dataclasses.replace(by_seed(low), collapsed=(0.5,), majority=0.5)
        figures = {"a": by_seed([0.7, 0.702]), "b": flawed}
        found = judged(rule, lambda method, labels, metric, figures=figures: figures[method])
        assert found.verdict == INCONCLUSIVE and said in found.text


def test_the_number_of_seeds_that_would_show_that_a_method_learns():
    """It is that of its own interval, whatever the other conditions are, which it does not count among."""
    values = {"a": [0.52, 0.60, 0.58], "b": [0.80, 0.81, 0.83], "c": [0.79, 0.83, 0.82]}

    def look(method, labels, metric):
        return Figure(0.5, None, 1, exact=True) if metric == "majority" else by_seed(values[method])

    learns = {"is": "learns", "methods": ["a"], "by": 0.02}
    above = {"is": "above", "better": "b", "than": ["c"], "by": 0}
    lead = np.array(values["a"]) - 0.52
    enough = next(n for n in range(2, 99) if stats.t.ppf(0.975, n - 1) * lead.std(ddof=1) / n**0.5 < lead.mean())
    for rule in ([learns], [learns, above]):
        first, *others = judge(rule, look)
        assert first.verdict == INCONCLUSIVE and f"about {enough} seeds would decide" in first.text
    assert others[0].text == judge([above], look)[0].text  # one condition, and not one of two


def test_the_number_of_seeds_that_would_refute_one_of_several_conditions():
    """It is that of the wider interval: with as many seeds, and the same mean and spread, the claim is refuted."""
    gaps = np.array([-0.03, -0.01, -0.02, 0.005])

    def look_with(n):
        spread = np.resize([1.0, -1.0], n) if n % 2 == 0 else np.array([*np.resize([1.0, -1.0], n - 1), 0.0])
        drawn = gaps if n == 4 else gaps.mean() + spread * gaps.std(ddof=1) / spread.std(ddof=1)
        other = np.linspace(0.6, 0.7, n)
        return lambda method, labels, metric: by_seed(other + drawn if method == "a" else other)

    rule = [{"is": "above", "better": "a", "than": ["b", "c", "d"], "by": 0}]
    conditions = judge(rule, look_with(4))
    sizes = range(2, 99)
    alone, enough = (
        next(n for n in sizes if stats.t.ppf(1 - a / 2, n - 1) * gaps.std(ddof=1) / n**0.5 < -gaps.mean())
        for a in (0.05, 0.05 / 3)
    )
    assert alone < enough and all(f"about {enough} seeds would decide" in c.text for c in conditions)
    assert verdict(judge(rule, look_with(enough - 1))) == INCONCLUSIVE
    assert verdict(judge(rule, look_with(enough))) == FAILS


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
    assert judged({**close, "within": 0.05, "where": {"clients": 50}}).verdict == FAILS
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
        {"is": "keeps", "methods": ["lora", "rolora"], "share": bound, **FALL},
    ]
    conditions = judge(rules, look)
    assert len(conditions) == 15 and {c.met.unit for c in conditions} == {"test_acc", "quotient"}
    for condition in conditions:
        met = condition.met
        assert met.low <= met.centre <= met.high
        if condition.verdict == HOLDS:
            assert met.low >= -1e-12
        elif condition.verdict == INCONCLUSIVE and "refuted by chance" not in condition.text:
            assert met.low < 0 <= met.high
        else:
            assert met.high < 0


def test_of_a_quantity_between_two_bounds_the_middle_is_met_most():
    def spread(method, labels, metric):
        return by_seed([0.4, 0.5, 0.9] if method == "wide" else [0.5, 0.5, 0.5])

    near = judged({"is": "value", "methods": ["wide"], "at_least": 0.5, "at_most": 0.7}, spread)
    assert near.met.centre == pytest.approx(0.1) and near.met.high == pytest.approx(0.1) and near.met.low < -0.3
    alone = judged({"is": "value", "methods": ["one"], "at_least": 0.4}, lambda *_: by_seed([0.5]))
    assert (alone.met.centre, alone.met.low, alone.met.high) == (pytest.approx(0.1), None, None)


LOSSES = {"3": [1.0, 1.01, 1.02], "50": [3.0, 3.02, 3.01]}


def test_of_a_loss_a_rise_is_the_fall():
    def losses(method, labels, metric):
        return by_seed(LOSSES[labels["clients"]])

    def backwards(method, labels, metric):
        return by_seed(LOSSES[{"3": "50", "50": "3"}[labels["clients"]]])

    of_loss = {"methods": ["m"], "metric": "test_loss", "lower_is_better": True, **FALL}
    drops, keeps = {"is": "drops", "by": 1, **of_loss}, {"is": "keeps", "within": 1, **of_loss}
    assert judged(drops, losses).verdict == HOLDS and judged(drops, backwards).verdict == FAILS
    assert judged(keeps, losses).verdict == FAILS and judged(keeps, backwards).verdict == HOLDS


def test_close_is_refuted_on_both_sides():
    far = {"low": [0.2, 0.21, 0.22], "middle": [0.5, 0.51, 0.52], "high": [0.8, 0.81, 0.82]}
    noise = {"low": [0.2, 0.22, 0.21], "middle": [0.5, 0.51, 0.52], "high": [0.8, 0.82, 0.81]}

    def apart(method, labels, metric):
        return by_seed((far if method == "middle" else noise)[method])

    for other in ("low", "high"):
        close = {"is": "close", "methods": [other], "to": "middle", "within": 0.1}
        assert judged(close, apart).verdict == FAILS


def test_a_fall_of_exactly_the_margin_is_no_drop():
    def counted(method, labels, metric):
        return Figure({"3": 0.75, "50": 0.5}[labels["clients"]], None, 1, exact=True)

    drops = {"is": "drops", "methods": ["a"], **FALL}
    assert judged({**drops, "by": 0.25}, counted).verdict == FAILS
    assert judged({**drops, "by": 0.2499}, counted).verdict == HOLDS


@pytest.mark.parametrize(
    "rule, blamed",
    [
        ({"is": "drops", "methods": ["lora"], "by": 0.05, **FALL}, {("lora", "3")}),
        ({"is": "keeps", "methods": ["rolora"], "within": 0.02, **FALL}, {("rolora", "3"), ("rolora", "50")}),
        ({"is": "keeps", "methods": ["rolora"], "share": 0.2, **FALL}, {("rolora", "3"), ("rolora", "50")}),
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


def test_keeps_a_share_above_the_majority_at_the_first_end():
    """The lead is 0.3 over a majority of 0.5, and 0.1 over 0.7; the fall is 0.01."""

    def look(method, labels, metric):
        if metric == "majority":
            return Figure({"3": 0.5, "50": 0.7}[labels["clients"]], None, 1, exact=True)
        return by_seed(FIGURES["rolora", labels["clients"]])

    assert judged({"is": "keeps", "methods": ["rolora"], "share": 0.08, **FALL}, look).verdict == HOLDS


def test_what_was_learned_stands_at_the_end_of_a_grid_and_what_was_not_is_open():
    """A better rate beyond the end could only add to what was learned."""

    def at_end(method, labels, metric):
        return dataclasses.replace(look(method, labels, metric), at_end=metric != "majority")

    learns = {"is": "learns", "methods": ["rolora"], "where": {"clients": 3}}
    assert judged({**learns, "by": 0.02}, at_end).verdict == HOLDS
    assert judged({**learns, "by": 0.35}, at_end).verdict == INCONCLUSIVE


def test_a_ratio_is_of_any_scale():
    def large(method, labels, metric):
        return by_seed({"a": [10_010, 10_030, 10_020], "b": [10_000, 10_010, 10_020]}[method])

    ratio = {"is": "ratio", "of": "a", "to": "b", "about": 1}
    assert judged({**ratio, "within": 0.01}, large).verdict == HOLDS
    assert judged({**ratio, "about": 1.1, "within": 0.01}, large).verdict == FAILS


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
    drawn = {"a": by_seed([0.52, 0.5, 0.48]), "b": by_seed([1.0, 1.0, 1.0])}
    ratio = judged({"is": "ratio", "of": "a", "to": "b", "about": 0.6, "within": 0.2}, lambda m, *_: drawn[m])
    assert ratio.verdict == HOLDS and "95 % interval 0.4503 to 0.5497" in ratio.text


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


def test_a_missing_figure_outweighs_an_open_one():
    above = {"is": "above", "by": 0, "where": {"clients": 50}, "better": "rolora", "than": ["noisy", "absent"]}
    found = judge([above], look)
    assert [c.verdict for c in found] == [INCONCLUSIVE, UNTESTED] and verdict(found) == UNTESTED


def test_counted_figures_need_no_spread():
    def counted(method, labels, metric):
        return Figure({"half": 5.0, "all": 10.0}[method], None, 1, exact=True)

    ratio = {"is": "ratio", "of": "half", "to": "all", "about": 0.5, "within": 0}
    assert judged(ratio, counted).verdict == HOLDS
    assert judged({**ratio, "about": 0.6, "within": 0.05}, counted).verdict == FAILS
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
    return ExperimentResults(None, None, {(method, ""): listed for method, listed in records.items()})


def test_collapsed_seeds_are_named_and_counted_and_no_claim_holds_by_them(monkeypatch):
    found = results_of(
        rolora=[record(s, a) for s, a in enumerate((0.670, 0.716, 0.465))],
        lora=[record(s, a) for s, a in enumerate((0.81, 0.82, 0.80))],
        worse=[record(s, a) for s, a in enumerate((0.40, 0.41, 0.42))],
    )
    figure = found.figure("rolora", "", "test_acc")
    assert figure.collapsed == (0.465,) and not figure.whole
    assert found.cell("rolora", "", "test_acc").endswith("(1 collapsed)")
    assert found.figure("rolora", "", "test_loss") is None

    def look(method, labels, metric):
        return found.figure(method, "", metric)

    keeps = judged({"is": "value", "methods": ["rolora"], "at_least": 0.1}, look)
    assert keeps.verdict == INCONCLUSIVE
    assert "1 of 3 seeds collapsed to the majority class (0.465; majority 0.535)" in keeps.text
    # a method that collapsed is worse nevertheless
    above = {"is": "above", "by": 0, "better": "lora", "than": ["worse"]}
    assert judged(above, look).verdict == HOLDS and "worse: 3 of 3 seeds collapsed" in judged(above, look).text
    row = {m: found.figure(m, "", "test_acc") for m in ("rolora", "worse")}
    assert best_of(row, "test_acc") is None
    assert best_of({"lora": found.figure("lora", "", "test_acc"), **row}, "test_acc") is None  # rolora's spread


@pytest.mark.parametrize("metric", ["test_acc", "test_acc_last5", "client_test_acc"])
def test_a_seed_at_the_majority_class_has_collapsed(metric):
    """A mean of five equal accuracies may be above them by rounding."""
    majority = 352 / 872
    last5 = float(np.mean([majority] * 5))
    assert last5 > majority
    found = results_of(a=[record(0, majority, majority), record(1, 0.9, majority)])
    for name in ("test_acc_last5", "client_test_acc"):
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

    def look(method, labels, metric):
        return found.figure(method, "", metric)

    above = judged({"is": "above", "by": 0, "better": "a", "than": ["b"]}, look)
    assert above.verdict == INCONCLUSIVE and "a: 1 of 3 seeds failed" in above.text
    # What a lacks is not in its mean, so nothing is refuted in its favour either.
    below = judged({"is": "above", "by": 0, "better": "b", "than": ["a"]}, look)
    assert below.verdict == INCONCLUSIVE and "does not count as refuted" in below.text
    assert best_of({m: found.figure(m, "", "test_acc") for m in "ab"}, "test_acc") is None
    assert found.cell("a", "", "test_acc").endswith("(1 failed)")
    found.lost.clear()
    found.lost["b", ""] = {2}
    assert judged({"is": "above", "by": 0, "better": "b", "than": ["a"]}, look).verdict == FAILS
    found.lost.clear()
    assert best_of({m: found.figure(m, "", "test_acc") for m in "ab"}, "test_acc") == "a"


def test_a_method_whose_seeds_all_failed_is_not_untested(monkeypatch):
    monkeypatch.setattr(ExperimentResults, "_column", lambda self, labels: "")
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
    rule = {"is": "value", "methods": ["study"], "metric": "x", "at_least": 0.5}
    held = judged(rule, lambda method, labels, metric: found.figure(method, "", metric))
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
    assert found.figure("a", "", "test_loss") is None and found.cell("a", "", "test_loss") == "– (3 failed)"


def search(winner, values, grid=(), **more):
    tried = [{"lr": v, "value": v == winner} for v in values]
    return {
        "hash": "s",
        "winner": {"point": {"lr": winner}},
        "tried": tried,
        "space": {"lr": {"grid": list(grid)}},
        **more,
    }


RANK = "llm.adapter.args.0.r"


def test_a_claim_is_not_decided_by_a_winner_at_the_end_of_a_grid():
    assert [at_the_end(search(v, (1, 2, 3))) for v in (1, 2, 3)] == [True, False, True]
    assert at_the_end(search(1, (1, 2))) and not at_the_end(search(1, (1,)))  # with two points, both are ends
    assert not at_the_end(search(2, (1, 2), (1, 2, 3)))  # 3 diverged
    assert not at_the_end(search(2, (1, 2), grown=[{"lr": 4}])) and at_the_end(search(4, (1, 2, 4), grown=[{"lr": 4}]))
    ranks = {"winner": {"point": {RANK: 1}}, "tried": [{RANK: r, "value": -r} for r in (1, 2)]}
    config = decisive(load_config({"federate.client_num": 2, "federate.method": "rolora", "llm.adapter.use": True}))
    assert at_the_end(ranks) and not at_the_end({**ranks, "config": config})  # no rank is below 1
    assert at_the_end({**ranks, "winner": {"point": {RANK: 2}}, "config": config})
    level = {
        **search(2, (1, 2, 3)),
        "tried": [{"lr": 1, "value": 0.5}, {"lr": 2, "value": 0.8}, {"lr": 3, "value": 0.8}],
    }
    assert at_the_end(level) and at_the_end({**search(2, (1, 2, 3)), "nothing_learned": "nothing was learned"})
    assert at_the_end({**ranks, "config": {"of.another": "version"}})
    found = results_of(
        a=[record(s, a, at_end=True) for s, a in enumerate((0.8, 0.81))],
        b=[record(s, a) for s, a in enumerate((0.6, 0.615))],
    )

    def look(method, labels, metric):
        return found.figure(method, "", metric)

    for better, than in ("ab", "ba"):
        condition = judged({"is": "above", "by": 0, "better": better, "than": [than]}, look)
        assert condition.verdict == INCONCLUSIVE and "a: its rate won at the end of the grid" in condition.text
    for r in found.all_records:
        r["at_end"] = False
    assert judged({"is": "above", "by": 0, "better": "a", "than": ["b"]}, look).verdict == HOLDS


def test_experiments_that_share_cells_count_once():
    class Stub:
        def __init__(self, better, hashes):
            self.better, self.own = better, hashes

        def look(self, method, labels, metric):
            if self.better is None:  # nobody is
                return by_seed([0.9, 0.5, 0.7] if method == "a" else [0.5, 0.9, 0.7])
            return by_seed([0.9, 0.91, 0.92] if (method == "a") == self.better else [0.5, 0.5, 0.515])

        def hashes(self, places):
            assert set(m for m, _ in places) == {"a", "b"}
            return set(self.own)

    class Suite:
        rule = [{"is": "above", "better": "a", "than": ["b"], "by": 0}]
        claims = {"c": {"experiments": ["one", "two", "three", "absent"], "rule": rule}}

    apart = {"one": Stub(True, "xy"), "two": Stub(True, "z"), "three": Stub(False, "w")}
    assert judged_claims(Suite, apart)["c"].verdict == "holds in 2 of 3 experiments, does not hold in 1"
    refuted = {"one": Stub(False, "x"), "two": Stub(None, "z")}
    assert judged_claims(Suite, refuted)["c"].verdict == "does not hold in 1 of 2 experiments, inconclusive in 1"
    shared = {**apart, "two": Stub(True, "yz")}
    result = judged_claims(Suite, shared)["c"]
    assert result.verdict == "holds in 1 of 2 experiments, does not hold in 1" and result.sharing == [["one", "two"]]
    opposed = {**apart, "two": Stub(False, "yz"), "three": Stub(True, "z")}
    assert judged_claims(Suite, opposed)["c"].verdict == INCONCLUSIVE  # one and three are connected through two


#: of RoLoRA's data sets, by the name of the papers' figures
MAJORITY = {"sst2": 0.509, "qnli": 0.505, "mnli": 0.354, "qqp": 0.632, "rte": 0.527}
#: about the number of seeds of the papers' means, which not all papers give
SEEDS = 3


def paper_figure(values, method, column, metric, majority, scale):
    if metric == "majority":
        return Figure(majority, None, 1, exact=True)
    entry = {str(k): v for k, v in values.get(method, {}).items()}.get(column)
    if entry is None:
        return None
    mean, std = entry if isinstance(entry, list) else (entry, None)
    return Figure(mean / scale, std / scale if std else None, SEEDS)


@pytest.mark.parametrize("name", shipped())
def test_the_papers_own_tables_pass_their_equivalence_rules(name):
    """With every margin of keeps and close, the table of the paper holds, with its spread or by its means alone."""
    suite, tested = load_suite(name, "paper"), 0
    for claim in suite.claims.values():
        for experiment in (suite.experiments[e] for e in claim["experiments"] if e in suite.experiments):
            values = (experiment.reference or {}).get("values", {})
            for condition in claim["rule"]:
                if condition["is"] not in ("keeps", "close") or not values:
                    continue
                if condition.get("metric", "test_acc").startswith("uplink"):
                    continue

                def look(method, labels, metric, values=values, name=experiment.name):
                    column = next(iter(labels.values()), metric.split(":")[1] if ":" in metric else "")
                    columns = [str(k) for row in values.values() for k in row]
                    column = next((c for c in columns if c.split(" / ")[0] == column), column)
                    return paper_figure(values, method, column, metric, MAJORITY.get(name), 100)

                for result in judge([condition], look):
                    tested += result.verdict != UNTESTED
                    unknown = "no sign of the spread" in result.text
                    assert result.verdict in (HOLDS, UNTESTED) or unknown, f"{experiment.name}: {result.text}"
                if unknown := [r for r in judge([condition], look) if "no sign of the spread" in r.text]:
                    exact = {**condition, "spread": False}
                    assert all(r.verdict in (HOLDS, UNTESTED) for r in judge([exact], look)), unknown
    assert tested >= {"glue": 10, "vision": 2, "mmlu": 2}.get(name, 0)


@pytest.mark.parametrize(
    "condition, words",
    [
        ({"is": "above", "better": "a", "than": ["b"]}, "claims.a.rule.0.by is missing"),
        (
            {"is": "above", "better": "a", "than": ["b"], "by": 0, "were": {}},
            "unknown key 'claims.a.rule.0.were'; did you mean 'where'",
        ),
        ("drops", "claims.a.rule.0 = 'drops': expected a mapping, such as {is: drops"),
        ({"is": "dropps"}, "claims.a.rule.0.is = 'dropps': expected one of drops, .*did you mean 'drops'"),
        ({"is": "learns", "methods": ["a"], "by": "much"}, "by = 'much': expected a number"),
        ({"is": "keeps", "methods": ["a"], "along": "x", "from": 1, "to": 2}, "has both within and share, or none"),
        (
            {"is": "keeps", "methods": ["a"], "along": "x", "from": 1, "to": 2, "share": 0.2, "lower_is_better": True},
            "claims.a.rule.0 has share, which is of an accuracy's lead, and lower_is_better",
        ),
        ({"is": "value", "methods": ["a"]}, "has no bound: expected at_least"),
        ({"is": "close", "methods": ["a"], "to": "b", "within": 1, "by": 2}, "unknown key 'claims.a.rule.0.by'"),
    ],
)
def test_wrong_rules(condition, words):
    with pytest.raises(UserError, match=words):
        check_rule(condition, Origin(), "claims.a.rule.0")


def test_a_seed_that_missed_the_target_holds_nothing_and_is_no_missing_figure(monkeypatch):
    def record(seed, sent):
        reached = {"round": 1, "val_acc": 0.9 if sent else 0.5, "uplink": sent, "downlink": 0}
        return {"seed": seed, "metrics": {}, "history": {"evaluated": [reached]}}

    monkeypatch.setattr(ExperimentResults, "_column", lambda self, labels: "")
    methods = {"a": (10, 11, 0), "b": (20, 21, 22.5), "c": (0, 0, 0)}
    found = results_of(**{m: [record(s, n) for s, n in enumerate(sent)] for m, sent in methods.items()})
    metric = "bytes_to:val_acc:0.7"
    figure = found.figure("a", "", metric)
    assert (figure.mean, figure.missed, figure.whole) == (10.5, (2,), False) and found.figure("c", "", metric) is None
    assert [found.cell(m, "", metric) for m in "abcd"] == ["reached by 2 of 3", "21 B ± 1 B", "not reached", "–"]
    assert best_of({m: found.figure(m, "", metric) for m in "ab"}, metric) is None
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


@pytest.mark.parametrize(
    "metric",
    [
        "rounds_to:val_acc:0.7",
        "lm_eval:wikitext:word_perplexity",
        "test_loss",
        "generate:boolq:unparsed",
        "bytes_to:val_acc:0.7",
        "aggregation",
        "client_test_loss_mean",
        "client_test_loss_worst_decile",
    ],
)
def test_the_smaller_figure_is_bold_where_less_is_better(metric):
    assert best_of({"a": by_seed([10, 11]), "b": by_seed([20, 21.5])}, metric) == "a"
    assert best_of({"a": by_seed([10, 11]), "b": by_seed([20, 21.5])}, "lm_eval:boolq:acc") == "b"
    assert best_of({"a": by_seed([10, 11]), "b": by_seed([20, 21.5])}, "client_test_acc_worst_decile") == "b"
    assert best_of({"a": by_seed([10, 11]), "b": by_seed([20, 21.5])}, "client_test_acc_std") is None


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
    assert shown(by_seed([0.7, 0.8]), "test_acc") == "75.00 ± 7.07" and shown(by_seed([2048]), "uplink") == "2.0 kB"
    assert shown(None, "test_acc") == "–" and scale_of("aggregation")[0] == 1000


def test_bold_only_beyond_the_interval():
    """The differences by seed are 0.1, 0.11 and 0.1 in one case, 0.1 and 0.06 in the other."""
    assert best_of({"a": by_seed([0.8, 0.82, 0.9]), "b": by_seed([0.7, 0.71, 0.8])}, "test_acc") == "a"
    assert best_of({"a": by_seed([0.8, 0.82, 0.9]), "b": by_seed([0.7, 0.71, 0.8])}, "test_loss") == "b"
    assert best_of({"a": by_seed([0.8, 0.9]), "b": by_seed([0.7, 0.84])}, "test_acc") is None
    assert best_of({"a": by_seed([0.9]), "b": by_seed([0.1])}, "test_acc") is None  # one seed shows no spread


def test_bold_is_ahead_of_every_other_and_by_the_seeds_that_both_have():
    clear, tie = by_seed([0.8, 0.82, 0.9]), by_seed([0.81, 0.8, 0.89])
    low = by_seed([0.7, 0.71, 0.8])
    assert best_of({"a": clear, "b": low, "c": by_seed([0.6, 0.61, 0.7])}, "test_acc") == "a"
    assert best_of({"a": clear, "c": tie, "b": low}, "test_acc") is None
    # The second in order is far behind, the third is close but noisy.
    noisy = by_seed([0.2, 1.0, 0.3])
    assert noisy.mean < low.mean and best_of({"a": clear, "b": low, "c": noisy}, "test_acc") is None
    # a leads by all of its seeds, and is worse wherever both were run.
    more = figure_of({0: 0.50, 1: 0.505, 2: 0.90, 3: 0.91})
    assert best_of({"a": more, "b": figure_of({0: 0.60, 1: 0.606})}, "test_acc") is None
    less = figure_of({0: 0.60, 1: 0.606, 2: 0.1, 3: 0.11})
    assert best_of({"a": less, "b": figure_of({0: 0.50, 1: 0.505})}, "test_loss") is None


def test_nothing_is_bold_where_a_claim_of_it_would_not_hold():
    clear, low = by_seed([0.8, 0.82, 0.9]), by_seed([0.7, 0.71, 0.8])
    assert best_of({"a": clear, "b": low}, "test_acc") == "a"
    assert best_of({"a": dataclasses.replace(clear, at_end=True), "b": low}, "test_acc") is None
    assert best_of({"a": clear, "b": dataclasses.replace(low, at_end=True)}, "test_acc") is None
    two = by_seed([0.8, 0.9]), by_seed([0.5, 0.601])
    assert best_of(dict(zip("ab", two)), "test_acc") == "a"
    assert best_of({"a": two[0], "b": dataclasses.replace(two[1], collapsed=(0.5,), majority=0.5)}, "test_acc") is None


RATES = [0.01, 0.1, 1, 10]
#: method -> by seed, the accuracy at each rate
CURVES = {
    "wide": [[0.80, 0.81, 0.80, 0.50], [0.79, 0.80, 0.795, 0.50], [0.81, 0.81, 0.80, 0.52]],
    "narrow": [[0.50, 0.80, 0.60, 0.50], [0.52, 0.79, 0.60, 0.50], [0.50, 0.82, 0.61, 0.50]],
    "other": [[0.50, 0.79, 0.81, 0.50], [0.52, 0.79, 0.60, 0.50], [0.50, 0.82, 0.61, 0.50]],
    "a hole": [[0.80, 0.60, 0.81, 0.50]] * 2 + [[0.80, 0.6, 0.79, 0.5]],
}


def on_curves(method, labels, metric):
    if method not in CURVES:
        return None
    at = RATES.index(float(labels["rate"]))
    shift = 0.01 if metric == "val_acc" else 0.0
    return by_seed([curve[at] + shift for curve in CURVES[method]])


def along(kind, better, than, **more):
    rule = {"is": kind, "better": better, "than": than, "along": "rate", "points": RATES, "by": 0, **more}
    return judged(check_rule(rule, Origin(), "here"), on_curves)


def test_the_width_of_a_range_is_that_of_the_unbroken_part_around_the_best():
    assert span_of_best(dict(zip(RATES, CURVES["wide"][0])), 0.02, 1) == (pytest.approx(2.0), True)
    assert span_of_best(dict(zip(RATES, CURVES["narrow"][0])), 0.02, 1) == (0.0, False)
    assert span_of_best(dict(zip(RATES, CURVES["a hole"][0])), 0.02, 1) == (0.0, False)
    assert span_of_best(dict(zip(RATES, CURVES["a hole"][0])), 0.25, 1) == (pytest.approx(2.0), True)
    falling = {rate: 1 - value for rate, value in zip(RATES, CURVES["narrow"][1])}
    assert span_of_best(falling, 0.2, -1) == (pytest.approx(1.0), False)


def test_wider():
    """Ranges: wide 2, 2, 2 powers of ten, from the grid's first point on; other 1, 0, 0; narrow 0, 0, 0."""
    held = along("wider", "wide", ["other"], within=0.02)
    assert held.verdict == HOLDS and "wider by 1.667" in held.text
    lost = along("wider", "other", ["wide"], within=0.02)
    assert lost.verdict == FAILS
    # In the other order, what is wider may be wider still, and what is narrower is not known to be.
    assert along("wider", "narrow", ["other"], within=0.02).verdict == INCONCLUSIVE
    assert along("wider", "wide", ["absent"], within=0.02).verdict == UNTESTED


def test_two_seeds_do_not_decide_which_range_is_wider(monkeypatch):
    """Ranges 0 and 1 against 1 and 2.0001 powers of ten: by the interval the second is wider."""
    monkeypatch.setitem(CURVES, "first", [[0.5, 0.8, 0.5, 0.5], [0.5, 0.8, 0.8, 0.5]])
    monkeypatch.setitem(CURVES, "second", [[0.5, 0.8, 0.79, 0.5], [0.5, 0.8, 0.8, 0.79]])
    points = [1e-4, 1e-3, 1e-2, 1.001e-1]
    rule = {
        "is": "wider",
        "better": "second",
        "than": ["first"],
        "along": "rate",
        "points": points,
        "by": 0,
        "within": 0.02,
    }
    seen = {str(point): rate for point, rate in zip(points, RATES)}

    def look(method, labels, metric):
        return on_curves(method, {"rate": str(seen[labels["rate"]])}, metric)

    found = judged(rule, look)
    assert found.verdict == INCONCLUSIVE and "two seeds may agree by chance" in found.text


def test_a_range_that_touches_an_end_may_be_wider(monkeypatch):
    monkeypatch.setitem(CURVES, "ends", [[0.8, 0.8, 0.5, 0.5], [0.8, 0.8, 0.5, 0.5], [0.8, 0.8, 0.7, 0.5]])
    monkeypatch.setitem(CURVES, "inside", [[0.5, 0.8, 0.5, 0.5], [0.5, 0.8, 0.8, 0.5], [0.5, 0.8, 0.5, 0.5]])
    monkeypatch.setitem(CURVES, "all", [[0.8] * 4, [0.8] * 4, [0.8, 0.8, 0.8, 0.7]])
    for better, other in (("all", "ends"), ("ends", "all")):
        found = along("wider", better, [other], within=0.02)
        assert found.verdict == INCONCLUSIVE and "touches an end of the curve, so it may be wider" in found.text
    assert along("wider", "all", ["inside"], within=0.02).verdict == HOLDS


def test_a_method_that_learns_nothing_works_at_no_rate(monkeypatch):
    """At every rate it is about as good as at its best, but that is the majority class."""

    def look(method, labels, metric):
        values = on_curves(method, labels, metric)
        return dataclasses.replace(values, majority=0.5)

    monkeypatch.setitem(CURVES, "learns", [[0.8, 0.81, 0.8, 0.5], [0.5, 0.8, 0.8, 0.5], [0.8, 0.8, 0.8, 0.5]])
    monkeypatch.setitem(CURVES, "idle", [[0.5] * 4, [0.5, 0.51, 0.5, 0.5], [0.515] * 4])
    rule = {"is": "wider", "along": "rate", "points": RATES, "by": 0, "within": 0.02}
    idle = judged({**rule, "better": "idle", "than": ["learns"]}, look)
    assert idle.verdict == FAILS and "idle: 3 of 3 seeds learned nothing at any point" in idle.text
    assert judged({**rule, "better": "learns", "than": ["idle"]}, look).verdict == HOLDS
    assert span_of_best(dict(zip(RATES, [0.5, 0.52, 0.5, 0.5])), 0.02, 1, 0.5) == (0.0, False)
    assert span_of_best(dict(zip(RATES, [0.5, 0.6, 0.59, 0.5])), 0.02, 1, 0.5) == (pytest.approx(1.0), False)


def test_the_majority_class_is_that_of_any_point():
    """At the first point all seeds have failed, so it has none; at the others nothing was learned."""
    curves = {"idle": [None, 0.5, 0.5, 0.51], "learns": [0.5, 0.8, 0.5, 0.5]}

    def look(method, labels, metric):
        value = curves[method][RATES.index(float(labels["rate"]))]
        if value is None:
            return Figure(math.nan, None, 0, failed=(0, 1, 2))
        return dataclasses.replace(by_seed([value, value + 0.001, value - 0.001]), majority=0.5)

    rule = {"is": "wider", "along": "rate", "points": RATES, "by": -1, "within": 0.02}
    found = judged({**rule, "better": "idle", "than": ["learns"]}, look)
    assert "idle: 3 of 3 seeds learned nothing at any point" in found.text and found.verdict != HOLDS


def test_a_seed_that_fails_at_a_rate_does_not_work_there():
    """Of two seeds with the same curve one has failed at 1: its range ends before."""

    def look(method, labels, metric):
        values = dict(enumerate([0.80, 0.81, 0.80, 0.50][RATES.index(float(labels["rate"]))] for _ in range(2)))
        if method == "fails" and labels["rate"] == "1":
            values.pop(1)
            return dataclasses.replace(figure_of(values), failed=(1,))
        return figure_of(values)

    rule = {"is": "wider", "along": "rate", "points": RATES, "by": 0, "within": 0.02}
    found = judged({**rule, "better": "fails", "than": ["whole"]}, look)
    assert "fails 1.5 ± 0.71 (n=2)" in found.text and "fails: 1 of 2 seeds failed at a point" in found.text


def test_curves_without_a_spread_are_compared_as_they_are():
    at = {"a": (0.5, 0.9, 0.9, 0.5), "b": (0.5, 0.9, 0.5, 0.5)}
    curves = {(m, str(10.0**i)): by_seed([value]) for m, values in at.items() for i, value in enumerate(values)}
    rule = {"is": "wider", "better": "a", "than": ["b"], "along": "rate", "points": [1.0, 10.0, 100.0, 1000.0]}
    rule |= {"within": 0.02, "by": 0, "spread": False}
    assert judged(rule, lambda method, labels, _: curves[method, labels["rate"]]).verdict == HOLDS


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
    assert found.verdict == HOLDS and "at rate 1 against b" in found.text


def test_best_is_each_at_its_own_point(monkeypatch):
    level = along("best", "wide", ["narrow"], chosen_by="val_acc")
    assert level.verdict == INCONCLUSIVE and "at rate 0.1 against narrow" in level.text
    monkeypatch.setitem(CURVES, "low", [[0.5, 0.60, 0.5, 0.5], [0.5, 0.61, 0.5, 0.5], [0.5, 0.62, 0.6, 0.5]])
    assert along("best", "narrow", ["low"], chosen_by="val_acc").verdict == HOLDS
    assert along("best", "low", ["narrow"], chosen_by="val_acc").verdict == FAILS
    for better, other in (("narrow", "low"), ("low", "narrow")):
        chosen = along("best", better, [other], chosen_by="client_test_acc")
        assert chosen.verdict == INCONCLUSIVE and "chosen by test data, which decides nothing" in chosen.text
    monkeypatch.setitem(CURVES, "end", [[0.9, 0.5, 0.5, 0.5], [0.91, 0.5, 0.5, 0.5], [0.9, 0.5, 0.5, 0.5]])
    ended = along("best", "end", ["low"], chosen_by="val_acc")
    assert ended.verdict == INCONCLUSIVE and "at the end of the grid" in ended.text
    monkeypatch.setitem(CURVES, "flat", [[0.5, 0.5, 0.5, 0.5]] * 3)
    flat = along("best", "flat", ["narrow"], chosen_by="val_acc")
    assert flat.verdict == INCONCLUSIVE and "flat: its rate won at the end of the grid" in flat.text


@pytest.mark.parametrize("points", [[1], [2, 1], [1, 1], [0, 1], ["a", 1], 3])
def test_points_are_ascending_numbers(points):
    rule = {"is": "wider", "better": "a", "than": ["b"], "along": "rate", "points": points, "within": 0.02, "by": 0}
    with pytest.raises(UserError, match="points"):
        check_rule(rule, Origin(), "here")
