"""Pictures and tables of runs: what they show, and that nothing global changes by drawing them."""

import math
import sys

import pytest
import scipy.stats
from matplotlib.figure import Figure

from fs_lowrank.config import load_config
from fs_lowrank.draw import figures
from fs_lowrank.draw import runs as drawn_runs
from fs_lowrank.draw.runs import (
    client_panel,
    confusion_panel,
    curve_panels,
    curves,
    predictions,
    score_panel,
    setting_of,
)
from fs_lowrank.errors import RunFailed
from fs_lowrank.jobs.tables import write_tables
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


def panels_of(histories, *given, **more):
    return {panel.title: panel for panel in curve_panels(histories, *given, **more)}


def test_every_panel_shows_the_records():
    history = [record(1), record(2, acc=0.62)]
    panels = panels_of({"rolora": [history]}, 0.5, {"test": 100})
    by_round, by_bytes, loss, train, norms, drift = panels.values()
    assert [panel.main for panel in panels.values()] == [True, True, False, False, False, False]
    score, majority = by_round.marks
    assert (score.name, score.x, score.y) == ("rolora", [1, 2], [0.6, 0.62])
    assert (score.low, score.high) == (
        pytest.approx([wilson(y, 100)[0] for y in score.y]),
        pytest.approx([wilson(y, 100)[1] for y in score.y]),
    )
    assert (majority.name, majority.x, majority.y) == ("majority class", [1, 2], [0.5, 0.5])
    assert by_bytes.marks[0].x == [1, 2]
    assert (by_round.y, loss.y, by_bytes.x) == (
        "test accuracy",
        "test loss",
        "MB sent so far by all clients, up and down",
    )
    assert train.marks[0].y == [0.7, 0.7]
    assert [(line.means, line.y) for line in norms.marks] == [("matrix A", [1, 1]), ("matrix B", [0.5, 0.5])]
    assert [(line.means, line.y) for line in drift.marks] == [("matrix B", [0.1, 0.1])]
    figure = curves({"rolora": [history]}, 0.5, title="the setting", sizes={"test": 100})
    assert figure.get_suptitle() == "the setting\nbands: one standard error of 100 test samples"
    assert len(figure.axes) == len(panels)


def test_a_picture_has_the_split_that_counts_and_a_page_all():
    history = [
        record(r, metrics={s: {"acc": 0.5, "loss": 1.0} for s in ("val", "test", "client_test")}) for r in (1, 2)
    ]
    assert {"val accuracy by round", "client test loss by round"} <= panels_of({"x": [history]}, 0.5).keys()
    titles = [axes.get_title("left") for axes in curves({"x": [history]}, 0.5).axes]
    assert titles[0] == "test accuracy by round" and not [t for t in titles if t.startswith(("val", "client"))]


@pytest.mark.parametrize("majority", [None, 0.5])
def test_only_a_language_model_is_judged_by_its_loss(majority):
    """A classifier has no majority class without a test set."""
    histories = {"x": [[record(r, metrics={"val": {"acc": 0.5, "loss": 1.0}}) for r in (1, 2)]]}
    for language, first, other in (
        (False, "val accuracy by round", "val loss by round"),
        (True, "val loss by round", "val next-token accuracy by round"),
    ):
        panels = panels_of(histories, majority, {"val": 100}, language=language)
        assert next(iter(panels)) == first and other in panels
        drawn = curves(histories, majority, sizes={"val": 100}, language=language)
        assert drawn.axes[0].get_title("left") == first
        assert ("bands: one standard error of 100 val samples" in drawn.get_suptitle()) is not language


def test_what_has_no_curve_is_left_out():
    assert not curve_panels({"x": [[record(1, drift={}, metrics={})]]}, 0.5)
    one = panels_of({"x": [[record(1)]]}, 0.5)
    assert [*one] == ["test accuracy by round", "test accuracy by bytes"], "the result, if there is one round"
    nothing_sent = [record(r, uplink_bytes=0, downlink_bytes=0) for r in (1, 2)]
    both = panels_of({"pooled": [nothing_sent], "x": [[record(1), record(2)]]}, 0.5)
    assert [line.name for line in both["test accuracy by bytes"].marks] == ["x", "majority class"]
    assert both["test accuracy by bytes"].marks[0].colour == 1, "a method has one colour"


