"""Evaluation of the global model and of the clients' own models, the best round, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data import Examples, ImageExamples
from ..errors import UserError, say_once
from ..methods import State
from ..settings.metrics import CLIENTS, chief, larger_is_better, metric_name
from ..training.evaluate import BatchScore, batch_scores, mean_scores, worst_tenth
from ..training.metrics import of_outputs
from ..training.schedule import evaluation_due
from .workspace import Workspace


def size_of(examples: Examples | ImageExamples) -> dict[str, int]:
    """The number of ``samples``; of a language model also the number of ``tokens``, over which scores are means."""
    if isinstance(examples, Examples) and examples.labels is None:
        return {"samples": len(examples), "tokens": int(examples.losses(range(len(examples))).sum())}
    return {"samples": len(examples)}


def average(scores: Mapping[Any, Mapping[str, float]], metric: str) -> float:
    """The mean of a metric over all samples of some clients, or over all their tokens.

    Args:
        scores: by client, with its ``size_of``. If one has no ``tokens``, as in a record of before, samples count.
    """
    unit = "tokens" if all("tokens" in own for own in scores.values()) else "samples"
    values, weights = zip(*((own[metric], own[unit]) for own in scores.values()))
    return float(np.average(values, weights=weights))


def ranked(record: Mapping[str, Any], split: str, metric: str) -> float:
    """The record's value of a metric, negative where larger is better; infinite if it has none that is finite."""
    value: float = record["metrics"].get(split, {}).get(metric, math.nan)
    if not math.isfinite(value):
        return math.inf
    return -value if larger_is_better(metric) else value


def best_record(history: Iterable[Mapping[str, Any]], split: str, metric: str) -> Mapping[str, Any] | None:
    """The record of the round with the best value of a metric, the first of equals; None if no value is finite."""
    best = min(history, key=lambda record: ranked(record, split, metric), default=None)
    return best if best and math.isfinite(ranked(best, split, metric)) else None


