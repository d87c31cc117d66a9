"""The leaderboard: measured exactness, and a page from cells of a small suite."""

import math
import textwrap

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from benchmark.cli import main
from benchmark.intervals import Figure
from benchmark.leaderboard import MEASURED, bytes_to_target, curves, equal_bytes, exactness, gap, table
from benchmark.suite import load_suite
from fs_lowrank import list_methods

pytestmark = pytest.mark.more
SUITE = """
    config:
      model: {type: MODEL@transformers}
      data: {type: DATA, splits: [0.7, 0.1, 0.2]}
      llm: {tok_len: 24, adapter: {args: [{r: 2, alpha: 6, modules: [query], layers: [2]}]}}
      dataloader: {batch_size: 8}
      train: {local_update_steps: 1, optimizer: {type: AdamW, lr: 1e-2}}
      federate: {client_num: 2, total_round_num: 4}
    methods: [ffa_lora, fedlora]
    seeds: [0, 1]
    grid: {federate.client_num: [2, 3]}
    experiments:
      main: {title: Two methods}
      ranks: {title: Unequal ranks, methods: [flora], config: {lowrank: {ranks: [1, 2]}}}
"""


@pytest.mark.parametrize("method", ["ffa_lora", "rolora", "flora", "fedex_lora", "fedsvd", "ravan"])
def test_these_methods_keep_the_mean_of_the_products(method):
    assert exactness(method, {}) < 1e-5


def test_the_mean_of_factors_is_away_from_the_mean_of_products():
    lora, cut = exactness("fedlora", {}), exactness("flexlora", {})
    assert 0.01 < cut < lora < 1