def test_two_points_make_no_valley_and_an_axis_of_accuracy_ends_at_1():
    (panel, *_) = curve_panels({"x": [[record(1, 0.999), record(2, 1.0)]]}, 0.7, {"test": 400})
    axes = figures.figure([panel]).axes[0]
    assert axes.get_ylim()[1] == 1.0 and axes.get_ylim()[0] < 0.7
    flat = [record(1, loss=0.700), record(2, loss=0.701)]
    assert panels_of({"x": [flat]})["test loss by round"].least == pytest.approx(0.25 * 0.701)
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_several_seeds_are_a_mean_and_a_band():
    runs = [[record(1, 0.5), record(2)], [record(1, 0.6), record(2)], [record(1, 0.7)]]
    (line, _) = panels_of({"x": runs}, 0.5, {"test": 100})["test accuracy by round"].marks
    assert line.x == [1], "to the end of the shortest run"
    assert (line.y, line.low, line.high) == tuple(pytest.approx([v]) for v in (0.6, 0.5, 0.7))
    assert "one standard deviation over 3 seeds" in curves({"x": runs}, 0.5, sizes={"test": 100}).get_suptitle()
    both = panels_of({"x": runs, "one": [[record(1)]]}, 0.5, {"test": 100})["test accuracy by round"].marks
    assert [bool(line.low) for line in both] == [True, False, False], "no other kind of band beside it"


@pytest.mark.more
@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_are_drawn_as_gaps(tmp_path):
    runs = [[record(1, math.nan, math.nan), record(2, 0.5)], [record(1, 0.5, math.inf), record(2, 0.5)]]
    for given in (runs, runs[:1]):
        plotted = curves({"x": given}, 0.5, sizes={"test": 9})
        assert figures.save(plotted, tmp_path / "curves.png").exists()


