"""What one client does in one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from ..methods import Method, Phase, State
from ..seeds import derive
from ..settings import Settings
from ..training.schedule import Schedule, lr_at


class Task:
    """What ``client`` does in ``round``; each part is computed once.

    Args:
        method: the federated method.
        state: at the start of the round; None in a client's process, where there are no ``view`` and ``expected``.
        settings: by which the client trains. schedule: of the learning rate.

    Attributes:
        lr: the learning rate. seed: for the order of the data, dropout, and augmentation of images.
    """

    def __init__(
        self,
        method: Method,
        client: int,
        round: int,
        state: State | Any,
        settings: Settings,
        schedule: Schedule,
    ):
        self.client, self.round, self.settings = client, round, settings
        self._method, self._state = method, state
        self.lr = lr_at(round, settings.federate.total_round_num, settings.train.optimizer.lr, schedule)
        self.seed = derive(settings.seed, "train", round, client)

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """What is trained, and for how long."""
        return self._method.phases(self.round, self.client)

    @cached_property
    def view(self) -> Mapping[str, Tensor]:
        """The shared tensors that the client starts from."""
        return self._method.view(self._state, self.client)

    @cached_property
    def expected(self) -> Mapping[str, Tensor]:
        """Names, shapes and dtypes of what the client must send."""
        return self._method.expected(self._state, self.round, self.client)