def test_the_page_has_a_row_for_each_method(tmp_path, tiny_encoder, reviews_csv, monkeypatch, capsys):
    text = textwrap.dedent(SUITE).replace("MODEL", str(tiny_encoder)).replace("DATA", str(reviews_csv))
    (tmp_path / "leaderboard.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "leaderboard.yaml"]) == 0
    assert main(["report", "leaderboard.yaml"]) == 0
    claims = tmp_path / "results" / "claims.csv"
    assert claims.exists()
    claims.write_text("of all suites")
    (tmp_path / "results" / "README.md").write_text("<!-- methods -->")
    assert main(["report", "leaderboard.yaml"]) == 0 and claims.read_text() == "of all suites"
    page = (tmp_path / "results" / "leaderboard.md").read_text()
    assert (tmp_path / "results" / "leaderboard.svg").stat().st_size > 5000
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    of = {row[0]: dict(zip(rows[0], row)) for row in rows[2:4]}
    assert of.keys() == {"`fedlora`", "`ffa_lora`"}
    assert of["`fedlora`"]["points against `fedlora`, equal rounds"] == "0"
    up = {method: float(row["kB up, down"].split(",")[0]) for method, row in of.items()}
    assert up["`ffa_lora`"] == pytest.approx(up["`fedlora`"] / 2, rel=0.05)
    assert of["`ffa_lora`"]["off the mean of the products"] == "exact" and of["`fedlora`"]["settings, runs"] == "2, 4"
    assert "## Unequal ranks" in page and "flora" in page


def test_gaps_without_a_spread_have_their_mean():
    ours, base = ({name: Figure({0: acc}) for name, acc in zip("ab", accs)} for accs in ((0.6, 0.7), (0.5, 0.4)))
    found = gap(ours, base)
    assert found.centre == pytest.approx(0.2) and found.ends is None and gap(base, base).centre == 0


def test_a_method_is_compared_on_the_seeds_that_both_have_in_all_settings():
    base = {"a": Figure({0: 0.5, 1: 0.6, 2: 0.9}), "b": Figure({0: 0.4, 1: 0.4, 2: 0.4})}
    assert gap({"a": Figure({1: 0.7}), "b": Figure({1: 0.5, 7: 0.0})}, base).centre == pytest.approx(0.1)
    part = gap({"a": Figure({0: 0.6}), "b": Figure({2: 0.7}), "c": Figure({})}, {**base, "c": Figure({0: 0.1})})
    assert part.centre == pytest.approx(0.2) and part.ends is None  # a run that goes on has other seeds by setting
    assert math.isnan(gap({"a": Figure({7: 0.7})}, base).centre)


def test_every_setting_counts_alike_and_the_interval_is_that_of_the_differences_by_seed():
    draw = np.random.default_rng(0)
    base = {name: dict(enumerate(draw.normal(0.6, spread, 5))) for name, spread in (("a", 0.001), ("b", 0.2))}
    ours = {name: {s: v + draw.normal(0.02, 0.01) for s, v in values.items()} for name, values in base.items()}
    found = gap(*({name: Figure(values) for name, values in entry.items()} for entry in (ours, base)))
    by_seed = np.mean([[ours[n][s] - base[n][s] for s in range(5)] for n in "ab"], axis=0)
    low, high = t.interval(0.95, 4, by_seed.mean(), by_seed.std(ddof=1) / 5**0.5)
    assert found.ends == (pytest.approx(low), pytest.approx(high)) and high - low < 0.04


def run_of(setting, method, *points):
    """A run whose rounds sent so many bytes, of the head as many again, and had these scores."""
    sent = ("uplink", "downlink", "uplink_without_head", "downlink_without_head")
    evaluated = [
        {**dict.fromkeys(sent[:2], 2 * half), **dict.fromkeys(sent[2:], half), "val_acc": acc} for half, acc in points
    ]
    return {"setting": setting, "method": method, "seed": 0, "points": evaluated, "val_acc": points[-1][1]}


def test_bytes_are_without_the_head_and_settings_without_a_score_are_counted():
    runs = [run_of(setting, "fedlora", (10, 0.5), (20, 0.8)) for setting in ("a", "b")]
    runs += [run_of("a", "flora", (5, 0.6), (10, 0.8)), run_of("b", "flora", (15, 0.8), (20, 0.9))]
    runs = pd.DataFrame(runs)
    quotients, reached = bytes_to_target(curves(runs), runs)
    assert equal_bytes(curves(runs))["flora"].dropna().to_dict() == {"a": pytest.approx(0.3)}  # b was not evaluated
    assert quotients["flora"].to_dict() == {"a": 10 / 20, "b": 15 / 20} and reached["flora"] == 2
    between = pd.DataFrame([run_of("a", "fedlora", (10, 0.5), (20, 0.8)), run_of("a", "rolora", (5, 0.4), (15, 0.6))])
    assert equal_bytes(curves(between))["rolora"].to_dict() == {"a": pytest.approx(0.0)}  # 0.5 after 10


def test_a_run_without_a_metric_is_in_no_median(monkeypatch):
    monkeypatch.setattr("benchmark.leaderboard.exactness", lambda method, keys: 0.0)
    run = {**run_of("a", "fedlora", (10, 0.5), (20, 0.8)), **dict.fromkeys(MEASURED), "uplink_without_head": 2e3}
    runs = [{**run, "config": {"federate.method": "fedlora"}, "memory": of} for of in (3e11, 5e11, None)]
    (row,) = table({"fedlora": {"a": Figure({0: 0.5})}}, pd.DataFrame(runs))
    assert (row["memory, GB"], row["server, ms"], row["kB up, down"]) == ("400", "–", "2, –")


#: they train all weights, or networks of their own
NO_ADAPTER = {"dense", "fedavg", "fedfisher", "fedhm", "fedpara", "fisher_merge", "otfusion", "pfnm", "regmean"}
#: they are scored by client
PERSONAL = {"fedsa_lora", "pfedlora", "pfedloru", "pmfedloru"}
#: clients hold nested pairs, which need ranks of their own
NESTED = {"mfedloru"}


def test_the_suite_has_every_method_that_fits():
    suite = load_suite("leaderboard", "small")
    there = {entry.method for each in suite.experiments.values() for entry in each.methods}
    assert there == set(list_methods()) - NO_ADAPTER - PERSONAL - NESTED
