"""One round at the server, the same for every engine.

An engine asks clients (``ask``), says what arrived (``delivered``), hands in what came back (``take``) or that nothing
will (``fail``). When ``waiting`` is empty it ends the round (``finish``) and writes its record (``record``).

Nothing here waits, reads a clock, or knows a wire, a process or a model; answers may come in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..methods import RefusedUpdate, State, Update
from .admission import is_whole
from .codec import Codec, Plain, Sizes
from .finite import NotFinite, require_finite
from .intake import Intake, Kept, TooFewClients
from .ledger import Ledger, Standing
from .parcel import Parcel
from .record import Failure, Spent, round_record

logger = logging.getLogger("fs_lowrank")

Purpose = Literal["train", "follow", "evaluate"]


class BadRound(RuntimeError):
    """The server's step failed on updates that were admitted; state and outbox are those before the round."""

    remedy = "set lowrank.on_bad_round to skip, or bound lowrank.max_update_norm or lowrank.max_update_norm_factor"


@dataclass(frozen=True)
class Order:
    """What goes to one client.

    Attributes:
        purpose: ``train``; ``follow`` for a client that will not answer, but whose copy is kept current; ``evaluate``.
        since: the round at whose end its copy stands; None: unknown, so it gets everything, changed base weights too.
        stands: the round at whose end its copy stands when it has followed.
        parcel: the tensors that it lacks, and the facts ``round``, ``purpose``, ``since``, ``stands``; ``whole`` where
            the tensors are values to load and no message to apply; ``encoded`` where they went through the codec;
            ``undo``, a round that it may have trained in for nothing; ``stamp`` where its copy says its standing.
        sizes: bytes of the tensors as they travel, with and without the head.
    """

    client: int
    round: int
    purpose: Purpose
    since: int | None
    stands: int
    parcel: Parcel
    sizes: Sizes


@dataclass(frozen=True)
class Finished:
    """What a round came to.

    Attributes:
        message: what every copy follows, as it arrives there; None for a round that was left out.
        undone: clients that trained for nothing: what they keep is put back to what it was before the round.
    """

    message: Mapping[str, Tensor] | None
    undone: frozenset[int]


