"""Which metrics of a client's evaluation the server believes, by the names that ``trainer.named`` gives them.

The framework merges what it is told: a name that only one client has, or no number of samples, ends its server, and a
number of samples below zero or beyond what there are weights the means by it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch

from ...methods import RefusedUpdate

_FLOAT32 = torch.finfo(torch.float32)
#: how far the sum of a loss may be from the mean times the number of samples: numbers travel as float32
_ROUNDING = 8 * _FLOAT32.eps
#: characters of a client's text that an error message shows
_SHOWN = 60


def check_scores(client: int, reported: Mapping[str, float], sizes: Mapping[str, int], accurate: bool) -> None:
    """Check the metrics that ``client`` reports: of every split all, and nothing else.

    Args:
        sizes: the splits on which it may evaluate, and how many samples of each it can have.
        accurate: whether the run measures an accuracy.
    Raises:
        RefusedUpdate: a name is unknown or missing, or a number is none that an evaluation can give; the message names
            client and metric.
    """
    kinds = ("loss", "avg_loss", "total", *(("acc",) if accurate else ()))
    names = {split: [f"{split}_{kind}" for kind in kinds] for split in sizes}
    given = [split for split in sizes if not reported.keys().isdisjoint(names[split])]
    for name in sorted(reported.keys() - {name for split in given for name in names[split]}):
        wanted = f"{', '.join(kinds)} of {' or '.join(sizes) or 'no split'}"
        raise RefusedUpdate(f"client {client}: unknown metric {name[:_SHOWN]!r}, expected {wanted}")
    for split in given:
        for name in names[split]:
            if name not in reported:
                raise RefusedUpdate(f"client {client}: {name} is missing among its metrics")
        _check_split(client, {kind: reported[f"{split}_{kind}"] for kind in kinds}, split, sizes[split])


def _check_split(client: int, scores: Mapping[str, float], split: str, size: int) -> None:
    """Check the metrics of one split, by kind, of which the client can have ``size`` samples."""

    def refused(kind: str, expected: str) -> RefusedUpdate:
        return RefusedUpdate(f"client {client}: {split}_{kind} is {repr(scores[kind])[:_SHOWN]}, expected {expected}")

    for kind, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise refused(kind, "a finite number")
    total, mean = scores["total"], scores["avg_loss"]
    if not 1 <= total <= size or total != int(total):
        raise refused("total", f"a whole number from 1 to {size}")
    if not 0 <= mean <= _FLOAT32.max:
        raise refused("avg_loss", "a number from 0 to the largest float32")
    if not math.isclose(scores["loss"], mean * total, rel_tol=_ROUNDING, abs_tol=_FLOAT32.tiny):
        raise refused("loss", f"{split}_avg_loss times {split}_total, {mean * total:.6g}")
    if not 0 <= scores.get("acc", 0.0) <= 1:
        raise refused("acc", "a number from 0 to 1")
