"""Pictures and tables of runs: what they show, and that nothing global changes by drawing them."""

import csv
import math
import re
import sys

import numpy as np
import pytest
import scipy.stats
from matplotlib.figure import Figure

from fs_lowrank.config import load_config
from fs_lowrank.errors import RunFailed, say_once
from fs_lowrank.jobs.tables import latex, write_tables
from fs_lowrank.runs import plots
from fs_lowrank.runs.plots import curves, plot_clients, plot_curves, plot_test, setting_of
from fs_lowrank.settings.metrics import wilson


def record(round, acc=0.6, loss=0.7, **more):
    return {
        "round": round,
        "loss": loss,
        "metrics": {"test": {"acc": acc, "loss": loss}},
        "uplink_bytes": 500_000,
        "downlink_bytes": 500_000,
        "adapter_norm": {"lora_A": 1.0, "lora_B": 0.5},
        "drift": {"lora_B": 0.1},
        "seconds": {"training": 2.0, "aggregation": 0.5},
        **more,
    }


def band(axes):
    """The lowest and the highest value of the first band at its first point."""
    values = axes.collections[0].get_paths()[0].vertices
    ends = values[values[:, 0] == values[:, 0].min()][:, 1]
    return ends.min(), ends.max()


def test_every_panel_shows_the_records():
    figure = curves({"rolora": [[record(1), record(2, acc=0.62)]]}, 0.5, title="the setting", sizes={"test": 100})
    score, sent, spent, loss, train, norms, drift, _ = figure.axes
    assert list(score.lines[0].get_xdata()) == [1, 2] and list(score.lines[0].get_ydata()) == [0.6, 0.62]
    assert list(sent.lines[0].get_xdata()) == [1, 2] and list(spent.lines[0].get_xdata()) == [2.5, 5]
    assert [axes.get_ylabel() for axes in (score, loss)] == ["test accuracy", "test loss"]
    assert list(train.lines[0].get_ydata()) == [0.7, 0.7]
    assert [line.get_ydata()[0] for line in norms.lines] == [1.0, 0.5] and drift.lines[0].get_ydata()[0] == 0.1
    assert "the setting" in figure.get_suptitle() and "one standard error of 100 test samples" in figure.get_suptitle()
    assert [line.get_ydata()[0] for line in score.lines if line.get_label() == "majority class"] == [0.5]


def test_a_panel_without_values_is_left_out():
    figure = curves({"x": [[record(1, drift={}, metrics={})]]}, 0.5)
    assert [axes.get_visible() for axes in figure.axes] == [*[False] * 4, True, True, False, True]


def test_two_points_make_no_valley_and_rounds_are_whole():
    score = curves({"x": [[record(1, 0.700), record(2, 0.701)]]}, 0.7, sizes={"test": 400}).axes[0]
    low, high = score.get_ylim()
    assert high - low >= 8 * math.sqrt(0.25 / 400)
    assert band(score) == pytest.approx(wilson(0.7, 400))
    assert all(tick == int(tick) for tick in score.get_xticks())


def test_several_seeds_are_a_mean_and_a_band():
    runs = [[record(1, 0.5)], [record(1, 0.6)], [record(1, 0.7)]]
    figure = curves({"x": runs}, 0.5, sizes={"test": 100})
    assert figure.axes[0].lines[0].get_ydata()[0] == pytest.approx(0.6)
    assert band(figure.axes[0]) == pytest.approx((0.5, 0.7))
    assert "one standard deviation over 3 seeds" in figure.get_suptitle()


@pytest.mark.more
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("majority, metrics", [(0.6, "all"), (None, "some"), (None, "none")])
def test_curves_are_drawn_from_whatever_there_is(tmp_path, majority, metrics):
    history = [
        record(r) if metrics == "all" or (metrics == "some" and r == 3) else record(r, metrics={}) for r in (1, 2, 3)
    ]
    path = plot_curves({"rolora": history, "fedlora": history}, tmp_path / "curves.png", majority)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    pdf = path.with_suffix(".pdf")
    first = pdf.read_bytes()
    plot_curves({"rolora": history, "fedlora": history}, path, majority)
    assert first.startswith(b"%PDF") and pdf.read_bytes() == first, "the same figure is the same file"


@pytest.mark.more
def test_drawing_changes_nothing_global(tmp_path):
    import matplotlib

    before, loaded = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    plot_curves({"x": [record(1)]}, tmp_path / "curves.png", 0.5)
    assert dict(matplotlib.rcParams) == before and ("matplotlib.pyplot" in sys.modules) == loaded


