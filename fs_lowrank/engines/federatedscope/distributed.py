"""Distributed mode: the server is a transport of the framework's messages, under the loop of all engines.

A client asks the server to join, and then again and again for its next order; the server holds that request until there
is one. So a client is reached wherever it is, and one that asks no more is gone. Its messages carry its token; one
without it reaches nobody.
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

from ...algebra import nbytes
from ...config import Config
from ...errors import RunFailed, UserError
from ...rounds.codec import codec_of
from ...rounds.copies import apology, standing_in
from ...rounds.intake import Intake
from ...rounds.joining import reported_standing
from ...rounds.ledger import Ledger
from ...rounds.node import Node
from ...rounds.parcel import Parcel
from ...rounds.round import Order
from ...rounds.site import Site
from ...rounds.transport import Lost
from ..members import Members, memory_of
from ..waiting import Silent, Waiting
from .session import Session
from .sharing import Sharing
from .sums import intake_of
from .wire import Channel, Listener, Unwelcome, parcel_of, text_of

logger = logging.getLogger("federatedscope.lowrank")

#: seconds without a request after which a client is gone, and for which its request for an order is held
_GONE, _HOLD = 5.0, 15.0
#: seconds between two attempts of a client to reach the server, and that the end waits for clients to be told
_PAUSE, _END = 0.3, 5.0
#: a host and a port; else gRPC would connect in other ways, as by ``unix:``
_ADDRESS = r"([A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:]{2,39}\]):[0-9]{1,5}"


# -- the server ----------------------------------------------------------------------------------------


@dataclass
class Seat:
    """A client's process, as the server knows it.

    Attributes:
        token: proves who it is; a restart of the same command has the same one. process: drawn by each process.
        address: where it takes shares of other clients, with ``federate.use_ss``.
        serial: of the last order, from 1. order: the text of that, until it is answered or given up.
        answered: the serial of the last answer.
        waiting: requests for the next order that are held. left: when the last of them ended, by ``time.monotonic``.
        late: why it is not asked until it answers again; empty: it is.
        told: it knows that the run has ended.
    """

    token: str
    process: str
    address: str = ""
    serial: int = 0
    order: str = ""
    answered: int = 0
    waiting: int = 0
    left: float = math.inf
    late: str = ""
    told: bool = False

    @property
    def gone(self) -> bool:
        """Whether the process asks for orders no more, as one that lives does at any time."""
        return not self.waiting and time.monotonic() > self.left + _GONE


class Clients(Members):
    """Clients that fetch their orders from the port on which this process listens.

    Args:
        config: of the run. cfg: the framework's configuration.
    """

    def __init__(self, config: Config, cfg: Any):
        super().__init__(config, Path(cfg.outdir) / "distributed", elsewhere="distribute.data_idx -1")
        self.cfg, self.timeout = cfg, config.lowrank.timeout
        self.codec = codec_of(cfg.quantization.method, cfg.quantization.nbits)
        self.inbox: queue.SimpleQueue[tuple[int, int, Parcel | Lost]] = queue.SimpleQueue()
        self.listener: Listener | None = None
        #: once the run has ended: what clients are told
        self.ended: Parcel | None = None
        #: there is an order, an answer of another process, or the end
        self.news = threading.Condition()
        self._processes: set[str] = set()

    def intake(self) -> Intake | None:
        return intake_of(self.cfg, self.site)

    def begin(self, site: Site, ledger: Ledger, resumed: bool) -> None:
        """Wait until every client has joined, but no longer than ``lowrank.timeout``.

        Raises:
            UserError: this process cannot listen.
        """
        super().begin(site, ledger, resumed)
        to, federate = self.cfg.distribute, self.config.federate
        # A client asks for an order while it answers another.
        self.listener = Listener(to.server_host, to.server_port, to, 2 * federate.client_num + 8, self._handle)

        def absent() -> list[int]:
            time.sleep(0.05)
            return [client for client in range(1, federate.client_num + 1) if client not in self.members]

        only_ends = ledger.stood >= federate.total_round_num
        self.gather(min(self.timeout, _END) if only_ends else self.timeout, absent)

    # -- in the listener's threads -----------------------------------------------------------------

    def _handle(self, message: Message, token: str, process: str, context: grpc.ServicerContext) -> str:
        with self.news:
            if message.msg_type == "join_in":
                return self._join(parcel_of(message.content).facts, token, process)
            given = (token, process)
            client = next((c for c, m in list(self.members.items()) if (m.place.token, m.place.process) == given), 0)
            if not client:
                raise Unwelcome(grpc.StatusCode.UNAUTHENTICATED, "this process does not know the sender's token")
            member = self.members[client]
            seat: Seat = member.place
            if message.msg_type == "next":
                if reported := parcel_of(message.content).facts:
                    member.standing = reported_standing(reported)
                return self._next(client, seat, int(message.state), context)
            if message.msg_type == "model_para" and seat.answered < int(message.state) <= seat.serial:
                seat.answered, seat.late = int(message.state), ""
                answer: Parcel | Lost
                try:
                    answer = parcel = parcel_of(message.content)
                    member.standing = reported_standing(parcel.facts)
                except ValueError as error:
                    answer = Lost("refused", str(error))
                self.inbox.put((client, seat.answered, answer))
            else:
                logger.warning("ignored a message %.40r of client %d: nobody waits for it", message.msg_type, client)
            return ""

    def _join(self, facts: dict[str, Any], token: str, process: str) -> str:
        """Let a client take part; the reply has its number and what tells this run from others."""
        if not re.fullmatch("[0-9a-f]{32}", token) or not re.fullmatch("[0-9a-f]{32}", process):
            raise Unwelcome(grpc.StatusCode.INVALID_ARGUMENT, "a token has 32 hexadecimal digits")
        seats: dict[int, Seat] = {client: member.place for client, member in list(self.members.items())}
        if facts.get("client") == 0:  # all of its data are its own, and any number will do
            own = (client for client, seat in seats.items() if seat.token == token)
            free = (c for c in range(1, self.config.federate.client_num + 1) if c not in seats)
            facts = {**facts, "client": next(own, next(free, 0))}
        client: Any = facts.get("client")
        reason = self.refusal(facts)
        if client == 0:
            reason = f"all {self.config.federate.client_num} clients have joined"
        before = None if reason else seats.get(client)
        if before and before.token != token and not (before.gone or before.late):
            reason = f"client {client} has joined already; choose another distribute.data_idx"
        if before and before.process != process and process in self._processes:
            reason = f"another process of client {client} has joined in its place"
        if reason:
            logger.warning("refused a client: %s", reason)
            raise Unwelcome(grpc.StatusCode.PERMISSION_DENIED, reason)
        address = str(facts.get("address", ""))
        if self.cfg.federate.use_ss and not re.fullmatch(_ADDRESS, address):
            raise Unwelcome(grpc.StatusCode.INVALID_ARGUMENT, f"it listens at {address!r:.60}, no host and port")
        self._processes.add(process)
        seat = Seat(token, process, address)
        if before:  # an order that is not answered yet is for the process that comes again, too
            seat.serial, seat.order, seat.answered = before.serial, before.order, before.answered
        self.welcome(facts, seat)
        self.news.notify_all()
        logger.info("client %d joined%s", client, " again" if before else "")
        return text_of(Parcel({}, client=client, run=self.token))

    def _next(self, client: int, seat: Seat, seen: int, context: grpc.ServicerContext) -> str:
        """The order after the one with serial ``seen``, once there is one; empty now and then, as a sign of life."""

        def replaced() -> bool:
            return client not in self.members or self.members[client].place is not seat

        def due() -> bool:
            ended = self.ended is not None or replaced() or not context.is_active()
            return ended or bool(seat.order and seat.serial > seen)

        def wake() -> None:
            with self.news:
                self.news.notify_all()

        context.add_callback(wake)  # also where the connection is closed
        seat.waiting += 1
        self.news.wait_for(due, min(_HOLD, self.timeout / 3))
        seat.waiting, seat.left = seat.waiting - 1, time.monotonic()
        if replaced():
            return text_of(Parcel({}, end="another process of this client has joined in its place"))
        if self.ended is not None:
            seat.told = True
            return text_of(self.ended)
        return seat.order if seat.order and seat.serial > seen else text_of(Parcel({}))

    # -- a round -----------------------------------------------------------------------------------

    def missing(self, clients: Collection[int]) -> Mapping[int, str]:
        reasons = {client: self._why_absent(client) for client in clients}
        return {client: reason for client, reason in reasons.items() if reason}

    def _why_absent(self, client: int) -> str:
        if client not in self.members:
            return "it has not joined"
        return self._gone(client) or self.members[client].place.late

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel | Lost]]:
        waiting = {order.client: order for order in orders}
        tokens = {frozenset(pair): secrets.token_hex(16) for pair in combinations(waiting, 2)}
        with self.news:
            for client, order in waiting.items():
                seat, facts = self.members[client].place, order.parcel.facts
                if self.cfg.federate.use_ss and order.purpose == "train":
                    others = {c: self.members[c].place.address for c in waiting if c != client}
                    shares = {str(c): (address, tokens[frozenset((c, client))]) for c, address in others.items()}
                    facts = {**facts, "shares": shares}
                seat.serial += 1
                seat.order = text_of(Parcel(order.parcel.tensors, **facts, serial=seat.serial))
            self.news.notify_all()
        for client, answer in Waiting(self.timeout, "client", work=True).replies(waiting, self._arrived, self._gone):
            seat = self.members[client].place
            seat.order, order = "", waiting[client]
            if isinstance(answer, Silent):
                seat.late = answer.reason
            yield order, answer if isinstance(answer, Lost) else self.checked(order, answer)

    def _arrived(self) -> Iterator[tuple[int, Parcel | Lost]]:
        with contextlib.suppress(queue.Empty):
            client, serial, answer = self.inbox.get(timeout=0.2)
            if client in self.members and serial == self.members[client].place.serial:
                yield client, answer

    def _gone(self, client: int) -> str:
        return "its process is gone" if self.members[client].place.gone else ""

    def end(self, error: BaseException | None = None) -> None:
        """Tell the clients that the run has ended, and why if it was not by its last round."""
        if self.listener is None:
            return
        reason = ""
        if error is not None:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        until, seats = time.monotonic() + min(self.timeout, _END), [member.place for member in self.members.values()]
        with self.news:
            self.ended = Parcel({}, end=reason[:4000])
            self.news.notify_all()
        while time.monotonic() < until and not all(seat.told or seat.gone or seat.late for seat in seats):
            time.sleep(0.02)
        self.listener.close()


# -- a client ------------------------------------------------------------------------------------------


class RemoteClient:
    """A client of a server elsewhere.

    Args:
        session: of this process. cfg: the framework's configuration.

    Attributes:
        orders: what the server has sent: orders, an error, or None at the end of the run.
        seen: the serial of the last order; -1 before the first request after joining.
        memory: the folder for what it remembers of the run. identity: of the run.
        until: when it gives up a server that does not answer, by ``time.monotonic``.
    """

    seen: int
    memory: Path
    identity: str

    def __init__(self, session: Session, cfg: Any):
        self.session, self.cfg, self.timeout = session, cfg, session.config.lowrank.timeout
        self.address = f"{cfg.distribute.server_host}:{cfg.distribute.server_port}"
        self.orders: queue.SimpleQueue[Parcel | Exception | None] = queue.SimpleQueue()
        self.number, self.until = max(session.index, 0), math.inf
        self.said = False

    def run(self) -> None:
        """Carry out the server's orders until the run is over.

        Raises:
            UserError: the server refused this client.
            RunFailed: the server stopped, or is gone.
        """
        session, to = self.session, self.cfg.distribute
        codec = codec_of(self.cfg.quantization.method, self.cfg.quantization.nbits)
        self.node = Node(session.site, codec, session.has_own_data)
        token = own_token(session.outdir / f"token_{to.client_port}")
        self.channel = Channel(self.address, to, token, secrets.token_hex(16))
        uniform = session.method.setting.uniform
        self.sharing = Sharing(to, self.timeout, uniform) if self.cfg.federate.use_ss else None
        self.until = time.monotonic() + 2 * self.timeout
        try:
            self._join()
            threading.Thread(target=self._fetch, name="orders", daemon=True).start()
            while (order := self.orders.get()) is not None:
                if isinstance(order, Exception):
                    raise order
                self._answer(order)
            logger.info("client %d: the run is over", self.number)
        finally:
            self.channel.close()
            if self.sharing:
                self.sharing.listener.close()

    def _call(self, kind: str, parcel: Parcel, state: int = 0) -> Parcel | None:
        """The server's reply to a message; None: there is none, and the message is to be sent again.

        Raises:
            UserError: the server refused this client. RunFailed: it has not answered within ``lowrank.timeout``.
        """
        try:
            reply = parcel_of(self.channel.begin(kind, self.number, parcel, state, timeout=60.0).result().msg)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
        else:
            self.until, self.said = time.monotonic() + self.timeout, False
            return reply
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
            raise UserError(f"the server refused this client: {details}")
        if code is grpc.StatusCode.UNAUTHENTICATED:  # it has been started anew
            self._join()
            return None
        left = self.until - time.monotonic()
        if left < 0:
            raise RunFailed(
                f"no server answers at {self.address}, by lowrank.timeout = {self.timeout:g} ({details}); start it, or "
                "correct distribute.server_host and distribute.server_port"
            )
        if not self.said:
            self.said = True
            logger.warning("no server answers at %s yet; calling it for up to %.0f s more", self.address, left)
        time.sleep(_PAUSE)
        return None

    def _join(self) -> None:
        introduction = self.node.introduction(max(self.number, 1))
        introduction.facts["client"] = self.number
        if self.sharing:
            introduction.facts["address"] = self.sharing.address
        while (reply := self._call("join_in", introduction)) is None:
            pass
        self.number, self.seen = reply.facts["client"], -1
        self.identity = f"{self.session.config.fingerprint()}:{reply.facts['run']}"
        self.memory = memory_of(self.session.outdir / "memory", self.identity, self.number)

    def _fetch(self) -> None:
        """Ask for the next order again and again, so that the server sees that this client lives while it works."""
        try:
            while True:
                facts = {}
                if self.seen < 0:  # just joined
                    facts["standing"] = list(standing_in(self.memory, self.number, self.identity))
                if (order := self._call("next", Parcel({}, **facts), max(self.seen, 0))) is None:
                    continue
                self.seen = order.facts.get("serial", max(self.seen, 0))
                if (reason := order.facts.get("end")) is not None:
                    self.orders.put(RunFailed(f"the server stopped: {reason}") if reason else None)
                    return
                if "serial" in order.facts:
                    self.orders.put(order)
        except Exception as error:
            self.orders.put(error)

    def _answer(self, order: Parcel) -> None:
        """Carry out ``order`` and send the answer, until it has arrived or nobody waits for it any more."""
        facts, config = order.facts, self.session.config
        if facts["purpose"] == "train":
            self.session.on_client(facts["round"], self.number, config.sampled_per_round)
        others = facts.get("shares", {})
        if self.sharing:
            self.sharing.expect(others)
        answer = self.node.obey(order, self.number, self.memory, self.identity)
        if self.sharing and facts["purpose"] == "train" and "error" not in answer.facts:
            answer = self.sharing.summed(answer, self.number, others)
        answer.facts["agreed"] = self.node.agreed
        while self.orders.empty():  # else there is a newer order, or the end
            try:
                self.channel.begin("model_para", self.number, answer, facts["serial"], self.timeout).result()
                return
            except grpc.RpcError as error:
                code, details = error.code(), str(error.details())
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return  # the server has been started anew, and asks again
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and answer.tensors:
                way = "send" if "sent" in details.lower() else "receive"
                reason = f"its answer of {nbytes(answer.tensors)} bytes is too large ({details}); raise "
                reason += f"distribute.grpc_max_{way}_message_length of the process that is to {way} it"
                answer = Parcel({}, **{**answer.facts, **apology(facts["round"], UserError(reason)).facts})
            time.sleep(_PAUSE)


def own_token(path: Path) -> str:
    """The token of a client, in a file at ``path``, so that a restart of the same command is the same client."""
    with contextlib.suppress(FileNotFoundError):
        token = path.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", token):
            return token
    token = secrets.token_hex(16)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(token, encoding="utf-8")
    return token
