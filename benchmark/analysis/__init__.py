"""Studies of the theory behind the methods. Each module is a command that writes a JSON file and a PNG."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

import fs_lowrank


class ServerStep(NamedTuple):
    """A server step: the clients' tensors and weights, their mean (before merging or drawing new pairs), the state
    before the step, and the factor s of s B A."""

    round: int
    tensors: Sequence[Mapping[str, Tensor]]
    weights: Sequence[float]
    mean: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    scale: float


def band(axes, x, curves: Tensor, color, label: str, **style) -> None:
    """Plot the mean of ``curves`` (seeds, points) as a line, and their range as a band."""
    axes.plot(x, curves.mean(0), lw=2, color=color, label=label, **style)
    axes.fill_between(x, curves.amin(0), curves.amax(0), color=color, alpha=0.15)


def watch(method: str, look: Callable[[ServerStep], None]) -> str:
    """Register a copy of ``method`` that calls ``look`` with every server step; returns its name."""
    base = type(fs_lowrank.create_method(method))

    class Watched(base):
        source = f"{base.source}, watched"

        def aggregate(self, updates, state, round):
            mean = self.mean(updates, state)
            look(
                ServerStep(
                    round, [u.tensors for u in updates], self.weights(updates), mean, state, self.adapter.scale()
                )
            )
            return super().aggregate(updates, state, round)

    name = f"watched_{method}"
    fs_lowrank.register_method(name)(Watched)
    return name
