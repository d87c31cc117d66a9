"""The metrics of suites: names, direction, scale and title."""

from __future__ import annotations

import re
from collections.abc import Collection

from fs_lowrank.errors import nearest
from fs_lowrank.runs.summary import shown_name
from fs_lowrank.settings.metrics import METRICS, larger_is_better

from .scorers import SCORERS

BYTES = ("uplink", "downlink", "uplink_without_head", "downlink_without_head")
#: of a run, besides metrics on held-out data
_RUN_METRICS = (*BYTES, "traffic", "traffic_without_head", "formula", "majority", "memory", "aggregation", "training")
_BY_ROUND = rf"((val|test)_({'|'.join(METRICS)})|client_test_(acc|loss)(_mean|_std|_worst_decile)?)"
#: of each evaluated round, of the run as a whole, and until a target is reached
_FORMS = (
    re.compile(_BY_ROUND),
    re.compile("(val|test|client_test)_acc_last5|unseen_test_(acc|loss)|test_acc_worst_decile|best_round"),
    re.compile(rf"(bytes|rounds)_to:{_BY_ROUND}:[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"),
)
#: endings of metrics of scorers that are better when smaller
_LOWER = ("loss", "perplexity", "bits_per_byte", "brier_score", "unparsed", "_stderr")


def unknown(metric: str, values: Collection[str] = ()) -> str:
    """Why there is no such metric, with the nearest one; empty if there is.

    Args:
        values: names of a script's metrics.
    """
    names, scorer = (*values, *_RUN_METRICS), metric.partition(":")[0]
    if metric in names or any(form.fullmatch(metric) for form in _FORMS) or scorer in SCORERS and metric.count(":") > 1:
        return ""
    hint = nearest(metric, [*names, *(f"{split}_{name}" for split in ("test", "val") for name in METRICS)])
    return f"there is no such metric{hint}; docs/guides/benchmark.md lists them"


def of_test_data(metric: str) -> bool:
    """Whether it is measured on test data, so that nothing may be chosen by it."""
    kind, _, remainder = metric.partition(":")
    name = remainder if to_a_target(metric) else metric
    return kind in SCORERS or name.removeprefix("client_").removeprefix("unseen_").startswith("test_")


def better(metric: str) -> int:
    """1 if a larger value is better, -1 if a smaller one is, 0 for a spread, which is neither."""
    name = metric.rpartition(":")[2]
    if name.endswith("_std"):
        return 0
    lower = scale_of(metric)[0] == 0 or metric in ("aggregation", "training") or metric.startswith("rounds_to")
    return -1 if lower or name.endswith(_LOWER) or not larger_is_better(name) else 1


def to_a_target(metric: str) -> bool:
    return metric.partition(":")[0] in ("bytes_to", "rounds_to")


def scale_of(metric: str) -> tuple[float, int]:
    """The factor on a figure and its number of digits; 0 for bytes."""
    name = metric.rpartition(":")[2]
    byte_kinds = ("uplink", "downlink", "traffic", "formula", "memory")
    if metric.startswith("bytes_to") or metric.partition("_")[0] in byte_kinds:
        return 0, 0
    if metric.startswith("rounds_to"):
        return 1, 0
    if metric == "aggregation":
        return 1000, 2
    accuracy = "acc" in name or "exact_match" in name or "pass@" in name
    return (100, 2) if accuracy else (1, 3)


def title_of(metric: str, language: bool = False) -> str:
    """A description of the metric, with its unit; accuracy is that of the next token for a language model."""
    kind, _, remainder = metric.partition(":")
    words = {
        "test_acc": "test accuracy, %",
        "test_loss": "test loss",
        "val_acc": "validation accuracy, %",
        "client_test_acc": "accuracy of the clients' models on their test shares, %",
        "test_acc_worst_decile": "test accuracy of the worst tenth of the clients, %",
        "test_acc_last5": "test accuracy, mean of the last five evaluations, %",
        "uplink": "sent up, per client and round",
        "downlink": "sent down, per client and round",
        "uplink_without_head": "sent up without the head, per client and round",
        "downlink_without_head": "sent down without the head, per client and round",
        "traffic": "both directions, per client and round",
        "formula": "both directions by the papers' formula, 2 × up",
        "traffic_without_head": "both directions without the head, per client and round",
        "aggregation": "server aggregation, median of a round, ms",
        "training": "training of all clients in all rounds, s",
        "memory": "peak memory",
    }
    if to_a_target(metric):
        name, _, target = remainder.partition(":")
        amount = "all bytes, both directions" if kind == "bytes_to" else "rounds"
        return f"{amount}, until {shown_name(name, language)} is {target}"
    title = words.get(metric, metric.replace("_", " "))
    return title.replace("accuracy", "next-token accuracy") if language else title
