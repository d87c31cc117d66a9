"""Where the updates of a round go once they are admitted: kept one by one, or into a running mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..algebra import FlatTensors
from ..methods import Update


class TooFewClients(RuntimeError):
    """A round cannot be finished with the updates that it has: fewer than ``lowrank.min_clients``, or than all."""

    remedy = "a smaller lowrank.min_clients if no more clients can be had"


@dataclass(frozen=True)
class Gathered:
    """The updates of a round, sorted by client, or one in their place: their mean.

    Attributes:
        updates: for ``Method.aggregate``.
        clients: of how many clients they are.
        samples: of how many samples they are.
    """

    updates: list[Update]
    clients: int
    samples: int


class Intake(Protocol):
    """Takes the admitted updates of one round."""

    def expects(self, expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Names, shapes and dtypes of what a client sends, where the method expects ``expected`` of it."""

    def add(self, update: Update, reference: Mapping[str, Tensor]) -> None:
        """Take an update. ``reference``: the shared tensors that the client held at the start of the round."""

    def close(self, without: Collection[int] = ()) -> Gathered:
        """What was taken, in an order that does not depend on who came first.

        Args:
            without: clients whose updates are left out after all.
        Raises:
            TooFewClients: it is of no use without those that are missing.
        """


class Kept:
    """Every update is kept until the round ends."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def expects(self, expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return expected

    def add(self, update: Update, reference: Mapping[str, Tensor]) -> None:
        self.updates.append(update)

    def close(self, without: Collection[int] = ()) -> Gathered:
        updates = sorted((u for u in self.updates if u.client not in without), key=lambda u: u.client)
        return Gathered(updates, len(updates), sum(u.num_samples for u in updates))


class RunningMean:
    """The weighted mean of updates that come one after the other, in the memory of one.

    Its rounding depends on the order in which they come.

    Args:
        uniform: every client weighs the same, whatever its samples (``federate.ignore_weight``).
    """

    def __init__(self, uniform: bool = False) -> None:
        self.uniform, self.weight, self.clients, self.samples = uniform, 0.0, 0, 0
        self._sums: dict[str, Tensor] = {}

    def expects(self, expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return expected

    def add(self, update: Update, reference: Mapping[str, Tensor]) -> None:
        weight = 1 if self.uniform else update.num_samples
        if not self.clients:
            self._sums = {name: tensor.float() * weight for name, tensor in update.tensors.items()}
            self._dtypes = {name: tensor.dtype for name, tensor in update.tensors.items()}
        else:
            for name, total in self._sums.items():
                total.add_(update.tensors[name], alpha=weight)
        self.weight += weight
        self.clients, self.samples = self.clients + 1, self.samples + update.num_samples

    def close(self, without: Collection[int] = ()) -> Gathered:
        if without:
            raise ValueError(f"a running mean cannot leave out clients {sorted(without)} once they are in it")
        if not self.clients:
            return Gathered([], 0, 0)
        means = {name: (total / self.weight).to(self._dtypes[name]) for name, total in self._sums.items()}
        return Gathered([mean_as_update(means, self.samples)], self.clients, self.samples)


def mean_as_update(means: Mapping[str, Tensor], samples: int) -> Update:
    """A mean in the place of the updates it is of, for methods whose server step is a weighted sum."""
    one_dtype = len({t.dtype for t in means.values()}) == 1
    return Update(1, samples, FlatTensors.pack(means) if one_dtype else dict(means))
