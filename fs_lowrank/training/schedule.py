"""The client learning rate as a function of the round."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..settings import Origin, Scheduler, Settings, check_keys, key, keys_of
from ..settings.check import rounds_of


@dataclass(frozen=True)
class Schedule:
    """The keys of ``train.scheduler``. FederatedScope's own trainers have other types."""

    #: empty or `constant`, `linear`, `cosine`
    type: str = key("", choices=("", "constant", "linear", "cosine"), fold=True)
    #: fraction of the rounds with a linearly increasing rate
    warmup_ratio: float = key(0.0, min=0.0, max=1.0)
    #: final rate of ``linear`` and ``cosine``; a rate that is smaller at the start stays
    min_lr: float = key(0.0, min=0.0, words="a learning rate")
    #: number of rounds after which they restart; 0: no restart
    cycle: int = key(0, min=0, words="a whole number of rounds, 0 for the whole run")


def schedule_of(scheduler: Scheduler, origin: Origin | None = None) -> Schedule:
    """The schedule configured by ``train.scheduler``.

    Raises:
        UserError: an unknown type or key (the message suggests the nearest); a value of the wrong type or out of range.
    """
    settings = asdict(scheduler)
    values = {**settings.pop("extra"), **settings}
    return Schedule(**check_keys(values, keys_of(Schedule), origin or Origin(), "train.scheduler"))


def lr_at(round: int, rounds: int, lr: float, schedule: Schedule) -> float:
    """The learning rate of ``round`` (from 1): ``train.optimizer.lr`` under ``schedule``.

    ``linear`` and ``cosine`` decrease from ``lr`` to ``min_lr`` over the run, or over every ``cycle`` rounds; an ``lr``
    below ``min_lr`` stays. In the first ``warmup_ratio`` of the rounds, the rate increases linearly.
    """
    warmup = rounds_of(schedule.warmup_ratio, rounds) if schedule.warmup_ratio else 0
    if round <= warmup:
        return lr * round / warmup
    if schedule.type in ("", "constant"):
        return lr
    length = schedule.cycle or rounds - warmup
    done = ((round - warmup - 1) % length) / max(length - 1, 1)
    fall = (1 - done) if schedule.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    lowest = min(schedule.min_lr, lr)
    return lowest + (lr - lowest) * fall


def without_effect(config: Settings) -> list[tuple[str, Any, str]]:
    """The keys of ``train.scheduler`` without which all rounds have the same learning rates: name, value and reason."""
    schedule, rounds = schedule_of(config.train.scheduler, config.source), config.federate.total_round_num
    rates = {client.train.optimizer.lr for client in config.variants()}
    idle = []
    for name, value in asdict(schedule).items():
        without = replace(schedule, **{name: getattr(Schedule(), name)})
        if without != schedule and value != "constant":
            pairs = (
                (lr_at(r, rounds, lr, s) for s in (schedule, without)) for lr in rates for r in range(1, rounds + 1)
            )
            if all(math.isclose(*pair) for pair in pairs):
                reason = "the learning rate of every round is the same without it"
                if name == "type" and schedule.min_lr >= max(rates):
                    reason += f", since min_lr = {schedule.min_lr:g} is not below train.optimizer.lr"
                idle.append((f"train.scheduler.{name}", value, reason))
    return idle


def evaluation_due(config: Settings, round: int) -> bool:
    """Whether ``round`` ends with an evaluation: every ``eval.freq`` rounds, and always the last."""
    freq = config.eval.freq
    return (freq > 0 and round % freq == 0) or round == config.federate.total_round_num
