"""Pictures of studies, as PNG and as one HTML page: history, slices, a key against the objective, Pareto front.

Not Optuna's own: those leave out pruned trials, which with rungs are most of them, draw the slices of one study at a
time, and know nothing of fresh seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fs_lowrank import UserError

from .best import Point, points_of, summary
from .settings import OBJECTIVES, settings_of, space_of
from .storage import load_study

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


@dataclass
class Series:
    label: str
    x: list
    y: list
    line: bool = False
    hollow: bool = False
    colour: int = 0
    error: list | None = None


@dataclass
class Panel:
    title: str
    x: str
    y: str
    series: list[Series] = field(default_factory=list)
    log: bool = False


def panels(storage, names: Sequence[str]) -> dict[str, list[Panel]]:
    """The pictures of some studies by file name."""
    studies = {n: load_study(storage, n) for n in names}
    first = settings_of(next(iter(studies.values())))
    objective = first.objectives[0]
    trials = {n: points_of(s) for n, s in studies.items()}
    if not any(trials.values()):
        raise UserError("there is no finished trial to draw yet; see `python -m hpo status`")
    short = _short(names)
    history = Panel("best so far" if len(first.objectives) == 1 else "trials", "trial", objective)
    pick = max if OBJECTIVES[objective] == "maximize" else min
    for index, (name, found) in enumerate(trials.items()):
        history.series += _points(found, lambda p: p.number, short[name], index)
        whole = [p for p in found if p.complete]
        best = [pick(q.value for q in whole[: i + 1]) for i in range(len(whole))]
        history.series.append(Series("", [p.number for p in whole], best, line=True, colour=index))
    pictures = {"history": [history], "slices": [], "pareto": []}
    for key in dict.fromkeys(p.key for s in studies.values() for p in space_of(s).parameters):
        panel = Panel(f"{objective} against {key}", key, objective, log=_log(studies.values(), key))
        for index, (name, found) in enumerate(trials.items()):
            panel.series += _points(
                [p for p in found if key in p.point], lambda p, k=key: _axis(p.point[k]), short[name], index
            )
        pictures["slices"].append(panel)
    rate = "train.optimizer.lr"
    if any(rate in p.point for found in trials.values() for p in found):
        pictures["learning_rate"] = [learning_rate_panel(storage, names)]
    if len(first.objectives) > 1:
        for axis, other in enumerate(first.objectives[1:], 1):
            panel = Panel("Pareto front", other, objective)
            for index, (name, found) in enumerate(trials.items()):
                complete = [p for p in found if len(p.values) > axis]
                panel.series.append(
                    Series(
                        short[name],
                        [p.values[axis] for p in complete],
                        [p.value for p in complete],
                        colour=index,
                        hollow=True,
                    )
                )
                winners = summary(storage, name)["winners"]
                line = sorted((w["values"][other], w["values"][objective]) for w in winners)
                panel.series.append(
                    Series(f"{short[name]}: front", [x for x, _ in line], [y for _, y in line], line=True, colour=index)
                )
            pictures["pareto"].append(panel)
    return {name: made for name, made in pictures.items() if made}


def learning_rate_panel(storage, names: Sequence[str]) -> Panel:
    """The objective against the learning rate, a line a study, with the winner's mean and spread on fresh seeds."""
    short, rate = _short(names), "train.optimizer.lr"
    objective = settings_of(load_study(storage, names[0])).objectives[0]
    panel = Panel(f"{objective} against the learning rate", "learning rate", objective, log=True)
    for index, name in enumerate(names):
        study = load_study(storage, name)
        found = sorted((p for p in points_of(study) if rate in p.point), key=lambda p: p.point[rate])
        whole, cut = [p for p in found if p.complete], [p for p in found if not p.complete]
        alone = {p.key for p in space_of(study).parameters} == {rate}
        panel.series.append(
            Series(short[name], [p.point[rate] for p in whole], [p.value for p in whole], line=alone, colour=index)
        )
        if cut:
            panel.series.append(
                Series("", [p.point[rate] for p in cut], [p.value for p in cut], hollow=True, colour=index)
            )
        for winner in summary(storage, name)["winners"][:1]:
            fresh = (winner["confirmed"] or {}).get("metrics", {}).get(objective)
            if fresh:
                panel.series.append(
                    Series(
                        f"{short[name]}: best, fresh seeds",
                        [winner["point"][rate]],
                        [fresh["mean"]],
                        colour=index,
                        error=[fresh["std"] or 0.0],
                    )
                )
    return panel


