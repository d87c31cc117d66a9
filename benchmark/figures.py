"""The figures of the report, drawn with matplotlib."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fs_lowrank.jobs.files import write_bytes
from fs_lowrank.runs.plots import legend, plain

from .decide import FAILS, HOLDS, INCONCLUSIVE, UNTESTED, Condition, Met
from .metrics import scale_of, title_of
from .plan import settings
from .results import ExperimentResults

_COLOURS = "#1f77b4 #d62728 #2ca02c #9467bd #ff7f0e #17becf #8c564b #e377c2 #7f7f7f #bcbd22".split()
_MARKERS = "osD^vP*X<>"
_OF_VERDICT = {HOLDS: "#2ca02c", FAILS: "#d62728", INCONCLUSIVE: "#7f7f7f", UNTESTED: "#bcbd22"}
#: the most by which the lowest point is above the majority class where that is drawn
_NEAR = 0.3
_HOLLOW = {"markerfacecolor": "white"}
#: what a hollow point means
_NOT_WHOLE = "a seed collapsed or failed"
#: number of panels in a row
_COLUMNS = 4


def draw_all(results: ExperimentResults, folder: Path) -> dict[str, Path]:
    """Draw all figures of an experiment for which there are results; returns files by title."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{results.suite.name}-{results.suite.size}-{results.experiment.name}"
    drawn = {}
    for title, name, draw in (
        ("", "axis", _along_axis),
        ("Learning curves", "curves", _curves),
        ("Accuracy against bytes", "traffic", _traffic),
        ("Bytes by method", "bytes", _bytes),
        ("Learning rates tried", "rates", _rates),
    ):
        figure = draw(results)
        if figure is not None:
            path = folder / f"{stem}-{name}.png"
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=110)
            write_bytes(path, image.getvalue(), durable=False)
            drawn[title or title_of(results.experiment.metrics[0], results.language)] = path
    return drawn


def draw_claim(title: str, by_experiment: Mapping[str, Sequence[Condition]], path: Path) -> Path | None:
    """Draw by how much each condition of a claim is met, in each experiment; None if there are no figures for any.

    One panel for each unit. A condition whose spread is not known is a hollow point without an interval.
    """
    panels: dict[str, list[tuple[str, str, Met]]] = {}
    for experiment, conditions in by_experiment.items():
        for condition in conditions:
            if condition.met is not None and math.isfinite(condition.met.centre):
                rows = panels.setdefault(condition.met.unit, [])
                rows.append((f"{experiment}: {plain(condition.met.what)}", condition.verdict, condition.met))
    if not panels:
        return None
    from matplotlib.lines import Line2D

    path.parent.mkdir(parents=True, exist_ok=True)
    heights = [len(rows) + 1.6 for rows in panels.values()]
    figure = _figure(8.5, 0.24 * sum(heights) + 0.8)
    figure.suptitle(plain(textwrap.fill(title, 100)), fontsize=10)
    for axes, (unit, rows) in zip(
        figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat, panels.items()
    ):
        _conditions(axes, unit, rows)
    look: dict[str, Any] = {"marker": "o", "ls": "", "color": _OF_VERDICT[INCONCLUSIVE]}
    handles = [Line2D([], [], label="spread not known", markerfacecolor="white", **look)]
    handles += [
        Line2D([], [], label=v, **{**look, "color": _OF_VERDICT[v]}) for v in (HOLDS, FAILS, INCONCLUSIVE, UNTESTED)
    ]
    figure.legend(handles=handles, fontsize=7, loc="outside lower center", ncols=5)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    write_bytes(path, image.getvalue(), durable=False)
    return path


def _conditions(axes, unit: str, rows: Sequence[tuple[str, str, Met]]) -> None:
    scale = scale_of(unit)[0] or 1
    percent = scale == 100
    for index, (_, verdict, met) in enumerate(rows):
        colour = _OF_VERDICT[verdict]
        if met.low is not None and met.high is not None:
            axes.plot([met.low * scale, met.high * scale], [index, index], color=colour, lw=2)
        face = "white" if met.low is None else colour
        axes.plot(met.centre * scale, index, "o", color=colour, markerfacecolor=face, markersize=5)
    # An interval that is far wider than the quantities would leave no room for the others, and is cut.
    centres = [0.0, *(met.centre for *_, met in rows)]
    room = 2 * max(map(abs, centres)) or 1.0
    low = max(min([*centres, *(met.low for *_, met in rows if met.low is not None)]), min(centres) - room)
    high = min(max([*centres, *(met.high for *_, met in rows if met.high is not None)]), max(centres) + room)
    edge = 0.05 * (high - low) or 0.05
    axes.axvline(0, color="black", lw=0.8)
    axes.set(xlim=(scale * (low - edge), scale * (high + edge)), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    name = "points of accuracy" if percent else title_of(unit) if unit != "quotient" else unit
    axes.set_xlabel(f"← not met      by how much it is met: {name}", fontsize=8)
    axes.grid(alpha=0.3, axis="x")


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style(results: ExperimentResults, method: str) -> dict:
    index = results.methods.index(method)
    return {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)], "markersize": 4}


