"""Verdicts by rule, on numbers that can be checked by hand."""

import statistics

import pytest

from benchmark.claims import FAILS, HOLDS, UNTESTED, check_rule, judge, noise, paired_noise, spread, verdict
from benchmark.results import ExperimentResults, best_of, scale_of, shown, value
from fs_lowrank import UserError
from fs_lowrank.settings import Origin

FIGURES = {
    ("lora", "3"): [0.80, 0.82],
    ("lora", "50"): [0.60, 0.62],
    ("rolora", "3"): [0.80, 0.80],
    ("rolora", "50"): [0.79, 0.79],
    ("noisy", "3"): [0.9, 0.5],
    ("noisy", "50"): [0.8, 0.4],
}


def look(method, labels, metric):
    return spread(FIGURES.get((method, labels["clients"]), []))


def found(**rule):
    conditions = judge([rule], look)
    return verdict(conditions), conditions[0].text


def test_spread():
    two = spread([0.6, 0.8])
    assert (two.mean, two.n) == (pytest.approx(0.7), 2) and two.std == pytest.approx(0.2 / 2**0.5)
    assert spread([0.5]).std is None and spread([]) is None
    assert noise(two, two) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "method, expected", [("lora", HOLDS), ("rolora", FAILS), ("noisy", FAILS), ("absent", UNTESTED)]
)
def test_drops(method, expected):
    assert (
        found(**{"is": "drops", "methods": [method], "along": "clients", "from": 3, "to": 50, "by": 0.02})[0]
        == expected
    )


@pytest.mark.parametrize("method, expected", [("lora", FAILS), ("rolora", HOLDS), ("absent", UNTESTED)])
def test_keeps(method, expected):
    assert (
        found(**{"is": "keeps", "methods": [method], "along": "clients", "from": 3, "to": 50, "within": 0.02})[0]
        == expected
    )


def test_above_asks_for_more_than_the_spread():
    above = {"is": "above", "by": 0, "where": {"clients": 50}}
    assert found(**above, better="rolora", than=["lora"])[0] == HOLDS
    assert found(**above, better="lora", than=["rolora"])[0] == FAILS
    assert found(**above, better="rolora", than=["noisy"])[0] == FAILS  # ahead by 0.19, spread 0.28
    assert found(**above, better="lora", than=["rolora"], lower_is_better=True)[0] == HOLDS
    assert found(**above, better="rolora", than=["lora", "absent"])[0] == UNTESTED  # one figure is missing


def test_what_learned_nothing_tests_nothing():
    at = {"is": "learns", "methods": ["rolora"], "where": {"clients": 3}}

    def with_majority(method, labels, metric):
        return spread([0.77]) if metric == "majority" else look(method, labels, metric)

    assert verdict(judge([{**at, "by": 0.02}], with_majority)) == HOLDS
    assert verdict(judge([{**at, "by": 0.05}], with_majority)) == UNTESTED


def test_close_ratio_value():
    at = {"where": {"clients": 3}}
    assert found(**{"is": "close", "methods": ["rolora"], "to": "lora", "within": 0.02, **at})[0] == HOLDS
    assert found(**{"is": "ratio", "of": "rolora", "to": "lora", "about": 1, "within": 0.001, **at})[0] == FAILS
    verdict_, text = found(**{"is": "value", "methods": ["rolora"], "at_least": 0.8, **at})
    assert verdict_ == HOLDS and "asked: at least 0.8" in text


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
    ],
)
def test_wrong_rules(condition, words):
    with pytest.raises(UserError, match=words):
        check_rule(condition, Origin(), "claims.a.rule.0")


