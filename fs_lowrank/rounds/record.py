"""Parts of a round's record, which ``Round.record`` puts together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypedDict

import torch
from torch import Tensor

from ..algebra import change_norms
from ..models.names import is_head, tags
from ..settings.metrics import chief

#: with more clients, only the record of the last round has the scores of all; others have so many at either end
MANY, EXTREME = 100, 10


class Failure(TypedDict):
    """A client that could not be counted on: ``absent``, ``dropped``, ``failed`` or ``refused``, and why."""

    client: int
    kind: str
    reason: str


def extremes(scores: Mapping[int, Mapping[str, float]]) -> dict[int, Mapping[str, float]]:
    """The scores of all clients; of more than ``MANY``, of the ``EXTREME`` at either end by accuracy, or loss."""
    if len(scores) <= MANY:
        return dict(scores)
    main = chief(next(iter(scores.values())))
    ranked = sorted(scores, key=lambda client: (scores[client][main], client))
    return {client: scores[client] for client in sorted({*ranked[:EXTREME], *ranked[-EXTREME:]})}


def norms(view: Mapping[str, Tensor], heads: Sequence[str] = ()) -> dict[str, float]:
    """Frobenius norm over all layers, of each half of the pair, or of the weights of a full method and its head.

    Args:
        heads: see ``names.is_head``.
    """
    groups = {g: [view[n] for n in names] for g, names in by_part(tuple(view), tuple(heads)).items()}
    norms = {g: float(torch.stack([t.float().norm() for t in ts]).norm()) for g, ts in groups.items()}
    # The squares of large values overflow float32; the norm itself does not overflow float64.
    wide = {g: math.hypot(*(float(t.double().norm()) for t in groups[g])) for g, n in norms.items() if n == math.inf}
    return {**norms, **wide}


def changes(
    tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], heads: Sequence[str] = ()
) -> dict[str, float]:
    """Norm of the difference to ``reference`` in each of the groups of ``norms``, of tensors that both have."""
    shared = {n: t for n, t in tensors.items() if n in reference and reference[n].shape == t.shape}
    by_name = change_norms(shared, reference)
    groups = by_part(tuple(by_name), tuple(heads))
    return {group: math.sqrt(sum(by_name[n] ** 2 for n in names)) for group, names in groups.items()}


@lru_cache(maxsize=256)
def by_part(names: tuple[str, ...], heads: tuple[str, ...]) -> dict[str, list[str]]:
    """The names by their part of the model, both in order; ``x:NAME`` is of the part of ``NAME``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kinds = ("lora_A", "lora_B", "adapter", "base")
        tensor = name.rpartition(":")[2]
        kind = "head" if is_head(tensor, heads) else next((t for t in kinds if t in tags(tensor)), "other")
        groups.setdefault(kind, []).append(name)
    return dict(sorted(groups.items()))