def _numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _along_axis(results: ExperimentResults):
    """Mean and standard deviation of the first metric along the only axis; with several axes along the first one of
    numbers, with a panel for each setting of the others."""
    metric, named = results.experiment.metrics[0], results.experiment.axes
    if len(results.columns) < 2 or ":" in metric or scale_of(metric)[0] == 0:
        return None
    numbered = (name for name, labels in named.items() if len(labels) > 1 and _numbers(list(labels)))
    name = next(iter(named), None) if len(named) == 1 else next(numbered, None)
    if name is None:
        return None
    panels: dict[str, dict[str, str]] = {}  # the other labels -> the label on the axis -> the column
    for setting in settings(results.experiment):
        if (column := " / ".join(setting.values())) in results.columns:
            others = ", ".join(f"{other} {label}" for other, label in setting.items() if other != name)
            panels.setdefault(others, {})[setting[name]] = column
    if len(named) == 1:
        figure = _figure(6, 4)
        axes = figure.subplots()
        _points(axes, results, name, panels[""])
        axes.set(ylabel=title_of(metric, results.language), title=_broken(results.experiment.title))
        axes.legend(fontsize=8)
        return figure
    figure, drawn = _grid(results, f"by {name}", len(panels))
    for index, (axes, (others, columns)) in enumerate(zip(drawn, panels.items())):
        _points(axes, results, name, columns)
        axes.set_title(plain(others), fontsize=9)
        if index % _COLUMNS == 0:
            axes.set_ylabel(_measured(results, metric))
    _common_legend(figure, drawn)
    return figure


def _points(axes, results: ExperimentResults, name: str, columns: Mapping[str, str]) -> None:
    """The first metric of each method at the labels of an axis, of which ``columns`` has the columns."""
    metric = results.experiment.metrics[0]
    at, scale = _numbers(list(columns)) or list(range(len(columns))), scale_of(metric)[0]
    lowest = math.inf
    for method in results.methods:
        points = [(x, f) for x, c in zip(at, columns.values()) if (f := results.figure(method, c, metric)) is not None]
        lowest = min([lowest, *(f.mean for _, f in points)])
        axes.errorbar(
            [x for x, _ in points],
            [f.mean * scale for _, f in points],
            [(f.std or 0) * scale for _, f in points],
            label=method,
            capsize=3,
            **_style(results, method),
        )
        _hollow(axes, [(x, f.mean * scale) for x, f in points if not f.whole], _style(results, method))
    axes.set(xlabel=plain(name))
    if min(at) > 0 and max(at) >= 20 * min(at):
        axes.set_xscale("log")
        axes.set_xticks([], minor=True)
    axes.set_xticks(at, [plain(label) for label in columns])
    majority = _majority(results)
    if majority and scale == 100 and lowest < majority + _NEAR:  # farther below, it would leave no room for the points
        axes.axhline(100 * majority, color="grey", ls=":", label="majority class")
    axes.grid(alpha=0.3)


def _hollow(axes, points: Sequence[tuple[float, float]], style: Mapping[str, Any]) -> None:
    """Draw points again, hollow, and say what that means."""
    if points:
        axes.plot(*zip(*points), ls="", zorder=3, **{**style, **_HOLLOW})
        if _NOT_WHOLE not in axes.get_legend_handles_labels()[1]:
            axes.plot([], [], ls="", marker="o", markersize=4, color="grey", **_HOLLOW, label=_NOT_WHOLE)


def _broken(title: str) -> str:
    """A title broken to the width of a figure of one panel."""
    return plain(textwrap.fill(title, 60))


def _measured(results: ExperimentResults, metric: str) -> str:
    """A description of the metric broken to the height of a panel."""
    return textwrap.fill(title_of(metric, results.language), 36)


def _majority(results: ExperimentResults) -> float | None:
    return next((r["majority"] for r in results.all_records if r.get("majority")), None)


def curve_metric(results: ExperimentResults) -> str | None:
    """The metric of the learning curves: held-out accuracy if there is one, else loss."""
    points = [p for r in results.all_records for p in r.get("history", {}).get("evaluated", ())]
    there = {name for p in points for name in p}
    if _majority(results) is None and "client_test_acc" not in there and "val_loss" in there:
        return "val_loss"  # of a causal language model
    return next((n for n in ("val_acc", "client_test_acc", "test_acc", "val_loss", "test_loss") if n in there), None)


def _grid(results: ExperimentResults, title: str, count: int):
    """A figure of ``count`` panels with a common y axis."""
    rows, across = -(-count // _COLUMNS), min(count, _COLUMNS)
    figure = _figure(across * 3.7 + 0.4, rows * 3.2 + 0.5)
    panels = figure.subplots(rows, across, squeeze=False, sharey=True)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    said = textwrap.fill(f"{results.experiment.title}: {title}", int(13 * figure.get_figwidth()))
    figure.suptitle(plain(said), fontsize=11)
    return figure, panels.flat[:count]


def _common_legend(figure, panels) -> None:
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels())}
    legend(figure, handles, loc="outside lower center", ncols=min(len(handles), 6), fontsize=8)


