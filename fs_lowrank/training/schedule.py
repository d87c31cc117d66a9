"""The client learning rate as a function of the round."""

from __future__ import annotations

import math

from ..config import Scheduler
from ..errors import UserError, nearest

_TYPES = ("", "constant", "linear", "cosine")


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise ``UserError`` if ``train.scheduler`` holds an unknown type or key, or a value that is no number."""
    kind = scheduler.type.lower()
    if kind not in _TYPES:
        raise UserError(
            f"train.scheduler.type = {scheduler.type!r}: expected one of constant, linear, cosine"
            f"{nearest(kind, _TYPES[1:])}"
        )
    known = ("type", "warmup_ratio", "min_lr", "cycle")
    for key in scheduler.extra:
        if key not in known:
            raise UserError(f"train.scheduler.{key}: no such key{nearest(key, known)}; known: {', '.join(known)}")
    floor, cycle = scheduler.extra.get("min_lr", 0.0), scheduler.extra.get("cycle", 0)
    if not 0 <= _number(floor) < math.inf:
        raise UserError(f"train.scheduler.min_lr = {floor!r}: expected a learning rate, 0 or more")
    if not (_number(cycle) >= 0 and _number(cycle).is_integer()):
        raise UserError(f"train.scheduler.cycle = {cycle!r}: expected a whole number of rounds; or 0 for the whole run")


def _number(value: object) -> float:
    """``value`` as a number, also where it is written as text; NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def lr_at(round: int, rounds: int, lr: float, scheduler: Scheduler) -> float:
    """The learning rate of ``round`` (from 1): ``train.optimizer.lr`` under ``train.scheduler``.

    ``linear`` and ``cosine`` fall from ``lr`` to ``min_lr`` over the run, or over every ``cycle`` rounds;
    the first ``warmup_ratio`` of the rounds rise linearly. A server that schedules sends a number a round.
    """
    kind, floor = scheduler.type.lower(), float(scheduler.extra.get("min_lr", 0.0))
    warmup = math.ceil(scheduler.warmup_ratio * rounds)
    if round <= warmup:
        return lr * round / warmup
    if kind in ("", "constant"):
        return lr
    length = int(float(scheduler.extra.get("cycle", 0))) or rounds - warmup
    done = ((round - warmup - 1) % length) / max(length - 1, 1)
    fall = (1 - done) if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (lr - floor) * fall


def evaluation_due(config, round: int) -> bool:
    """Whether ``round`` ends with an evaluation: every ``eval.freq`` rounds, and always the last."""
    freq = config.eval.freq
    return (freq > 0 and round % freq == 0) or round == config.federate.total_round_num
