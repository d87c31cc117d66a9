"""Evaluation of one model on one set of examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from ..data.examples import IGNORED_LABEL
from ..models.frozen import FrozenPrefix
from ..models.machine import input_device
from ..models.reads import OnlyRead
from .local import label_logits, shortcuts, to_device

#: sum of the losses, correct predictions, and number of predictions of one batch
BatchScore = tuple[float, int, int]


def evaluate(
    model: nn.Module,
    examples,
    batch_size: int,
    *,
    owner: str = "",
    prefix: FrozenPrefix | None = None,
    reads: OnlyRead | None = None,
) -> dict[str, float]:
    """Mean loss and accuracy over ``examples``.

    Samples are sorted by length to reduce padding, which changes the result only by rounding.

    Returns:
        ``loss`` and ``acc``. For a classifier both are per sample; for a causal LM per predicted token
        (positions with label -100 are ignored).
    """
    return mean_scores(batch_scores(model, examples, batch_size, owner=owner, prefix=prefix, reads=reads))


def mean_scores(scores: Iterable[BatchScore]) -> dict[str, float]:
    """``loss`` and ``acc`` over all batches, added in the order given."""
    loss, correct, count = 0.0, 0, 0
    for batch_loss, batch_correct, batch_count in scores:
        loss, correct, count = loss + batch_loss, correct + batch_correct, count + batch_count
    return {"loss": loss / count, "acc": correct / count}


def batch_scores(
    model: nn.Module,
    examples,
    batch_size: int,
    *,
    owner: str = "",
    prefix: FrozenPrefix | None = None,
    reads: OnlyRead | None = None,
) -> list[BatchScore]:
    """The scores of each batch of ``batch_size``, the longest samples first."""
    scores = []
    for logits, labels in _outputs(model, examples, batch_size, owner, prefix, reads):
        loss = float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        scores.append((loss, int((logits.argmax(-1) == labels).sum()), len(labels)))
    return scores


def predictions(
    model: nn.Module,
    examples,
    batch_size: int,
    *,
    owner: str = "",
    prefix: FrozenPrefix | None = None,
    reads: OnlyRead | None = None,
) -> np.ndarray:
    """The class that a classifier predicts for each of ``examples``, int64 ``(n,)``."""
    outputs = _outputs(model, examples, batch_size, owner, prefix, reads)
    found = [logits.argmax(-1).cpu().numpy() for logits, _ in outputs]
    predicted = np.empty(len(examples), dtype=np.int64)
    predicted[np.argsort(-examples.lengths, kind="stable")] = np.concatenate(found)
    return predicted


@torch.no_grad()
def _outputs(
    model: nn.Module, examples, batch_size: int, owner: str, prefix: FrozenPrefix | None, reads: OnlyRead | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits in float32 and labels of what counts in each batch, the longest samples first."""
    model.eval()
    device = input_device(model)
    order = np.argsort(-examples.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = examples.batch(indices)
        with shortcuts(prefix, reads, [(owner, examples, indices)], batch):
            logits, labels = label_logits(model, to_device(batch, device))
        kept = labels != IGNORED_LABEL
        yield logits[kept].float(), labels[kept]
