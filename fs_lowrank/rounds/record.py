"""The line of ``rounds.jsonl`` that says what a round was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..models.names import tags

#: what a process spent on a client: seconds of ``training`` and ``upload``, and whether it was ``reused``
Spent = dict[str, float | bool]


class Failure(TypedDict):
    """A client that could not be counted on: ``absent``, ``dropped``, ``failed`` or ``refused``, and why."""

    client: int
    kind: str
    reason: str


def round_record(
    view: Mapping[str, Tensor],
    round: int,
    *,
    selected: list[int],
    failed: list[Failure],
    losses: Mapping[int, float],
    uplink: Mapping[int, tuple[int, int]],
    downlink: Mapping[int, tuple[int, int]],
    samples: Mapping[int, int],
    metrics: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, float],
    spent: Mapping[int, Spent],
    skipped: str = "",
    notes: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """The line of ``rounds.jsonl``; bytes come by client, with and without the head.

    ``skipped``: why the round was left out (``lowrank.on_bad_round``); no client is among its ``clients`` then, and
    its loss is of those that had trained. ``notes``: by client, why the server's step left its update out or scaled it
    down (``lowrank.robust``); the client is among ``clients`` all the same.

    ``client_seconds`` says of each client that this process trained how long training and upload took, and
    whether it was reused; the seconds are then those of the time it was trained.
    """
    seconds = dict(seconds)
    losses = dict(sorted(losses.items()))  # updates come in any order between processes
    # What was not trained again counts with the time it took when it was.
    seconds["training"] += sum(s["training"] for s in spent.values() if s["reused"])
    return {
        "round": round,
        **({"skipped": skipped} if skipped else {}),
        "selected": selected,
        "clients": [] if skipped else sorted(losses),
        "failed": sorted(failed, key=lambda f: f["client"]),
        **({"robust": [{"client": c, "reason": notes[c]} for c in sorted(notes)]} if notes else {}),
        "loss": sum(losses[c] * samples[c] for c in losses) / sum(samples[c] for c in losses),
        "metrics": metrics,
        "uplink_bytes": sum(b for b, _ in uplink.values()),
        "uplink_bytes_without_head": sum(b for _, b in uplink.values()),
        "downlink_bytes": sum(b for b, _ in downlink.values()),
        "downlink_bytes_without_head": sum(b for _, b in downlink.values()),
        "client_uplink_bytes": {c: b for c, (b, _) in sorted(uplink.items())},
        "client_downlink_bytes": {c: b for c, (b, _) in sorted(downlink.items())},
        "adapter_norm": norms(view),
        "seconds": seconds,
        "client_seconds": spent,
    }


def norms(view: Mapping[str, Tensor]) -> dict[str, float]:
    """Frobenius norm over all layers, of each half of the pair, or of the weights of a full method."""
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in view.items():
        group = next((t for t in ("lora_A", "lora_B", "adapter", "head", "base") if t in tags(name)), "other")
        groups.setdefault(group, []).append(tensor)
    norms = {g: float(torch.stack([t.float().norm() for t in ts]).norm()) for g, ts in sorted(groups.items())}
    # The squares of large values leave float32; the norm itself does not leave float64.
    wide = {g: math.hypot(*(float(t.double().norm()) for t in groups[g])) for g, n in norms.items() if n == math.inf}
    return {**norms, **wide}
