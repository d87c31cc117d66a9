"""The figures of a run that has ended, from the records of its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..runs.records import flat_metrics
from .evaluator import Evaluator, average, best_record

History = Sequence[Mapping[str, Any]]


def final_figures(history: History, evaluator: Evaluator) -> dict[str, Any]:
    """The metrics of the last evaluation; ``…_acc_last5``, the mean of the last five; ``best_round``, by
    ``eval.best_res_update_round_wise_key``; and those of clients that never took part (``unseen_test_…``).
    """
    evaluated = [record for record in history if record["metrics"]]
    last: Mapping[str, Any] = evaluated[-1] if evaluated else {"metrics": {}}
    final: dict[str, Any] = {**flat_metrics(last["metrics"]), **_unseen(history, last, evaluator)}
    for split in (split for split, metrics in last["metrics"].items() if "acc" in metrics):
        accuracies = [record["metrics"][split]["acc"] for record in evaluated if split in record["metrics"]]
        final[f"{split}_acc_last5"] = float(np.mean(accuracies[-5:]))
    if best := best_record(evaluated, *evaluator.config.watched):
        final["best_round"] = best["round"]
    return final


def best_figures(history: History, evaluator: Evaluator) -> dict[str, Any]:
    """The round that was the best by validation data, by which metric, and its metrics; empty if there is none."""
    record = evaluator.best(history)
    return {"round": record["round"], "by": evaluator.best_by, **flat_metrics(record["metrics"])} if record else {}


def _unseen(history: History, record: Mapping[str, Any], evaluator: Evaluator) -> dict[str, float]:
    """The scores in ``record`` over the test shares of the clients that never took part."""
    took_part = {str(client) for r in history for client in r["clients"]}
    scores = {c: values for c, values in record.get("client_scores", {}).items() if c not in took_part}
    if not scores or not took_part:
        return {}
    if {str(client) for client, _ in evaluator.workspace.tested()} - record["client_scores"].keys():
        return {}
    measured = next(iter(scores.values()))
    return {f"unseen_test_{m}": average(scores, m) for m in ("acc", "loss") if m in measured}
