"""Optuna's pictures of studies as PNG files, and all trials as a CSV file.

Slices leave out pruned trials, as Optuna's do; ``trials.csv`` has them, and ``optuna-dashboard`` shows a study live.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.storages import BaseStorage

from fs_lowrank import UserError
from fs_lowrank.jobs.files import replacing, write_text
from fs_lowrank.runs.summary import shown_name

from .best import points_of, values_of
from .settings import settings_of
from .storage import load_study


def draw(storage: BaseStorage, names: Sequence[str], folder: Path) -> list[Path]:
    """Write ``history.png`` of all studies, their intermediate values, slices and Pareto fronts, and ``trials.csv``.

    Raises:
        UserError: no trial has a value yet. RunFailed: a file cannot be written.
    """
    from optuna.visualization import matplotlib as pictures

    studies = [load_study(storage, name) for name in names]
    if not any(points_of(study) for study in studies):
        raise UserError("there is no finished trial to draw yet; continue the search with the command that began it")
    settings = settings_of(studies[0])
    shown = [shown_name(name, settings.base.is_language) for name in settings.objectives]
    made: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
    if len(shown) == 1:
        first: dict[str, Any] = {"target": None, "target_name": shown[0]}
        made["history"] = pictures.plot_optimization_history, studies, first
        for study in studies:
            made[f"rounds-{study.study_name}"] = pictures.plot_intermediate_values, study, {}
            made[f"slices-{study.study_name}"] = pictures.plot_slice, study, first
    for study, pair in itertools.product(studies, itertools.combinations(range(len(shown)), 2)):
        both: dict[str, Any] = {"targets": lambda trial, pair=pair: [trial.values[i] for i in pair]}
        both["target_names"] = [shown[i] for i in pair]
        name = f"pareto-{study.study_name}" + f"-{pair[0]}-{pair[1]}" * (len(shown) > 2)
        made[name] = pictures.plot_pareto_front, study, both
    written = [_drawn(*of, folder / f"{name}.png") for name, of in made.items()]
    write_text(folder / "trials.csv", trials_table(studies).to_csv(index=False, lineterminator="\n"))
    return [*written, folder / "trials.csv"]


def _drawn(function: Any, what: Any, options: dict[str, Any], path: Path) -> Path:
    """Draw one picture, without a change of Matplotlib's settings and its open figures."""
    import matplotlib
    import matplotlib.pyplot as plt
    import numpy as np

    with matplotlib.rc_context():
        plt.switch_backend("agg")
        axes = np.ravel(function(what, **options))[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            axes.figure.savefig(aside, format="png", bbox_inches="tight")
        plt.close(axes.figure)
    return path


def trials_table(studies: Sequence[optuna.Study]) -> pd.DataFrame:
    """All trials of some studies with their parameters, and the values that were measured (``values_of``)."""
    rows = []
    for study in studies:
        objectives = settings_of(study).objectives
        for trial in study.get_trials(deepcopy=False):
            about = {"study": study.study_name, "trial": trial.number, "state": trial.state.name.lower()}
            values = dict(zip(objectives, values_of(trial, objectives)))
            rows.append({**about, "rounds evaluated": len(trial.intermediate_values), **values, **trial.params})
    return pd.DataFrame(rows)
