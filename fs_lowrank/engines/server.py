"""The server's side of a run, the same for every engine: who takes part, what travels, what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..algebra import nbytes
from ..config import Config
from ..methods import Method, RefusedUpdate, State, Update, check_update
from ..models.names import tags
from ..seeds import derive


class TooFewClients(RuntimeError):
    """A round ended with fewer usable updates than ``lowrank.min_clients``."""


def without_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # What travels beside a tensor, as ``x:…`` of its name, belongs to the head where the tensor does.
    return {n: t for n, t in tensors.items() if "head" not in tags(n.rsplit(":", 1)[-1])}


class Server:
    """State, participation and messages of one run.

    Args:
        method: the federated method.
        state: its state before round 1.
        num_clients: clients 1 … ``num_clients``.
        per_round: how many take part in a round.
        min_clients: usable updates a round needs.
        seed: decides who takes part.
        drop_rate: chance that a client which was chosen never reports.
        keep_messages: keep the messages' values, to bring late clients up to date. An engine whose clients
            share one model needs only their sizes.
    """

    def __init__(
        self,
        method: Method,
        state: State,
        num_clients: int,
        per_round: int,
        min_clients: int,
        seed: int,
        drop_rate: float = 0.0,
        keep_messages: bool = False,
    ):
        self.method, self.state = method, state
        self.num_clients, self.per_round, self.min_clients = num_clients, per_round, min_clients
        self.seed, self.drop_rate, self.keep_messages = seed, drop_rate, keep_messages
        #: name -> (the round it came from, its value or a meta tensor of its shape)
        self.outbox: dict[str, tuple[int, Tensor]] = {}
        #: client -> the round its copy of the shared tensors stands at; absent means 0
        self.synced: dict[int, int] = {}
        self.updates: list[Update] = []

    @classmethod
    def of(cls, config: Config, method: Method, state: State, keep_messages: bool = False) -> Server:
        """The server that ``config`` asks for."""
        return cls(
            method,
            state,
            config.federate.client_num,
            config.sampled_per_round,
            config.lowrank.min_clients,
            config.seed,
            drop_rate=config.lowrank.drop_rate,
            keep_messages=keep_messages,
        )

    def select(self, round: int) -> list[int]:
        """The clients of ``round``, sorted; without replacement, decided by the seed and the round alone."""
        if self.per_round >= self.num_clients:
            return list(range(1, self.num_clients + 1))
        generator = np.random.default_rng(derive(self.seed, "participation", round))
        return sorted(int(i) + 1 for i in generator.choice(self.num_clients, self.per_round, replace=False))

    def drops_out(self, client: int, round: int) -> bool:
        """Whether ``client`` is lost in ``round``, after it was sent the message."""
        return np.random.default_rng(derive(self.seed, "dropout", round, client)).random() < self.drop_rate

    def downlink(self, client: int, round: int) -> Mapping[str, Tensor]:
        """What ``client`` lacks at the start of ``round``; from here on it counts as sent."""
        since = self.synced.get(client, 0)
        self.synced[client] = round - 1
        return self.method.tailor({n: t for n, (came, t) in self.outbox.items() if came > since}, client)

    def receive(self, update: Update, round: int) -> Update:
        """Check an update and keep it for the end of the round.

        Raises:
            RefusedUpdate: it is not what the method expects of this client, came twice, or from none of the clients.
        """
        if not 1 <= update.client <= self.num_clients:
            raise RefusedUpdate(f"client {update.client}: this run has clients 1 to {self.num_clients}")
        if any(u.client == update.client for u in self.updates):
            raise RefusedUpdate(f"client {update.client}: heard already in round {round}")
        update = check_update(update, self.method.expected(self.state, round, update.client))
        self.updates.append(update)
        return update

    def finish(self, round: int) -> dict[str, Tensor]:
        """Aggregate what was received, in the order of client ids, and return the message.

        Raises:
            TooFewClients: the state is left as it was.
        """
        updates, self.updates = sorted(self.updates, key=lambda u: u.client), []
        if len(updates) < self.min_clients:
            raise TooFewClients(
                f"round {round}: {len(updates)} usable updates, lowrank.min_clients is {self.min_clients}"
            )
        before = self.state
        with torch.no_grad():
            self.state, message = self.method.aggregate(updates, before, round)
        for name, tensor in message.items():
            self.outbox[name] = (round, tensor if self.keep_messages else tensor.to("meta"))
        everyone_has = min(self.synced.get(client, 0) for client in range(1, self.num_clients + 1))
        for name in list(self.outbox):
            # What changed without being sent is drawn anew by every copy: an older value must not overtake it.
            redrawn = name not in message and self.state.get(name) is not before.get(name)
            if redrawn or self.outbox[name][0] <= everyone_has:
                del self.outbox[name]
        return message

    def sizes(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Bytes of ``tensors`` with and without the head."""
        return nbytes(tensors), nbytes(without_head(tensors))