def test_methods_are_compared_seed_by_seed():
    # Splits differ far more than the methods do on each of them.
    one, other = spread({0: 0.80, 1: 0.50, 2: 0.60}), spread({0: 0.77, 1: 0.46, 2: 0.57})
    assert paired_noise(one, other) == pytest.approx(statistics.stdev([0.03, 0.04, 0.03])) and noise(one, other) > 0.2
    assert best_of({"a": one, "b": other}, "test_acc") == "a"
    elsewhere = spread({0: 0.77, 1: 0.46, 3: 0.57})
    assert paired_noise(one, elsewhere) == noise(one, elsewhere)
    assert paired_noise(spread({0: 0.8}), spread({0: 0.7})) == 0.0


def test_one_seed_tells_no_difference():
    def one(method, labels, metric):
        return spread([{"a": 0.9, "b": 0.1}[method] - (labels["clients"] == "50") * 0.5])

    above = {"is": "above", "better": "a", "than": ["b"], "by": 0, "where": {"clients": 3}}
    for rule in (
        above,
        {**above, "better": "b", "than": ["a"]},
        {"is": "drops", "methods": ["a"], "along": "clients", "from": 3, "to": 50, "by": 0.02},
    ):
        (condition,) = judge([rule], one)
        assert condition.verdict == UNTESTED and "spread unknown with one seed" in condition.text
    assert verdict(judge([{**above, "spread": False}], one)) == HOLDS  # where the suite says that it needs none


def test_a_missing_figure_hides_no_refutation():
    above = {"is": "above", "by": 0, "where": {"clients": 50}, "better": "lora"}
    assert verdict(judge([{**above, "than": ["rolora", "absent"]}], look)) == FAILS
    learns = {"is": "learns", "methods": ["absent"], "by": 0.02, "where": {"clients": 3}}
    assert verdict(judge([learns, {**above, "than": ["rolora"]}], look)) == UNTESTED  # the ground itself is missing


def test_a_target_that_a_seed_missed_has_no_mean():
    def record(seed, reached):
        return {
            "seed": seed,
            "metrics": {},
            "history": {"evaluated": [{"round": 1, "val_acc": 0.9 if reached else 0.5, "uplink": 10, "downlink": 0}]},
        }

    found = ExperimentResults(
        None,
        None,
        {("a", ""): [record(0, True), record(1, False)], ("b", ""): [record(0, True)], ("c", ""): [record(0, False)]},
    )
    metric = "bytes_to:val_acc:0.7"
    assert found.figure("a", "", metric) is None and found.figure("b", "", metric).mean == 10
    assert [found.cell(m, "", metric) for m in "abcd"] == ["reached by 1 of 2", "10 B", "not reached", "–"]


@pytest.mark.parametrize(
    "metric",
    [
        "rounds_to:val_acc:0.7",
        "lm_eval:wikitext:word_perplexity",
        "test_loss",
        "generate:boolq:unparsed",
        "bytes_to:val_acc:0.7",
        "aggregation",
    ],
)
def test_bold_goes_to_the_smaller_where_less_is_better(metric):
    assert best_of({"a": spread([10, 11]), "b": spread([20, 21])}, metric) == "a"
    assert best_of({"a": spread([10, 11]), "b": spread([20, 21])}, "lm_eval:boolq:acc") == "b"


def test_bold_only_beyond_the_spread():
    assert best_of({"a": spread([0.8, 0.82]), "b": spread([0.7, 0.72])}, "test_acc") == "a"
    assert best_of({"a": spread([0.8, 0.9]), "b": spread([0.7, 0.84])}, "test_acc") is None
    assert best_of({"a": spread([0.9]), "b": spread([0.1])}, "test_acc") is None  # one seed shows no spread
    assert best_of({"a": spread([0.8, 0.82]), "b": spread([0.7, 0.72])}, "test_loss") == "b"


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
    assert value(record, "lm_eval:boolq:acc") is None  # scorers are never mixed
    assert shown(spread([0.7, 0.8]), "test_acc") == "75.00 ± 7.07" and shown(spread([2048]), "uplink") == "2.0 kB"
    assert shown(None, "test_acc") == "–" and scale_of("aggregation")[0] == 1000
