"""Studies of the statements the methods rest on. Each module is a command that writes one JSON and one PNG."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

import fs_lowrank


class Seen(NamedTuple):
    """A server's step: the clients' tensors and weights, the new global tensors before anything is merged or redrawn,
    the state before, and the factor s of s B A."""

    round: int
    tensors: Sequence[Mapping[str, Tensor]]
    weights: Sequence[float]
    mean: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    scale: float


def short(value, digits: int = 6):
    """Floats to ``digits`` significant digits, all the way down lists and dictionaries."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {k: short(v, digits) for k, v in value.items()}
    return [short(v, digits) for v in value] if isinstance(value, (list, tuple)) else value


def watch(method: str, look: Callable[[Seen], None]) -> str:
    """Register a twin of ``method`` that changes nothing and shows every server's step; returns its name."""
    base = type(fs_lowrank.create_method(method))

    class Watched(base):
        source = f"{base.source}, watched"

        def aggregate(self, updates, state, round):
            mean, _ = self.average(updates, state)
            look(Seen(round, [u.tensors for u in updates], self.weights(updates), mean, state, self.adapter.scale()))
            return super().aggregate(updates, state, round)

    name = f"watched_{method}"
    fs_lowrank.register_method(name)(Watched)
    return name
