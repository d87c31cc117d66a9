"""Distributed mode: the server is a transport of the framework's messages, under the loop of all engines.

A client asks the server to join, and then again and again for its next order; the server holds that request until there
is one. So a client is reached wherever it is, and one whose connection is closed is gone. Its messages carry its
token; one without it reaches nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
from ..waiting import Waiting
from . import saved
from .parallel import drive, own_folder
from .session import current
from .sharing import Sharing
from .sums import intake_of
from .wire import Channel, Listener, Unwelcome, parcel_of, text_of

logger = logging.getLogger("federatedscope.lowrank")

#: seconds after which a client whose connection was closed is gone, and for which its request is held
_GONE, _HOLD = 3.0, 15.0
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
        serial: of the last order, from 1. order: the text of that, until it is answered or given up.
        answered: the serial of the last answer.
        waiting: requests for the next order that are held. cut: when the connection of the last of them was closed, by
            ``time.monotonic``, if none came after it.
        late: why it is not asked until it answers again; empty: it is.
        address: where it takes shares of other clients, with ``federate.use_ss``.
    """

    token: str
    process: str
    address: str = ""
    serial: int = 0
    order: str = ""
    answered: int = 0
    waiting: int = 0
    cut: float | None = None
    late: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def gone(self) -> bool:
        """Whether the process has closed its connection, and made no other."""
        return not self.waiting and self.cut is not None and time.monotonic() > self.cut + _GONE


