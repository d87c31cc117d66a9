"""What the report says of a claim beside its verdict: what it takes, what was run, the seeds, the tested cause."""

from itertools import cycle
from types import SimpleNamespace

import pytest

from benchmark.conditions import FAILS, HOLDS, INCONCLUSIVE, UNTESTED
from benchmark.page import html
from benchmark.results import ExperimentResults
from benchmark.suite import SIZES, load_suite, shipped
from benchmark.template import markdown
from benchmark.verdicts import cause_of, claims_table, judged_claims

RULE = [{"is": "above", "better": "a", "than": ["b"], "by": 0}]
CAUSE = {"says": "Too few rounds.", "experiments": ["longer", "analysis/why"]}
STUDY = {"label": "python -m studies.analysis.why --seeds 1", "hash": "s", "seed": 0}


def record(seed, acc, **more):
    found = {"seed": seed, "hash": f"{seed} {acc}", "metrics": {"test_acc": acc}, "rounds": 4, "samples": 640}
    return {**found, "model": {"type": "tiny"}, **more}


def results(experiment, **by_method):
    axes = SimpleNamespace(axes={}, name=experiment, reference=None)
    return ExperimentResults(None, axes, {(method, ""): records for method, records in by_method.items()})


def rows(claim, found, elsewhere=lambda suite, experiment: []):
    claim = {"says": "A is ahead", "source": "a paper", "experiments": ["one"], "rule": RULE, **claim}
    suite = SimpleNamespace(claims={"c": claim}, name="mine", size="small", sized=True)
    (row,) = judged_claims(suite, found).values()
    row.cause = cause_of(row, found, elsewhere)
    return row, markdown("claim", row), markdown("table", claims_table([row]), "verdict")


BEHIND = results(
    "one",
    a=[record(0, 0.6), record(1, 0.61, rounds=6)],
    b=[record(s, 0.8 + s / 50) for s in (0, 1)],
    c=[record(7, 0.5)],
)
AHEAD = results("one", a=[record(s, 0.8 + s / 50) for s in (0, 1)], b=[record(0, 0.6), record(1, 0.615)])


def test_what_was_run_and_the_seeds_are_those_of_the_figures_that_the_rule_compares():
    row, said, table = rows({"needs": "Two methods."}, {"one": BEHIND})
    assert (row.verdict, row.seeded) == (FAILS, "0, 1")  # the method c is in no rule
    assert "- one: **does not hold** — 4 runs; model `tiny`; 4 to 6 rounds; 640 samples trained on; seeds 0, 1" in said
    assert "What it takes to see it: Two methods." in said
    assert "| A is ahead | mine | small | **does not hold** | a above b: −20.50 (" in table
    assert " | 0, 1 | Two methods. | none |" in table


def test_seeds_are_named_by_experiment_where_they_differ():
    apart = results("two", a=[record(5, 0.7)], b=[record(5, 0.6)])
    row, _, _ = rows({"experiments": ["one", "two", "absent"]}, {"one": AHEAD, "two": apart})
    assert row.seeded == "one: 0, 1; two: 5"


def test_a_gap_is_of_the_experiment_with_several_seeds_also_after_one_with_a_single_seed():
    single = results("two", a=[record(5, 0.2)], b=[record(5, 0.9)])
    for order in (["one", "two"], ["two", "one"]):
        assert "above b: 20.25 (" in rows({"experiments": order}, {"one": AHEAD, "two": single})[0].gap


def test_a_claim_without_results_says_so():
    row, said, table = rows({}, {"one": results("one")})
    assert (row.needs, row.seeded, row.cause) == ("–", "–", "")
    assert "- one: **not tested at this size**\n" in said and "What it takes" not in said


def test_experiments_that_lack_a_figure_are_counted():
    """They were run, so a verdict of the others alone would hide them."""
    row, said, table = rows({"experiments": ["one", "two"]}, {"one": AHEAD, "two": results("two", a=[record(0, 0.9)])})
    assert row.verdict == "holds, not tested in 1" and "| **holds, not tested in 1** |" in table and row.cause == ""
    assert "Claim: A is ahead — holds, not tested in 1" in said
    coloured = html(f"# R\n\n- a: **{row.verdict}**\n- b: **{UNTESTED}**\n")
    assert coloured.count('class="holds"') == 1 and coloured.count('class="untested"') == 1
    assert rows({"experiments": ["one", "two"]}, {"one": AHEAD, "two": results("two")})[0].verdict == HOLDS


def test_failed_runs_are_named_beside_what_was_run():
    found = results("one", a=[record(s, 0.8 + s / 50) for s in (0, 1)], b=[record(0, 0.6), record(1, 0.615)])
    found.lost = {("a", ""): {2}, ("c", ""): {0}}  # c is in no rule
    row, said, _ = rows({}, {"one": found})
    assert "**inconclusive** — 4 runs; 1 failed; model" in said
    found.records, found.lost = {}, {("a", ""): {0, 1}, ("b", ""): {0}}
    row, said, _ = rows({}, {"one": found})
    assert "**inconclusive** — 3 failed" in said


