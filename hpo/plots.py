"""Pictures of studies, as PNG files and as one HTML page.

The rounds and the Pareto front are Optuna's own plots. The slices are ours: Optuna's leave out pruned trials (with
rungs these are most), show one study at a time, and do not show the winner's runs on fresh seeds. So is the history,
which has one colour for each study, and the majority class.

Every picture is a list of Plotly figures, which the HTML page shows as they are, and ``draw_png`` with Matplotlib:
Plotly itself needs a browser to write a PNG.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from fs_lowrank import UserError
from fs_lowrank.jobs.files import write_text
from fs_lowrank.jobs.tables import write_tables
from fs_lowrank.page.look import document, plot, table
from fs_lowrank.runs.plots import legend, plain, save, set_title, setting_of
from fs_lowrank.runs.summary import shown_name

from .best import points_of, summary, values_of
from .settings import settings_of, space_of
from .storage import load_study

try:
    import plotly.graph_objects as go
except ImportError:
    raise UserError("plots need plotly: pip install 'fs-lowrank[hpo]'") from None

RATE = "train.optimizer.lr"
_COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"),
    *("#bcbd22", "#000080", "#f4a460", "#556b2f"),
)
#: of trials in a picture that are named, each with a colour of its own; of more, the names would cover it
_MOST_NAMED = len(_COLOURS)
_STYLES = {"dot": ":", "dash": "--"}
_MARKERS = {"circle-open": "o", "star": "*", "x": "x"}


def pictures(storage: optuna.storages.BaseStorage, names: Sequence[str]) -> dict[str, list[go.Figure]]:
    """The pictures of some studies: file name -> figures.

    Raises:
        UserError: no trial has a value yet.
    """
    studies = {name: load_study(storage, name) for name in names}
    if not any(points_of(study) for study in studies.values()):
        raise UserError("there is no finished trial to draw yet; continue the search with the command that began it")
    objectives = settings_of(next(iter(studies.values()))).objectives
    keys = dict.fromkeys(p.key for study in studies.values() for p in space_of(study).parameters)
    made = {
        "history": [history_figure(studies, objectives[0])],
        "rounds": [rounds_figure(study, objectives[0]) for study in studies.values() if len(objectives) == 1],
        "slices": [slice_figure(storage, names, key) for key in keys],
        "learning_rate": [slice_figure(storage, names, RATE)] if RATE in keys else [],
    }
    if 1 < len(objectives) < 4:
        made["pareto"] = [
            optuna.visualization.plot_pareto_front(
                study, target_names=[_shown(o, study) for o in objectives]
            ).update_layout(title=name)
            for name, study in studies.items()
        ]
    return {name: figures for name, figures in made.items() if figures}


def setting(storage: optuna.storages.BaseStorage, names: Sequence[str]) -> str:
    """What some studies search in, for the title of their pictures."""
    found: dict[str, None] = {}
    for study in (load_study(storage, name) for name in names):
        searched = {p.key for p in space_of(study).parameters}
        found[setting_of(settings_of(study).base, rate=RATE not in searched)] = None
    return "; ".join(found)


def history_figure(studies: Mapping[str, optuna.Study], objective: str) -> go.Figure:
    """The objective of every complete trial in its order, and the best so far, in one colour for each study."""
    figure, labels = go.Figure(), _labels(list(studies))
    for index, (name, study) in enumerate(studies.items()):
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        numbers, values = [t.number for t in done], [t.values[0] for t in done]
        better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
        look: dict[str, Any] = {"x": numbers, "line_color": _COLOURS[index % len(_COLOURS)]}
        figure.add_scatter(y=values, mode="markers", name=labels[name], marker_size=9, opacity=0.7, **look)
        figure.add_scatter(
            y=list(itertools.accumulate(values, better)), mode="lines", name=f"{labels[name]}: best so far", **look
        )
    _add_majority(figure, studies.values(), objective)
    steps = max(1, max(len(study.trials) for study in studies.values()) // 10)
    shown = _shown(objective, next(iter(studies.values())))
    return figure.update_layout(title=f"{shown} by trial", xaxis_title="trial", yaxis_title=shown, xaxis_dtick=steps)


def _add_majority(figure: go.Figure, studies: Iterable[optuna.Study], objective: str) -> None:
    """Draw the accuracy of always predicting the majority class, from end to end."""
    found = (chance for s in studies for t in s.get_trials(deepcopy=False) if (chance := t.user_attrs.get("chance")))
    share = next((chance["share"] for chance in found), None)
    at = [x for line in figure.data for x in line.x or ()]
    if share is None or objective != "val_acc" or not at or any(isinstance(x, str) for x in at):
        return
    line, ends = {"color": "#808080", "dash": "dash"}, [min(at), max(at)]
    figure.add_scatter(x=ends, y=[share] * 2, mode="lines", line=line, name="majority class")


def rounds_figure(study: optuna.Study, objective: str) -> go.Figure:
    """The objective of every trial by round; pruned trials are dotted, with a cross where they ended."""
    figure = optuna.visualization.plot_intermediate_values(study)
    pruned = {f"Trial{t.number}" for t in study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))}
    measured = {f"Trial{t.number}": t.user_attrs.get("measured", {}) for t in study.get_trials(deepcopy=False)}
    lines = [line for line in figure.data if len(line.x)]
    for index, line in enumerate(lines):
        # What was reported may be the level of chance instead.
        line.update(y=[measured[line.name].get(str(x), y) for x, y in zip(line.x, line.y)])
        line.update(line={"color": _COLOURS[index % len(_COLOURS)], "dash": "dot" if line.name in pruned else "solid"})
        line.update(showlegend=len(lines) <= _MOST_NAMED, marker={"size": 5})
    ends = [(line.x[-1], line.y[-1]) for line in lines if line.name in pruned]
    if ends:
        cross = {"symbol": "x", "color": "#808080", "size": 10}
        figure.add_scatter(x=[x for x, _ in ends], y=[y for _, y in ends], mode="markers", marker=cross, name="pruned")
    _add_majority(figure, [study], objective)
    rounds = [x for line in lines for x in line.x]
    figure.update_layout(showlegend=True, xaxis_dtick=max(1, (max(rounds, default=1) - 1) // 10))
    return figure.update_layout(title=study.study_name, xaxis_title="round", yaxis_title=_shown(objective, study))


def slice_figure(storage: optuna.storages.BaseStorage, names: Sequence[str], key: str) -> go.Figure:
    """The objective against one key, a colour for each study; the winner also with mean and spread on fresh seeds."""
    objective = settings_of(load_study(storage, names[0])).objectives[0]
    figure, labels = go.Figure(), _labels(names)
    for index, name in enumerate(names):
        study = load_study(storage, name)
        points = sorted((p for p in points_of(study) if key in p.point), key=lambda p: _axis(p.point[key]))
        only = {p.key for p in space_of(study).parameters} == {key}
        style: dict[str, Any] = {"marker": {"color": _COLOURS[index % len(_COLOURS)], "size": 9}, "opacity": 0.7}
        for complete in (True, False):
            if not (shown := [p for p in points if p.complete == complete]):
                continue
            figure.add_scatter(
                x=[_axis(p.point[key]) for p in shown],
                y=[p.value for p in shown],
                name=labels[name] + ", pruned" * (not complete),
                mode="lines+markers" if only and complete else "markers",
                marker_symbol="circle" if complete else "circle-open",
                **style,
            )
        for winner in summary(storage, name)["winners"][:1]:
            fresh = (winner["confirmed"] or {}).get("metrics", {}).get(objective)
            if fresh and key in winner["point"]:
                figure.add_scatter(
                    x=[_axis(winner["point"][key])],
                    y=[fresh["mean"]],
                    name=f"{labels[name]}: best, fresh seeds",
                    mode="markers",
                    marker_symbol="star",
                    error_y={"array": [fresh["std"] or 0.0]},
                    **style,
                )
    log = "log" if _over_decades(storage, names, key) else None
    axis = "learning rate" if key == RATE else key
    values = {x for trace in figure.data for x in trace.x}
    _add_majority(figure, [load_study(storage, name) for name in names], objective)
    if len(values) <= 8 and all(isinstance(x, (int, float)) for x in values):  # what was tried, not ticks between
        figure.update_layout(xaxis_tickvals=sorted(values), xaxis_ticktext=[f"{x:g}" for x in sorted(values)])
    called = _shown(objective, load_study(storage, names[0]))
    return figure.update_layout(title=f"{called} against {axis}", xaxis_title=axis, yaxis_title=called, xaxis_type=log)


def _shown(objective: str, study: optuna.Study) -> str:
    return shown_name(objective, settings_of(study).base.is_language)


def _axis(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _over_decades(storage: optuna.storages.BaseStorage, names: Sequence[str], key: str) -> bool:
    """Whether the values of a key need a logarithmic axis."""
    parameters = [p for name in names for p in space_of(load_study(storage, name)).parameters if p.key == key]
    if any(p.log for p in parameters):
        return True
    values = [v for p in parameters for v in p.values or (p.low, p.high)]
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in values)
    return bool(values) and numbers and max(values) / min(values) >= 30


def _labels(names: Sequence[str]) -> dict[str, str]:
    """What tells the studies apart: their names without the parts that all begin with."""
    parts = [n.split(".") for n in names]
    common = 0
    while len(names) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return {n: ".".join(p[common:]) for n, p in zip(names, parts)}


def draw(
    made: Mapping[str, Sequence[go.Figure]],
    folder: Path,
    title: str,
    trials: Sequence[Sequence[Any]] = (),
    said: str = "",
) -> list[Path]:
    """Write ``NAME.png`` for each picture, ``plots.html`` with all of them, and ``trials.csv``; returns the paths.

    Args:
        trials: the table of ``trials_table``. said: the ``setting``, above the pictures.

    Raises:
        UserError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [draw_png(figures, folder / f"{name}.png", said) for name, figures in made.items()]
        if trials:
            written.append(write_tables([[str(cell) for cell in row] for row in trials], folder / "trials.csv"))
        shown = f"<p class=note>{html.escape(said)}</p>" * bool(said)
        shown += f"<h2>Trials</h2>{table('trials', trials[0], trials[1:])}" if trials else ""
        return [
            *written,
            _html([f for figures in made.values() for f in figures], shown, folder / "plots.html", title),
        ]
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None


