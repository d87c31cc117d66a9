"""Evaluation of the global model and of the clients' own models, the best round, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..config import Config
from ..data import Examples, ImageExamples
from ..errors import UserError, nearest
from ..methods import State
from ..training import evaluate
from ..training.schedule import evaluation_due
from .site import Site

#: the name, beside the splits, of the metrics of the clients' own models
CLIENTS = "client_test"


def watched(config: Config) -> tuple[str, str]:
    """Split and metric of ``eval.best_res_update_round_wise_key``; the framework's ``avg_loss`` is our loss."""
    key = config.eval.best_res_update_round_wise_key.rpartition(".")[2]
    split = CLIENTS if key.startswith(CLIENTS) else key.partition("_")[0]
    return split, key.removeprefix(f"{split}_").removeprefix("avg_")


class Evaluator:
    """Evaluates on the model of ``site``."""

    def __init__(self, site: Site):
        self.site, self.config = site, site.config

    def due(self, round: int) -> bool:
        """Whether ``round`` ends with an evaluation."""
        return evaluation_due(self.config, round)

    def splits(self) -> list[str]:
        """The names of the metrics that ``evaluate`` gives."""
        global_model = self.config.federate.make_global_eval
        clients = (self.site.personal.untrained or not global_model) and self.site.data.test is not None
        return [*(self.site.held_out() if global_model else ()), *([CLIENTS] if clients else ())]

    def evaluate(self, state: State) -> dict[str, dict[str, float]]:
        """Metrics of the global model by split, and of the clients' own models as ``client_test``.

        The clients' own models are evaluated if they differ from the global one, or if ``federate.make_global_eval`` is
        False; in that case the global model is not evaluated.
        """
        return {**self.held_out(), **({CLIENTS: self.clients(state)} if CLIENTS in self.splits() else {})}

    def held_out(self) -> dict[str, dict[str, float]]:
        """Metrics of the global model by split; none where ``federate.make_global_eval`` is False."""
        return {
            split: self.score(examples, split)
            for split, examples in self.site.held_out().items()
            if split in self.splits()
        }

    def score(self, examples: Examples | ImageExamples, owner: str) -> dict[str, float]:
        """Metrics of the model as it is, on ``examples``; ``owner`` is their name in the cache of frozen layers."""
        size = self.config.eval.batch_size or self.config.dataloader.batch_size
        site = self.site
        return evaluate(site.model, examples, size, owner=owner, prefix=site.prefix, reads=site.reads)

    def clients(self, state: State) -> dict[str, float]:
        """Every client's own model on its share of the test set (``FederatedData.client_tests``), as ``combined``."""
        scores, sizes = [], []
        for client, examples in zip(self.site.clients, self.site.data.client_tests):
            if examples is None:
                continue
            self.site.load_client(state, client.id)
            scores.append(self.score(examples, f"client {client.id} test"))
            sizes.append(len(examples))
        self.site.load_global(state)
        return self.combined(scores, sizes)

    @staticmethod
    def combined(scores: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
        """The metrics of ``client_test`` from those of each client and the numbers of samples.

        Returns:
            ``acc`` and ``loss`` over all samples; over the clients ``acc_mean``, ``acc_std`` and
            ``acc_worst_decile``, the mean of the lowest tenth (one client at least).
        """
        accuracies = np.sort([s["acc"] for s in scores])
        return {
            **{m: float(np.average([s[m] for s in scores], weights=sizes)) for m in ("acc", "loss")},
            "acc_mean": float(accuracies.mean()),
            "acc_std": float(accuracies.std()),
            "acc_worst_decile": float(accuracies[: max(len(accuracies) // 10, 1)].mean()),
        }

    def key_value(self, record: Mapping[str, Any]) -> float | None:
        """The record's value of ``eval.best_res_update_round_wise_key``, smaller is better.

        None if it has none, or one that is not finite.
        """
        split, metric = watched(self.config)
        value: float | None = record["metrics"].get(split, {}).get(metric)
        if value is None or not math.isfinite(value):
            return None
        return value if metric == "loss" else -value

    def stalled(self, history: Iterable[Mapping[str, Any]]) -> bool:
        """FederatedScope's early stopping: the last ``patience`` evaluations were not better by ``delta``."""
        stop = self.config.early_stop
        best, without = math.inf, 0
        for value in (self.key_value(r) for r in history if r["metrics"]):
            if value is not None and value < best - stop.delta:
                best, without = value, 0
            else:
                without += 1
        return 0 < stop.patience <= without

    def check_watched(self) -> None:
        """Raise ``UserError`` if the metric in ``eval.best_res_update_round_wise_key`` is not measured."""
        key, (split, metric) = "eval.best_res_update_round_wise_key", watched(self.config)
        value, patience = self.config.get(key), self.config.early_stop.patience
        known = ("loss", "acc", *(("acc_mean", "acc_std", "acc_worst_decile") if split == CLIENTS else ()))
        if metric not in known:
            raise UserError(
                f"{key} = {value!r}: no metric {metric!r} is measured"
                f"{nearest(metric, known)}; {split}_ may be followed by: {', '.join(known)}"
            )
        if patience > 0 and split not in self.splits():
            raise UserError(
                f"early_stop.patience = {patience}: it watches {key} = {value}, a split that is not "
                f"evaluated; evaluated are: {', '.join(self.splits()) or 'none'}"
            )
