"""The server's side: it drives the rounds over Flower's grid, with a message of its own to every node.

A node says once which client it is, what it has in common with the server and where its copy of the model stands, and
then with every reply where its copy stands now. A node that has lost its copy says so, and is sent everything.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from ...callbacks import Callback, callbacks_of
from ...config import Config
from ...errors import DamagedFile, RunFailed, UserError
from ...jobs.files import read_json, to_json, write_text
from ...rounds.admission import is_whole
from ...rounds.copies import personal_in
from ...rounds.ending import end_round, ending
from ...rounds.evaluator import CLIENTS, Evaluator
from ...rounds.joining import objection, proof_of, samples_objection
from ...rounds.keeper import RecordKeeper
from ...rounds.ledger import Ledger, Standing
from ...rounds.parcel import Parcel
from ...rounds.record import Spent
from ...rounds.round import Order, Purpose, Round
from ...rounds.site import Site
from ...runs.folder import outdir_of
from ...runs.result import RunResult
from ...settings.metrics import measured
from . import keys
from .client import memory
from .messages import ENCODING, packed, unpacked
from .waiting import Waiting

logger = logging.getLogger("fs_lowrank")

#: the folder in a run's own for what this engine keeps: what tells the run from others and, in a simulation, the
#: clients' copies
FOLDER = "flower"
#: nodes that are called together: Flower's simulation looks through all messages for each node
AT_A_TIME = 64
#: the type of a Flower message, by what the client is asked for
KINDS: dict[str, str] = {"call": "query", "train": "train", "follow": "train", "evaluate": "evaluate"}


@dataclass(frozen=True)
class Unheard:
    """There is no answer of a node; ``waited``: within ``lowrank.timeout``."""

    kind: Literal["absent", "failed"]
    reason: str
    waited: bool = False


class Stopped(RunFailed):
    """The run was told to stop while it waited."""


@dataclass
class Member:
    """A node that takes part.

    Attributes:
        standing: where its copy of the model stands, as it said last.
        agreed: a hash of what it has in common with the server, as it said when it joined (``joining.agreed``).
        tested: the number of its test samples.
    """

    client: int
    node: int
    standing: Standing
    agreed: str
    tested: int


class Server:
    """The server of one run.

    Args:
        config: the run's configuration.
        on_round, on_client, callbacks: as for ``fs_lowrank.run``.
        stopped: whether the run is to stop; asked while the server waits.
        pause: seconds between two looks for replies.
        gathers: the clients' copies are on this machine, so that their personal parts are saved with the result.
    """

    def __init__(
        self,
        config: Config,
        on_round: Callable[[dict[str, Any]], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None,
        callbacks: Sequence[Callback] = (),
        stopped: Callable[[], bool] = lambda: False,
        pause: float = 0.5,
        gathers: bool = False,
    ):
        self.config, self.timeout, self.pause, self.gathers = config, config.lowrank.timeout, pause, gathers
        self.on_round, self.on_client = on_round or (lambda record: None), on_client or (lambda *_: None)
        self.stopped = stopped
        self.folder = outdir_of(config) / FOLDER
        self.site = Site(config)
        self.proof = proof_of(self.site)
        self.codec = keys.codec(config)
        self.evaluator = Evaluator(self.site)
        self.evaluator.check_watched()
        parts = self.site.method, self.site.initial_state, self.site.clients
        self.ledger = Ledger.of(config, *parts, keep_messages=True, heads=self.site.heads)
        callbacks = callbacks_of(config, callbacks)
        self.keeper = RecordKeeper(self.site, self.evaluator, self.ledger, outdir_of(config), callbacks)
        #: client -> its node
        self.members: dict[int, Member] = {}
        #: node -> why it does not take part; of these ``silent`` did not even answer
        self.refused: dict[int, str] = {}
        self.silent: set[int] = set()
        self.grid: Grid

    def run(self, grid: Grid, resume: bool = False) -> RunResult:
        """Run all rounds over ``grid``, from the start or from the last checkpoint.

        Raises:
            UserError: the folder holds another run, or cannot be continued with this configuration.
            RunFailed: something cannot be written, too few clients remain, or another run writes to the folder.
        """
        self.grid = grid
        with ending(self.keeper):
            return self._run(resume)

    def _run(self, resume: bool) -> RunResult:
        checkpoint = self.keeper.start(resume)
        self.token = self._own_token(resume and checkpoint is not None)
        self._gather()
        rounds = range(checkpoint.round + 1 if checkpoint else 1, self.config.federate.total_round_num + 1)
        if rounds and self.refused and not self.members:
            reasons = sorted({re.sub(r"^client \d+: ", "", reason) for reason in self.refused.values()})
            raise RunFailed(f"no node can take part; refused were {len(self.refused)}: {'; '.join(reasons[:3])}")
        for number in rounds:
            if self.keeper.ended:
                break
            record = self._round(number)
            self.keeper.add(record)
            if self.site.personal.untrained and not self.keeper.checkpoint_due(number):
                self.keeper.save(number)  # a client can undo its last training, and none before that
            if self.on_round(record):
                break
        if self.gathers:
            self._take_personal()
        return self.keeper.finish()

    def _own_token(self, resume: bool) -> str:
        """What tells this run from others of its configuration; clients keep it with their copies.

        Raises:
            UserError: it cannot be read again, and clients would lose their personal parts.
        """
        path = self.folder / "run.json"
        if resume:
            try:
                return str(read_json(path, fields={"run": str}, remedy="")["run"])
            except DamagedFile as error:
                lost = str(error)
            if self.site.personal.untrained:
                raise UserError(
                    f"{lost}; without it the clients' personal parts are not found again: restore the file, or start "
                    "anew in another outdir"
                )
            logger.warning("%s; the clients' copies start anew and are sent everything", lost)
        shutil.rmtree(self.folder, ignore_errors=True)
        token = secrets.token_hex(8)
        self.folder.mkdir(parents=True)
        write_text(path, to_json({"run": token}))
        return token

    # -- who is there ------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Wait until every client has a node, but no longer than ``lowrank.timeout``.

        A node that is refused may be mended and started anew meanwhile; those of a simulation are what they are.
        """
        wanted, began = self.config.federate.client_num, time.monotonic()
        next_word = began + 5.0
        while time.monotonic() < began + self.timeout:
            if len(self._present()) + self.gathers * len(self.refused) >= wanted:
                break
            if time.monotonic() > next_word:
                logger.warning("%d of %d clients have joined; waiting for the others", len(self.members), wanted)
                next_word = time.monotonic() + 30.0
            self._wait()

    def _present(self) -> dict[int, Member]:
        """The members whose nodes are connected, after nodes that are new have been called."""
        connected = set(self.grid.get_node_ids())
        # A node that was seen to be gone is called again, with or without another number.
        self.silent &= connected
        self.refused = {node: reason for node, reason in self.refused.items() if node in connected}
        known = {member.node for member in self.members.values()} | self.refused.keys()
        new = sorted(connected - known)
        for first in range(0, len(new), AT_A_TIME):
            calls = {node: Parcel({}, kind="call") for node in new[first : first + AT_A_TIME]}
            for node, reply in self._exchange(calls, "call", 0):
                if reason := self._joined(node, reply, connected):
                    logger.warning("refused node %d: %s", node, reason)
                    self.refused[node] = reason
                    if isinstance(reply, Unheard) and reply.waited:
                        self.silent.add(node)
        return {client: member for client, member in self.members.items() if member.node in connected}

    def _joined(self, node: int, reply: Parcel | Unheard, connected: set[int]) -> str:
        """Let a node that has introduced itself take part; the reason if it cannot."""
        if isinstance(reply, Unheard):
            return reply.reason
        facts = reply.facts
        if "error" in facts:
            return str(facts["error"])[:1000]
        client, own_data = facts.get("client"), facts.get("own_data") is True
        if not is_whole(client) or not 1 <= client <= self.config.federate.client_num:
            return f"there is no client {client!r:.60}; federate.client_num is {self.config.federate.client_num}"
        theirs: list[Any] = [facts.get(name) for name in ("config", "revisions", "proof")]
        agreed = facts.get("agreed")
        if not all(isinstance(part, dict) for part in theirs) or not isinstance(agreed, str):
            return f"client {client}: it does not say what it has in common with the server"
        reason = objection(self.config, self.proof, theirs[0], theirs[1], theirs[2], own_data)
        reason = reason or samples_objection(
            client, facts.get("samples"), self.ledger.admission, own_data, elsewhere="own-data=true"
        )
        if reason:
            return f"client {client}: {reason}"
        before = self.members.get(client)
        if before and before.node in connected:
            return f"client {client} has joined already, as node {before.node}; choose another partition-id"
        self.ledger.admission.samples[client] = facts["samples"]
        tested = facts.get("tested") if own_data else self._share(client)
        if not is_whole(tested) or not 0 <= tested <= self.ledger.admission.max_samples:
            tested = 0
        self.members[client] = Member(client, node, _standing(facts), agreed, tested)
        return ""

    # -- a round -----------------------------------------------------------------------------------

    def _round(self, number: int) -> dict[str, Any]:
        site, started = self.site, time.perf_counter()
        round = Round(number, self.ledger, codec=self.codec, base=site.changed_base)
        # What was wrong may be mended by now; a node that does not answer would cost every round the time to wait.
        self.refused = {node: reason for node, reason in self.refused.items() if node in self.silent}
        present = self._present()
        for client in round.selected:
            if client not in present:
                round.fail(client, "absent", self._why_absent(client))
        spent, asked = {}, [client for client in round.selected if client in present]
        for done, (client, answer) in enumerate(self._ask(round, asked, "train")):
            self.on_client(number, done, len(asked))
            if client in round.trains:
                round.take(client, answer)
            if client in round.losses:
                spent[client] = _spent(answer.facts)
        for client in round.waiting:
            round.fail(client, "failed", "its answer is not of this round")
        trained = time.perf_counter()
        end_round(round, self.keeper)
        aggregated = time.perf_counter()
        metrics: dict[str, dict[str, Any]] = {}
        if self.evaluator.due(number):
            metrics = self.evaluator.held_out()
            if CLIENTS in self.evaluator.splits():
                metrics |= self._clients_evaluate(round)
        seconds = {
            "training": trained - started,
            "aggregation": aggregated - trained,
            "evaluation": time.perf_counter() - aggregated,
        }
        return round.record(metrics, seconds, dict(sorted(spent.items())))

    def _why_absent(self, client: int) -> str:
        for reason in self.refused.values():
            if reason.startswith(f"client {client}: "):
                return f"its node was refused: {reason.partition(': ')[2]}"
        if client in self.members:
            return "its node is not connected"
        strangers = [reason for reason in self.refused.values() if not reason.startswith("client ")]
        return "; ".join(["no node has joined for it", *(f"one was refused: {reason}" for reason in strangers[:1])])

    def _clients_evaluate(self, round: Round) -> dict[str, dict[str, Any]]:
        """The metrics of the clients' own models on their test data."""
        present, scores = self._present(), {}
        sizes = {client: self._tested(client) for client in range(1, self.config.federate.client_num + 1)}
        sizes = {client: size for client, size in sizes.items() if size}
        for client in sorted(sizes.keys() - present.keys()):
            round.leave_unevaluated(client, self._why_absent(client))
        metrics = [name for name in measured(self.config.model.task, []) if name in ("loss", "acc")]
        for client, answer in self._ask(round, sorted(sizes.keys() & present.keys()), "evaluate"):
            if found := _scores(answer.facts, metrics):
                scores[client] = found
            else:
                usable = f"its answer has no {' and '.join(metrics)} that it can be"
                round.leave_unevaluated(client, str(answer.facts.get("error", usable)))
        return {CLIENTS: self.evaluator.combined(dict(sorted(scores.items())), sizes)} if scores else {}

    def _tested(self, client: int) -> int:
        """The number of test samples of ``client``; before it has joined, that of its share of the server's data."""
        return self.members[client].tested if client in self.members else self._share(client)

    def _share(self, client: int) -> int:
        """The number of rows of the server's test set that are the share of ``client``."""
        data = self.site.data
        return 0 if data.test is None else len(data.test_shares[client - 1])

    def _ask(self, round: Round, clients: Iterable[int], purpose: Purpose) -> Iterator[tuple[int, Parcel]]:
        """Bring ``clients`` up to date and have them train or evaluate; their answers, as they come.

        A client that has lost its copy is asked again, with everything. One without an answer fails.
        """
        asked, again = list(clients), True
        while asked:
            lost = []
            for order, answer in self._replies(round, asked, purpose):
                client = order.client
                if isinstance(answer, Unheard):
                    _without(round, order, answer.kind, answer.reason)
                    continue
                member, failed = self.members[client], "error" in answer.facts
                # A node keeps its number when it is started anew. One that cannot even read its configuration says
                # nothing of it, and has no update either.
                if answer.facts.get("agreed", member.agreed if failed else None) != member.agreed:
                    del self.members[client]  # so that it is called again, and told what differs
                    _without(round, order, "refused", "it has another configuration or base model than when it joined")
                    continue
                member.standing = _standing(answer.facts)
                if answer.facts.get("lost") is True and again:
                    logger.warning("client %d: %.300s; it is sent everything", client, answer.facts.get("error"))
                    lost.append(client)
                    continue
                if not failed or answer.facts.get("followed") is True:
                    round.delivered(order)
                elif order.purpose == "follow":
                    round.fail(client, "failed", str(answer.facts["error"])[:1000])
                yield client, answer
            asked, again = lost, False

    def _replies(
        self, round: Round, clients: Iterable[int], purpose: Purpose
    ) -> Iterator[tuple[Order, Parcel | Unheard]]:
        orders = {
            self.members[client].node: round.ask(client, self.members[client].standing, purpose) for client in clients
        }
        parcels = {node: order.parcel for node, order in orders.items()}
        for node, answer in self._exchange(parcels, purpose, round.number):
            yield orders[node], answer

    # -- messages ----------------------------------------------------------------------------------

    def _exchange(self, parcels: Mapping[int, Parcel], kind: str, round: int) -> Iterator[tuple[int, Parcel | Unheard]]:
        """Send nodes their parcels; the replies, as they come, and at last those from whom there is none.

        The wait ends ``lowrank.timeout`` after the last reply, since nodes of a simulation take turns; meanwhile it is
        said for whom the server waits.
        """
        known = {"run": self.token, "config": self.config.to_dict()}
        waiting: dict[str, int] = {}
        for node, parcel in parcels.items():
            content = packed(Parcel(parcel.tensors, **parcel.facts, **known))
            # A node that comes back later than the server waits is not to work on it any more.
            ttl = self.timeout * (len(parcels) + 2) + 600.0
            message = Message(content, dst_node_id=node, message_type=KINDS[kind], ttl=ttl, group_id=str(round))
            taken = [identity for identity in self.grid.push_messages([message]) if identity]
            if taken:
                waiting[taken[0]] = node
            else:
                yield node, Unheard("absent", "Flower's SuperLink did not take the message for its node")
        wait = Waiting(self.timeout, kind)
        while waiting and not wait.over:
            replies = list(self.grid.pull_messages(list(waiting)))
            for reply in replies:
                if reply.metadata.reply_to_message_id in waiting:
                    yield waiting.pop(reply.metadata.reply_to_message_id), _answer(reply, self.gathers)
                    wait.heard()
            if waiting and not replies:
                if word := wait.word(waiting.values()):
                    logger.warning("%s", word)
                self._wait()
        for node in waiting.values():
            yield node, Unheard("absent", f"no answer within lowrank.timeout, {self.timeout:g} s", waited=True)

    def _wait(self) -> None:
        if self.stopped():
            raise Stopped("the run was stopped; continue it with resume=True")
        time.sleep(self.pause)

    # -- the end -----------------------------------------------------------------------------------

    def _take_personal(self) -> None:
        """Read the personal tensors of all clients from their copies on this machine."""
        identity = f"{self.config.fingerprint()}:{self.token}"
        for client in self.members if self.site.personal.untrained else ():
            copy = memory(client_folder(self.config), identity, client)
            own = personal_in(copy, client, identity, self.ledger.undone.get(client))
            if own:
                self.site.personal[client] = {name: tensor.to(self.site.device) for name, tensor in own.items()}


