"""What the model of a finished run computes for the rows of a file, and how good that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..data import CAUSAL_LM, CLASSIFICATION, Examples
from ..data.labels import bits
from ..data.tables import MULTI_LABEL
from ..models.machine import input_device
from ..settings.metrics import extras, perplexity, standard_error
from ..training import evaluate
from .rows import Rows
from .run import FinishedRun


def evaluate_rows(run: FinishedRun, rows: Rows) -> dict[str, Any]:
    """Scores on the rows of a file.

    Returns:
        ``rows``, those of them that the run was ``trained_on``, ``loss`` and the metrics that the run measured. Of
        classes, sets of them and language models ``acc`` and its standard error ``acc_error``; ``acc`` of a language
        model is that of the next token, and ``perplexity`` and ``tokens`` are beside it. Of classes and sets
        ``majority``, the accuracy of always giving the most frequent one, and ``classes``: name → number of rows and
        ``recall``. Of a regression ``mean_loss``, the loss of always giving the mean.
    """
    metrics, examples = extras(run.config.model.task, run.config.eval.metrics), rows.examples
    scores: dict[str, Any] = {
        "rows": len(examples),
        "trained_on": rows.trained_on,
        **evaluate(run.model, examples, run.config.eval_batch_size, metrics=metrics),
    }
    if run.task == CAUSAL_LM:
        counted = int(examples.losses(range(len(examples))).sum())
        scores |= {"tokens": counted, "acc_error": standard_error(scores["acc"], counted)}
        return {**scores, "perplexity": perplexity(scores["loss"])}
    labels = np.asarray(examples.labels)
    if run.task not in (CLASSIFICATION, MULTI_LABEL):
        return {**scores, "mean_loss": float(labels.var(dtype=np.float64))}
    chances = probabilities(run, examples)
    each = np.arange(len(run.labels))
    if run.task == MULTI_LABEL:
        true, predicted = bits(labels, len(run.labels)) == 1, chances > 0.5
    else:
        true, predicted = labels[:, None] == each, chances.argmax(axis=1)[:, None] == each
    counts = true.sum(axis=0)
    return {
        **scores,
        "acc_error": standard_error(scores["acc"], len(labels)),
        "majority": float(np.unique(labels, return_counts=True)[1].max() / len(labels)),
        "classes": {
            name: {"rows": int(counts[i]), "recall": float(predicted[true[:, i], i].mean()) if counts[i] else None}
            for i, name in enumerate(run.labels)
        },
    }


@torch.no_grad()
def outputs(run: FinishedRun, examples: Examples) -> np.ndarray:
    """The logits of labelled text, float64 ``(n, classes)``; of a regression ``(n, 1)``, the numbers."""
    device = input_device(run.model)
    parts = []
    for start in range(0, len(examples), run.config.eval_batch_size):
        batch = examples.batch(range(start, min(start + run.config.eval_batch_size, len(examples))))
        batch.pop("labels")
        parts.append(run.model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.double().cpu())
    return torch.cat(parts).numpy()


def probabilities(run: FinishedRun, examples: Examples) -> np.ndarray:
    """Of each class, float64 ``(n, classes)``; where labels are sets, that it is in the set."""
    logits = torch.from_numpy(outputs(run, examples))
    return (logits.sigmoid() if run.task == MULTI_LABEL else logits.softmax(dim=-1)).numpy()
