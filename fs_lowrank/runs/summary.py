"""Summary figures of a run, from its records."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..draw.panels import digits
from ..settings.metrics import perplexity


def per_client_and_round(history: Sequence[dict]) -> dict[str, float]:
    """Mean bytes that a client sends and receives in a round, with and without the head.

    The downlink excludes round 1, in which most methods send nothing, since everything comes from the seed.

    Returns:
        ``uplink``, ``uplink_without_head``, ``downlink``, ``downlink_without_head`` in bytes.
    """

    def mean(direction: str, bare: str, records: Sequence[dict]) -> float:
        clients = sum(len(r[f"client_{direction}_bytes"]) for r in records)
        return sum(r[f"{direction}_bytes{bare}"] for r in records) / clients if clients else 0.0

    later = [r for r in history if r["round"] > 1]
    return {
        "uplink": mean("uplink", "", history),
        "uplink_without_head": mean("uplink", "_without_head", history),
        "downlink": mean("downlink", "", later),
        "downlink_without_head": mean("downlink", "_without_head", later),
    }


def seconds(history: Sequence[dict]) -> dict[str, float]:
    """Seconds of the whole run for training, aggregation and evaluation, and the median aggregation of a round."""
    total = {k: sum(r["seconds"][k] for r in history) for k in ("training", "aggregation", "evaluation")}
    total["aggregation_median"] = statistics.median([r["seconds"]["aggregation"] for r in history] or [0.0])
    return total


def shown_name(metric: str, language: bool) -> str:
    """``val_acc`` as people are shown it: of a language model it is the accuracy of the next token."""
    return re.sub(r"(?<![a-z])acc(?![a-z])", "token_acc", metric) if language else metric


def for_people(metrics: Mapping[str, float], language: bool) -> dict[str, float]:
    """Metrics by the names that people are shown.

    Of a language model ``acc`` is the accuracy of the next token, so it is called ``token_acc``, and each loss has its
    perplexity, the exponential, beside it.

    Args:
        metrics: by names such as ``acc``, ``test_acc_last5``, ``val_loss``.
    """
    if not language:
        return dict(metrics)
    named = {}
    for name, value in metrics.items():
        named[shown_name(name, language)] = value
        if name.endswith("loss"):
            named[name.removesuffix("loss") + "perplexity"] = perplexity(value)
    return named


def human_bytes(n: float) -> str:
    """Bytes in powers of 1000: ``999 B``, ``12.3 kB``, ``1.5 MB``, ``2000.0 GB``."""
    power = next((p for p in range(3) if n < 1000 ** (p + 1)), 3)
    return f"{n / 1000**power:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB')[power]}"


def human_percent(share: float) -> str:
    """A share in percent, with three digits: ``12.3 %``, ``0.0575 %``."""
    return f"{digits(100 * share)} %"


def human_time(seconds: float) -> str:
    """Seconds with two digits or more: ``0.4 s``, ``45 s``, ``12 min``, ``3.2 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 or not seconds else f"{seconds:.1g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def of_clients(facts: Iterable[Mapping[str, Any]]) -> str:
    """The models behind ``client_test`` of these runs, by their facts, and the accuracy of each client's most frequent
    class; runs of before version 0.2.0 do not say.
    """
    facts = list(facts)
    flags = {f.get("own_models") for f in facts}
    subject = "every client's model, its own or the global one, on its share of the test set"
    if flags == {True}:
        subject = "every client's own model on its share of the test set"
    if flags == {False}:
        subject = "the global model on every client's share of the test set"
    constant = {share for f in facts if (share := f.get("client_majority")) is not None}
    values = ", ".join(f"{share:.3f}" for share in sorted(constant))
    return subject + (f"; always answering with a client's own most frequent class: acc {values}" if values else "")
