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


def band(axes, x, curves: Tensor, color, label: str, **style) -> None:
    """The mean of ``curves`` (seeds, points) as a line, and from the smallest to the largest as a band."""
    axes.plot(x, curves.mean(0), lw=2, color=color, label=label, **style)
    axes.fill_between(x, curves.amin(0), curves.amax(0), color=color, alpha=0.15)


def watch(method: str, look: Callable[[Seen], None]) -> str:
    """Register a twin of ``method`` that changes nothing and shows every server's step; returns its name."""
    base = type(fs_lowrank.create_method(method))

    class Watched(base):
        source = f"{base.source}, watched"

        def aggregate(self, updates, state, round):
            mean = self.mean(updates, state)
            look(Seen(round, [u.tensors for u in updates], self.weights(updates), mean, state, self.adapter.scale()))
            return super().aggregate(updates, state, round)

    name = f"watched_{method}"
    fs_lowrank.register_method(name)(Watched)
    return name