class Evaluator:
    """Evaluates on the model of ``workspace``.

    Args:
        clients_evaluate: with ``federate.make_global_eval`` False, clients evaluate validation data, too.
    """

    def __init__(self, workspace: Workspace, clients_evaluate: bool = False):
        self.workspace, self.config, self.clients_evaluate = workspace, workspace.config, clients_evaluate

    def splits(self) -> list[str]:
        """The names of the metrics that ``evaluate`` gives."""
        global_model = self.config.federate.make_global_eval
        requested = self.config.eval.client_scores or not global_model
        clients = (self.workspace.personal.of_model or requested) and self.workspace.data.test is not None
        return [*(self.workspace.held_out() if global_model else ()), *([CLIENTS] if clients else ())]

    def evaluate(self, state: State) -> dict[str, dict[str, Any]]:
        """Metrics of the global model by split, and of the clients' own models as ``client_test``.

        The clients' own models are evaluated if they differ from the global one, if ``eval.client_scores`` is True, or
        if ``federate.make_global_eval`` is False; in that case the global model is not evaluated.
        """
        return {**self.held_out(), **({CLIENTS: self.clients(state)} if CLIENTS in self.splits() else {})}

    def differ(self, state: State) -> bool:
        """Whether a client's model is not the global one: it has a personal part, or ranks of its own."""
        common = self.workspace.method.view(state)
        views = (self.workspace.method.view(state, client) for client in self.workspace.kinds())
        return bool(self.workspace.personal.of_model) or any(
            view.keys() != common.keys()
            or any(t is not common[n] and not torch.equal(t, common[n]) for n, t in view.items())
            for view in views
        )

    def held_out(self) -> dict[str, dict[str, float]]:
        """Metrics of the global model by split; none where ``federate.make_global_eval`` is False."""
        return {
            split: self.score(examples, split, self.config.metrics)
            for split, examples in self.workspace.held_out().items()
            if split in self.splits()
        }

    def score(self, examples: Examples | ImageExamples, owner: str, metrics: Sequence[str] = ()) -> dict[str, float]:
        """Loss, accuracy and ``metrics`` of the model as it is.

        Args:
            owner: name of ``examples`` in the cache of frozen layers.
        """
        return mean_scores(self.batches(examples, owner, outputs=bool(of_outputs(metrics))), metrics)

    def batches(self, examples: Examples | ImageExamples, owner: str, outputs: bool = False) -> list[BatchScore]:
        """As ``training.evaluate.batch_scores``, of the model as it is."""
        workspace, size = self.workspace, self.config.eval_batch_size
        prefix, reads = workspace.prefix, workspace.reads
        return batch_scores(workspace.model, examples, size, outputs=outputs, owner=owner, prefix=prefix, reads=reads)

    def on_test(self) -> dict[str, Any]:
        """The predictions of a classifier, as it is, for the test set.

        Returns:
            ``confusion``, numbers of samples by true class (rows) and predicted class (columns); ``clients``: by
            client, ``acc`` of the same predictions on its share of the test set, and its number of ``samples``.
        """
        workspace, test = self.workspace, self.workspace.held_out()["test"]
        batches = self.batches(test, "test", outputs=True)
        predicted, labels = (np.concatenate([batch[column] for batch in batches]) for column in (3, 4))
        classes, shares = len(workspace.data.label_names), workspace.data.test_shares
        pairs = np.bincount(labels * classes + predicted, minlength=classes**2)
        correct = np.empty(len(test), dtype=bool)
        correct[np.argsort(-test.lengths, kind="stable")] = predicted == labels  # they come with the longest first
        return {
            "confusion": pairs.reshape(classes, classes).tolist(),
            "clients": {
                str(i + 1): {"acc": float(correct[shares[i]].mean()), "samples": len(shares[i])}
                for i in workspace.data.tested()
            },
        }

    def clients(self, state: State) -> dict[str, Any]:
        """Every client's own model on its share of the test set (``FederatedData.client_tests``), as ``combined``."""
        scores = {}
        for client, examples in self.workspace.tested():
            self.workspace.load_client(state, client)
            scores[client] = {**self.score(examples, f"client {client} test"), **size_of(examples)}
        self.workspace.load_global(state)
        return self.combined(scores)

    @staticmethod
    def combined(scores: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
        """The metrics of ``client_test`` from those of each client, with its ``size_of``, by client.

        Returns:
            ``acc`` and ``loss`` as ``average``; over the clients ``acc_mean``, ``acc_std`` and
            ``acc_worst_decile``, the mean of the worst tenth (one client at least), of a regression those of the loss;
            and ``clients``, the ``scores`` in order, which a record has under ``client_scores``.
        """
        main = chief(next(iter(scores.values())))
        values = np.sort([s[main] for s in scores.values()])
        return {
            "clients": {client: scores[client] for client in sorted(scores)},
            **{m: average(scores, m) for m in ("acc", "loss") if m in next(iter(scores.values()))},
            f"{main}_mean": float(values.mean()),
            f"{main}_std": float(values.std()),
            f"{main}_worst_decile": worst_tenth(values, larger_is_better(main)),
        }

    def best(self, history: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The record of the best round by validation data (``best_by``), the first of equals.

        None if no round has such a metric. Test data never decide.
        """
        return best_record(history, "val", self.best_by.removeprefix("val_"))

    @property
    def best_by(self) -> str:
        """The metric of ``eval.best_res_update_round_wise_key`` on validation data: ``val_acc`` for ``test_acc``."""
        return f"val_{metric_name(self.config.watched[1])}"

    def check_best(self) -> None:
        """Raise ``UserError`` if ``eval.save_best`` is True and no validation data are evaluated."""
        config, available = self.config, self.workspace.data.validation is not None
        evaluated = config.federate.make_global_eval or self.clients_evaluate
        if config.eval.save_best is True and not (available and "val" in config.eval.split and evaluated):
            raise UserError(
                "eval.save_best = True: the best round is chosen by validation data, and none are evaluated; give "
                f"data.splits a share for them (now {list(config.data.splits)}), put val into eval.split (now "
                f"{list(config.eval.split)}), and set federate.make_global_eval True"
            )

    def stalled(self, history: Iterable[Mapping[str, Any]]) -> bool:
        """FederatedScope's early stopping: the last ``patience`` evaluations were not better by ``delta``.

        With ``delta`` 0, a value that equals the best counts as better. With ``improve_indicator_mode: mean``, the last
        evaluation was not better than the mean of the ``patience`` before it.

        Only evaluations that were due count. The one at the end of a run that is continued with more rounds may not be.
        """
        stop = self.config.early_stop
        due = (r for r in history if r["metrics"] and evaluation_due(self.config, r["round"]))
        values = [ranked(record, *self.config.watched) for record in due]
        if stop.improve_indicator_mode == "mean":
            before = values[-stop.patience - 1 : -1]
            return 0 < stop.patience < len(values) and values[-1] > float(np.mean(before)) - stop.delta
        best, without = math.inf, 0
        for value in values:
            better = math.isfinite(value) and value <= best - stop.delta
            best, without = (value, 0) if better else (best, without + 1)
        return 0 < stop.patience <= without

    def check_watched(self) -> None:
        """Check that early stopping has the split that it watches; warn of stopping by test data.

        Raises:
            UserError: the split is not evaluated.
        """
        key, split = "eval.best_res_update_round_wise_key", self.config.watched[0]
        value, patience = self.config.get(key), self.config.early_stop.patience
        if patience > 0 and split not in self.splits():
            raise UserError(
                f"early_stop.patience = {patience}: it watches {key} = {value}, a split that is not "
                f"evaluated; evaluated are: {', '.join(self.splits()) or 'none'}"
            )
        if patience > 0 and split in (CLIENTS, "test"):
            say_once(
                f"early_stop.patience = {patience}: the run stops by {value}, so the test data choose its length, and "
                f"its test results are too good; hold out validation data with data.splits, and set {key} val_loss"
            )