class Clients(Members):
    """Clients that fetch their orders from the port on which this process listens.

    Args:
        config: of the run. cfg: the framework's configuration.
    """

    def __init__(self, config: Config, cfg: Any):
        super().__init__(config, Path(cfg.outdir) / "distributed", elsewhere="distribute.data_idx -1")
        self.cfg, self.timeout = cfg, config.lowrank.timeout
        self.codec = codec_of(cfg.quantization.method, cfg.quantization.nbits)
        self.inbox: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self.listener: Listener | None = None
        #: once the run has ended: what clients are told
        self.ended: Parcel | None = None
        self._processes: set[str] = set()

    def intake(self) -> Intake | None:
        return intake_of(self.cfg, self.site)

    def begin(self, site: Site, ledger: Ledger, resumed: bool) -> None:
        """Wait until every client has joined, but no longer than ``lowrank.timeout``.

        Raises:
            RunFailed: fewer than ``lowrank.min_clients`` have.
            UserError: this process cannot listen, or the file of ``federate.restore_from`` cannot be read.
        """
        if self.cfg.federate.restore_from and not resumed:
            saved.load_state(self.cfg.federate.restore_from, site, ledger)
        super().begin(site, ledger, resumed)
        to, federate = self.cfg.distribute, self.config.federate
        self.listener = Listener(to.server_host, to.server_port, to, self._largest(), self._handle)
        only_ends, began, said = ledger.stood >= federate.total_round_num, time.monotonic(), False
        while len(self.members) < federate.client_num:
            passed = time.monotonic() - began
            if passed > (min(self.timeout, _END) if only_ends else self.timeout):
                break
            if passed > _END and not said:
                said = True
                logger.warning(
                    "%d of %d clients have joined at %s:%s; waiting for the others for up to %.0f s",
                    *(len(self.members), federate.client_num, to.server_host, to.server_port, self.timeout - passed),
                )
            time.sleep(0.05)
        joined = len(self.members)
        if joined < federate.client_num and not only_ends:
            if joined < self.config.lowrank.min_clients:
                raise RunFailed(
                    f"{joined} of {federate.client_num} clients joined within {self.timeout:g} s, lowrank.min_clients "
                    f"is {self.config.lowrank.min_clients}; start them, or raise lowrank.timeout"
                )
            logger.warning(
                "%d of %d clients joined within %g s; starting with them", joined, federate.client_num, self.timeout
            )

    def _largest(self) -> int:
        """Bytes of the largest message that a client sends, with a margin: an update, or what it says on joining.

        Every number counts eight bytes, which base64 makes a third longer.
        """
        method, state = self.site.method, self.ledger.state
        sent = [method.view(state), *(method.expected(state, 1, client) for client in self.site.kinds())]
        sent += [method.expected(state, round, 1) for round in range(2, min(self.config.federate.total_round_num, 32))]
        numbers = max(sum(t.numel() for t in tensors.values()) for tensors in sent)
        margin = 2**20 + 16 * len(str(self.proof))
        return int(min(self.cfg.distribute.grpc_max_receive_message_length, numbers * 8 * 4 / 3 * 1.1 + margin))

    # -- in the listener's thread ------------------------------------------------------------------

    async def _handle(self, message: Message, token: str, process: str) -> str:
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
            return await self._next(client, seat, int(message.state))
        if message.msg_type == "model_para" and seat.answered < int(message.state) <= seat.serial:
            seat.answered, seat.late = int(message.state), ""
            self.inbox.put((client, seat.answered, message.content))
        else:
            logger.warning("ignored a message %.40r of client %d: nobody waits for it", message.msg_type, client)
        return ""

    def _join(self, facts: dict[str, Any], token: str, process: str) -> str:
        """Let a client take part; the reply has its number and what tells this run from others."""
        if not re.fullmatch("[0-9a-f]{32}", token) or not re.fullmatch("[0-9a-f]{32}", process):
            raise Unwelcome(grpc.StatusCode.INVALID_ARGUMENT, "a token has 32 hexadecimal digits")
        # A copy, since the loop, in another thread, may take a member out.
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
        if before:
            before.news.set()
        logger.info("client %d joined%s", client, " again" if before else "")
        return text_of(Parcel({}, client=client, run=self.token))

    async def _next(self, client: int, seat: Seat, seen: int) -> str:
        """The order after the one with serial ``seen``, once there is one."""
        seat.waiting, seat.cut = seat.waiting + 1, None
        try:
            while self.ended is None and client in self.members and self.members[client].place is seat:
                if seat.order and seat.serial > seen:
                    return seat.order
                seat.news.clear()
                await asyncio.wait_for(seat.news.wait(), min(_HOLD, self.timeout / 3))
        except TimeoutError:  # said now and then, so that the client knows that this process lives
            return text_of(Parcel({}))
        except asyncio.CancelledError:
            seat.cut = time.monotonic()
            raise
        finally:
            seat.waiting -= 1
        return text_of(self.ended or Parcel({}, end="another process of this client has joined in its place"))

    # -- a round -----------------------------------------------------------------------------------

    def missing(self, clients: Collection[int]) -> Mapping[int, str]:
        for _ in self._arrived(0.0):
            pass  # too late for its round; where the copy is now has been noted
        reasons = {client: self._why_absent(client) for client in clients}
        return {client: reason for client, reason in reasons.items() if reason}

    def _why_absent(self, client: int) -> str:
        if client not in self.members:
            return "it has not joined"
        seat: Seat = self.members[client].place
        return "its process is gone" if seat.gone else seat.late

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel | Lost]]:
        assert self.listener is not None
        waiting = {order.client: order for order in orders}
        tokens = {frozenset(pair): secrets.token_hex(16) for pair in combinations(waiting, 2)}
        for client, order in waiting.items():
            seat, facts = self.members[client].place, order.parcel.facts
            if self.cfg.federate.use_ss and order.purpose == "train":
                others = {c: self.members[c].place.address for c in waiting if c != client}
                shares = {str(c): (address, tokens[frozenset((c, client))]) for c, address in others.items()}
                facts = {**facts, "shares": shares}
            seat.order = text_of(Parcel(order.parcel.tensors, **facts, serial=seat.serial + 1))
            seat.serial += 1
            self.listener.tell(seat.news)
        wait = Waiting(self.timeout, "client", work=True)
        while waiting:
            for client, serial, answer in self._arrived(0.2):
                if client in waiting and serial == self.members[client].place.serial:
                    self.members[client].place.order = ""
                    wait.heard()
                    order = waiting.pop(client)
                    yield order, answer if isinstance(answer, Lost) else self.checked(order, answer)
            for client in list(waiting):
                seat = self.members[client].place
                reason = "its process is gone" if seat.gone else ""
                if not reason and wait.over:
                    reason = seat.late = f"no answer within lowrank.timeout, {self.timeout:g} s"
                if reason:
                    seat.order = ""
                    yield waiting.pop(client), Lost("absent", reason)
            if word := wait.word(waiting):
                logger.warning("%s", word)

    def _arrived(self, seconds: float) -> Iterator[tuple[int, int, Parcel | Lost]]:
        """The answers that have come; waits for the first."""
        with contextlib.suppress(queue.Empty):
            while True:
                client, serial, content = self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
                seconds = 0.0
                try:
                    answer = parcel_of(content)
                except ValueError as error:
                    yield client, serial, Lost("refused", str(error))
                    continue
                if client in self.members:
                    self.members[client].standing = reported_standing(answer.facts)
                yield client, serial, answer

    def end(self, error: BaseException | None = None) -> None:
        """Tell the clients that the run has ended, and why if it was not by its last round."""
        if self.listener is None:
            return
        reason = ""
        if error is not None:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.ended = Parcel({}, end=reason[:4000])
        until = time.monotonic() + min(self.timeout, _END)
        seats = [member.place for member in self.members.values()]
        for seat in seats:
            self.listener.tell(seat.news)
        while any(seat.waiting for seat in seats) and time.monotonic() < until:
            time.sleep(0.02)
        self.listener.close()