def client_folder(config: Config) -> Path:
    """Where the clients of a simulation keep what they remember."""
    return (outdir_of(config) / FOLDER / "clients").absolute()


#: Flower's codes for a message or a reply that did not arrive, and for a node that is gone
_NOT_THERE = (3, 4, 5)
#: Flower's code for what one of its mods refuses, and words of what the others raise
_OF_MODS, _WORDS_OF_MODS = 6, (ENCODING, "secagg")
#: the largest loss or time that is accepted: of float32, so that sums of them are finite
_LARGEST = torch.finfo(torch.float32).max


def _without(round: Round, order: Order, kind: Literal["absent", "failed", "refused"], reason: str) -> None:
    """Go on without the answer to ``order``."""
    if order.purpose == "evaluate":
        round.leave_unevaluated(order.client, reason)
    else:
        round.fail(order.client, kind, reason)


def _answer(reply: Message, simulated: bool) -> Parcel | Unheard:
    """The parcel of a reply, or why it has none.

    Args:
        simulated: the reason of an error is Flower's own; in a federation, a node can write any.
    Raises:
        RunFailed: a process of the simulation died, in whose place Flower starts no other.
    """
    if reply.has_error():
        reason = " ".join((reply.error.reason or "no reason given").split())[:500]
        if simulated and "ray.exceptions" in reason and "Actor" in reason:
            raise RunFailed(f"a process of Flower's simulation died ({reason:.200}); run again with resume=True")
        if reply.error.code == _OF_MODS or any(word in reason for word in _WORDS_OF_MODS):
            reason = f"a mod in the node's app does not take our messages (docs/guides/flower.md, Security): {reason}"
        return Unheard("absent" if reply.error.code in _NOT_THERE else "failed", f"Flower: {reason}")
    try:
        return unpacked(reply.content)
    except ValueError as error:
        return Unheard("failed", str(error))


