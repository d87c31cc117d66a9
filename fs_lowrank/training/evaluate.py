"""Evaluation of one model on one set of examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.examples import IGNORED_LABEL
from ..jobs.progress import steps
from ..models.machine import input_device
from ..models.shortcuts.frozen import FrozenPrefix
from ..models.shortcuts.reads import OnlyRead
from ..settings.metrics import perplexity
from .local import label_logits, losses_of, shortcuts, to_device
from .metrics import measure, of_outputs

#: sum of the losses of one batch, correct predictions (None where there are no classes), number of predictions; and,
#: if metrics ask for them, the predictions and the labels as lists, and the number of classes
BatchScore = tuple[Any, ...]


def evaluate(model: nn.Module, examples, batch_size: int, reads: OnlyRead | None = None) -> dict[str, float]:
    """Mean loss and accuracy over ``examples``, as ``mean_scores``."""
    return mean_scores(batch_scores(model, examples, batch_size, reads=reads))


def mean_scores(scores: Iterable[BatchScore], metrics: Sequence[str] = ()) -> dict[str, float]:
    """``loss`` and ``acc`` over all batches, added in the order given, and ``metrics`` of their outputs.

    Returns:
        For a classifier they are per sample; for a language model per predicted token (positions with label -100 are
        ignored). ``loss`` of a regression is the mean squared error, and there is no ``acc``; of sets of classes it is
        the mean cross-entropy of a class, and ``acc`` that of whole sets.
    """
    loss, correct, count, accurate = 0.0, 0, 0, True
    predicted, labels, classes = list[Any](), list[Any](), 0
    for batch_loss, batch_correct, batch_count, *outputs in scores:
        loss, correct, count = loss + batch_loss, correct + (batch_correct or 0), count + batch_count
        accurate &= batch_correct is not None
        if outputs:
            predicted, labels, classes = predicted + outputs[0], labels + outputs[1], outputs[2]
    requested = of_outputs(metrics)
    extra = measure(requested, np.asarray(predicted), np.asarray(labels), classes) if requested else {}
    if "perplexity" in metrics:
        extra["perplexity"] = perplexity(loss / count)
    return {"loss": loss / count, **({"acc": correct / count} if accurate else {}), **extra}


def worst_tenth(values: Iterable[float], larger: bool) -> float:
    """The mean of the worst tenth of ``values``, of one at least; of losses NaN is the worst.

    Args:
        larger: whether larger values are better.
    """
    ordered = np.sort([*values])[:: 1 if larger else -1]
    return float(np.mean(ordered[: max(len(ordered) // 10, 1)]))


@torch.no_grad()
def batch_scores(
    model: nn.Module,
    examples,
    batch_size: int,
    *,
    outputs: bool = False,
    owner: str = "",
    prefix: FrozenPrefix | None = None,
    reads: OnlyRead | None = None,
) -> list[BatchScore]:
    """The scores of each batch of ``batch_size``, the longest samples first; with predictions and labels if asked."""
    model.eval()
    device, scores = input_device(model), list[BatchScore]()
    order = np.argsort(-examples.lengths, kind="stable")
    for start in steps(range(0, len(order), batch_size), "evaluating"):
        indices = order[start : start + batch_size]
        batch = examples.batch(indices)
        with shortcuts(prefix, reads, [(owner, examples, indices)], batch, device):
            logits, labels = label_logits(model, to_device(batch, device))
        correct: int | None
        if not labels.is_floating_point():
            labelled = labels != IGNORED_LABEL
            logits, labels = logits[labelled].float(), labels[labelled]
            loss, predicted = float(nn.functional.cross_entropy(logits, labels, reduction="sum")), logits.argmax(-1)
            correct = int((predicted == labels).sum())
        else:
            logits, sets = logits.float(), labels.ndim == 2
            loss = float(losses_of(logits, labels).sum())
            predicted = (logits > 0).long() if sets else logits.squeeze(-1)
            correct = int((predicted == labels).all(-1).sum()) if sets else None
        lists = [predicted.tolist(), labels.tolist(), logits.shape[-1]] if outputs else []
        scores.append((loss, correct, len(labels), *lists))
    return scores
