"""Communication over gRPC in which nothing waits without a limit, and senders prove who they are.

gRPC runs in an event loop in a thread of its own. A message is delivered without blocking the caller, and deliveries to
several processes do not wait for each other; those to one process arrive in the order in which they were sent.
Received messages, and the outcomes of deliveries, are put into one queue, which ``receive`` reads in the worker's
thread, and which the worker handles one by one.

A client draws a token and sends it when it joins. From then on every message between the two has the token in its
metadata; a message without a known token is answered with the status UNAUTHENTICATED and reaches nobody. Every message
also names the process that sends it: one that comes back to its sender, under whatever name of its address, is noticed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
from federatedscope.core.communication import gRPCCommManager
from federatedscope.core.message import Message
from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol
from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service
from google.protobuf.message import DecodeError

from ...errors import UserError
from . import messages
from .session import current, is_open
from .wire import Sealed, encodable, with_content

logger = logging.getLogger("federatedscope.lowrank")

_TOKEN, _PROCESS = "fs-lowrank-token", "fs-lowrank-process"
#: seconds between two attempts to deliver a message
_PAUSE = 0.3
#: messages of one sender that may wait to be read
_WAITING = 32
#: refusals that are kept for clients which could not be told, and the longest text of a status
_UNTOLD, _LONGEST_STATUS = 256, 600
_COMPRESSION = {"deflate": grpc.Compression.Deflate, "gzip": grpc.Compression.Gzip}


@dataclass(frozen=True)
class Undelivered:
    """Why a message was not delivered."""

    code: grpc.StatusCode
    details: str

    @property
    def unknown(self) -> bool:
        """Whether the receiver does not know the token."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED

    @property
    def itself(self) -> bool:
        """Whether the message came back to the process that sent it."""
        return self.code is grpc.StatusCode.FAILED_PRECONDITION

    @property
    def refused(self) -> bool:
        """Whether the server has answered a request to join with a refusal; ``details`` is the reason."""
        return self.code is grpc.StatusCode.PERMISSION_DENIED

    @property
    def gone(self) -> bool:
        """Whether no process listens at the address, or another one than the token's."""
        return self.unknown or (self.code is grpc.StatusCode.UNAVAILABLE and "refused" in self.details.lower())

    @property
    def remedy(self) -> str:
        """What to do if the message has more bytes than a process may send or receive; else empty."""
        too_large = self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in self.details
        way = "send" if "sent message" in self.details.lower() else "receive"
        return f"; raise distribute.grpc_max_{way}_message_length of the process that is to {way} it" * too_large

    def __str__(self) -> str:
        return f"{self.code.name.lower()}: {self.details:.300}{self.remedy}"


Then = Callable[[Undelivered | None], object]


@dataclass(frozen=True)
class Outcome:
    """What became of a delivery: ``failed`` is None if the message has arrived. ``settle`` is to be called with it."""

    receiver: int
    kind: str
    failed: Undelivered | None
    then: Then

    def settle(self) -> None:
        """Tell who waits for it."""
        self.then(self.failed)


@dataclass(frozen=True)
class Misfit:
    """A message that does not fit the schema: whose token came with it (-1: of a new client), its type, and why."""

    sender: int
    kind: str
    reason: str


