"""Optuna's pictures of studies as PNG files, and all trials as a CSV file.

Slices leave out pruned trials, as Optuna's do; ``trials.csv``, its table of trials, has them, and ``optuna-dashboard``
shows a study live.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from optuna.storages import BaseStorage

from fs_lowrank import UserError
from fs_lowrank.jobs.files import replacing, write_text
from fs_lowrank.runs.summary import shown_name

from .settings import settings_of
from .storage import load_study
from .summary import points_of


def draw(storage: BaseStorage, names: Sequence[str], folder: Path) -> list[Path]:
    """Write ``history.png`` of all studies, their intermediate values, slices and Pareto fronts, and ``trials.csv``.

    Raises:
        UserError: no trial has a value yet. RunFailed: a file cannot be written.
    """
    import matplotlib.pyplot as plt
    import numpy as np
    from optuna.visualization import matplotlib as pictures

    studies = [load_study(storage, name) for name in names]
    if not any(points_of(study) for study in studies):
        raise UserError("there is no finished trial to draw yet; continue the search with the command that began it")
    settings = settings_of(studies[0])
    other = next((s.study_name for s in studies if settings_of(s).objectives != settings.objectives), None)
    if other:
        raise UserError(f"{names[0]} and {other} have other objectives; draw one of them alone")
    labels = [shown_name(name, settings.base.is_language) for name in settings.objectives]
    plots: list[tuple[str, Any, Any, dict[str, Any]]] = []
    if len(labels) == 1:
        target: dict[str, Any] = {"target": None, "target_name": labels[0]}
        plots.append(("history", pictures.plot_optimization_history, studies, target))
        for study in studies:
            plots.append((f"rounds-{study.study_name}", pictures.plot_intermediate_values, study, {}))
            plots.append((f"slices-{study.study_name}", pictures.plot_slice, study, target))
    for study, pair in itertools.product(studies, itertools.combinations(range(len(labels)), 2)):
        targets: dict[str, Any] = {"targets": lambda trial, pair=pair: [trial.values[i] for i in pair]}
        name = f"pareto-{study.study_name}" + f"-{pair[0]}-{pair[1]}" * (len(labels) > 2)
        plots.append((name, pictures.plot_pareto_front, study, targets | {"target_names": [labels[i] for i in pair]}))
    folder.mkdir(parents=True, exist_ok=True)
    for name, function, subject, options in plots:
        with plt.rc_context({"backend": "agg"}), replacing(folder / f"{name}.png") as aside:
            axes = np.ravel(function(subject, **options))[0]
            if function is pictures.plot_intermediate_values:
                # At chance a pruner is told a level above it.
                told = ", as the pruner compares trials" * (settings_of(subject).pruner != "none")
                axes.set(title=f"Validation by round{told}", xlabel="Round", ylabel=labels[0])
            axes.figure.savefig(aside, format="png", bbox_inches="tight")
            plt.close(axes.figure)
    attributes = ("number", "state", "value" if len(labels) == 1 else "values", "params", "user_attrs")
    table = pd.concat({study.study_name: study.trials_dataframe(attributes) for study in studies}, names=["study"])
    write_text(folder / "trials.csv", table.reset_index("study").to_csv(index=False, lineterminator="\n"))
    return [*(folder / f"{name}.png" for name, *_ in plots), folder / "trials.csv"]
