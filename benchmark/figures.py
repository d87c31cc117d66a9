"""Which figures the report has, as panels of ``fs_lowrank.draw``, and their files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fs_lowrank.draw.figures import GREY, INK, drawn, figure
from fs_lowrank.draw.panels import Line, Panel
from fs_lowrank.jobs.files import write_bytes
from fs_lowrank.versions import __version__

from .conditions import FAILS, HOLDS, INCONCLUSIVE, UNTESTED, Condition
from .metrics import scale_of, title_of
from .plan import settings
from .results import ExperimentResults
from .store import digest

_OF_VERDICT = {HOLDS: "#2ca02c", FAILS: "#d62728", INCONCLUSIVE: "#7f7f7f", UNTESTED: "#bcbd22"}
#: the majority class is drawn if the lowest point is less than this above it
_NEAR = 0.3
#: the meaning of a hollow point
_NOT_WHOLE = "a seed collapsed or failed"


def draw_all(results: ExperimentResults, root: Path) -> dict[str, str]:
    """Draw all figures of an experiment, none of a script; returns files below ``root`` by title."""
    if results.experiment.script or not results.records:
        return {}
    stem = f"{results.suite.name}-{results.suite.size}-{results.experiment.name}"
    drawings = {}
    for title, name, note, panels in (
        (title_of(results.experiment.metrics[0], results.language), "axis", "", along_axis(results)),
        ("Learning curves", "curves", "mean; band: smallest to largest over seeds", learning_curves(results)),
    ):
        if panels:
            above = ": ".join(filter(None, (results.experiment.title, note)))
            size = (6.0, 4.0) if len(panels) == 1 else (3.7, 3.2)
            drawings[title] = f"report/{stem}-{name}.png"
            _write(root / drawings[title], panels, above, size=size, same=True, in_a_row=4)
    return drawings


def _write(path: Path, panels: Sequence[Panel], title: str, **look: Any) -> None:
    """Draw a picture as PNG, unless the existing file has the same data, by its comment."""
    from PIL import Image

    comment = digest(repr((__version__, panels, title, look)))
    with suppress(OSError, SyntaxError), Image.open(path) as existing:  # no picture yet, or not a whole one
        if existing.info.get("Comment") == comment:
            return existing.verify()
    write_bytes(path, drawn(figure(panels, title, **look), "png", comment), durable=False)


def draw_claim(title: str, by_experiment: Mapping[str, Sequence[Condition]], path: Path) -> Path | None:
    """Draw by how much each condition of a claim is met, in each experiment; None if there are no figures for any."""
    panels = claim_panels(by_experiment)
    if not panels:
        return None
    _write(path, panels, title, size=(9.5, 0.26), in_a_row=1)
    return path


def point(name: str, colour: int | str, x: float, y: float, ends: Sequence[float] | None = None, **look: Any) -> Line:
    """A point with an interval, if it has ``ends``."""
    low, high = ([end] for end in ends) if ends else ((), ())
    return Line(name, [x], [y], low, high, colour=colour, style="", marker="o", band=False, **look)


def draw_on_white(panels: Sequence[Panel], title: str, path: Path, **look: Any) -> None:
    """Draw a picture as SVG with a white ground, for dark pages."""
    ground = b'<g id="figure_1">\n'
    content = drawn(figure(panels, title, **look), "svg").replace(
        ground, b'<rect width="100%" height="100%" fill="white"/>' + ground, 1
    )
    write_bytes(path, content, durable=False)


def claim_panels(by_experiment: Mapping[str, Sequence[Condition]]) -> list[Panel]:
    """A panel for each unit of conditions, without those that only ask whether anything was learned. One whose spread
    is not known is a hollow point without an interval."""
    units: dict[str, list[tuple[str, str, tuple[float, float | None, float | None]]]] = {}
    for experiment, conditions in by_experiment.items():
        for condition in conditions:
            if not condition.premise and (met := condition.met) is not None:
                label = ", ".join(filter(None, (f"{experiment}: {condition.subject}", condition.where)))
                units.setdefault(condition.unit, []).append((label, condition.verdict, met))
    panels = []
    for unit, rows in units.items():
        scale = scale_of(unit)[0] or 1
        marks = [Line("", [-0.5, len(rows) - 0.5], [0.0, 0.0], colour=INK, marker="")]
        for position, (_, verdict, (centre, low, high)) in enumerate(rows):
            ends = None if low is None or high is None else (low * scale, high * scale)
            look = {} if ends else {"hollow": True, "means": "spread not known"}
            marks.append(point(verdict, _OF_VERDICT[verdict], position, centre * scale, ends, **look))
        name = "points of accuracy" if scale == 100 else unit if unit == "quotient" else title_of(unit)
        title = f"← not met      by how much it is met: {name}"
        ticks = {position: label for position, (label, *_) in enumerate(rows)}
        panels.append(Panel(unit, "", "", title, marks, ticks=ticks, sideways=True, tall=len(rows) + 5))
    return panels


def _numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def along_axis(results: ExperimentResults) -> list[Panel]:
    """Mean and standard deviation of the first metric along the only axis; with several axes along the first one of
    numbers, with a panel for each setting of the others."""
    metric, axes = results.experiment.metrics[0], results.experiment.axes
    if len(results.columns) < 2 or ":" in metric or scale_of(metric)[0] == 0:
        return []
    numeric = (name for name, labels in axes.items() if len(labels) > 1 and _numbers([*labels]))
    name = next(iter(axes), None) if len(axes) == 1 else next(numeric, None)
    if name is None:
        return []
    panels: dict[str, dict[str, str]] = {}  # the other labels -> the label on the axis -> the column
    for setting in settings(results.experiment):
        if (column := " / ".join(setting.values())) in results.columns:
            title = ", ".join(f"{other} {label}" for other, label in setting.items() if other != name)
            panels.setdefault(title, {})[setting[name]] = column
    return [_axis_panel(results, name, title, columns) for title, columns in panels.items()]


def _axis_panel(results: ExperimentResults, name: str, title: str, columns: Mapping[str, str]) -> Panel:
    """The first metric of each method at the labels of an axis, of which ``columns`` has the columns."""
    metric = results.experiment.metrics[0]
    at, scale = _numbers([*columns]) or [*range(len(columns))], scale_of(metric)[0]
    marks, lowest = [], math.inf
    for index, method in enumerate(results.methods):
        points = [(x, f) for x, c in zip(at, columns.values()) if (f := results.figure(method, c, metric)) and f.n]
        if not points:
            continue
        x, means = [x for x, _ in points], [f.mean * scale for _, f in points]
        spreads = [(f.std or 0) * scale for _, f in points]
        low, high = ([mean + sign * spread for mean, spread in zip(means, spreads)] for sign in (-1, 1))
        marks.append(Line(method, x, means, low, high, colour=index, band=False))
        marks += _hollow([(x, f.mean * scale) for x, f in points if not f.complete], index)
        lowest = min([lowest, *means])
    majority = _majority(results)
    if majority and scale == 100 and lowest < 100 * (majority + _NEAR):  # farther below, it would leave no room
        ends = [min(at), max(at)]
        marks.append(Line("majority class", ends, [100 * majority] * 2, colour=GREY, style=":", marker=""))
    log = min(at) > 0 and max(at) >= 20 * min(at)
    return Panel("axis", title, name, title_of(metric, results.language), marks, log=log, ticks=dict(zip(at, columns)))


def _hollow(points: Sequence[tuple[float, float]], index: int) -> list[Line]:
    """Hollow points over the line of the method with this number, where a seed collapsed or failed."""
    if not points:
        return []
    x, y = zip(*points)
    return [Line("", x, y, colour=index, style="", hollow=True, means=_NOT_WHOLE)]


def _majority(results: ExperimentResults) -> float | None:
    return next((r["majority"] for r in results.all_records if r.get("majority")), None)


def curve_metric(results: ExperimentResults) -> str | None:
    """The metric of the learning curves: held-out accuracy if there is one, else loss."""
    points = [p for r in results.all_records for p in r.get("history", {}).get("evaluated", ())]
    names = {name for p in points for name in p}
    if _majority(results) is None and "client_test_acc" not in names and "val_loss" in names:
        return "val_loss"  # of a causal language model
    return next((n for n in ("val_acc", "client_test_acc", "test_acc", "val_loss", "test_loss") if n in names), None)


def learning_curves(results: ExperimentResults) -> list[Panel]:
    """The metric of the curves by round, a panel for each setting: means over seeds with bands from the smallest to the
    largest; the end of a method with a lost seed is hollow."""
    metric, panels = curve_metric(results), []
    if metric is None:
        return []
    scale, first_metric = scale_of(metric)[0], results.experiment.metrics[0]
    for column in results.columns:
        marks, note = [], ""
        for index, method in enumerate(results.methods):
            records = [r for r in results.records.get((method, column), ()) if "history" in r]
            curves = [
                [(p["round"], p[metric] * scale) for p in r["history"]["evaluated"] if metric in p] for r in records
            ]
            runs = [run for run in curves if run]
            points = [*zip(*runs)]
            if not points:
                continue
            if len(points) < max(map(len, runs)):
                note += f"; {method} to the end of its shortest run"
            x, y = ([statistics.fmean(point[i] for point in group) for group in points] for i in (0, 1))
            low, high = ([end(value for _, value in group) for group in points] for end in (min, max))
            marks.append(Line(method, x, y, low, high, colour=index))
            end = results.figure(method, column, first_metric)
            if end and (end.failed or end.collapsed):
                marks += _hollow([(x[-1], y[-1])], index)
        name = title_of(metric, results.language)
        title = ", ".join(f"{axis} {label}" for axis, label in zip(results.experiment.axes, column.split(" / ")))
        panels.append(Panel("curves", title, "round" + note, name, marks, whole=True))
    return panels if any(panel.marks for panel in panels) else []
