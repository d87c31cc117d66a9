"""The leaderboard: measured exactness, and a page from cells of a small suite."""

import math
import textwrap
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from benchmark.cli import main
from benchmark.intervals import Figure
from benchmark.job import Options
from benchmark.leaderboard import (
    LOSS,
    MEASURED,
    WORST,
    _run_columns,
    bytes_to_target,
    curves,
    equal_bytes,
    exactness,
    gap,
    table,
    write_leaderboard,
)
from benchmark.plan import jobs_of
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
      ranks: {title: Unequal ranks, methods: [flora], config: {lowrank: {ranks: [1, 2]}},
        fixed_methods: true}
"""


@pytest.mark.parametrize("method", ["ffa_lora", "rolora", "flora", "fedex_lora", "fedsvd", "ravan"])
def test_these_methods_keep_the_mean_of_the_products(method):
    assert exactness(method) < 1e-5


def test_the_mean_of_factors_is_away_from_the_mean_of_products():
    lora, cut = exactness("fedlora"), exactness("flexlora")
    assert 0.01 < cut < lora < 1


@pytest.mark.parametrize("method", ["fedavg", "fedhm", "dense"])
def test_without_an_adapter_there_is_no_mean_of_products(method, monkeypatch):
    assert math.isnan(exactness(method))
    monkeypatch.setattr("benchmark.leaderboard.exactness", lambda method, tau: math.nan)
    runs = [{**run_of("a", "fedlora", (10, 0.5), (20, 0.8)), **dict.fromkeys(MEASURED)}]
    runs = pd.DataFrame([{**run, "config": {"federate.method": "fedlora"}} for run in runs])
    assert table({"fedlora": {"a": Figure({0: 0.5})}}, runs)[0]["off the mean of the products"] == "–"


def test_the_page_has_a_row_for_each_method(tmp_path, tiny_encoder, reviews_csv, monkeypatch, capsys):
    text = textwrap.dedent(SUITE).replace("MODEL", str(tiny_encoder)).replace("DATA", str(reviews_csv))
    (tmp_path / "leaderboard.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "leaderboard.yaml", "--methods", "ffa_lora,fedlora,rolora"]) == 0
    page = tmp_path / "results" / "leaderboard.md"
    assert "results/leaderboard.md" in capsys.readouterr().out and "| `rolora` |" in page.read_text()
    for path in (tmp_path / "results" / "cells").iterdir():
        if '"rolora"' in path.read_text():
            path.unlink()
    assert main(["run", "leaderboard.yaml"]) == 0
    page.unlink()
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
    assert float(of["`fedlora`"]["worst tenth of clients"]) <= float(of["`fedlora`"]["accuracy"].split()[0])
    up = {method: float(row["kB up, down"].split(",")[0]) for method, row in of.items()}
    assert up["`ffa_lora`"] == pytest.approx(up["`fedlora`"] / 2, rel=0.05)
    assert of["`ffa_lora`"]["off the mean of the products"] == "exact" and of["`fedlora`"]["settings, runs"] == "2, 4"
    assert "## Unequal ranks" in page and "flora" in page
    assert "| method | Two methods | 2 | 3 |" in page  # the points in the task, and in each setting


def test_a_language_model_alone_has_a_page(tmp_path, monkeypatch):
    runs = {"ffa_lora": 1.2, "fedlora": 1.4}
    frame = pd.DataFrame(
        [
            {**run_of("a", name, (10, 2.0), (20, loss), score="val_loss"), **dict.fromkeys(MEASURED), "task": "t"}
            | {"clients": "c", "config": {"federate.method": name}}
            for name, loss in runs.items()
        ]
    )
    losses = {name: {"a": Figure({0: loss})} for name, loss in runs.items()}
    monkeypatch.setattr("benchmark.leaderboard.exactness", lambda method, tau: 0.0)
    monkeypatch.setattr(
        "benchmark.leaderboard.collect",
        lambda results, score: (losses, frame) if score is LOSS else ({}, pd.DataFrame()),
    )
    suite = load_suite("leaderboard", "small")
    assert write_leaderboard(suite, {}, tmp_path) == [tmp_path / "leaderboard.md"]
    page = (tmp_path / "leaderboard.md").read_text()
    assert "| `ffa_lora` | 1.200 | −0.200 |" in page and "![" not in page and "Points against LoRA**" not in page
    monkeypatch.setattr("benchmark.leaderboard.collect", lambda results, score: ({}, pd.DataFrame()))
    assert write_leaderboard(suite, {}, tmp_path) == []


def test_gaps_without_a_spread_have_their_mean():
    ours, base = ({name: Figure({0: acc}) for name, acc in zip("ab", accs)} for accs in ((0.6, 0.7), (0.5, 0.4)))
    found = gap(ours, base)
    assert found.centre == pytest.approx(0.2) and found.ends is None and gap(base, base).centre == 0


def test_a_method_is_compared_on_the_seeds_that_both_have():
    base = {"a": Figure({0: 0.5, 1: 0.6, 2: 0.9}), "b": Figure({0: 0.4, 1: 0.4, 2: 0.4})}
    assert gap({"a": Figure({1: 0.7}), "b": Figure({1: 0.5, 7: 0.0})}, base).centre == pytest.approx(0.1)
    part = gap({"a": Figure({0: 0.6}), "b": Figure({2: 0.7}), "c": Figure({})}, {**base, "c": Figure({0: 0.1})})
    assert part.centre == pytest.approx((0.1 + 0.3) / 2) and part.ends is None  # a setting may have other seeds
    assert math.isnan(gap({"a": Figure({7: 0.7})}, base).centre)


def test_every_setting_counts_alike_and_its_seeds_are_paired():
    draw = np.random.default_rng(0)
    base = {name: dict(enumerate(draw.normal(0.6, spread, 5))) for name, spread in (("a", 0.001), ("b", 0.2))}
    wide = {"a": 0.01, "b": 0.03}
    ours = {n: {s: v + draw.normal(0.02, wide[n]) for s, v in values.items()} for n, values in base.items()}
    found = gap(*({name: Figure(values) for name, values in entry.items()} for entry in (ours, base)))
    differences = [np.array([ours[n][s] - base[n][s] for s in range(5)]) for n in "ab"]
    shares = [d.var(ddof=1) / 5 / 4 for d in differences]  # of the mean of two, so a fourth
    low, high = t.interval(
        0.95, sum(shares) ** 2 / (sum(v**2 for v in shares) / 4), np.mean(differences), sum(shares) ** 0.5
    )
    assert found.ends == (pytest.approx(low), pytest.approx(high)) and high - low < 0.1


def test_the_rows_of_one_test_set_have_a_part_in_the_interval():
    draw = np.random.default_rng(1)
    rows = {name: {s: ("test", draw.integers(0, 2, 400).astype(float)) for s in range(3)} for name in "ab"}
    plain = {name: Figure({s: r.mean() for s, (_, r) in by_seed.items()}) for name, by_seed in rows.items()}
    whole = {name: replace(plain[name], right=rows[name]) for name in rows}
    without, with_rows = (gap({"x": of["a"]}, {"x": of["b"]}) for of in (plain, whole))
    mean = np.mean([rows["a"][s][1] - rows["b"][s][1] for s in range(3)], axis=0)
    assert with_rows.error**2 == pytest.approx(without.error**2 + mean.var(ddof=1) / 400)
    other = replace(plain["b"], right={s: ("other rows", right[:300]) for s, (_, right) in rows["b"].items()})
    assert gap({"x": whole["a"]}, {"x": other}).error == pytest.approx(without.error)


def run_of(setting, method, *points, score="val_acc"):
    """A run that has sent so many bytes up, twice as many down, and one more of the head, and had these scores."""
    evaluated = [{"uplink": up + 1, "downlink": 2 * up + 1, score: value} for up, value in points]
    return {"setting": setting, "method": method, "seed": 0, "points": evaluated, score: points[-1][1]}


def test_bytes_are_with_the_head_and_settings_without_a_score_are_counted():
    runs = [run_of(setting, "fedlora", (8, 0.5), (20, 0.8)) for setting in ("a", "b")]
    runs += [run_of("a", "flora", (5, 0.6), (10, 0.8)), run_of("b", "flora", (15, 0.8), (20, 0.9))]
    runs = pd.DataFrame(runs)
    quotients, reached = bytes_to_target(curves(runs), runs)
    after_31 = 0.6 + 0.2 * 14 / 15 - (0.5 + 0.3 * 5 / 36)  # half of LoRA's 62
    assert equal_bytes(curves(runs))["flora"].dropna().to_dict() == {"a": pytest.approx(after_31)}  # b came later
    assert [*quotients.loc["a", "flora"]] == [11 / 21, 21 / 41] and [*quotients.loc["b", "flora"]] == [16 / 21, 31 / 41]
    assert reached["flora"] == 2
    short = pd.DataFrame([run_of("a", "fedlora", (8, 0.5), (20, 0.8)), run_of("a", "ravan", (2, 0.4), (6, 0.6))])
    assert equal_bytes(curves(short))["ravan"].isna().all()  # it never sends as much


def test_a_common_accuracy_is_that_of_the_median_seed():
    runs = [{**run_of("a", "fedlora", (8, 0.5), (20, 0.8)), "seed": seed} for seed in range(3)]
    runs += [{**run_of("a", "flora", (9, acc)), "seed": seed} for seed, acc in enumerate((0.9, 0.9, 0.1))]
    runs += [{**run_of("a", "ravan", (9, acc)), "seed": seed} for seed, acc in enumerate((0.9, 0.1, 0.1))]
    quotients, reached = bytes_to_target(curves(pd.DataFrame(runs)), pd.DataFrame(runs))
    assert quotients.loc[("a", "flora"), "uplink"] == 10 / 21 and quotients.loc["a", "ravan"].isna().all()
    assert (reached["flora"], reached["ravan"]) == (2, 1)


def test_a_loss_is_near_the_bases_from_above():
    runs = [run_of("a", "fedlora", (8, 2.0), (20, 1.0), score="val_loss")]
    runs += [run_of("a", "flora", (10, 1.01), score="val_loss"), run_of("a", "ravan", (10, 1.03), score="val_loss")]
    runs = pd.DataFrame(runs)
    quotients, reached = bytes_to_target(curves(runs, LOSS), runs, LOSS)
    assert quotients.loc[("a", "flora"), "uplink"] == 11 / 21 and (reached["flora"], reached["ravan"]) == (1, 0)


def test_a_clients_seconds_are_those_after_the_second_evaluation():
    evaluated = [{"round": t, "seconds": seconds} for t, seconds in ((2, 60.0), (4, 61.0), (10, 64.0))]
    record = {"config": {"federate.client_num": 5}, "seconds": {"aggregation_median": 0.1}}
    assert _run_columns({**record, "history": {"evaluated": evaluated}})["client"] == pytest.approx((3 / 6 - 0.1) / 5)


def test_a_run_without_a_metric_is_in_no_median(monkeypatch):
    monkeypatch.setattr("benchmark.leaderboard.exactness", lambda method, tau: 0.0)
    run = {**run_of("a", "fedlora", (10, 0.5), (20, 0.8)), **dict.fromkeys(MEASURED), "uplink_without_head": 2e3}
    runs = [{**run, "config": {"federate.method": "fedlora"}, "memory": of} for of in (3e11, 5e11, None)]
    assert table({"fedlora": {"a": Figure({0: 0.5})}}, pd.DataFrame(runs))[0]["worst tenth of clients"] == "–"
    runs = [{**run, WORST: worst} for run, worst in zip(runs, (0.2, 0.25, None))]
    (row,) = table({"fedlora": {"a": Figure({0: 0.5})}}, pd.DataFrame(runs))
    assert row["worst tenth of clients"] == "22.5"
    assert (row["memory, GB"], row["server, ms"], row["kB up, down"]) == ("400", "–", "2, –")


#: they send all weights, or networks of their own
NO_LOW_RANK = {"dense", "fedavg", "fedfisher", "fisher_merge", "otfusion", "pfedlora", "pfnm", "regmean"}


def test_the_suite_has_every_low_rank_method():
    suite = load_suite("leaderboard", "small")
    there = {entry.method for each in suite.experiments.values() for entry in each.methods}
    assert there == set(list_methods()) - NO_LOW_RANK


def test_a_method_joins_the_experiments_that_do_not_configure_their_methods_one_by_one():
    suite, options = load_suite("leaderboard", "small"), Options(suites=("leaderboard",), methods=("raflora",))
    joined = {name for name, experiment in suite.experiments.items() if jobs_of(suite, experiment, options)}
    assert joined == {name for name in suite.experiments if not name.endswith("_own")}
