"""What the server knows from one round to the next: the state, the messages, and who has which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algebra import nbytes
from ..methods import Client, Method, State
from ..seeds import derive
from ..settings import Settings
from .admission import Admission
from .parcel import digest


class Standing(NamedTuple):
    """What a client's copy says of itself: the round at whose end it stands, and the server's stamp of that round.

    A copy that was never brought up to date, or was lost, stands at round 0; its stamp does not matter.
    """

    round: int = 0
    stamp: str = ""


class Ledger:
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
        admission: what counts as an update; by default any that fits.
        identity: what distinguishes this run from others of the same method, in the stamps that copies keep.
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
        admission: Admission | None = None,
        identity: str = "",
    ):
        self.method, self.state = method, state
        self.num_clients, self.per_round, self.min_clients = num_clients, per_round, min_clients
        self.seed, self.drop_rate, self.keep_messages, self.identity = seed, drop_rate, keep_messages, identity
        self.admission = admission or Admission(num_clients)
        #: the last round that was finished and not left out: where a copy stands that has every message
        self.stood = 0
        #: name -> (the round it came from, its value or a meta tensor of its shape)
        self.outbox: dict[str, tuple[int, Tensor]] = {}
        #: messages up to this round are gone from the outbox
        self.floor = 0
        #: of these, those up to this round went because a client that lacks them is sent the whole model instead
        self.horizon = 0
        #: clients of whose copy nothing is known: they get everything
        self.unknown: set[int] = set()
        #: client -> the last round that it trained in for nothing, until it has been told so
        self.undone: dict[int, int] = {}
        #: round -> what copies that stand there have been told to remember
        self.stamps: dict[int, str] = {}
        self.synced = {}

    @classmethod
    def of(
        cls, config: Settings, method: Method, state: State, clients: Sequence[Client], keep_messages: bool = False
    ) -> Ledger:
        """The ledger that ``config`` asks for; ``clients`` say how many samples they have."""
        bounds = config.lowrank
        return cls(
            method,
            state,
            len(clients),
            config.sampled_per_round,
            config.lowrank.min_clients,
            config.seed,
            drop_rate=config.lowrank.drop_rate,
            keep_messages=keep_messages,
            admission=Admission(
                len(clients),
                {c.id: c.num_samples for c in clients},
                bounds.max_samples,
                bounds.max_update_norm,
                bounds.max_update_norm_factor,
            ),
            identity=config.fingerprint(),
        )

    # -- who takes part ----------------------------------------------------------------------------

    def select(self, round: int) -> list[int]:
        """The clients of ``round``, sorted; without replacement, decided by the seed and the round alone."""
        if self.per_round >= self.num_clients:
            return list(range(1, self.num_clients + 1))
        generator = np.random.default_rng(derive(self.seed, "participation", round))
        return sorted(int(i) + 1 for i in generator.choice(self.num_clients, self.per_round, replace=False))

    def drops_out(self, client: int, round: int) -> bool:
        """Whether ``client`` is lost in ``round``, after it was sent the message."""
        return np.random.default_rng(derive(self.seed, "dropout", round, client)).random() < self.drop_rate

    # -- who has what ------------------------------------------------------------------------------

    @property
    def synced(self) -> dict[int, int]:
        """Client -> the round its copy of the shared tensors stands at; absent means 0. Not to be written to."""
        return self._synced

    @synced.setter
    def synced(self, synced: Mapping[int, int]) -> None:
        self._synced = dict(synced)
        self._standing_at = Counter(self._synced.values())  # round -> how many clients stand there

    def move(self, client: int, round: int | None) -> None:
        """The copy of ``client`` stands at ``round`` now; None: as if it had never been brought anywhere."""
        before = self._synced.pop(client, None)
        if before is not None:
            self._standing_at[before] -= 1
            if not self._standing_at[before]:
                del self._standing_at[before]
        if round is not None:
            self._synced[client] = round
            self._standing_at[round] += 1

    def everyone_has(self) -> int:
        """The round whose messages, and those before it, every client has. No loop over the clients."""
        if len(self._synced) < self.num_clients:
            return 0
        return min(self._standing_at)

    def forget(self, clients: Iterable[int]) -> None:
        """Nothing is known of these clients' copies any more, as after a loss or a new process: they get everything."""
        self.unknown.update(clients)

    def since(self, client: int, standing: Standing | None = None) -> int | None:
        """The round at whose end the copy of ``client`` stands; None if it must be given everything.

        Args:
            standing: what the copy says. None: it does not say, and what was delivered to it counts.
        """
        if standing is None:
            stands = self._synced.get(client, 0)
            return None if client in self.unknown or stands < self.horizon else stands
        known = standing.round == 0 or standing.stamp == self.stamp(standing.round)
        return standing.round if known and self.floor <= standing.round <= self.stood else None

    def lacks(self, since: int) -> dict[str, Tensor]:
        """The messages that a copy lacks which stands at ``since``."""
        return {n: t for n, (came, t) in self.outbox.items() if came > since}

    def stamp(self, round: int) -> str | None:
        """What a copy at the end of ``round`` remembers of it; None if no copy was told."""
        if round == self.stood and round not in self.stamps:
            told = f"{self.identity}:{round}:{self.stamps.get(max(self.stamps, default=0), '')}"
            self.stamps[round] = digest(self.method.view(self.state), told)
        return self.stamps.get(round)

    # -- a round's end -----------------------------------------------------------------------------

    def commit(self, round: int, state: State, message: Mapping[str, Tensor], base_bytes: int | None = None) -> None:
        """``round`` is finished: its state, and what every copy is to be sent.

        Messages for late clients are kept up to the bytes of the whole model (what is shared, and the base weights that
        changed); a client that lacks more is sent the whole model. The newest message is kept whatever it weighs.

        Args:
            base_bytes: of the base weights that the method has changed; None: not known, so that no message is dropped.
        """
        before, self.state, self.stood = self.state, state, round
        for name, tensor in message.items():
            self.outbox[name] = (round, tensor if self.keep_messages else tensor.to("meta"))
        everyone_has = self.everyone_has()
        for name in list(self.outbox):
            # What changed without being sent is drawn anew by every copy: an older value must not overtake it.
            redrawn = name not in message and state.get(name) is not before.get(name)
            if redrawn or self.outbox[name][0] <= everyone_has:
                del self.outbox[name]
        if base_bytes is not None:
            self._drop_old(nbytes(self.method.view(state)) + base_bytes)
        self.floor = max(self.floor, self.horizon, everyone_has)
        self.stamps = {r: stamp for r, stamp in self.stamps.items() if r >= self.floor}

    def _drop_old(self, limit: int) -> None:
        """Forget the oldest messages until those that are kept weigh at most ``limit`` bytes, or one round is left."""
        by_round: Counter[int] = Counter()
        for came, tensor in self.outbox.values():
            by_round[came] += tensor.numel() * tensor.element_size()
        total = by_round.total()
        for came in sorted(by_round)[:-1]:
            if total <= limit:
                break
            total -= by_round[came]
            self.horizon = came
        self.outbox = {n: kept for n, kept in self.outbox.items() if kept[0] > self.horizon}

    # -- on disk -----------------------------------------------------------------------------------

    def saved(self, round: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """After ``round``: tensors by part, and plain data, from which ``restore`` goes on.

        The messages' values are among them only where copies remember their standing: elsewhere nobody is left to
        whom a part of them would do.
        """
        parts = {"state": {n: v for n, v in self.state.items() if isinstance(v, Tensor)}}
        data = {
            "numbers": {n: v for n, v in self.state.items() if not isinstance(v, Tensor)},
            "synced": self.synced,
            "outbox": {
                n: [came, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, (came, t) in self.outbox.items()
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

    def restore(
        self,
        round: int,
        parts: Mapping[str, Mapping[str, Tensor]],
        data: Mapping[str, Any],
        device: torch.device | str,
    ) -> None:
        """Go on as after ``round``, from what ``saved`` gave."""

        def to(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: t.to(device) for n, t in tensors.items()}

        self.state = {**to(parts.get("state", {})), **data["numbers"]}
        self.synced = {int(c): r for c, r in data["synced"].items()}
        values = to(parts.get("outbox", {}))
        self.outbox = {
            n: (came, values[n] if n in values else torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            for n, (came, shape, dtype) in data["outbox"].items()
        }
        standings = data.get("standings", {})
        self.stood, self.horizon = standings.get("stood", round), data.get("horizon", 0)
        # Without their values, older messages are of no use to a copy of its own.
        self.floor = standings.get("floor", round)
        self.stamps = {int(r): stamp for r, stamp in standings.get("stamps", {}).items()}
        self.undone = {int(c): r for c, r in standings.get("undone", {}).items()}