class DistributedServer:
    """What the framework's runner makes and runs as the server."""

    best_results: dict[str, Any] = {}

    def __init__(self, config: Any = None, **kwargs: Any):
        self.cfg = config

    def run(self) -> None:
        """Run all rounds; the session has the result."""
        config = own_folder(current().config)
        drive(Clients(config, self.cfg), self.cfg, config)


# -- a client ------------------------------------------------------------------------------------------


class DistributedClient:
    """What the framework's runner makes and runs as a client.

    Attributes:
        seen: the serial of the last order; -1 before the first request after joining.
        memory: the folder for what it remembers of the run. identity: of the run.
    """

    seen: int
    memory: Path
    identity: str

    def __init__(self, config: Any = None, server_host: str = "", server_port: int = 0, **kwargs: Any):
        self.cfg, self.address = config, f"{server_host}:{server_port}"

    def join_in(self) -> None:
        """Do nothing; ``run`` joins."""

    def run(self) -> None:
        """Carry out the server's orders until the run is over.

        Raises:
            UserError: the server refused this client.
            RunFailed: the server stopped, or is gone.
        """
        self.session, to = current(), self.cfg.distribute
        session = self.session
        self.config, self.timeout = session.config, session.config.lowrank.timeout
        codec = codec_of(self.cfg.quantization.method, self.cfg.quantization.nbits)
        self.node = Node(session.site, codec, session.has_own_data)
        token = own_token(session.outdir / f"token_{to.client_port}")
        self.channel = Channel(self.address, to, token, secrets.token_hex(16))
        #: what the server has sent: orders, an error, or None at the end of the run
        self.orders: queue.SimpleQueue[Parcel | Exception | None] = queue.SimpleQueue()
        self.number, self.heard = max(session.index, 0), time.monotonic()
        uniform = session.method.setting.uniform
        self.sharing = Sharing(to, self.timeout, uniform) if self.cfg.federate.use_ss else None
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

    def _fetch(self) -> None:
        """Ask for the next order again and again, so that the server sees that this client lives while it works."""
        try:
            while True:
                facts = {}
                if self.seen < 0:  # just joined
                    facts["standing"] = list(standing_in(self.memory, self.number, self.identity))
                try:
                    asked = self.channel.begin("next", self.number, Parcel({}, **facts), max(self.seen, 0), 60.0)
                    order = parcel_of(asked.result().msg)
                except grpc.RpcError as error:
                    self._again(error)
                    continue
                self.heard, self.seen = time.monotonic(), max(self.seen, 0)
                if (reason := order.facts.get("end")) is not None:
                    self.orders.put(RunFailed(f"the server stopped: {reason}") if reason else None)
                    return
                if "serial" in order.facts:
                    self.seen = order.facts["serial"]
                    self.orders.put(order)
        except Exception as error:
            self.orders.put(error)

    def _join(self) -> None:
        introduction = self.node.introduction(max(self.number, 1))
        introduction.facts["client"] = self.number
        if self.sharing:
            introduction.facts["address"] = self.sharing.address
        began, said, last = time.monotonic(), False, self.heard + 2 * self.timeout
        while True:
            try:
                reply = parcel_of(self.channel.begin("join_in", self.number, introduction, timeout=10.0).result().msg)
                break
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
            if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
                raise UserError(f"the server refused this client: {details}")
            now = time.monotonic()
            if now > last:
                raise RunFailed(
                    f"no server answers at {self.address} within {now - began:.0f} s ({details}); start it, or correct "
                    "distribute.server_host and distribute.server_port"
                )
            if now > began + 5.0 and not said:
                said = True
                logger.warning(
                    "the server at %s has not accepted this client yet; waiting for it for up to %.0f s",
                    *(self.address, last - now),
                )
            time.sleep(_PAUSE)
        self.number, self.seen = reply.facts["client"], -1
        self.identity = f"{self.config.fingerprint()}:{reply.facts['run']}"
        self.memory = memory_of(self.session.outdir / "memory", self.identity, self.number)

    def _again(self, error: grpc.RpcError) -> None:
        """Wait before the server is called again, or join it again if it does not know this client.

        Raises:
            RunFailed: it has not answered within ``lowrank.timeout``.
        """
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            logger.warning("client %d joins the server at %s again", self.number, self.address)
            return self._join()
        if time.monotonic() > self.heard + self.timeout:
            raise RunFailed(
                f"the server at {self.address} is gone: it has not answered for {self.timeout:g} s "
                f"({error.details()}); this client stops"
            )
        time.sleep(_PAUSE)

    def _answer(self, order: Parcel) -> None:
        """Carry out ``order`` and send the answer, until it has arrived or nobody waits for it any more."""
        facts, config = order.facts, self.config
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