# What a node reports is of any type, so each of these takes what fits and leaves out the rest.


def _standing(facts: Mapping[str, Any]) -> Standing:
    """Where a copy stands; at round 0 if the node does not say so in the agreed form."""
    match facts.get("standing"):
        case [int(round), str(stamp)]:
            return Standing(round, stamp)
    return Standing()


def _number(value: object, least: float, largest: float = _LARGEST) -> float | None:
    """``value`` as a float; None if it is no number within the bounds, as NaN is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Compared before it is converted, as an int of 400 digits cannot become a float.
    return float(value) if least <= value <= largest else None


def _spent(facts: Mapping[str, Any]) -> Spent:
    """What a client spent on its training."""
    match facts.get("spent"):
        case {"training": training, "upload": upload, "reused": bool(reused)}:
            return {"training": _number(training, 0.0) or 0.0, "upload": _number(upload, 0.0) or 0.0, "reused": reused}
    return {"training": 0.0, "upload": 0.0, "reused": False}


def _scores(facts: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, float]:
    """The ``metrics`` of a client's own model; empty if one of them is missing or no number that it can be."""
    given = facts.get("scores")
    if not isinstance(given, dict):
        return {}
    bounds = {"acc": (0.0, 1.0), "loss": (-_LARGEST, _LARGEST)}
    found = {name: _number(given.get(name), *bounds[name]) for name in metrics}
    return {name: value for name, value in found.items() if value is not None} if None not in found.values() else {}
