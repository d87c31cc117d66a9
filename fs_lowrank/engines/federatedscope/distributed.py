"""Distributed mode: the server is a transport of the framework's messages, under the loop of all engines.

A client asks the server to join, and then for its next order, also while it carries out one; the server holds that
request until there is an order. So a client is reached wherever it is, and a client without a request is lost. Its
messages carry its token; the server refuses a message without one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc
from federatedscope.core.message import Message

from ...algebra import digest
from ...config import Config
from ...errors import RunFailed, UserError
from ...jobs.files import read_json, to_json, write_text
from ...rounds.codec import codec_of
from ...rounds.copies import standing_in
from ...rounds.joining import reported_standing
from ...rounds.ledger import Ledger
from ...rounds.node import Node
from ...rounds.parcel import Parcel
from ...rounds.round import Order
from ...rounds.transport import Lost
from ...rounds.workspace import Workspace
from ...runs.folder import claim
from ..members import Members, memory_of
from ..waiting import replies
from .session import Session
from .sharing import Sharing
from .wire import Channel, Listener, Unwelcome, parcel_of, text_of

logger = logging.getLogger("federatedscope.lowrank")

#: seconds without a request after which a client is lost; between two attempts of a client to reach the server; and
#: that the end waits until clients are notified
_LOST, _PAUSE, _END = 5.0, 0.3, 5.0
#: a host and a port; else gRPC would connect in other ways, as by ``unix:``
_ADDRESS = r"([A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:]{2,39}\]):[0-9]{1,5}"


# -- the server ----------------------------------------------------------------------------------------


@dataclass
class Seat:
    """A client's process, as the server knows it.

    Attributes:
        token: proves who it is; a restart of the same command has the same one.
        address: where it takes shares of other clients, with ``federate.use_ss``.
        serial: of the last order, from 1. order: its text, until it is answered or given up.
        answered: the serial of the last answer.
        requests: the number of its requests for a next order; only the last is held. released: when the last ended, by
            ``time.monotonic``.
        notified: it knows that the run has ended.
    """

    token: str = ""
    address: str = ""
    serial: int = 0
    order: str = ""
    answered: int = 0
    requests: int = 0
    released: float = math.inf
    notified: bool = False

    @property
    def lost(self) -> bool:
        """Whether the process no longer asks for orders, as a living one does at any time."""
        return time.monotonic() > self.released + _LOST

    @property
    def late(self) -> bool:
        """Whether an order has been given up, and the process has not answered it since."""
        return not self.order and self.answered < self.serial


class Clients(Members):
    """Clients that fetch their orders from the port on which this process listens.

    Args:
        config: of the run. cfg: the framework's configuration.
    """

    def __init__(self, config: Config, cfg: Any):
        super().__init__(config, Path(cfg.outdir) / "distributed", elsewhere="distribute.data_idx -1")
        self.cfg, self.timeout = cfg, config.lowrank.timeout
        self.codec = codec_of(config)
        self.inbox: queue.SimpleQueue[tuple[int, int, Parcel | Lost]] = queue.SimpleQueue()
        self.listener: Listener | None = None
        #: the notice for clients, once the run has ended
        self.ended: Parcel | None = None
        #: there is an order, an answer of another process, or the end
        self.news = threading.Condition()

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:
        """Wait until every client has joined, but no longer than ``lowrank.timeout``.

        Raises:
            UserError: this process cannot listen.
        """
        super().begin(workspace, ledger, resumed)
        remedy = "restore it, or remove it: clients with data of their own are then numbered anew"
        self.numbers = read_json(self.folder / "numbers.json", missing={}, remedy=remedy)
        keys, federate = self.cfg.distribute, self.config.federate
        # A client asks for an order while it answers another.
        self.listener = Listener(keys.server_host, keys.server_port, keys, 2 * federate.client_num + 8, self._handle)

        def joined() -> list[tuple[int, None]]:
            time.sleep(0.05)
            return [(client, None) for client in list(self.members)]

        timeout = min(self.timeout, _END) if ledger.stood >= federate.total_round_num else self.timeout
        list(replies(range(1, federate.client_num + 1), joined, timeout, "client", work=False))  # waits

    # -- in the listener's threads -----------------------------------------------------------------

    def _handle(self, message: Message, token: str, context: grpc.ServicerContext) -> str:
        parcel: Parcel | Lost
        with self.news:
            if message.msg_type == "join_in":
                return self._join(parcel_of(message.content).facts, token)
            client = next((c for c, member in list(self.members.items()) if member.process.token == token), 0)
            if not client:
                raise Unwelcome(grpc.StatusCode.UNAUTHENTICATED, "this process does not know the sender's token")
            member, serial = self.members[client], int(message.state)
            seat: Seat = member.process
            if message.msg_type == "next":
                if reported := parcel_of(message.content).facts:
                    member.standing = reported_standing(reported)
                return self._next(seat, serial, context)
            if message.msg_type == "model_para" and seat.answered < serial <= seat.serial:
                seat.answered = serial
                try:
                    parcel = parcel_of(message.content)
                    member.standing = reported_standing(parcel.facts)
                except (ValueError, TypeError) as error:
                    parcel = Lost("refused", f"its answer cannot be read: {error}"[:300])
                self.inbox.put((client, serial, parcel))
            else:
                logger.warning("ignored a message %.40r of client %d: nobody waits for it", message.msg_type, client)
            return text_of(Parcel({}))

    def _join(self, facts: dict[str, Any], token: str) -> str:
        """Let a client take part; the reply has its number and the run's token."""
        if not re.fullmatch("[0-9a-f]{32}", token):
            raise Unwelcome(grpc.StatusCode.INVALID_ARGUMENT, "a token has 32 hexadecimal digits; remove its file")
        seats: dict[int, Seat] = {client: member.process for client, member in list(self.members.items())}
        if facts.get("client") == 0:  # all of its data are its own, and any number will do
            taken = {*seats, *self.numbers.values()}
            free = (c for c in range(1, self.config.federate.client_num + 1) if c not in taken)
            facts = {**facts, "client": self.numbers.get(digest({}, token)) or next(free, 0)}
        client: Any = facts.get("client")
        reason = self.refusal(facts)
        if client == 0:
            reason = f"all {self.config.federate.client_num} numbers are taken (distributed/numbers.json of the server)"
        before = None if reason else seats.get(client)
        if before and before.token != token and not (before.lost or before.late):
            reason = f"client {client} has joined already; choose another distribute.data_idx"
        if reason:
            logger.warning("refused a client: %s", reason)
            raise Unwelcome(grpc.StatusCode.PERMISSION_DENIED, reason)
        address = str(facts.get("address", ""))
        if self.cfg.federate.use_ss and not re.fullmatch(_ADDRESS, address):
            raise Unwelcome(grpc.StatusCode.INVALID_ARGUMENT, f"it listens at {address!r:.60}, no host and port")
        seat = before or Seat()
        seat.token, seat.address, seat.released = token, address, math.inf
        if not seat.order:  # an unanswered order is for the process that comes again, too
            seat.answered = seat.serial
        self.welcome(facts, seat)
        if facts.get("own_data") is True:  # its number is the same if server and client start again
            self.numbers[digest({}, token)] = client
            write_text(self.folder / "numbers.json", to_json(self.numbers))
        logger.info("client %d joined%s", client, " again" if before else "")
        return text_of(Parcel({}, client=client, run=self.token))

    def _next(self, seat: Seat, last: int, context: grpc.ServicerContext) -> str:
        """The order after the one with serial ``last``, once there is one."""
        seat.requests, seat.released = seat.requests + 1, math.inf
        request = seat.requests

        def due() -> bool:
            over = self.ended is not None or seat.requests != request or not context.is_active()
            return over or bool(seat.order and seat.serial > last)

        def wake() -> None:
            with self.news:
                self.news.notify_all()

        context.add_callback(wake)  # also where the connection is closed
        self.news.notify_all()
        self.news.wait_for(due)
        if seat.requests == request:
            seat.released = time.monotonic()
        if self.ended is not None:
            seat.notified = True
            return text_of(self.ended)
        return seat.order if seat.order and seat.serial > last else text_of(Parcel({}))

    # -- a round -----------------------------------------------------------------------------------

    def missing(self, clients: Collection[int]) -> Mapping[int, str]:
        return {client: reason for client in clients if (reason := self._why_absent(client))}

    def _why_absent(self, client: int) -> str:
        if client not in self.members:
            return "it has not joined"
        seat: Seat = self.members[client].process
        silent = f"no answer within lowrank.timeout, {self.timeout:g} s"
        return "its process is gone" if seat.lost else silent * seat.late

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel | Lost]]:
        waiting = {order.client: order for order in orders}
        tokens = {frozenset(pair): secrets.token_hex(16) for pair in combinations(waiting, 2)}
        with self.news:
            for client, order in waiting.items():
                seat, facts = self.members[client].process, order.parcel.facts
                if self.cfg.federate.use_ss and order.purpose == "train":
                    addresses = {c: self.members[c].process.address for c in waiting if c != client}
                    shares = {str(c): (address, tokens[frozenset((c, client))]) for c, address in addresses.items()}
                    facts = {**facts, "shares": shares}
                seat.serial += 1
                seat.order = text_of(Parcel(order.parcel.tensors, **facts, serial=seat.serial))
            self.news.notify_all()
        for client, answer in replies(waiting, self._arrived, self.timeout, "client", lost=self._why_absent):
            self.members[client].process.order, order = "", waiting[client]
            yield order, answer if isinstance(answer, Lost) else self.checked(order, answer)

    def _arrived(self) -> Iterator[tuple[int, Parcel | Lost]]:
        with contextlib.suppress(queue.Empty):
            client, serial, answer = self.inbox.get(timeout=0.2)
            if client in self.members and serial == self.members[client].process.serial:
                yield client, answer

    def end(self, error: BaseException | None = None) -> None:
        """Tell the clients that the run has ended, and why if it was not by its last round."""
        if self.listener is None:
            return
        reason = "" if error is None else str(error) if isinstance(error, UserError) else repr(error)
        until, seats = (
            time.monotonic() + min(self.timeout, _END),
            [member.process for member in list(self.members.values())],
        )
        with self.news:
            self.ended = Parcel({}, end=reason[:4000])
            self.news.notify_all()
        while time.monotonic() < until and not all(seat.notified or seat.lost or seat.late for seat in seats):
            time.sleep(0.02)
        self.listener.close()


