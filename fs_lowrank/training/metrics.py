"""Metrics of all predictions for a set of samples, beside loss and accuracy, through scikit-learn and SciPy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def of_outputs(names: Iterable[str]) -> list[str]:
    """The metrics in ``names`` of predictions and labels; perplexity is of the loss."""
    return [name for name in names if name != "perplexity"]


def measure(names: Iterable[str], predicted: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """The metrics ``names``; NaN where one is undefined, such as the correlation of a constant.

    Args:
        predicted, labels: classes or numbers, ``(n,)``; of sets of classes 0 and 1, ``(n, classes)``.
        classes: how many the model tells apart, also if some of them do not occur; 1 for numbers.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import f1_score, matthews_corrcoef

    # Of two classes F1 is that of the second, as in GLUE; of more, and of sets of classes, the mean over the classes.
    average = "binary" if labels.ndim == 1 and classes == 2 else "macro"
    several = len(labels) > 1
    functions: dict[str, Callable[[], Any]] = {
        "f1": lambda: f1_score(labels, predicted, average=average, zero_division=0.0),
        "matthews": lambda: matthews_corrcoef(labels, predicted),
        "pearson": lambda: pearsonr(labels, predicted).statistic if several else math.nan,
        "spearman": lambda: spearmanr(labels, predicted).statistic if several else math.nan,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant input, whose correlation is NaN
        return {name: float(functions[name]()) for name in names}
