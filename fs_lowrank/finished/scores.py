"""The outputs of a finished run's model for the rows of a file, and their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..data import CAUSAL_LM, CLASSIFICATION, Examples
from ..data.tables import MULTI_LABEL
from ..jobs.progress import steps
from ..models.machine import input_device
from ..settings.metrics import extras, perplexity, standard_error
from ..training.evaluate import batch_scores, mean_scores
from ..training.metrics import of_outputs
from .rows import Rows
from .run import FinishedRun


def evaluate_rows(run: FinishedRun, rows: Rows) -> dict[str, Any]:
    """Scores on the rows of a file.

    Returns:
        ``rows``, how many of them the run was ``trained_on``, ``loss`` and the metrics that the run measured. Of
        classes, sets of them and language models ``acc`` and its standard error ``acc_error``; ``acc`` of a language
        model is that of the next token, and ``perplexity`` and ``tokens`` are beside it. Of classes and sets
        ``majority``, the accuracy of always giving the most frequent one, and ``classes``: name → number of rows and
        ``recall``. Of a regression ``mean_loss``, the loss of always giving the mean.
    """
    metrics, examples = extras(run.config.model.task, run.config.eval.metrics), rows.examples
    outputs = run.task in (CLASSIFICATION, MULTI_LABEL) or bool(of_outputs(metrics))
    batches = batch_scores(run.model, examples, run.config.eval_batch_size, outputs=outputs)
    scores: dict[str, Any] = {
        "rows": len(examples),
        "trained_on": rows.trained_on,
        **mean_scores(batches, metrics),
    }
    if run.task == CAUSAL_LM:
        tokens = int(examples.losses(range(len(examples))).sum())
        scores |= {"tokens": tokens, "acc_error": standard_error(scores["acc"], tokens)}
        return {**scores, "perplexity": perplexity(scores["loss"])}
    labels = np.asarray(examples.labels)
    if run.task not in (CLASSIFICATION, MULTI_LABEL):
        return {**scores, "mean_loss": float(labels.var(dtype=np.float64))}
    predicted, true = (np.concatenate([batch[i] for batch in batches]) for i in (3, 4))
    if run.task == MULTI_LABEL:
        predicted, true = predicted == 1, true == 1
    else:
        predicted, true = (indices[:, None] == np.arange(len(run.labels)) for indices in (predicted, true))
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
    for start in steps(range(0, len(examples), run.config.eval_batch_size), "predicting"):
        batch = examples.batch(range(start, min(start + run.config.eval_batch_size, len(examples))))
        batch.pop("labels")
        parts.append(run.model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.double().cpu())
    return torch.cat(parts).numpy()


def probabilities(run: FinishedRun, examples: Examples) -> np.ndarray:
    """Of each class, float64 ``(n, classes)``; where labels are sets, that it is in the set."""
    logits = torch.from_numpy(outputs(run, examples))
    return (logits.sigmoid() if run.task == MULTI_LABEL else logits.softmax(dim=-1)).numpy()