def test_several_settings_are_taken_together_and_shared_runs_once():
    experiments = {"experiments": ["one", "two", "three"]}
    apart = results("two", a=[record(s, 0.9 + s / 50) for s in (2, 3)], b=[record(s, 0.6) for s in (2, 3)])
    row, said, table = rows(experiments, {"one": AHEAD, "two": apart, "three": AHEAD})
    assert row.groups == [["one", "three"], ["two"]] or row.groups == [["two"], ["one", "three"]]
    assert "2 settings" in row.gap and f"- {row.gap}; asked: more than 0" in said and row.gap in table


def experiment_of(verdict, cells):
    """Results with this verdict, of cells with these letters as their hashes."""
    ahead, behind, level = [0.9, 0.91, 0.92], [0.5, 0.5, 0.515], ([0.9, 0.5, 0.7], [0.5, 0.9, 0.7])
    of_methods = {HOLDS: (ahead, behind), FAILS: (behind, ahead), INCONCLUSIVE: level}[verdict]
    hashes = cycle(cells)
    runs = [[record(seed, acc, hash=next(hashes)) for seed, acc in enumerate(accs)] for accs in of_methods]
    return results("any", **dict(zip("ab", runs)))


@pytest.mark.parametrize(
    "experiments, verdict, groups",
    [
        (
            [(HOLDS, "xy"), (HOLDS, "z"), (FAILS, "w")],
            "holds in 2 of 3 experiments, does not hold in 1",
            ["0", "1", "2"],
        ),
        ([(FAILS, "x"), (INCONCLUSIVE, "z")], "does not hold in 1 of 2 experiments, inconclusive in 1", ["0", "1"]),
        ([(HOLDS, "xy"), (HOLDS, "yz"), (FAILS, "w")], "holds in 1 of 2 experiments, does not hold in 1", ["01", "2"]),
        ([(HOLDS, "xy"), (FAILS, "yz"), (HOLDS, "x")], INCONCLUSIVE, ["012"]),  # 1 and 2 are connected through 0
    ],
)
def test_experiments_that_share_cells_count_once(experiments, verdict, groups):
    found = {str(name): experiment_of(*experiment) for name, experiment in enumerate(experiments)}
    row, _, _ = rows({"experiments": [*found, "absent"]}, found)
    assert row.verdict == verdict and sorted("".join(group) for group in row.groups) == groups


def test_a_margin_that_anything_meets_names_who_meets_it():
    at = {"a": 0.8, "b": 0.85, "c": 0.801, "d": 0.5}
    found = results("one", **{method: [record(s, acc + s / 100) for s in (0, 1, 2)] for method, acc in at.items()})
    close = {"is": "close", "methods": ["a"], "to": "c", "within": 0.05}
    row, said, _ = rows({"rule": [close]}, {"one": found})
    assert row.other_methods == {"one": {"b": INCONCLUSIVE, "d": FAILS}}
    assert "The same rule on the other methods: one: b inconclusive, d does not hold." in said


def test_a_claim_that_fails_names_the_cause_with_what_tested_it():
    longer = results("longer", a=[record(3, 0.7)])

    def elsewhere(suite, experiment):
        assert (suite, experiment) == ("analysis", "why")
        return [STUDY]

    row, said, table = rows({"cause": CAUSE}, {"one": BEHIND, "longer": longer}, elsewhere)
    cause = "Too few rounds (longer: 1 run, seed 3; analysis/why: `python -m studies.analysis.why --seeds 1`)"
    assert row.cause == cause and f"The most likely cause that was tested: {cause}." in said and cause in table
    assert rows({"cause": CAUSE}, {"one": BEHIND})[0].cause == "none"  # what would test it has not run
    assert (
        rows({"cause": CAUSE}, {"one": results("one"), "longer": longer}, elsewhere)[0].cause == ""
    )  # nothing to explain
    row, said, _ = rows({"cause": CAUSE}, {"one": AHEAD, "longer": longer}, elsewhere)
    assert (row.verdict, row.cause) == (HOLDS, "") and "cause" not in said


def test_the_seeds_of_a_study_are_those_of_its_figures():
    study = {**STUDY, "metrics": {"ratio": 2.0}, "by_seed": {"ratio": {0: 1.9, 4: 2.1}}}
    rule = [{"is": "value", "methods": ["study"], "metric": "ratio", "at_least": 1}]
    row, said, _ = rows({"rule": rule}, {"one": results("one", study=[study])})
    assert row.seeded == "0, 4"
    many = {**study, "by_seed": {"ratio": {seed: 2.0 + seed / 100 for seed in range(50)}}}
    row, said, _ = rows({"rule": rule}, {"one": results("one", study=[many])})
    assert row.seeded == "0 to 49" and "; seeds 0 to 49" in said
    without = {**STUDY, "metrics": {"ratio": 2.0}}
    assert rows({"rule": rule}, {"one": results("one", study=[without])})[0].seeded == "–"


@pytest.mark.more
@pytest.mark.parametrize("name", shipped())
def test_the_claims_of_the_shipped_suites_say_what_it_takes_to_see_them(name):
    for size in SIZES:
        for claim in load_suite(name, size).claims.values():
            assert claim["needs"].endswith("."), claim["says"]
            assert claim.get("cause", {"says": "."})["says"].endswith("."), claim["says"]