def _points(found: list[Point], x, label: str, colour: int) -> list[Series]:
    whole, cut = [p for p in found if p.complete], [p for p in found if not p.complete]
    series = [Series(label, [x(p) for p in whole], [p.value for p in whole], colour=colour)]
    if cut:
        series.append(
            Series(f"{label}, pruned", [x(p) for p in cut], [p.value for p in cut], hollow=True, colour=colour)
        )
    return series


def _axis(value):
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _log(studies, key: str) -> bool:
    """Whether a key goes over decades."""
    values: list = []
    for study in studies:
        for p in space_of(study).parameters:
            if p.key == key:
                values += p.values or (p.low, p.high)
                if p.log:
                    return True
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in values)
    return bool(values) and numbers and max(values) / min(values) >= 30


def _short(names: Sequence[str]) -> dict[str, str]:
    """What tells the studies apart: their names without what all begin with."""
    parts = [n.split(".") for n in names]
    common = 0
    while len(names) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return {n: ".".join(p[common:]) for n, p in zip(names, parts)}


def draw(pictures: dict[str, list[Panel]], folder: Path, title: str) -> list[Path]:
    """Write ``NAME.png`` for each picture and ``plots.html`` with all of them; returns the paths.

    Raises:
        UserError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [draw_png(made, folder / f"{name}.png") for name, made in pictures.items()]
        return [*written, _html(pictures, folder / "plots.html", title)]
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None


def draw_png(made: list[Panel], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 5.5 * len(made), 4.2), layout="constrained")
    for panel, axes in zip(made, figure.subplots(1, len(made), squeeze=False)[0]):
        for s in panel.series:
            colour = _COLOURS[s.colour % len(_COLOURS)]
            if s.error is not None:
                axes.errorbar(s.x, s.y, yerr=s.error, fmt="*", color=colour, markersize=11, capsize=4, label=s.label)
            else:
                axes.plot(
                    s.x,
                    s.y,
                    marker="" if s.line and not s.label else "o",
                    linestyle="-" if s.line else "",
                    color=colour,
                    markerfacecolor="none" if s.hollow else colour,
                    label=s.label if s.label and s.x else "_",
                )
        if panel.log:
            axes.set_xscale("log")
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        if any(s.label and s.x for s in panel.series):
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def _html(pictures: dict[str, list[Panel]], path: Path, title: str) -> Path:
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise UserError(
            "the HTML page needs plotly: pip install 'fs-lowrank[hpo]'; the PNG files are written"
        ) from None
    parts = [f"<!doctype html><meta charset='utf-8'><title>{title}</title><h1>{title}</h1>"]
    script: str | bool = "directory"  # plotly.min.js beside the page: it opens without a network
    for made in pictures.values():
        for panel in made:
            figure = go.Figure()
            for s in panel.series:
                colour = _COLOURS[s.colour % len(_COLOURS)]
                symbol = "star" if s.error is not None else "circle-open" if s.hollow else "circle"
                figure.add_scatter(
                    x=s.x,
                    y=s.y,
                    name=s.label or None,
                    showlegend=bool(s.label and s.x),
                    mode="lines" if s.line and not s.label else "lines+markers" if s.line else "markers",
                    marker={"color": colour, "symbol": symbol, "size": 9},
                    line={"color": colour},
                    error_y={"array": s.error} if s.error is not None else None,
                )
            figure.update_layout(
                title=panel.title,
                xaxis_title=panel.x,
                yaxis_title=panel.y,
                height=480,
                xaxis_type="log" if panel.log else None,
            )
            parts.append(figure.to_html(full_html=False, include_plotlyjs=script))
            if script == "directory":
                from plotly.offline import get_plotlyjs

                beside = path.parent / "plotly.min.js"
                if not beside.exists():
                    beside.write_text(get_plotlyjs(), encoding="utf-8")
                script = False
    path.write_text("\n".join(parts), encoding="utf-8")
    return path
