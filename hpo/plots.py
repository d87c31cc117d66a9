"""Which pictures studies have: history, rounds, slices, Pareto front; as PNG and PDF files, and as one HTML page.

They are not Optuna's own: its slices leave out pruned trials (with rungs these are most), show one study at a time, and
do not show the winner's runs on fresh seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from fs_lowrank import UserError
from fs_lowrank.draw.figures import COLOURS, GREY, figure, save
from fs_lowrank.draw.page import PageTable, Section, document
from fs_lowrank.draw.panels import Line, Panel, columns
from fs_lowrank.draw.runs import setting_of
from fs_lowrank.jobs.files import write_text
from fs_lowrank.jobs.tables import write_tables
from fs_lowrank.runs.summary import shown_name

from .best import points_of, summary, values_of
from .settings import settings_of, space_of
from .storage import load_study

RATE = "train.optimizer.lr"
Studies = Mapping[str, optuna.Study]


def pictures(storage: optuna.storages.BaseStorage, names: Sequence[str]) -> dict[str, list[Panel]]:
    """The pictures of some studies: file name -> panels.

    Raises:
        UserError: no trial has a value yet.
    """
    studies = {name: load_study(storage, name) for name in names}
    if not any(points_of(study) for study in studies.values()):
        raise UserError("there is no finished trial to draw yet; continue the search with the command that began it")
    objectives = settings_of(next(iter(studies.values()))).objectives
    keys = dict.fromkeys(p.key for study in studies.values() for p in space_of(study).parameters)
    pairs = [*itertools.combinations(range(len(objectives)), 2)]
    made = {
        "history": [history_panel(studies)],
        "rounds": [rounds_panel(study) for study in studies.values() if len(objectives) == 1],
        "slices": [slice_panel(storage, names, key) for key in keys],
        "learning_rate": [slice_panel(storage, names, RATE)] if RATE in keys else [],
        "pareto": [pareto_panel(study, pair) for study in studies.values() for pair in pairs],
    }
    return {name: panels for name, panels in made.items() if panels}


def setting(storage: optuna.storages.BaseStorage, names: Sequence[str]) -> str:
    """What some studies search in, for the title of their pictures."""
    found: dict[str, None] = {}
    for study in (load_study(storage, name) for name in names):
        searched = {p.key for p in space_of(study).parameters}
        found[setting_of(settings_of(study).base, rate=RATE not in searched)] = None
    return "; ".join(found)


def history_panel(studies: Studies) -> Panel:
    """The objective of every complete trial in its order, and the best so far, in one colour for each study."""
    lines, labels = [], _labels([*studies])
    for index, (name, study) in enumerate(studies.items()):
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        numbers, values = [t.number for t in done], [t.values[0] for t in done]
        better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
        best = [*itertools.accumulate(values, better)]
        lines.append(Line(labels[name], numbers, values, colour=index, style=""))
        lines.append(Line(labels[name], numbers, best, colour=index, marker="", means="best so far"))
    lines += _majority_lines(studies, lines)
    shown = _shown(next(iter(studies.values())))
    return Panel("history", f"{shown} by trial", "trial", shown, lines, whole=True)


def _majority_lines(studies: Studies, lines: Sequence[Line]) -> list[Line]:
    """The accuracy of always predicting the majority class, from end to end: of all studies, or of each its own."""
    shares = {}
    for name, study in studies.items():
        chances = (t.user_attrs.get("chance") for t in study.get_trials(deepcopy=False))
        chance = next((chance for chance in chances if chance), None)
        if chance and settings_of(study).objectives[0] == "val_acc":
            shares[name] = chance["share"]
    places = [x for line in lines for x in line.x]
    if not shares or not places:
        return []
    ends, look = [min(places), max(places)], dict[str, Any](style="--", marker="")
    if len({*shares.values()}) == 1:
        return [Line("majority class", ends, [next(iter(shares.values()))] * 2, colour=GREY, **look)]
    labels, numbers = _labels([*studies]), {name: index for index, name in enumerate(studies)}
    return [
        Line(labels[name], ends, [share] * 2, colour=numbers[name], means="majority class", **look)
        for name, share in shares.items()
    ]


def rounds_panel(study: optuna.Study) -> Panel:
    """The objective of every trial by round; pruned trials are dotted, with a cross where they ended."""
    trials = [t for t in study.get_trials(deepcopy=False) if t.intermediate_values]
    lines, ends = [], []
    for index, trial in enumerate(trials):
        measured = trial.user_attrs.get("measured", {})  # what was reported may be the level of chance instead
        points = sorted((step, measured.get(str(step), value)) for step, value in trial.intermediate_values.items())
        pruned = trial.state == TrialState.PRUNED
        ends += [points[-1]] * pruned
        name = f"trial {trial.number}" if len(trials) <= len(COLOURS) else ""
        lines.append(Line(name, *columns(points), colour=index, style=":" if pruned else "-"))
    if ends:
        lines.append(Line("pruned", *columns(ends), colour=GREY, style="", marker="x"))
    lines += _majority_lines({study.study_name: study}, lines)
    shown = _shown(study)
    return Panel(
        f"rounds-{study.study_name}", f"{study.study_name}: {shown} by round", "round", shown, lines, whole=True
    )


def slice_panel(storage: optuna.storages.BaseStorage, names: Sequence[str], key: str) -> Panel:
    """The objective against one key, a colour for each study; the winner also with mean and spread on fresh seeds."""
    studies, labels = {name: load_study(storage, name) for name in names}, _labels(names)
    tried = {name: [p for p in points_of(study) if key in p.point] for name, study in studies.items()}
    place, ticks = _places({p.point[key] for points in tried.values() for p in points})
    lines = []
    for index, (name, study) in enumerate(studies.items()):
        points = sorted((place(p.point[key]), p.value, p.complete) for p in tried[name])
        only = {p.key for p in space_of(study).parameters} == {key}
        for complete in (True, False):
            if shown := [(x, y) for x, y, whole in points if whole == complete]:
                look: dict[str, Any] = {"style": "-"} if only and complete else {"style": "", "hollow": not complete}
                means = "" if complete else "pruned"
                lines.append(Line(labels[name], *columns(shown), colour=index, means=means, **look))
        objective = settings_of(study).objectives[0]
        for winner in summary(storage, name)["winners"][:1]:
            fresh = (winner["confirmed"] or {}).get("metrics", {}).get(objective)
            if fresh and key in winner["point"]:
                x, mean, spread = place(winner["point"][key]), fresh["mean"], fresh["std"] or 0.0
                given = ([x], [mean], [mean - spread], [mean + spread], index, "", "*")
                lines.append(Line(f"{labels[name]}: best, fresh seeds", *given))
    lines += _majority_lines(studies, lines)
    called, shown_key = _shown(next(iter(studies.values()))), "learning rate" if key == RATE else key
    log, title = _over_decades(storage, names, key), f"{called} against {shown_key}"
    return Panel(f"slice-{key}", title, shown_key, called, lines, log=log, ticks=ticks)


def pareto_panel(study: optuna.Study, pair: tuple[int, int]) -> Panel:
    """Two objectives of every complete trial, and those trials that no other is better than in all objectives."""
    objectives = [_shown(study, i) for i in pair]
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    lines = []
    kinds: tuple[tuple[str, list[FrozenTrial], dict[str, Any]], ...] = (
        ("all trials", done, {"colour": 0, "hollow": True}),
        ("Pareto front", study.best_trials, {"colour": 1}),
    )
    for name, trials, look in kinds:
        x, y = ([trial.values[i] for trial in trials] for i in pair)
        lines.append(Line(name, x, y, style="", **look))
    title = f"{study.study_name}: {objectives[1]} against {objectives[0]}"
    return Panel(f"pareto-{study.study_name}-{pair[0]}-{pair[1]}", title, objectives[0], objectives[1], lines)


def _shown(study: optuna.Study, index: int = 0) -> str:
    settings = settings_of(study)
    return shown_name(settings.objectives[index], settings.base.is_language)


def _places(values: set[Any]) -> tuple[Callable[[Any], float], dict[float, str]]:
    """Where the values of a key are on an axis, and what is written at these places; numbers where they are."""
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        few = sorted(values) if len(values) <= 8 else []  # what was tried, not ticks between
        return float, {x: f"{x:g}" for x in few}
    texts = sorted(map(str, values))
    return lambda value: texts.index(str(value)), dict(enumerate(texts))


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
    made: Mapping[str, Sequence[Panel]],
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
    shown = {panel.key: panel for panels in made.values() for panel in panels}
    sections = [Section("pictures", "Pictures", [*shown.values()])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [save(figure(panels, said, size=(5.5, 3.6)), folder / f"{name}.png") for name, panels in made.items()]
        if trials:
            written.append(write_tables([[str(cell) for cell in row] for row in trials], folder / "trials.csv"))
            sections.append(Section("trials", "Trials", [PageTable("trials", trials[0], trials[1:])]))
        write_text(folder / "plots.html", document(title, sections, lead=[said] if said else []))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return [*written, folder / "plots.html"]


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
