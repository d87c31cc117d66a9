"""Wrappers, which change the server's step of an averaging method without the method's knowledge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

#: a value of a method's state
Value = Tensor | float | int


class Wrapper(ABC):
    """A change to the server's step of any averaging method, such as ``methods.server_optimizer``.

    A wrapper is called between ``Averaging.mean`` and ``Averaging.settle``. What it remembers is in the method's state
    under ``<prefix><kind>:<name of the tensor>``. It is therefore saved and resumed, and is never sent.
    """

    prefix: ClassVar[str]

    @abstractmethod
    def step(
        self, mean: Mapping[str, Tensor], state: Mapping[str, Value]
    ) -> tuple[dict[str, Tensor], dict[str, Value]]:
        """The tensors to use instead of ``mean``, and what to remember; ``state`` is from before the round."""

    def forget(self, names: Collection[str], state: Mapping[str, Value]) -> dict[str, Value]:
        """``state`` without what the wrapper remembers about the tensors ``names``."""
        return {n: v for n, v in state.items() if not (n.startswith(self.prefix) and n.rsplit(":", 1)[1] in names)}