def _axis_title(results: ExperimentResults, column: str) -> str:
    """The setting of ``column`` for a title."""
    named = zip(results.experiment.axes, column.split(" / ")) if column else ()
    return plain(", ".join(f"{n} {label}" for n, label in named))


def _lines(results: ExperimentResults, title: str, x_label: str, x_of, log: bool = False):
    from matplotlib.ticker import LogLocator, MaxNLocator

    metric = curve_metric(results)
    if metric is None or not results.columns:
        return None
    scale, judged = scale_of(metric)[0], results.experiment.metrics[0]
    figure, panels = _grid(results, title, len(results.columns))
    for index, (axes, column) in enumerate(zip(panels, results.columns)):
        cut = []
        for method in results.methods:
            runs = [
                [(x_of(p), p[metric] * scale) for p in r["history"]["evaluated"] if metric in p]
                for r in results.records.get((method, column), ())
                if "history" in r
            ]
            runs = [run for run in runs if run]
            if not runs:
                continue
            length = min(map(len, runs))
            if length < max(map(len, runs)):
                cut.append(f"; {method} to the end of its shortest run")
            x = [statistics.fmean(run[i][0] for run in runs) for i in range(length)]
            y = [[run[i][1] for run in runs] for i in range(length)]
            style = _style(results, method)
            means = [statistics.fmean(v) for v in y]
            axes.plot(x, means, label=method, lw=1.4, **style)
            end = results.figure(method, column, judged)
            if results.failed_seeds(method, column, judged) or end and end.collapsed:
                _hollow(axes, [(x[-1], means[-1])], style)
            axes.fill_between(x, [min(v) for v in y], [max(v) for v in y], color=style["color"], alpha=0.12, lw=0)
        axes.set(xlabel=textwrap.fill(x_label + "".join(cut), 44), title=_axis_title(results, column))
        axes.title.set_fontsize(9)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(lambda value, _: "")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if index % _COLUMNS == 0:
            axes.set_ylabel(_measured(results, metric))
        axes.grid(alpha=0.3)
    _common_legend(figure, panels)
    return figure


def _curves(results: ExperimentResults):
    return _lines(
        results, "learning curves (mean; band: smallest to largest over seeds)", "round", lambda p: p["round"]
    )


def _traffic(results: ExperimentResults):
    if not any("history" in r for r in results.all_records):
        return None
    return _lines(
        results,
        "against bytes",
        "megabytes so far, all clients, both directions",
        lambda p: max((p["uplink"] + p["downlink"]) / 1e6, 1e-4),
        log=True,
    )


def _bytes(results: ExperimentResults):
    """Bytes per client and round, in the first setting that has all methods."""
    column = results.fullest
    names = [m for m in results.methods if column is not None and results.figure(m, column, "uplink")]
    if column is None or len(names) < 2:
        return None

    def mean(method: str, metric: str) -> float:
        figure = results.figure(method, column, metric)
        return figure.mean if figure else 0.0

    figure = _figure(7, 0.42 * len(names) + 1.7)
    axes, left = figure.subplots(), [0.0] * len(names)
    parts: dict[str, list[float]] = {}
    for direction in ("up", "down"):
        whole, bare = f"{direction}link", f"{direction}link_without_head"
        parts[f"{direction}, without head"] = [mean(m, bare) for m in names]
        parts[f"{direction}, head"] = [mean(m, whole) - mean(m, bare) for m in names]
    for (label, sizes), colour in zip(parts.items(), ("#1f77b4", "#aec7e8", "#2ca02c", "#98df8a")):
        axes.barh(names, [s / 1e3 for s in sizes], left=[x / 1e3 for x in left], color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes)]
    for index, total in enumerate(left):
        axes.annotate(f" {total / 1e3:.4g}", (total / 1e3, index), va="center", fontsize=8)
    axes.invert_yaxis()
    at = _axis_title(results, column)
    axes.set(xlabel="kB per client and round", title=_broken(results.experiment.title + (f": {at}" if at else "")))
    axes.margins(x=0.12)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    return figure


def _rates(results: ExperimentResults):
    """The trials and the winner of each search, one panel per setting."""
    key = "train.optimizer.lr"
    by_setting: dict[str, list[dict]] = {}
    for search in results.searches:
        if all(key in p for p in search["tried"]):
            by_setting.setdefault(", ".join(f"{k} {v}" for k, v in search["setting"].items()), []).append(search)
    if not by_setting:
        return None
    figure, panels = _grid(results, "rates tried", len(by_setting))
    for axes, (setting, searches) in zip(panels, by_setting.items()):
        for search in searches:
            points = sorted((p[key], p["value"]) for p in search["tried"])
            method = search["method"]
            look: dict[str, Any] = _style(results, method) if method in results.methods else {"marker": "."}
            axes.plot(*zip(*points), label=method, lw=1.4, **look)
        rates = sorted({p[key] for search in searches for p in search["tried"]})
        axes.set(xscale="log", xlabel="learning rate", title=plain(setting))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{results.searches[0]['objective']} at the end")
    _common_legend(figure, panels)
    return figure
