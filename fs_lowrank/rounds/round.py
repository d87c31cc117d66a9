"""One round at the server, the same for every engine.

An engine asks clients (``ask``), reports what was delivered (``delivered``), and passes on each answer (``take``) or
that there will be none (``fail``). When ``waiting`` is empty, it has the same clients asked once more where the round
``goes_on`` (``go_on``), or ends the round (``finish``) and writes the record (``record``).

Nothing here waits, reads a clock, or depends on a transport, a process or a model. Answers may come in any order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..algebra import on_device
from ..errors import described
from ..methods import RefusedUpdate, State, Update
from .admission import Spent, at_own_ranks, check_loss, spent_by
from .codec import Codec, Sizes
from .finite import BadRound, WrongStep, require_finite, require_valid
from .intake import Intake, TooFewClients
from .ledger import Ledger, Standing
from .parcel import Parcel
from .record import Failure, changes, norms
from .task import Task

logger = logging.getLogger("fs_lowrank")

Purpose = Literal["train", "follow", "evaluate"]


@dataclass(frozen=True)
class Order:
    """A message from the server to one client.

    Attributes:
        purpose: ``train``; ``evaluate``; ``follow`` for a client that drops out, whose copy is kept up to date.
        parcel: the tensors that the copy lacks, and the facts ``round``, ``purpose``, ``since``, ``stands``. ``since``
            is the round to which the client's copy is up to date now. None: the client is sent everything, changed base
            weights included, because it is unknown or because that is less. In a further exchange it is ``stands``, the
            round to which its copy is up to date when it has followed the order. Further facts: ``whole`` if the
            tensors are values to load instead of a message to apply; ``encoded`` if they went through the codec;
            ``undo``, a round whose training does not count; ``stamp`` for a copy that reports its standing. In a round
            of several exchanges ``exchange`` is the name of this one, and ``goes_on`` whether others follow. In all but
            the first the client is told the tensors; ``told`` are their names.
        sizes: bytes of the tensors as they travel, with and without the head.
        task: the client's work in the round, for a transport whose clients are in this process.
    """

    client: int
    round: int
    purpose: Purpose
    parcel: Parcel
    sizes: Sizes
    task: Task


@dataclass(frozen=True)
class Finished:
    """The outcome of a round.

    Attributes:
        message: every copy applies it; None for a round that was left out.
        undone: clients whose training does not count; their personal tensors are reset to those before the round.
    """

    message: Mapping[str, Tensor] | None
    undone: frozenset[int]


class Round:
    """Round ``number`` at the server.

    Args:
        number: from 1.
        ledger: the state from earlier rounds; it is updated on delivery and at the end.
        selected: the clients that take part; None: the ledger draws them.
        intake: makes the intake of updates, for each exchange. By default it stores them.
        codec: how tensors travel, in both directions.
        base: gives the base weights that the method has changed, as the server's own copy has them
            (``Workspace.changed_base``), for clients that must be sent everything. None: unknown, and not sent.

    Attributes:
        exchange: the number of the exchange, from 0. goes_on: another is to follow in this round.
        told: the tensors that clients were told in this round. state: of the method, with these.
        counted: the clients whose updates of this exchange were admitted.
        failed: the clients that could not be counted on, in the order in which that became known. Each has ``client``,
            ``kind`` (``absent``, ``dropped``, ``failed`` or ``refused``) and ``reason``.
        uplink, downlink: by client, bytes with and without the head.
        evaluation_downlink: of the downlink, the bytes of orders to evaluate.
        losses, samples: by client, the training loss and the number of samples of the admitted updates.
        norms: by client, the norms of the exchange's admitted updates, if the ledger's admission bounds them.
        drift: by client, how far its admitted update is from its start values, by half of the pair.
        spent: by client, its cost in its process, by its own report.
        trains: the clients that were asked to train; absent ones may have been, before the server was resumed.
        skipped: why the round was left out; empty if it was not.
        unevaluated: by client, why its evaluation after the round was left out, where clients evaluate.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        selected: Iterable[int] | None = None,
        *,
        intake: Callable[[], Intake | None] = Intake,
        codec: Codec | None = None,
        base: Callable[[], Mapping[str, Tensor]] | None = None,
    ):
        self.number, self.ledger, self.method = number, ledger, ledger.method
        self.selected = sorted(ledger.select(number) if selected is None else selected)
        self._intake, self.codec = intake, codec or Codec()
        self.intake = intake() or Intake()
        self.state = ledger.state
        self.exchanges, self.exchange = tuple(self.method.exchanges(self.state, number)), 0
        self.goes_on = len(self.exchanges) > 1
        self.told: dict[str, Tensor] = {}
        self._news: Mapping[str, Tensor] = {}  # told in this exchange
        self.counted: set[int] = set()
        self.admission, self.base = ledger.admission, base
        self.failed: list[Failure] = []
        self.uplink: dict[int, Sizes] = {}
        self._earlier_uplink: Mapping[int, Sizes] = {}  # of the exchanges before this one
        self.downlink: dict[int, Sizes] = {}
        self.evaluation_downlink = 0
        self.losses: dict[int, float] = {}
        self.samples: dict[int, int] = {}
        self.norms: dict[int, float] = {}
        self.drift: dict[int, dict[str, float]] = {}
        self.spent: dict[int, Spent] = {}
        self.trains: set[int] = set()
        self.skipped = ""
        self.unevaluated: dict[int, str] = {}
        #: a client, and how a server's step treated its update
        self.notes: list[tuple[int, str]] = []
        self._waiting = set(self.selected)
        #: the tasks of the clients that are asked, until their answers are taken
        self._tasks: dict[int, Task] = {}
        #: by client, where its copy was, and which round it had to undo, before this round
        self._before = dict(ledger.synced), dict(ledger.undone)
        #: the changed base weights, and the round after which they were read
        self._base: tuple[int, Mapping[str, Tensor]] | None = None

    @property
    def waiting(self) -> frozenset[int]:
        """The selected clients that have neither answered nor failed; when empty, ``finish`` may be called."""
        return frozenset(self._waiting)

    # -- downlink ----------------------------------------------------------------------------------

    def ask(self, client: int, standing: Standing | None = None, purpose: Purpose = "train") -> Order:
        """The order that brings ``client`` up to date: to the start of the round, or to its end if finished.

        It has the messages that the client's copy lacks, or the whole model if that is known and has fewer bytes.

        A client that is drawn to drop out of the round is asked to ``follow`` where it would be asked to train.

        Args:
            standing: as the client's copy reports it. A copy whose report is unknown or outdated is sent everything.
                None: it reports none, and is sent the messages that were not delivered to it yet.
        """
        ledger, waits = self.ledger, client in self._waiting
        if purpose == "train" and ledger.drops_out(client, self.number):
            purpose = "follow"
        task = self._tasks.get(client) if waits else ledger.task(client, self.number)
        if task is None:
            told = self.method.tailor(self._news, client, self.state) if self.exchange else None
            exchange = {"exchange": self.exchanges[self.exchange], "goes_on": self.goes_on, "told": told}
            task = self._tasks[client] = ledger.task(client, self.number, self.state, **exchange)
        # In a further exchange its copy was brought up to date by the first.
        since = ledger.stood if task.further else ledger.since(client, standing)
        tensors: Mapping[str, Tensor] = {}
        if since is not None:
            tensors = task.told if task.further else self.method.tailor(ledger.pending(since), client, ledger.state)
            sizes = self.codec.sizes(tensors, ledger.heads)
        if since is None or tensors and self.base is not None and not task.further:
            full = {**task.view, **self._changed_base()}
            full_sizes = Codec().sizes(full, ledger.heads)
            if since is None or full_sizes[0] < sizes[0]:
                since, tensors, sizes = None, full, full_sizes
        facts: dict[str, Any] = {
            "round": self.number,
            "purpose": purpose,
            "since": since,
            "stands": ledger.stood,
        }
        if not task.alone:
            facts |= {"exchange": task.exchange, "goes_on": task.goes_on}
        if task.further:
            facts["told"] = sorted(tensors)
        if client in ledger.undone:
            facts["undo"] = ledger.undone[client]
        if standing is not None:
            facts["stamp"] = ledger.stamp(ledger.stood)
        if since is None:
            facts["whole"] = True
        elif tensors and ledger.keep_messages and not self.codec.exact:
            tensors, facts["encoded"] = self.codec.encode(tensors), True
        if purpose == "train":
            self.trains.add(client)
        return Order(client, self.number, purpose, Parcel(tensors, **facts), sizes, task)

    def _changed_base(self) -> Mapping[str, Tensor]:
        if self._base is None or self._base[0] != self.ledger.stood:
            self._base = self.ledger.stood, self.base() if self.base else {}
        return self._base[1]

    def delivered(self, order: Order) -> None:
        """Count the bytes of an order that has arrived, and note the round of the client's copy.

        An engine that cannot lose a message calls this at once; one that cannot tell whether the order arrived calls
        ``ledger.forget``. A client that only follows in this round counts as dropped out of it.
        """
        client, ledger = order.client, self.ledger
        ledger.synced[client] = order.parcel.facts["stands"]
        ledger.unknown.discard(client)
        ledger.undone.pop(client, None)
        before = self.downlink.get(client, (0, 0))
        self.downlink[client] = (before[0] + order.sizes[0], before[1] + order.sizes[1])
        if order.purpose == "evaluate":
            self.evaluation_downlink += order.sizes[0]
        if order.purpose == "follow":
            self.fail(client, "dropped", "drawn by lowrank.drop_rate")

    # -- uplink ------------------------------------------------------------------------------------

    def take(self, client: int, parcel: Parcel) -> bool:
        """Admit the answer of ``client``.

        It has tensors and the facts ``round``, ``samples``, ``loss`` and ``spent`` (``trainer.Fitted.answer``). If the
        client could not train, it has the fact ``error``, and ``lost`` if its copy could not follow
        (``copies.apology``).

        Reads of an update that wait for the device: whether it is finite, those of ``Method.check``, and norms for
        ``drift`` and for bounds of norms.

        Returns:
            Whether the update counts. An answer that is late, repeated or was not asked for is ignored and logged; a
            refused update and an error become a ``fail``.
        """
        facts = parcel.facts
        invited = type(client) is int and client in self._waiting and client in self.trains
        if not invited or client not in self._tasks or facts.get("round") != self.number:
            logger.info(
                "left out the answer of client %.60r for round %.60r: nobody waits for it in round %d",
                client,
                facts.get("round"),
                self.number,
            )
            return False
        if "spent" in facts:
            self.spent[client] = spent_by(facts, self.spent.get(client, {}))
        if "error" in facts:
            if facts.get("lost"):
                self.ledger.forget([client])
            self.fail(client, "failed", str(facts["error"])[:1000])
            return False
        task, heads = self._tasks.pop(client), self.ledger.heads
        try:
            seen = self.intake.sees_values
            expected, check = (task.expected, self.method.check) if seen else (self.intake.expects(task.expected), None)
            tensors = self.codec.decode(parcel.tensors, expected)
            if self.method.needs.own_ranks:
                expected = at_own_ranks(expected, tensors)
            sizes = self.codec.sizes(expected, heads)
            device = next((t.device for t in expected.values()), torch.device("cpu"))
            if device.type not in ("cpu", "meta") and isinstance(tensors, Mapping):
                tensors = on_device(tensors, device)  # what came over a transport is on the CPU
            samples: Any = facts.get("samples")  # of any type; admission refuses what is no number of samples
            update = self.admission.admit(Update(client, samples, tensors), expected, check)
            loss = check_loss(client, facts.get("loss")) if task.trains else 0.0
            view = at_own_ranks(task.view, update.tensors) if self.method.needs.own_ranks else task.view
            if self.admission.max_norm or self.admission.norm_factor:
                self.norms[client] = self.admission.norm(update, view)
        except (RefusedUpdate, ValueError) as error:
            self.fail(client, "refused", _naming(client, str(error)))
            return False
        before = self.uplink.get(client, (0, 0))
        self.drift[client] = {**self.drift.get(client, {}), **changes(update.tensors, view, heads)}
        self.intake.add(update)
        self.uplink[client] = before[0] + sizes[0] * self.intake.copies, before[1] + sizes[1] * self.intake.copies
        self.samples[client] = update.num_samples
        if task.trains:
            self.losses[client] = loss
        self.counted.add(client)
        self._waiting.discard(client)
        return True

    def fail(self, client: int, kind: Literal["absent", "dropped", "failed", "refused"], reason: str) -> None:
        """Stop waiting for ``client`` in this round. Only the first failure of a client is recorded."""
        if client not in self._waiting:
            return
        self._waiting.discard(client)
        if kind == "absent":
            self.trains.add(client)
        for by_client in (self.losses, self.samples, self.drift):  # of an exchange before
            by_client.pop(client, None)
        self.failed.append({"client": client, "kind": kind, "reason": reason})
        if kind != "dropped":
            logger.warning("round %d: %s: %s", self.number, kind, _naming(client, reason))

    def leave_unevaluated(self, client: int, reason: str) -> None:
        """Note that there are no metrics of ``client``, and why; said in the engine's ``log``."""
        self.unevaluated[client] = reason[:1000].removeprefix(f"client {client}: ")
        logger.warning("round %d: no evaluation of client %d: %s", self.number, client, self.unevaluated[client])

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, model: nn.Module | None = None) -> Finished:
        """Combine the admitted updates, and commit the new state to the ledger.

        Args:
            model: a copy of the model at the end of the previous round, which is not changed. If it is given, a message
                with which it would not stay finite is a ``BadRound``.
        Raises:
            TooFewClients: the state is as before the round, and the ledger after ``roll_back``.
            BadRound: the server step raised an error, or its result is not finite. The state is as before the round;
                the caller calls ``roll_back`` or ``leave_out``.
            OSError: a file could not be read or written during the step.
            WrongStep: the method gave a result of a wrong form.
        """
        state, message = self._step(self._updates(), model)
        told = {n: t for n, t in self.told.items() if n in self.ledger.state}
        state = {n: value for n, value in state.items() if n in told or n not in self.told}
        message = {**told, **message}
        self.ledger.commit(self.number, state, message)
        return self._ended(message, self.trains - self.counted)

    def go_on(self) -> None:
        """Begin the next exchange: the clients whose updates were admitted are told the server's result of them.

        Raises:
            As ``finish``.
        """
        _, self._news = self._step(self._updates(), None)
        self.told |= self._news
        self.state = {**self.state, **self._news}
        self.exchange += 1
        self.goes_on = self.exchange + 1 < len(self.exchanges)
        self._waiting, self.counted, self._earlier_uplink = self.counted, set(), dict(self.uplink)
        self.intake, self.norms = self._intake() or Intake(), {}
        self._tasks.clear()

    def _updates(self) -> list[Update]:
        """The updates of this exchange, or their mean as a single one."""
        refused = self.admission.outliers(self.norms)
        for client, reason in refused.items():
            self._waiting.add(client)
            self.fail(client, "refused", reason)
            self.counted.discard(client)
            del self.uplink[client]
            if client in self._earlier_uplink:
                self.uplink[client] = self._earlier_uplink[client]
        least = self.ledger.config.lowrank.min_clients
        updates, usable = self.intake.close(without=refused.keys()), len(self.counted)
        if usable < least:
            raise TooFewClients(f"{usable} usable updates, lowrank.min_clients is {least}", least)
        return updates

    def _step(self, updates: list[Update], model: nn.Module | None) -> tuple[State, Mapping[str, Tensor]]:
        before = self.state
        message: Mapping[str, Tensor]
        try:
            with torch.no_grad():
                result: Any
                self.method.notes = {}
                if self.goes_on:
                    message = self.method.tell(updates, before, self.number, self.exchanges[self.exchange])
                    result = ({**before, **message}, message) if isinstance(message, Mapping) else message
                else:
                    result = self.method.aggregate(updates, before, self.number)
                state, message = require_valid(result, before, self.method)
                self.notes += self.method.notes.items()
                if not self.codec.exact:
                    # The server uses the message as clients will decode it, so that all copies stay equal.
                    decoded = self.codec.decode(self.codec.encode(message), message)
                    # What is merged and goes on (``merge:…``) is in the state under the name that copies give it.
                    by_id = {id(tensor): decoded[name] for name, tensor in message.items()}
                    state = {n: decoded[n] if n in decoded else by_id.get(id(t), t) for n, t in state.items()}
                    message = decoded
                changed = {n: v for n, v in state.items() if v is not before.get(n)}
                require_finite(changed, message, self.method, self.number, model)
        except (OSError, WrongStep, BadRound):  # the first two are of no client's values: of a full disk, or the method
            raise
        except Exception as error:  # clients' values can cause any error, and it must not end the run
            logger.debug("round %d", self.number, exc_info=True)
            reason = (str(error).splitlines() or [""])[0]
            raise BadRound(f"the server's step failed: {described(error, reason)}") from error
        return state, message

    def leave_out(self, reason: str) -> Finished:
        """End the round without its updates. Messages that were sent to clients in it stay delivered."""
        self.skipped = reason
        return self._ended(None, self.trains)

    def _ended(self, message: Mapping[str, Tensor] | None, undone: Iterable[int]) -> Finished:
        for client in undone:
            # An earlier round that the client has not been told of stays: it means that one and those after it.
            self.ledger.undone.setdefault(client, self.number)
        return Finished(message, frozenset(undone))

    def roll_back(self) -> None:
        """Restore the ledger as it was before this round."""
        self.ledger.synced, self.ledger.undone = (dict(saved) for saved in self._before)

    def record(self, metrics: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> dict[str, Any]:
        """The record of the round for ``rounds.jsonl``; after ``finish``, and after an evaluation by messages.

        The downlink is that of all orders that were delivered: to train, to follow and to evaluate. Where clients
        evaluate models of their own, ``evaluation_downlink_bytes`` is the part of the orders to evaluate; what a client
        receives with one, it does not receive again to train. The embedded engine evaluates clients' models in its own
        process and sends nothing for it.

        ``samples`` is the number of samples that the counted clients trained on, with repetitions.

        If the round was left out, ``skipped`` is the reason, ``clients`` is empty, and the loss is that of the clients
        that had trained. ``client_scores`` has the metrics of each client's model, where those were evaluated, and
        ``unevaluated`` the clients whose metrics were refused or did not come, with the reason.

        The seconds in ``client_seconds`` of a reused client, and its share in ``training``, are those
        of the time it was trained. A metric that is not finite is NaN here and null in the file (``runs.records``).

        Args:
            metrics: by split and name; under the name ``clients`` those of each client.
            seconds: the durations of ``training``, ``aggregation`` and ``evaluation``.
        """
        robust, unevaluated = _listed([] if self.skipped else self.notes), _listed(self.unevaluated.items())
        reused = sum(s["training"] for s in self.spent.values() if s["reused"])
        losses = sorted(self.losses.items())  # in a fixed order, as updates come in any
        samples = sum(self.samples[client] for client in self.losses)
        trained = self.ledger.samples_trained({} if self.skipped else self.samples, self.number)
        scores: Mapping[int, Mapping[str, float]]
        scores = next((values["clients"] for values in metrics.values() if "clients" in values), {})
        sent: dict[str, Any] = {}
        for direction, sizes in (("uplink", self.uplink), ("downlink", self.downlink)):
            sent[f"{direction}_bytes"] = sum(size for size, _ in sizes.values())
            sent[f"{direction}_bytes_without_head"] = sum(size for _, size in sizes.values())
        if self.evaluation_downlink:
            sent["evaluation_downlink_bytes"] = self.evaluation_downlink
        return {
            "round": self.number,
            **({"skipped": self.skipped} if self.skipped else {}),
            "selected": self.selected,
            "clients": [] if self.skipped else sorted(self.counted),
            "failed": sorted(self.failed, key=lambda failure: failure["client"]),
            **({"robust": robust} if robust else {}),
            **({"unevaluated": unevaluated} if unevaluated else {}),
            **({} if trained is None else {"samples": trained}),
            "loss": sum(loss * self.samples[client] for client, loss in losses) / samples if samples else math.nan,
            "metrics": {
                split: {n: v if math.isfinite(v) else math.nan for n, v in values.items() if n != "clients"}
                for split, values in metrics.items()
            },
            **({"client_scores": scores} if scores else {}),
            **sent,
            "client_uplink_bytes": {c: size for c, (size, _) in sorted(self.uplink.items())},
            "client_downlink_bytes": {c: size for c, (size, _) in sorted(self.downlink.items())},
            "adapter_norm": norms(self.method.view(self.ledger.state), self.ledger.heads),
            "drift": {
                half: sum(d.get(half, 0.0) for _, d in sorted(self.drift.items())) / len(self.drift)
                for half in sorted({half for d in self.drift.values() for half in d})
            },
            "seconds": {**seconds, "training": seconds["training"] + reused},
            "client_seconds": dict(sorted(self.spent.items())),
        }


def _listed(reasons: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"client": client, "reason": reason} for client, reason in sorted(reasons, key=lambda pair: pair[0])]


def _naming(client: int, reason: str) -> str:
    """``reason`` with the client's name at its beginning."""
    return reason if reason.startswith("client ") else f"client {client}: {reason}"
