"""Where admitted updates go: each waits for the end of the round, or is added to a running mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from ..algebra import wide
from ..methods import Update
from .admission import copies


class TooFewClients(RuntimeError):
    """A round cannot be finished: fewer updates than ``lowrank.min_clients``, or a client's share is missing.

    Args:
        least: ``lowrank.min_clients``, where a smaller one would help.
    """

    def __init__(self, reason: str, least: int = 1):
        super().__init__(reason)
        fewer = ", or set a smaller lowrank.min_clients if no more clients can be had" if least > 1 else ""
        self.remedy = f"correct what made the clients fail{fewer}"


class Intake:
    """Takes the admitted updates of one round, and stores them until it ends; derived classes do something else.

    Attributes:
        sees_values: a client's own values arrive, not shares.
        copies: how often a client sends tensors of these sizes: with shares, to every client.
    """

    sees_values: bool = True
    copies: int = 1

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def expects(self, expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Names, shapes and dtypes of the shares that a client sends, if the method expects ``expected`` of it."""
        return expected

    def add(self, update: Update) -> None:
        """Take an update."""
        self.updates.append(update)

    def close(self, without: Collection[int] = ()) -> list[Update]:
        """The updates for ``Method.aggregate``, sorted by client, or their mean as a single one.

        Args:
            without: clients whose updates are excluded after all.
        Raises:
            TooFewClients: the updates cannot be used without the missing ones.
        """
        return sorted((u for u in self.updates if u.client not in without), key=lambda u: u.client)


class RunningMean(Intake):
    """The weighted mean of updates, in the memory of one update. Its rounding depends on the order of arrival.

    It cannot leave out an update after it was added, so a configuration with it has no
    ``lowrank.max_update_norm_factor`` (``settings.conflicts``).

    Args:
        uniform: give every client the same weight (``federate.ignore_weight``).
    """

    def __init__(self, uniform: bool = False) -> None:
        self.uniform, self.weight, self.samples = uniform, 0.0, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, update: Update) -> None:
        weight = 1 if self.uniform else update.num_samples
        if not self.samples:
            self._sums = {name: tensor.to(wide(tensor.dtype)) * weight for name, tensor in update.tensors.items()}
            self._dtypes = {name: tensor.dtype for name, tensor in update.tensors.items()}
        else:
            for name, total in self._sums.items():
                total.add_(update.tensors[name], alpha=weight)
        self.weight += weight
        self.samples += update.num_samples

    def close(self, without: Collection[int] = ()) -> list[Update]:
        if not self.samples:
            return []
        means = {name: (total / self.weight).to(self._dtypes[name]) for name, total in self._sums.items()}
        return [mean_as_update(means, self.samples)]


def mean_as_update(means: Mapping[str, Tensor], samples: int) -> Update:
    """The mean of updates as a single update, for methods whose server step is a weighted sum."""
    return Update(1, samples, copies(means))