class Round:
    """Round ``number`` at the server.

    Args:
        number: from 1.
        ledger: what is known from the rounds before. It follows: on delivery, and at the end.
        selected: the clients that take part; None: those that the ledger draws.
        intake: where updates go; one of its own for every round. By default they are kept.
        codec: how tensors travel, both ways.
        base: gives the base weights that the method has changed, as the server's own copy has them; asked where a
            client must be given everything.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        selected: Iterable[int] | None = None,
        *,
        intake: Intake | None = None,
        codec: Codec | None = None,
        base: Callable[[], Mapping[str, Tensor]] = dict,
    ):
        self.number, self.ledger, self.method = number, ledger, ledger.method
        self.selected = sorted(ledger.select(number) if selected is None else selected)
        self.intake, self.codec = intake or Kept(), codec or Plain()
        self.admission, self.base = ledger.admission, base
        #: who could not be counted on, in the order in which it was known: ``client``, ``kind``, ``reason``
        self.failed: list[Failure] = []
        #: by client: bytes with and without the head; and what the admitted updates said
        self.uplink: dict[int, Sizes] = {}
        self.downlink: dict[int, Sizes] = {}
        self.losses: dict[int, float] = {}
        self.samples: dict[int, int] = {}
        #: of the admitted updates, where the ledger's admission bounds them
        self.norms: dict[int, float] = {}
        #: why the round was left out; empty if it was not
        self.skipped = ""
        #: what the server's step did to the updates of single clients
        self.notes: Mapping[int, str] = {}
        self._waiting = set(self.selected)
        #: who was asked to train
        self.trains: set[int] = set()
        #: client -> where the ledger had its copy, and which round it had to undo, before this round
        self._before: dict[int, tuple[int | None, int | None]] = {}
        self._base: tuple[int, Mapping[str, Tensor]] | None = None

    @property
    def waiting(self) -> frozenset[int]:
        """Selected, and neither heard nor failed; when empty, ``finish`` may be called."""
        return frozenset(self._waiting)

    # -- downlink ----------------------------------------------------------------------------------

    def ask(self, client: int, standing: Standing | None = None, purpose: Purpose = "train") -> Order:
        """What brings ``client`` to where the ledger stands: the start of the round, or its end once it is finished.

        A client that is drawn to drop out of the round is asked to ``follow`` where it would be asked to train.

        Args:
            standing: what its copy says it holds; unknown or outdated gets everything. None: it does not say, and
                gets what was not delivered to it yet.
        Raises:
            ValueError: the round does not wait for this client.
        """
        ledger = self.ledger
        if purpose != "evaluate" and client not in self._waiting:
            raise ValueError(f"round {self.number} does not wait for client {client}, so it cannot ask it to {purpose}")
        if purpose == "train" and ledger.drops_out(client, self.number):
            purpose = "follow"
        since = ledger.since(client, standing)
        facts: dict[str, int | str | None] = {
            "round": self.number,
            "purpose": purpose,
            "since": since,
            "stands": ledger.stood,
        }
        if client in ledger.undone:
            facts["undo"] = ledger.undone[client]
        if standing is not None:
            facts["stamp"] = ledger.stamp(ledger.stood)
        tensors: Mapping[str, Tensor]
        if since is None:
            tensors = {**self.method.view(ledger.state, client), **self._changed_base()}
            sizes = Plain().sizes(tensors)
            facts["whole"] = True
        else:
            tensors = self.method.tailor(ledger.lacks(since), client)
            sizes = self.codec.sizes(tensors)
            if tensors and ledger.keep_messages and not self.codec.exact:
                tensors, facts["encoded"] = self.codec.encode(tensors), True
        if purpose == "train":
            self.trains.add(client)
        return Order(client, self.number, purpose, since, ledger.stood, Parcel(tensors, **facts), sizes)

    def _changed_base(self) -> Mapping[str, Tensor]:
        if self._base is None or self._base[0] != self.ledger.stood:
            self._base = self.ledger.stood, self.base()
        return self._base[1]

    def delivered(self, order: Order) -> None:
        """It arrived: its bytes are counted, and the ledger has the client's copy where the order brings it.

        An engine that cannot lose a message calls it at once; one that cannot tell whether it arrived calls
        ``ledger.forget``. A client that only follows in this round counts as dropped out of it.
        """
        client, ledger = order.client, self.ledger
        self._before.setdefault(client, (ledger.synced.get(client), ledger.undone.get(client)))
        ledger.move(client, order.stands)
        ledger.unknown.discard(client)
        ledger.undone.pop(client, None)
        counted = self.downlink.get(client, (0, 0))
        self.downlink[client] = (counted[0] + order.sizes[0], counted[1] + order.sizes[1])
        if order.purpose == "follow":
            self.fail(client, "dropped", "drawn by lowrank.drop_rate")

    # -- uplink ------------------------------------------------------------------------------------

    def take(self, client: int, parcel: Parcel, sizes: Sizes | None = None) -> bool:
        """What ``client`` answered: tensors, with the facts ``round``, ``samples`` and ``loss`` (``copies.answer``).

        Or none, with the fact ``error``, and ``lost`` where its copy could not follow (``copies.apology``).

        Args:
            sizes: bytes that it has sent, with and without the head, where that is not the size of the tensors.
        Returns:
            Whether its update counts. One that is late, comes twice or was not asked for is left out; one that is
            refused, and an error, become a ``fail``.
        """
        facts = parcel.facts
        invited = is_whole(client) and client in self._waiting and client in self.trains
        if not invited or facts.get("round") != self.number:
            logger.info(
                "left out what client %.60r sent for round %.60r: nobody waits for it in round %d",
                client,
                facts.get("round"),
                self.number,
            )
            return False
        if "error" in facts:
            if facts.get("lost"):
                self.ledger.forget([client])
            self.fail(client, "failed", str(facts["error"])[:1000])
            return False
        method, state = self.method, self.ledger.state
        try:
            expected = self.intake.expects(method.expected(state, self.number, client))
            tensors = self._on_device(self.codec.decode(parcel.tensors, expected), expected)
            reference = method.view(state, client)
            samples: Any = facts.get("samples")  # whatever came: what is no number of samples is refused
            update = Update(client, samples, tensors)
            update = self.admission.admit(update, expected, facts.get("loss"))
            if self.admission.bounds_norms:
                self.norms[client] = self.admission.norm(update, reference)
        except (RefusedUpdate, ValueError) as error:
            text = str(error)
            self.fail(client, "refused", text if text.startswith("client ") else f"client {client}: {text}")
            return False
        self.intake.add(update, reference)
        self.uplink[client] = self.codec.sizes(update.tensors) if sizes is None else sizes
        self.losses[client], self.samples[client] = float(facts["loss"]), update.num_samples
        self._waiting.discard(client)
        return True

    @staticmethod
    def _on_device(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What came over a wire lies on the CPU; the state may not."""
        device = next((t.device for t in expected.values()), torch.device("cpu"))
        if device.type in ("cpu", "meta") or not isinstance(tensors, Mapping):
            return tensors
        return {n: t.to(device) if isinstance(t, Tensor) and t.device.type == "cpu" else t for n, t in tensors.items()}

    def fail(self, client: int, kind: Literal["absent", "dropped", "failed", "refused"], reason: str) -> None:
        """Nothing is to be had of ``client`` in this round. Only the first word on a client counts."""
        if client not in self._waiting:
            return
        self._waiting.discard(client)
        self.failed.append({"client": client, "kind": kind, "reason": reason})
        if kind != "dropped":
            named = reason if reason.startswith("client ") else f"client {client}: {reason}"
            logger.warning("round %d: %s: %s", self.number, kind, named)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, model: nn.Module | None = None) -> Finished:
        """Combine what was taken; the ledger then stands at this round.

        Args:
            model: a copy of the model at the end of the round before. It is not changed; given, a message that it
                could not follow and stay finite is a ``BadRound``.
        Raises:
            TooFewClients: state and ledger are as before the round.
            BadRound: the step raised, or gave something that is not finite. The state is as before the round; then
                either ``roll_back`` or ``leave_out``.
        """
        if self._waiting:
            raise RuntimeError(
                f"round {self.number} waits for clients {sorted(self._waiting)}; take or fail them first"
            )
        outliers = self.admission.outliers(self.norms)
        for client, reason in outliers.items():
            self._waiting.add(client)
            self.fail(client, "refused", reason)
            for said in (self.uplink, self.losses, self.samples):
                del said[client]
        ledger = self.ledger
        try:
            gathered = self.intake.close(without=outliers.keys())
            if gathered.clients < ledger.min_clients or not gathered.updates:
                raise TooFewClients(f"{gathered.clients} usable updates, lowrank.min_clients is {ledger.min_clients}")
        except TooFewClients as error:
            self.roll_back()
            raise TooFewClients(f"round {self.number}: {error}") from None
        state, message = self._step(gathered.updates, model)
        ledger.commit(self.number, state, message)
        return self._ended(message, self.trains - self.losses.keys())

    def _step(self, updates: list[Update], model: nn.Module | None) -> tuple[State, Mapping[str, Tensor]]:
        before = self.ledger.state
        message: Mapping[str, Tensor]
        try:
            with torch.no_grad():
                state, message = self.method.aggregate(updates, before, self.number)
                self.notes = dict(self.method.notes)
                if not self.codec.exact:
                    # The server's own copy follows what clients will read, so that all stay one.
                    message = self.codec.decode(self.codec.encode(message), message)
                    state = {**state, **{n: t for n, t in message.items() if n in state}}
                changed = {n: v for n, v in state.items() if v is not before.get(n)}
                require_finite(changed, message, self.method, self.number, model)
        except (UserError, OSError):
            raise
        except NotFinite as error:
            raise BadRound(f"round {self.number}: {error}") from None
        except Exception as error:  # whatever a client's values led to, it is this round's failure alone
            logger.debug("round %d", self.number, exc_info=True)
            reason = (str(error).splitlines() or [""])[0]
            raise BadRound(
                f"round {self.number}: the server's step failed: {type(error).__name__}: {reason}"
            ) from error
        return state, message

    def leave_out(self, reason: str) -> Finished:
        """End the round without its updates. What was sent down has arrived all the same."""
        self.skipped = reason
        return self._ended(None, self.trains)

    def _ended(self, message: Mapping[str, Tensor] | None, undone: Iterable[int]) -> Finished:
        self.ledger.undone.update(dict.fromkeys(undone, self.number))
        return Finished(message, frozenset(undone))

    def roll_back(self) -> None:
        """The ledger as it was before this round."""
        for client, (stood, undo) in self._before.items():
            self.ledger.move(client, stood)
            if undo is not None:
                self.ledger.undone[client] = undo
        self._before = {}

    def record(
        self,
        metrics: Mapping[str, Mapping[str, float]],
        seconds: Mapping[str, float],
        spent: Mapping[int, Spent],
    ) -> dict[str, Any]:
        """The line of ``rounds.jsonl`` as plain data; after ``finish``, and after an evaluation by messages.

        Args:
            metrics: by split and name.
            seconds: what ``training``, ``aggregation`` and ``evaluation`` took.
            spent: by client, what this process spent on it (``Site.take_spent``).
        """
        return round_record(
            self.method.view(self.ledger.state),
            self.number,
            selected=self.selected,
            failed=self.failed,
            losses=self.losses,
            uplink=self.uplink,
            downlink=self.downlink,
            samples=self.samples,
            metrics=metrics,
            spent=spent,
            seconds=seconds,
            skipped=self.skipped,
            notes={} if self.skipped else self.notes,
        )
