"""The work of one client in one exchange of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from ..methods import TRAIN, Method, Phase, State, Tensors
from ..seeds import derive
from ..settings import Settings
from ..training.schedule import Schedule, lr_at


class Task:
    """The work of ``client`` in an exchange of ``round``; each part is computed once.

    Args:
        method: the federated method.
        state: at the start of the exchange; None in a client's process, where there are no ``view`` and ``expected``.
        settings: the client's. schedule: of the learning rate.
        exchange: its name (``Method.exchanges``). goes_on: others follow in the round.
        told: the tensors that the client is told with it (``Method.tell``); None in the first of a round.

    Attributes:
        lr: the learning rate. seed: for the order of the data, dropout, and augmentation of images.
        trains: whether the client trains in this exchange. further: it is not the round's first. alone: it is the
            round's only one.
    """

    def __init__(
        self,
        method: Method,
        client: int,
        round: int,
        state: State | Any,
        settings: Settings,
        schedule: Schedule,
        exchange: str = TRAIN,
        goes_on: bool = False,
        told: Tensors | None = None,
    ):
        self.client, self.round, self.settings = client, round, settings
        self.exchange, self.goes_on, self.told = exchange, goes_on, told or {}
        self.trains, self.further = exchange == TRAIN, told is not None
        self.alone = not (self.further or goes_on)
        self._method, self._state = method, state
        self.lr = lr_at(round, settings.federate.total_round_num, settings.train.optimizer.lr, schedule)
        self.seed = derive(settings.seed, "train", round, client)

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """The tensors to train, and for how long."""
        return self._method.phases(self.round, self.client)

    @cached_property
    def view(self) -> Mapping[str, Tensor]:
        """The shared tensors that the client starts from."""
        return self._method.view(self._state, self.client)

    @cached_property
    def expected(self) -> Mapping[str, Tensor]:
        """Names, shapes and dtypes of the tensors that the client must send."""
        further = () if self.trains else (self.exchange,)
        return self._method.expected(self._state, self.round, self.client, *further)