# -- a client ------------------------------------------------------------------------------------------


class RemoteClient:
    """A client of a server elsewhere.

    Args:
        session: of this process. cfg: the framework's configuration.

    Attributes:
        serial: of the last order; -1 if there was none since it has joined.
        memory: the folder for its state in the run. identity: of the run.
        until: when it gives up a server that does not answer, by ``time.monotonic``; None while it does.
    """

    serial: int
    memory: Path
    identity: str = ""
    until: float | None = None

    def __init__(self, session: Session, cfg: Any):
        self.session, self.cfg, self.timeout = session, cfg, session.config.lowrank.timeout
        self.address = f"{cfg.distribute.server_host}:{cfg.distribute.server_port}"
        self.number = max(session.index, 0)

    def run(self) -> None:
        """Carry out the server's orders until the run is over.

        Raises:
            UserError: the server refused this client.
            RunFailed: the server stopped, or is lost; or the same command runs already.
        """
        session, keys = self.session, self.cfg.distribute
        token = own_token(session.outdir / f"token_{keys.client_port}")
        self.node = Node(session.workspace, codec_of(session.config))
        self.channel = Channel(self.address, keys, token)
        uniform = session.method.setting.uniform
        self.sharing = Sharing(keys, session.config, uniform) if self.cfg.federate.use_ss else None
        lock = claim(session.outdir)  # two processes of one client would share its state
        try:
            self._join()
            self._follow()
            logger.info("client %d: the run is over", self.number)
        finally:
            self.channel.close()
            if self.sharing:
                self.sharing.listener.close()
            lock.release()

    def _call(self, kind: str, parcel: Parcel, state: int = 0) -> Parcel | None:
        return self._reply(self.channel.begin(kind, self.number, parcel, state, max(self.timeout, 60.0)))

    def _reply(self, sent: Any) -> Parcel | None:
        """The server's reply to a message; None: there is none, and the message is to be sent again.

        Raises:
            UserError: the server refused this client. RunFailed: it has not answered within ``lowrank.timeout``.
        """
        try:
            reply = sent.result().msg
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
        else:
            self.until = None
            return parcel_of(reply)
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
            raise UserError(f"the server refused this client: {details}")
        if code is grpc.StatusCode.UNAUTHENTICATED:  # it has been started anew
            self._join()
            return None
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise UserError(
                f"a message is too large ({details}); raise distribute.grpc_max_send_message_length and "
                "distribute.grpc_max_receive_message_length, here and at the server"
            )
        if self.until is None:
            patience = self.timeout if self.identity else 2 * self.timeout
            self.until = time.monotonic() + patience
            logger.warning("no server answers at %s yet; calling it for up to %.0f s more", self.address, patience)
        if time.monotonic() > self.until:
            raise RunFailed(
                f"no server answers at {self.address}, by lowrank.timeout = {self.timeout:g} ({details}); start it, or "
                "correct distribute.server_host and distribute.server_port"
            )
        time.sleep(_PAUSE)
        return None

    def _join(self) -> None:
        introduction = self.node.introduction(max(self.number, 1))
        introduction.facts["client"] = self.number
        if self.sharing:
            introduction.facts["address"] = self.sharing.address
        while (reply := self._call("join_in", introduction)) is None:
            pass
        self.number, self.serial = reply.facts["client"], -1
        self.identity = f"{self.session.config.fingerprint()}:{reply.facts['run']}"
        self.memory = memory_of(self.session.outdir / "memory", self.identity, self.number)

    def _follow(self) -> None:
        """Carry out orders until the end; request the next meanwhile, so that the server sees this process alive."""
        order = Parcel({})
        while "end" not in order.facts:
            facts = {}
            if self.serial < 0:
                facts["standing"] = list(standing_in(self.memory, self.number, self.identity))
            request = self.channel.begin("next", self.number, Parcel({}, **facts), max(self.serial, 0))
            if "serial" in order.facts:
                self._answer(order, request)
            order = self._reply(request) or Parcel({})
            self.serial = order.facts.get("serial", self.serial)
        if order.facts["end"]:
            raise RunFailed(f"the server stopped: {order.facts['end']}")

    def _answer(self, order: Parcel, request: Any) -> None:
        """Carry out ``order`` and send the answer, until it has arrived, or there is a reply to ``request``."""
        facts, config = order.facts, self.session.config
        if facts["purpose"] == "train":
            self.session.on_client(facts["round"], self.number, config.sampled_per_round)
        shares = facts.get("shares", {})
        if self.sharing:
            self.sharing.expect(shares)
        answer = self.node.obey(order, self.number, self.memory, self.identity)
        if self.sharing and facts["purpose"] == "train" and "error" not in answer.facts:
            answer = self.sharing.summed(answer, self.number, shares)
        answer.facts["agreed"] = self.node.agreed
        while not request.done() and self._call("model_para", answer, facts["serial"]) is None:
            pass


def own_token(path: Path) -> str:
    """The token of a client, in a file at ``path``, so that a restart of the same command is the same client."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16), encoding="utf-8")
    return path.read_text(encoding="utf-8", errors="replace")