@pytest.mark.more
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("majority, metrics", [(0.6, "all"), (None, "some"), (None, "none")])
def test_curves_are_drawn_from_whatever_there_is(tmp_path, majority, metrics):
    history = [
        record(r) if metrics == "all" or (metrics == "some" and r == 3) else record(r, metrics={}) for r in (1, 2, 3)
    ]
    histories = {"rolora": [history], "fedlora": [history]}
    path = figures.save(curves(histories, majority), tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    pdf = path.with_suffix(".pdf")
    first = pdf.read_bytes()
    figures.save(curves(histories, majority), path)
    assert first.startswith(b"%PDF") and pdf.read_bytes() == first, "the same figure is the same file"


@pytest.mark.more
def test_drawing_changes_nothing_global(tmp_path):
    import matplotlib

    before, loaded = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    figures.save(curves({"x": [[record(1)]]}, 0.5), tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before and ("matplotlib.pyplot" in sys.modules) == loaded


def test_where_the_png_is_the_pdf_is_too(tmp_path):
    """A run draws a picture again only where its PNG is missing."""
    (tmp_path / "curves.pdf").mkdir()
    with pytest.raises(RunFailed, match="curves.pdf"):
        figures.save(Figure(), tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("classes", [0, 3, 40])
def test_clients_are_drawn_by_class(tmp_path, classes, monkeypatch):
    monkeypatch.setattr(drawn_runs, "MOST_CLIENTS", 4)
    labels = {"labels": {f"class {i}": i + 1 for i in range(classes)}} if classes else {}
    data = {"clients": [{"client": k, "size": 10 * k, **labels} for k in range(1, 7)]}
    panel = client_panel(data)
    assert panel.title.startswith("training samples of the first 4 of 6 clients")
    assert list(panel.ticks.values()) == ["1", "2", "3", "4"]
    (shown,) = panel.marks
    if classes == 40:
        assert [row[:] for row in shown.values] == [[i + 1] * 4 for i in range(40)]
    else:
        assert shown.parts == ({f"class {i}": [i + 1] * 4 for i in range(3)} if classes else {"": [10, 20, 30, 40]})
    path = figures.save(figures.figure([panel], "the setting"), tmp_path / "clients.png")
    assert path.stat().st_size > 3000


@pytest.mark.more
@pytest.mark.parametrize("classes", [2, 30])
def test_the_predictions_of_the_test_set(tmp_path, classes):
    confusion = [[int(i == j) for j in range(classes)] for i in range(classes)]
    on_test = {"confusion": confusion, "clients": {"1": {"acc": 0.5, "samples": 4}, "2": {"acc": 1.0, "samples": 2}}}
    made = predictions(on_test, [str(i) for i in range(classes)], 0.5)
    path = figures.save(made, tmp_path / "test.png")
    assert path.stat().st_size > 5000 and path.with_suffix(".pdf").exists()


def test_the_scores_of_clients_are_in_order_with_intervals():
    scores = {"own models": {"1": {"acc": 1.0, "samples": 4}, "2": {"acc": 0.5, "samples": 2}}}
    scores["another"] = {"3": {"acc": 0.25, "samples": 4}, "2": {"acc": 1.0, "samples": 2}}
    panel = score_panel(scores, 0.6)
    first, second, majority = panel.marks
    assert list(panel.ticks.values()) == ["2", "1", "3"] and panel.share
    assert (first.x, first.y, second.x, second.y) == ([0, 1], [0.5, 1.0], [0, 2], [1.0, 0.25])
    assert [*zip(first.low, first.high)] == [wilson(0.5, 2), wilson(1.0, 4)] and majority.y == [0.6, 0.6]


def test_a_confusion_matrix_is_by_true_class():
    panel = confusion_panel([[3, 1], [0, 0]], ["no", "a name of many letters"])
    (matrix,) = panel.marks
    assert matrix.values == [[0.75, 0.25], [0, 0]] and matrix.texts == [["3", "1"], ["0", "0"]]
    assert (panel.y, panel.rows[1]) == ("true class", "a name of many …")


@pytest.mark.parametrize("right, count", [(0, 1), (3, 3), (5, 8), (44, 60)])
def test_the_interval_of_a_client_is_wilsons(right, count):
    one_sigma = math.erf(math.sqrt(0.5))
    wanted = scipy.stats.binomtest(right, count).proportion_ci(one_sigma, method="wilson")
    assert wilson(right / count, count) == pytest.approx((wanted.low, wanted.high))


def test_a_long_title_breaks_after_a_dot(settings, tmp_path):
    figure = curves({"x": [[record(1)]]}, 0.5, title=" · ".join(["the setting"] * 40))
    lines = figure.get_suptitle().splitlines()
    assert len(lines) > 2 and not any(line.startswith("·") for line in lines)


def test_the_title_says_the_setting(settings):
    said = setting_of(load_config(settings), seeds=[0, 1])
    assert "5 clients, 5 a round" in said and "seeds 0, 1" in said and "reviews.csv" in said and "/" not in said


def test_a_table_is_csv_and_latex(tmp_path):
    lines = [["method", "test\nacc"], ["a_b, 50 %", "0.1 ± 0.2"], [], ["\\", "x\n"]]
    path = write_tables(lines, tmp_path / "t.csv")
    assert path.read_text(encoding="utf-8") == 'method,test acc\n"a_b, 50 %",0.1 ± 0.2\n\\,x \n'
    text = path.with_suffix(".tex").read_text(encoding="utf-8")
    assert r"a\_b, 50 \% & 0.1 $\pm$ 0.2 \\" in text and r"\begin{tabular}{lr}" in text
    assert r"\textbackslash  & x" in text and r"\toprule" in text
