"""The metrics of a model on held-out data, their tasks, and their better direction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: the values of ``model.task``
TASKS = (
    *("CausalLM", "Seq2SeqLM", "SequenceClassification", "SequenceRegression"),
    *("MultiLabelClassification", "ImageClassification"),
)
#: tasks whose accuracy is that of the next token
LANGUAGE = ("CausalLM", "Seq2SeqLM")
_CLASSES = ("SequenceClassification", "ImageClassification")


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        larger: a larger value is better. tasks: with the metric. always: measured without a request.
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


#: the name, beside the splits, of the metrics of the clients' own models
CLIENTS = "client_test"


def extras(task: str, requested: list[str]) -> list[str]:
    """The metrics beside loss and accuracy that are measured for ``task``: always, or if ``requested``."""
    metrics = {name: metric for name, metric in METRICS.items() if name not in ("acc", "loss") and task in metric.tasks}
    return [name for name, metric in metrics.items() if metric.always or name in requested]


def measured(task: str, requested: list[str]) -> list[str]:
    """All metrics that are measured for ``task``; loss and accuracy for an unknown task."""
    return [name for name in ("loss", "acc") if not task or task in METRICS[name].tasks] + extras(task, requested)


def of_clients(metrics: Sequence[str]) -> list[str]:
    """The metrics of the clients' own models, for a task of which ``metrics`` are ``measured``."""
    own = [name for name in metrics if name in ("loss", "acc")]
    return own + [f"{own[-1]}_{suffix}" for suffix in ("mean", "std", "worst_decile")]


def perplexity(loss: float) -> float:
    """Perplexity of a mean loss by token, limited to that of a loss of 700, since floats end there."""
    return math.exp(min(loss, 700.0))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of one standard error of a share of ``count`` (Wilson, 1927), which has a width at 0 and 1 too."""
    middle, half = share + 0.5 / count, math.sqrt(share * (1 - share) / count + 0.25 / count**2)
    # Rounding must not make an end of 0 or 1 fall short of the share.
    return min((middle - half) / (1 + 1 / count), share), max((middle + half) / (1 + 1 / count), share)


def standard_error(share: float, count: int) -> float:
    """The standard error of a share of ``count``: half the length of ``wilson``'s interval, so never 0."""
    low, high = wilson(share, count)
    return (high - low) / 2


def metric_name(name: str) -> str:
    """The metric in a name such as ``acc_mean`` or ``test_f1``; the name itself if it has none."""
    return next((part for part in name.split("_") if part in METRICS), name)


def larger_is_better(name: str) -> bool:
    """The direction of a metric, by a name such as ``test_acc`` or ``loss_mean``; True for other names."""
    metric = METRICS.get(metric_name(name))
    return metric is None or metric.larger


def chief(scores: Mapping[str, float]) -> str:
    """The metric by which clients are compared: the accuracy, or the loss where ``scores`` have none."""
    return "acc" if "acc" in scores else "loss"