def draw_png(figures: Sequence[go.Figure], path: Path, said: str = "") -> Path:
    """Draw the scatter traces of some Plotly figures side by side, as PNG and as PDF beside it; returns ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    page = Figure(figsize=(1.5 + 5.5 * len(figures), 4.2), layout="constrained")
    for figure, axes in zip(figures, page.subplots(1, len(figures), squeeze=False)[0]):
        layout, named = figure.layout, {}
        for trace in figure.data:
            colour = trace.line.color or trace.marker.color
            drawn = axes.errorbar(
                [plain(x) if isinstance(x, str) else x for x in trace.x],
                trace.y,
                yerr=trace.error_y.array,
                marker=_MARKERS.get(trace.marker.symbol, "o") if "markers" in (trace.mode or "markers") else "",
                markersize=11 if trace.marker.symbol == "star" else 0.75 * (trace.marker.size or 8),
                markerfacecolor="none" if trace.marker.symbol == "circle-open" else None,
                linestyle=_STYLES.get(trace.line.dash, "-") if "lines" in (trace.mode or "lines") else "",
                color=colour if isinstance(colour, str) and colour.startswith("#") else None,
                capsize=4,
                alpha=trace.opacity,
            )
            if trace.name and len(trace.x) and trace.showlegend is not False:
                named[trace.name] = drawn
        if layout.xaxis.type == "log":
            axes.set_xscale("log")
        if layout.xaxis.tickvals:
            axes.set_xticks(layout.xaxis.tickvals, layout.xaxis.ticktext)
            axes.minorticks_off()
        if layout.xaxis.dtick:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        titles = {"title": layout.title, "xlabel": layout.xaxis.title, "ylabel": layout.yaxis.title}
        axes.set(**{name: plain(title.text or "") for name, title in titles.items()})
        axes.grid(alpha=0.3)
        if layout.showlegend is not False and named:
            legend(axes, named, fontsize=8)
    set_title(page, said)
    return save(page, path)


def _html(figures: Sequence[go.Figure], more: str, path: Path, title: str) -> Path:
    """One page that needs no other file, with all figures and what there is ``more``."""
    plots = []
    for number, figure in enumerate(figures):
        shown = json.loads(figure.update_layout(template="none").to_json())
        plots.append(plot(str(number + 1), shown["data"], shown["layout"]))
    body = f"<section class=plots>{''.join(plots)}</section>{more}"
    write_text(path, document(title, body, plots=True))
    return path


def trials_table(storage: optuna.storages.BaseStorage, names: Sequence[str]) -> list[list[Any]]:
    """All trials of some studies with their values (``values_of``) and parameters, below a header."""
    found = [(name, trial) for name in names for trial in load_study(storage, name).get_trials(deepcopy=False)]
    keys = sorted({key for _, trial in found for key in trial.params})
    objectives = settings_of(load_study(storage, names[0])).objectives
    rows = [
        [
            *(name, trial.number, trial.state.name.lower(), len(trial.intermediate_values)),
            *(values_of(trial, objectives) or ("" for _ in objectives)),
            *(trial.params.get(key, "") for key in keys),
        ]
        for name, trial in found
    ]
    return [["study", "trial", "state", "rounds evaluated", *objectives, *keys], *rows]