class Comm(gRPCCommManager):
    """The communication manager of a distributed worker of ours, where the framework expects its own.

    Args:
        host, port: where to listen.
        client_num: number of clients.
        cfg: the framework's section ``distribute``.
    Raises:
        UserError: this process cannot listen there.

    Attributes:
        neighbors: by number, the address of each process to send to.
        tokens: by number, the token that a message to it carries.
        senders: by token, the number of the process whose messages are read.
        lets_join: whether a request to join is read without a token.
        asked: what ``federate.join_in_info`` asks of clients.
        monitor: of the worker; it is told the bytes of tensors that have come.
        process: drawn by this process.
    """

    def __init__(self, host: str, port: int, client_num: int, cfg: Any):
        session = current()
        self.host, self.port, self.monitor = host, port, None
        self.asked: tuple[str, ...] = ()
        self.serves = self.lets_join = session.role == "server"
        self.timeout: float = session.config.lowrank.timeout
        self.neighbors: dict[int, str] = {}
        self.tokens: dict[int, str] = {}
        self.senders: dict[str, int] = {}
        self.process = secrets.token_hex(16)
        self._refusals: dict[tuple[str, str], str] = {}
        self.joins_waiting = 4 * client_num + 64
        self._compression = _COMPRESSION.get(cfg.grpc_compression.lower(), grpc.Compression.NoCompression)
        self._largest_sent = cfg.grpc_max_send_message_length
        self._largest_request = 2**20 + 8 * len(json.dumps(session.proof))
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._waiting: Counter[int] = Counter()
        self._counting = threading.Lock()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._deliveries: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gRPC", daemon=True)
        self._thread.start()
        try:
            self._wait_for(self._listen(session.largest_message(cfg.grpc_max_receive_message_length)), 30.0)
        except (RuntimeError, OverflowError) as error:
            self._stop_loop()
            raise UserError(
                f"cannot listen on {host}:{port}: {error}; choose another port "
                "(distribute.server_port, distribute.client_port)"
            ) from None

    # -- receiving ---------------------------------------------------------------------------------

    async def _listen(self, largest: int) -> None:
        milliseconds = int(self.timeout * 1000)
        options = [
            ("grpc.max_receive_message_length", largest),
            # Two servers on one port would each get half of the messages.
            ("grpc.so_reuseport", 0),
            # A connection that stands still, in a message or between two, is closed after some time.
            ("grpc.max_connection_idle_ms", 60_000),
            ("grpc.max_connection_age_ms", max(milliseconds, 60_000)),
            ("grpc.max_connection_age_grace_ms", max(milliseconds, 10_000)),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        if self._compression is grpc.Compression.NoCompression:
            options.append(("grpc.compression_enabled_algorithms_bitset", 1))
        self._server = grpc.aio.server(options=options, compression=self._compression)
        # With bytes as they came, since gRPC prints a traceback for those that are no message.
        send = grpc.unary_unary_rpc_method_handler(
            self.sendMessage, response_serializer=protocol.MessageResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler("gRPCComServeFunc", {"sendMessage": send})
        self._server.add_generic_rpc_handlers((handlers,))
        if not self._server.add_insecure_port(f"{self.host}:{self.port}"):
            raise RuntimeError("the port is in use")
        await self._server.start()

    async def sendMessage(self, received: bytes, context: grpc.aio.ServicerContext) -> Any:
        """Take a message of another process; the name is the service's."""
        try:
            request: Any = protocol.MessageRequest.FromString(received)
        except DecodeError as error:
            logger.warning("ignored %d bytes that are no message: %s", len(received), error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no message")
        kind = request.msg["msg_type"].single_msg.str_value if "msg_type" in request.msg else ""
        sender, limit, told = -1, self.joins_waiting, dict(context.invocation_metadata() or ())
        token, process = str(told.get(_TOKEN, "")), str(told.get(_PROCESS, ""))
        if process == self.process:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "the address is that of the process itself, which sent the message"
            )
        if kind == "join_in" and self.lets_join:
            if refusal := self._refusals.get((token, process), ""):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
            if request.ByteSize() > self._largest_request:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {self._largest_request} bytes")
        else:
            if token not in self.senders:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this process does not know the sender's token")
            sender, limit = self.senders[token], _WAITING
        if kind != "alive":
            if self._waiting[sender] >= limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "too many messages wait to be read; try again")
            self._count(sender, 1)
            self._inbox.put((sender, request))
        return protocol.MessageResponse(msg="ACK")

    def receive(self, timeout: float = 0.5) -> Message | Misfit | Outcome | None:
        """The next message or outcome; None if there is neither within ``timeout`` seconds.

        A message that cannot be read, for whatever reason, is a ``Misfit``.
        """
        try:
            sender, item = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, Outcome):
            return item
        self._count(sender, -1)
        kind = str(item.msg["msg_type"].single_msg.str_value)[:40] if "msg_type" in item.msg else ""
        try:
            message = messages.read(item, self.serves, sender, self.asked)
            if self.monitor is not None and isinstance(message.content, Sealed):
                self.monitor.track_download_bytes(message.content.opened().nbytes)
        except Exception as error:  # whatever another process sends, it must not end this one
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {str(error)[:300]}"
            known = f"client {sender}" if self.serves or sender != messages.SERVER else "the server"
            logger.warning("ignored a message %r of %s: %s", kind, known if sender >= 0 else "a new client", reason)
            return Misfit(sender, kind, reason)
        return message

    def _count(self, sender: int, change: int) -> None:
        with self._counting:  # of two threads
            self._waiting[sender] += change

    # -- sending -----------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Deliver ``message`` to its receivers, as far as they are neighbours; the framework's interface."""
        receivers = message.receiver if isinstance(message.receiver, list) else [message.receiver]
        for receiver in receivers:
            if receiver in self.neighbors:
                # A server that is resumed listens again; a client that is gone has to join again.
                self.deliver(receiver, message, insist=() if self.serves else (grpc.StatusCode.UNAVAILABLE,))

    def deliver(
        self,
        receiver: int,
        message: Message,
        then: Then | None = None,
        *,
        timeout: float = 0.0,
        insist: tuple[grpc.StatusCode, ...] = (),
        address: str = "",
        token: str = "",
    ) -> None:
        """Begin to deliver ``message`` and return at once.

        A process that cannot be reached is tried again until the time is over.

        Args:
            then: an ``Outcome`` with it is received when the message has arrived, or cannot arrive.
            timeout: seconds; by default ``lowrank.timeout``.
            insist: try again also if nothing listens (UNAVAILABLE), or if the token is unknown (UNAUTHENTICATED).
            address, token: of the receiver, if it is not a neighbour.
        """
        address, token = address or self.neighbors[receiver], token or self.tokens.get(receiver, "")
        if isinstance(message.content, str):
            message = with_content(message, encodable(message.content))
        request = message.transform(to_list=True)
        in_turn = message.msg_type != "alive" and address in self.neighbors.values()
        work = self._deliver(address, token, request, timeout or self.timeout, insist, in_turn)

        async def task() -> None:
            try:
                failed = await work
            except Exception as error:  # else who waits for the outcome would never hear of it
                failed = Undelivered(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            if failed is not None and message.msg_type != "alive":
                logger.info("could not deliver %r to %s: %s", message.msg_type, address, failed)
            if then is not None:
                self._inbox.put((-1, Outcome(receiver, message.msg_type, failed, then)))

        def start() -> None:
            begun = self._loop.create_task(task())
            self._deliveries.add(begun)
            begun.add_done_callback(self._deliveries.discard)

        self._loop.call_soon_threadsafe(start)

    def ping(
        self,
        receiver: int,
        then: Then,
        timeout: float,
        address: str = "",
        token: str = "",
        insist: tuple[grpc.StatusCode, ...] = (),
    ) -> None:
        """Ask whether the process of ``receiver`` is alive and knows this one; the arguments are ``deliver``'s."""
        message = Message("alive", 0, [receiver], 0, "alive", 0)
        self.deliver(receiver, message, then, timeout=timeout, insist=insist, address=address, token=token)

    def answer_with(self, token: str, process: str, reason: str) -> None:
        """Answer further requests of a client to join with ``reason``, since it could not be told at its address.

        Args:
            token, process: of the client. Another process of the same client is not meant.
        """
        while len(self._refusals) >= _UNTOLD:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[token, process] = encodable(reason)[:_LONGEST_STATUS]

    async def _deliver(
        self, address: str, token: str, request: Any, timeout: float, insist: tuple[grpc.StatusCode, ...], in_turn: bool
    ) -> Undelivered | None:
        deadline = time.monotonic() + timeout
        if not in_turn:
            return await self._attempt(address, token, request, deadline, insist)
        turn = self._turns.setdefault(address, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout):
                await turn.acquire()
        except TimeoutError:
            return Undelivered(grpc.StatusCode.DEADLINE_EXCEEDED, "an earlier message is still on its way")
        try:
            return await self._attempt(address, token, request, deadline, insist)
        finally:
            turn.release()

    async def _attempt(
        self, address: str, token: str, request: Any, deadline: float, insist: tuple[grpc.StatusCode, ...]
    ) -> Undelivered | None:
        """Send ``request`` until it has arrived, cannot arrive, or the time is over."""
        known = address in self.neighbors.values()
        channel = self._channel(address) if known else self._new_channel(address)
        stub, metadata = service.gRPCComServeFuncStub(channel), ((_TOKEN, token), (_PROCESS, self.process))
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    await stub.sendMessage(request, timeout=max(left, 0.05), metadata=metadata)
                    return None
                except grpc.aio.AioRpcError as error:
                    failed = Undelivered(error.code(), str(error.details()))
                again = failed.code in insist or (failed.code is grpc.StatusCode.UNAVAILABLE and not failed.gone)
                if not again or left < _PAUSE:
                    return failed
                await asyncio.sleep(_PAUSE)
        finally:
            if not known:
                await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._new_channel(address)
        return self._channels[address]

    def _new_channel(self, address: str) -> grpc.aio.Channel:
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", self._largest_sent),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A connection that the network has lost is noticed, and made again.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        return grpc.aio.insecure_channel(address, options=options, compression=self._compression)

    # -- the end -----------------------------------------------------------------------------------

    def close(self, wait: float = 5.0) -> None:
        """Wait up to ``wait`` seconds for messages on their way, then stop."""
        try:
            self._wait_for(self._close(wait), wait + 5.0)
        except TimeoutError:
            logger.warning("gRPC did not stop within %g s", wait + 5.0)
        self._stop_loop()

    async def _close(self, wait: float) -> None:
        if self._deliveries:
            _, unfinished = await asyncio.wait(self._deliveries, timeout=wait)
            for task in unfinished:
                task.cancel()
        await self._server.stop(grace=0.5)
        for channel in self._channels.values():
            await channel.close()

    def _wait_for(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)


def choose_manager(frameworks: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a ``Comm`` while one of our methods runs, and the framework's own manager otherwise."""

    def make(**kwargs: Any) -> Any:
        return Comm(**kwargs) if is_open() else frameworks(**kwargs)

    return make
