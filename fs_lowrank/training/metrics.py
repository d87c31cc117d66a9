"""Metrics of all predictions for a set of samples, beside loss and accuracy, through scikit-learn and SciPy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np


def _f1(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Of two classes that of the second, as in GLUE; of more, and of sets of classes, the mean over the classes."""
    from sklearn.metrics import f1_score

    average = "binary" if labels.ndim == 1 and classes == 2 else "macro"
    return float(f1_score(labels, predicted, average=average, zero_division=0.0))


def _matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predicted))


def _pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return float(pearsonr(labels, predicted).statistic) if len(labels) > 1 else math.nan


def _spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(labels, predicted).statistic) if len(labels) > 1 else math.nan


_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}


def of_outputs(names: Iterable[str]) -> list[str]:
    """Those of the metrics ``names`` that are of predictions and labels; perplexity is of the loss."""
    return [name for name in names if name != "perplexity"]


def measure(names: Iterable[str], predicted: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """The metrics ``names``; NaN for one that these predictions do not have, such as the correlation of a constant.

    Args:
        predicted, labels: classes or numbers, ``(n,)``; of sets of classes 0 and 1, ``(n, classes)``.
        classes: how many the model tells apart, also if some of them do not occur; 1 for numbers.
    """
    functions: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
        **_FUNCTIONS,
        "f1": partial(_f1, classes=classes),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant input, whose correlation is NaN
        return {name: functions[name](predicted, labels) for name in names}
