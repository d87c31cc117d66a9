"""What goes around an averaging method from outside, without the method knowing which it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

#: what a method's state holds under a name
Value = Tensor | float | int


class Wrapper:
    """A change to the server's step of any averaging method; ``methods.server_optimizer`` is the one there is.

    A wrapper lives between ``Averaging.mean`` and ``Averaging.settle``. What it remembers lies in the method's state
    under ``<prefix><what>:<name of the tensor>``, so it is saved and resumed with it and never travels.

    What is not here yet, and where it belongs: SCAFFOLD adds ``phases(phases, round, client)``, which gives each phase
    of the method the term ``c - c_k``, and ``upload(sent, round, client)``, which sends the change of ``c_k`` beside
    the method's own tensors; ``step`` then moves ``c``. Client-level privacy adds ``admit(update, reference)``, which
    clips an update's distance from what the client received; ``step`` then adds the noise. Each is a method of this
    class that changes nothing unless overridden, called by ``Averaging`` or by the engine in the wrappers' order.
    """

    prefix: ClassVar[str]

    def step(
        self, mean: Mapping[str, Tensor], state: Mapping[str, Value]
    ) -> tuple[dict[str, Tensor], dict[str, Value]]:
        """The tensors to take in the place of ``mean``, and what to remember; ``state`` is from before the round."""
        raise NotImplementedError

    def forget(self, names: Collection[str], state: Mapping[str, Value]) -> dict[str, Value]:
        """``state`` without what is remembered of the tensors called ``names``."""
        return {n: v for n, v in state.items() if not (n.startswith(self.prefix) and n.rsplit(":", 1)[1] in names)}
