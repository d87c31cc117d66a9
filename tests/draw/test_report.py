"""What the page of several runs says: which method, by how much, how sure, at what price."""

import math

import pytest
import scipy.stats

from fs_lowrank.config import load_config
from fs_lowrank.draw import report
from fs_lowrank.draw.panels import digits
from fs_lowrank.draw.report import Shown
from fs_lowrank.runs.shown import _named
from fs_lowrank.settings.metrics import standard_error

CONFIG = load_config({"federate.client_num": 4, "data.type": "reviews.csv"})


def shown(label, acc, seed=0, sent=1000, metric="test_acc", **more):
    split, name = metric.split("_", 1)
    record = {
        "round": 1,
        "loss": 0.5,
        "metrics": {split: {name: acc}},
        "clients": [1],
        "failed": [],
        "seconds": {"training": 2.0},
    }
    record |= {"uplink_bytes": 4 * sent, "downlink_bytes": 4 * sent, "client_uplink_bytes": {"1": sent}}
    given = {"majority": 0.5, "held_out": {"test": 100}, **more}
    config = CONFIG.replace({"seed": seed})
    name = f"{label}, seed {seed}"
    price = {"uplink": float(sent), "downlink": float(sent)}
    return Shown(
        name, label, config, True, [record], {}, last={metric: acc}, sent=price, seconds={"training": 2.0}, **given
    )


def texts(runs, tmp_path):
    path = report.write_page(runs, tmp_path / "report.html")
    return path.read_text(encoding="utf-8")


def test_one_seed_of_each_is_compared_by_the_test_rows():
    runs = [shown("near", 0.80, sent=500), shown("first", 0.82), shown("far", 0.55)]
    scores = report._scores({run.label: [run] for run in runs}, "test", "acc")
    assert [score.label for score in scores] == ["first", "near", "far"]
    near = scores[1]
    assert near.behind == pytest.approx(0.02) and near.error == standard_error(0.80, 100)
    assert near.sure == pytest.approx(1.96 * math.hypot(standard_error(0.8, 100), standard_error(0.82, 100)))
    said = report._answer(scores, "test accuracy")
    assert "first has the best test accuracy of 0.820 ± 0.038; the most frequent class alone gives 0.500." in said
    assert "Behind by more than chance explains: far. The difference from near may be chance." in said
    assert (
        "Of first and near, near sends least: 0.500 kB up and 0.500 kB down per client and round, 0.00400 MB in all."
        in said
    )


def test_seeds_are_compared_by_their_differences():
    values = {"a": [0.80, 0.82, 0.90], "b": [0.79, 0.80, 0.88]}
    groups = {label: [shown(label, acc, seed) for seed, acc in enumerate(of)] for label, of in values.items()}
    _, other = report._scores(groups, "test", "acc")
    low, high = scipy.stats.ttest_rel(values["a"], values["b"]).confidence_interval(0.95)
    assert (other.behind - other.sure, other.behind + other.sure) == pytest.approx((low, high))
    assert other.error == pytest.approx(scipy.stats.tstd(values["b"]))


def test_a_page_has_one_meaning_of_plus_and_minus(tmp_path):
    """Beside deviations over seeds, the only run of a label has no standard error."""
    text = texts([shown("several", 0.6, 1), shown("several", 0.7, 2), shown("one", 0.55, 1)], tmp_path)
    assert "± is one standard deviation over the seeds" in text and ">0.650 ± 0.071<" in text
    assert ">0.550<" in text and "0.550 ±" not in text


def test_a_smaller_loss_is_better_and_one_run_of_each_is_not_sure():
    runs = [
        shown(label, loss, metric="test_loss", majority=None, held_out={}) for label, loss in (("a", 2.5), ("b", 2.0))
    ]
    scores = report._scores({run.label: [run] for run in runs}, "test", "loss")
    assert [(score.label, score.behind, score.sure) for score in scores] == [("b", 0.0, None), ("a", 0.5, None)]
    assert "compare with several seeds" in report._answer(scores, "test loss")


def test_the_first_screen_of_a_comparison_has_the_answer_and_the_ranking(tmp_path):
    text = texts([shown("b", 0.7), shown("a", 0.9)], tmp_path)
    assert "<title>b and a on reviews.csv, 4 clients</title>" in text
    assert text.index("a has the best test accuracy") < text.index('data-name="result"') < text.index("<svg")
    table = text[text.index('data-name="result"') :]
    assert table.index(">a<") < table.index(">b<") and "<th>behind the best</th>" in table


def test_runs_that_differ_in_their_seed_have_one_label(tmp_path):
    other = CONFIG.replace({"train.optimizer.lr": 0.5})
    seeds = [(tmp_path / f"run_{seed}", CONFIG.replace({"seed": seed})) for seed in (0, 1)]
    names = [(name, label) for name, label, *_ in _named(seeds)]
    assert names == [("fedavg, seed 0", "fedavg"), ("fedavg, seed 1", "fedavg")]
    names = [(name, label) for name, label, *_ in _named([seeds[0], (tmp_path / "other", other)])]
    assert names == [("run_0", "run_0"), ("other", "other")]


def test_settings_differ_by_what_was_written_and_not_by_what_a_method_has(tmp_path):
    runs = [shown(name, 0.9) for name in ("fedavg", "flora")]
    runs[1].config = CONFIG.replace({"federate.method": "flora", "train.optimizer.lr": 0.5})
    text = texts(runs, tmp_path)
    differ = text[text.index('data-name="differences"') : text.index('data-name="settings"')]
    assert "federate.method" in differ and "train.optimizer.lr" in differ and "lowrank." not in text


def test_verdicts_of_several_runs_are_one_line(tmp_path):
    said = "nothing was learned: test_acc 0.5, while always predicting the majority class gives 0.5"
    text = texts([shown(name, 0.5, verdict=said) for name in "ab"] + [shown("c", 0.9)], tmp_path)
    assert "a, seed 0 and b, seed 0: not above the most frequent class" in text and said not in text
    assert said in texts([shown("a", 0.5, verdict=said)], tmp_path)


@pytest.mark.parametrize(
    "value, text",
    [(0.65, "0.650"), (1.0, "1.00"), (27.66, "27.7"), (109.1, "109"), (999.7, "1,000"), (0.0, "0"), (4, "4")],
)
def test_figures_have_three_digits(value, text):
    assert digits(value) == text