def test_where_the_png_is_the_pdf_is_too(tmp_path):
    """A run draws a picture again only where its PNG is missing."""
    (tmp_path / "curves.pdf").mkdir()
    with pytest.raises(RunFailed, match="curves.pdf"):
        plots.save(Figure(), tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("classes", [0, 3, 40])
def test_clients_are_drawn_by_class(tmp_path, classes, monkeypatch):
    monkeypatch.setattr(plots, "MOST_CLIENTS", 4)
    labels = {"labels": {f"class {i}": i + 1 for i in range(classes)}} if classes else {}
    data = {"clients": [{"client": k, "size": 10 * k, **labels} for k in range(1, 7)]}
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    plot_clients(data, tmp_path / "clients.png", "the setting")
    axes, title = figures[0].axes[0], figures[0].get_suptitle()
    assert "the first 4 of 6 clients" in title and "the setting" in title
    if classes == 40:
        assert axes.images[0].get_array().shape == (40, 4)
    else:
        assert len(axes.patches) == 4 * max(classes, 1)


@pytest.mark.more
@pytest.mark.parametrize("classes", [2, 30])
def test_the_predictions_of_the_test_set(tmp_path, classes):
    confusion = [[int(i == j) for j in range(classes)] for i in range(classes)]
    on_test = {"confusion": confusion, "clients": {"1": {"acc": 0.5, "samples": 4}, "2": {"acc": 1.0, "samples": 2}}}
    path = plot_test(on_test, tmp_path / "test.png", [str(i) for i in range(classes)], 0.5)
    assert path.stat().st_size > 5000 and path.with_suffix(".pdf").exists()


CLASSES = ["under $10_$20", "_a", r"\$x_$", "50 %"]


@pytest.mark.more
@pytest.mark.filterwarnings("error")
def test_names_are_shown_as_they_are_written(tmp_path, monkeypatch):
    kept, write = [], plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: kept.append(figure) or write(figure, path))
    counts = {"clients": [{"client": 1, "size": 9, "labels": {name: 2 for name in CLASSES}}]}
    on_test = {"confusion": [[1] * 4] * 4, "clients": {"1": {"acc": 0.5, "samples": 4}}}
    plot_clients(counts, tmp_path / "clients.png", "my_$data_$ · model")
    plot_test(on_test, tmp_path / "test.png", CLASSES, title="my_$data_$ · model")
    plot_curves({name: [record(1)] for name in CLASSES}, tmp_path / "curves.png", 0.5, title="my_$data_$ · model")
    clients, test, curve = kept
    for place in (clients.legends[0], curve.axes[-1].get_legend()):
        assert shown(place.get_texts())[:4] == CLASSES
    assert shown(test.axes[0].get_xticklabels()) == shown(test.axes[0].get_yticklabels()) == CLASSES
    titles = [shown([figure._suptitle])[0].replace("\u00a0", " ") for figure in kept]
    assert all(title.startswith("my_$data_$ · model") for title in titles)


def shown(texts):
    """The texts as matplotlib writes them; none may be a formula."""
    read = [text._preprocess_math(text.get_text()) for text in texts]
    assert not any(formula for _, formula in read)
    return [text for text, _ in read]


def test_characters_without_a_font_are_said_and_not_warned_of(tmp_path, caplog, recwarn, monkeypatch):
    monkeypatch.setattr(plots, "_WIDE", re.compile("no such font"))
    say_once.cache_clear()
    clients = [{"client": 1, "labels": {"\u4e2d\u6587": 3, "b": 4}}]
    assert plot_clients({"clients": clients}, tmp_path / "clients.png").is_file()
    assert "characters that no font here draws" in caplog.text
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


@pytest.mark.parametrize("right, count", [(0, 1), (3, 3), (5, 8), (44, 60)])
def test_the_interval_of_a_client_is_wilsons(right, count):
    one_sigma = math.erf(math.sqrt(0.5))
    wanted = scipy.stats.binomtest(right, count).proportion_ci(one_sigma, method="wilson")
    assert wilson(right / count, count) == pytest.approx((wanted.low, wanted.high))


def test_one_evaluation_has_a_band_too_and_panels_have_the_same_rounds():
    figure = curves({"x": [[record(1, metrics={}), record(2, 0.7)]]}, 0.5, sizes={"test": 100})
    (bar,) = figure.axes[0].collections[-1].get_segments()
    assert bar[1][1] - bar[0][1] == pytest.approx(np.diff(wilson(0.7, 100))[0])
    assert figure.axes[0].get_xlim() == figure.axes[4].get_xlim()


def test_a_long_title_breaks_after_a_dot(settings, tmp_path):
    figure = curves({"x": [[record(1)]]}, 0.5, title=" · ".join(["the setting"] * 40))
    lines = figure.get_suptitle().splitlines()
    assert len(lines) > 2 and not any(line.startswith("·") for line in lines)


def test_the_title_says_the_setting(settings):
    said = setting_of(load_config(settings), seeds=[0, 1])
    assert "5 clients, 5 a round" in said and "seeds 0, 1" in said and "reviews.csv" in said and "/" not in said


def test_a_table_is_csv_and_latex(tmp_path):
    path = write_tables([["method", "test\nacc"], ["a_b, 50 %", "0.1 ± 0.2"]], tmp_path / "t.csv")
    assert list(csv.reader(path.open(encoding="utf-8"))) == [["method", "test acc"], ["a_b, 50 %", "0.1 ± 0.2"]]
    text = path.with_suffix(".tex").read_text(encoding="utf-8")
    assert r"a\_b, 50 \% & 0.1 $\pm$ 0.2 \\" in text and r"\begin{tabular}{lr}" in text
    assert latex([["\\"]]).splitlines()[2] == r"\textbackslash{} \\"
