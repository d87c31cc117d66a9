"""What is measured of a model on held-out data, for which tasks, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: the values of ``model.task``
TASKS = (
    *("CausalLM", "Seq2SeqLM", "SequenceClassification", "SequenceRegression"),
    *("MultiLabelClassification", "ImageClassification"),
)
#: those whose accuracy is that of the next token
LANGUAGE = ("CausalLM", "Seq2SeqLM")
_CLASSES = ("SequenceClassification", "ImageClassification")


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        larger: a larger value is better. tasks: it can be measured for. always: it need not be asked for.
    """

    larger: bool
    tasks: tuple[str, ...]
    always: bool = False


METRICS = {
    "acc": Metric(True, tuple(task for task in TASKS if task != "SequenceRegression"), True),
    "loss": Metric(False, TASKS, True),
    "f1": Metric(True, (*_CLASSES, "MultiLabelClassification")),
    "matthews": Metric(True, _CLASSES),
    "pearson": Metric(True, ("SequenceRegression",), True),
    "spearman": Metric(True, ("SequenceRegression",), True),
    "perplexity": Metric(False, LANGUAGE),
}


def extras(task: str, asked: list[str]) -> list[str]:
    """The metrics beside loss and accuracy that are measured for ``task``: always, or where they are ``asked`` for."""
    found = {name: of for name, of in METRICS.items() if name not in ("acc", "loss") and task in of.tasks}
    return [name for name, of in found.items() if of.always or name in asked]


def measured(task: str, asked: list[str]) -> list[str]:
    """All metrics that are measured for ``task``; loss and accuracy where that is not known."""
    return [name for name in ("loss", "acc") if not task or task in METRICS[name].tasks] + extras(task, asked)


def perplexity(loss: float) -> float:
    """Of a mean loss by token; that of 700 for a larger one, beyond which there is no such number."""
    return math.exp(min(loss, 700.0))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of one standard error of a share of ``count`` (Wilson, 1927), which has a width at 0 and 1 too."""
    middle, half = share + 0.5 / count, math.sqrt(share * (1 - share) / count + 0.25 / count**2)
    # Rounding must not make an end of 0 or 1 fall short of the share.
    return min((middle - half) / (1 + 1 / count), share), max((middle + half) / (1 + 1 / count), share)


def standard_error(share: float, count: int) -> float:
    """Of a share of ``count``: half the length of ``wilson``'s interval, so never 0."""
    low, high = wilson(share, count)
    return (high - low) / 2


def of_name(name: str) -> str:
    """The metric of a name such as ``acc_mean`` or ``test_f1``; the name itself, if it is of none."""
    return next((part for part in name.split("_") if part in METRICS), name)


def larger_is_better(name: str) -> bool:
    """Which way a metric goes, by a name such as ``test_acc`` or ``loss_mean``; that of others is up."""
    metric = METRICS.get(of_name(name))
    return metric is None or metric.larger


def chief(scores: Mapping[str, float]) -> str:
    """The metric by which clients are compared: the accuracy, or the loss where ``scores`` have none."""
    return "acc" if "acc" in scores else "loss"
