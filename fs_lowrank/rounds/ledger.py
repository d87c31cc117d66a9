"""The server's state from one round to the next, the messages, and which client has which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algebra import digest, nbytes
from ..methods import Method, State
from ..seeds import derive
from ..settings import Settings
from ..training import samples_trained
from ..training.schedule import schedule_of
from .admission import Admission
from .task import Task


class Standing(NamedTuple):
    """The standing of a client's copy of the model: the round after which it is up to date, and its stamp.

    A copy that was never brought up to date, or was lost, is at round 0; its stamp is ignored.
    """

    round: int = 0
    stamp: str = ""


def clients_of_round(round: int, num_clients: int, per_round: int, seed: int) -> list[int]:
    """The clients of ``round``, sorted; drawn without replacement, from the seed and the round alone."""
    if per_round >= num_clients:
        return list(range(1, num_clients + 1))
    generator = np.random.default_rng(derive(seed, "participation", round))
    return sorted(int(i) + 1 for i in generator.choice(num_clients, per_round, replace=False))


class Ledger:
    """State, participation and messages of one run.

    Args:
        config: of the run.
        method: the federated method.
        state: its state before round 1.
        sizes: of the clients' training sets, which updates must declare; a client beyond them may declare any.
        keep_messages: store the values of messages, to bring late clients up to date. An engine whose clients share one
            model needs only their sizes.
        heads: the modules that count as a head by their place (``names.is_head``).

    Attributes:
        admission: checks updates.
        stood: the last round that was finished and not left out; the standing of a copy that has every message.
        outbox: name -> (the round of the message, its value or a meta tensor of its shape).
        synced: client -> the round to which its copy is up to date; 0 for a missing client.
        floor: messages up to this round are no longer in the outbox.
        horizon: messages up to this round were dropped because a client that lacks them is sent the whole model.
        unknown: clients whose copies may be at any round; they are sent everything.
        undone: client -> the first round in which its training did not count, until the client has been notified.
        stamps: round -> the stamp that copies at this round were given.
        tested: client -> the size of its test data (``evaluator.size_of``), if they are its own; empty if it has none.
    """

    def __init__(
        self,
        config: Settings,
        method: Method,
        state: State,
        sizes: Sequence[int] | np.ndarray = (),
        keep_messages: bool = False,
        heads: Sequence[str] = (),
    ):
        self.config, self.method, self.state = config, method, state
        self.keep_messages, self.heads, bounds = keep_messages, tuple(heads), config.lowrank
        self.admission = Admission(bounds.max_samples, bounds.max_update_norm, bounds.max_update_norm_factor, sizes)
        self.schedule = schedule_of(config.train.scheduler, config.source)
        self.stood = self.floor = self.horizon = 0
        self.outbox: dict[str, tuple[int, Tensor]] = {}
        self.unknown: set[int] = set()
        self.undone: dict[int, int] = {}
        self.stamps: dict[int, str] = {}
        self.tested: dict[int, dict[str, int]] = {}
        self.synced: dict[int, int] = {}

    def task(self, client: int, round: int, state: State | None = None, **exchange: Any) -> Task:
        """What ``client`` does in an ``exchange`` (see ``Task``) of ``round``, from ``state``; None: the ledger's."""
        settings = self.config.of_client(client), self.schedule
        return Task(self.method, client, round, self.state if state is None else state, *settings, **exchange)

    # -- who takes part ----------------------------------------------------------------------------

    def select(self, round: int) -> list[int]:
        """The clients of ``round``, sorted."""
        config = self.config
        return clients_of_round(round, config.taking_part, config.sampled_per_round, config.seed)

    def drops_out(self, client: int, round: int) -> bool:
        """Whether ``client`` drops out of ``round`` after it was sent the message."""
        rate = self.config.lowrank.drop_rate
        return rate > 0 and np.random.default_rng(derive(self.config.seed, "dropout", round, client)).random() < rate

    def samples_trained(self, sizes: Mapping[int, int], round: int) -> int | None:
        """The number of samples that clients with so many samples of their own train on in ``round``, in all."""
        method, config = self.method, self.config
        counts = [
            samples_trained(size, method.phases(round, client), config.of_client(client))
            for client, size in sizes.items()
        ]
        numbers = [number for number in counts if number is not None]
        return sum(numbers) if len(numbers) == len(counts) else None

    # -- who has what ------------------------------------------------------------------------------

    def everyone_has(self) -> int:
        """The last round whose messages, and those before it, every client has."""
        return min(self.synced.values()) if len(self.synced) == self.config.taking_part else 0

    def forget(self, clients: Iterable[int]) -> None:
        """Treat the copies of ``clients`` as unknown, as after a loss or in a new process: they are sent everything."""
        self.unknown.update(clients)

    def since(self, client: int, standing: Standing | None = None) -> int | None:
        """The round to which the copy of ``client`` is up to date; None if the client must be sent everything.

        Args:
            standing: as the copy reports it. None: it reports none, and the messages that were delivered to it decide.
        """
        if standing is None:
            round = self.synced.get(client, 0)
            return None if client in self.unknown or round < self.horizon else round
        valid = standing.round == 0 or standing.stamp == self.stamp(standing.round)
        return standing.round if valid and self.floor <= standing.round <= self.stood else None

    def pending(self, since: int) -> dict[str, Tensor]:
        """The messages that a copy at round ``since`` lacks."""
        return {n: t for n, (sent, t) in self.outbox.items() if sent > since}

    def stamp(self, round: int) -> str | None:
        """The stamp of ``round``, a hash over the state and all stamps before it; None if no copy was given one."""
        if round == self.stood and round not in self.stamps:
            seed = f"{self.config.fingerprint()}:{round}:{self.stamps.get(max(self.stamps, default=0), '')}"
            self.stamps[round] = digest(self.method.view(self.state), seed)[:16]
        return self.stamps.get(round)

    # -- a round's end -----------------------------------------------------------------------------

    def commit(self, round: int, state: State, message: Mapping[str, Tensor]) -> None:
        """End ``round`` with a new state and the message for every copy."""
        scattered = {n: t.contiguous() for n, t in state.items() if isinstance(t, Tensor) and not t.is_contiguous()}
        if scattered:
            # As a checkpoint would restore them: with another layout in memory, sums round in another way.
            state = {**state, **scattered}
        before, self.state, self.stood = self.state, state, round
        for name, tensor in message.items():
            self.outbox[name] = (round, tensor if self.keep_messages else tensor.to("meta"))
        everyone_has = self.everyone_has()
        for name in list(self.outbox):
            # What changed without being sent is drawn anew by every copy: an older value must not replace it.
            redrawn = name not in message and state.get(name) is not before.get(name)
            if redrawn or self.outbox[name][0] <= everyone_has:
                del self.outbox[name]
        self._raise_floor(everyone_has)

    def _raise_floor(self, round: int) -> None:
        self.floor = max(self.floor, round)
        self.stamps = {r: stamp for r, stamp in self.stamps.items() if r >= self.floor}

    def bound(self, base_bytes: int) -> None:
        """Store messages for late clients up to the bytes of the whole model: the shared tensors, the base weights that
        the method has changed, and tensors beside the base. A client that lacks more is sent the whole model. The
        newest message stays whatever its size.

        Args:
            base_bytes: of the changed base after the last round, whose message the model has applied.
        """
        limit = nbytes(self.method.view(self.state)) + base_bytes
        by_round: Counter[int] = Counter()
        for sent, tensor in self.outbox.values():
            by_round[sent] += tensor.numel() * tensor.element_size()
        total = by_round.total()
        for sent in sorted(by_round)[:-1]:
            if total <= limit:
                break
            total -= by_round[sent]
            self.horizon = sent
        self.outbox = {n: message for n, message in self.outbox.items() if message[0] > self.horizon}
        self._raise_floor(self.horizon)

    # -- on disk -----------------------------------------------------------------------------------

    def saved(self, round: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """After ``round``: tensors by part, and plain data, from which ``restore`` continues.

        The values of messages are included only if copies report their standing. Otherwise clients start anew with
        the server, and are sent everything.
        """
        parts = {
            "state": {n: v for n, v in self.state.items() if isinstance(v, Tensor)},
            "synced": {
                "clients": torch.tensor(list(self.synced), dtype=torch.int32),
                "rounds": torch.tensor(list(self.synced.values()), dtype=torch.int32),
            },
        }
        data = {
            "numbers": {n: v for n, v in self.state.items() if not isinstance(v, Tensor)},
            "outbox": {
                n: [sent, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, (sent, t) in self.outbox.items()
            },
        }
        if self.horizon:
            data["horizon"] = self.horizon
        if self.stamps:
            parts["outbox"] = {n: t for n, (_, t) in self.outbox.items()}
        if self.stamps or self.stood != round:
            data["standings"] = {
                "stood": self.stood,
                "floor": self.floor,
                "stamps": self.stamps,
                "undone": self.undone,
            }
        return parts, data

    def restore(self, round: int, parts: Mapping[str, Mapping[str, Tensor]], data: Mapping[str, Any]) -> None:
        """Continue after ``round`` from the return values of ``saved``; ``parts`` are on the run's device."""
        self.state = {**parts.get("state", {}), **data["numbers"]}
        if "synced" in data:  # schema 1
            self.synced = {int(c): r for c, r in data["synced"].items()}
        else:
            synced = parts["synced"]
            self.synced = dict(zip(synced["clients"].tolist(), synced["rounds"].tolist()))
        values = parts.get("outbox", {})
        self.outbox = {
            n: (sent, values[n] if n in values else torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            for n, (sent, shape, dtype) in data["outbox"].items()
        }
        standings = data.get("standings", {})
        self.stood, self.horizon = standings.get("stood", round), data.get("horizon", 0)
        # Messages without their values cannot bring a copy up to date.
        self.floor = standings.get("floor", round)
        self.stamps = {int(r): stamp for r, stamp in standings.get("stamps", {}).items()}
        self.undone = {int(c): r for c, r in standings.get("undone", {}).items()}
