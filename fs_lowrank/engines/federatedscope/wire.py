"""The content of messages, and the framework's gRPC service for processes.

Tensors travel as safetensors, and nothing that is received is unpickled. The framework's messages have fields for text
but none for bytes, so between processes tensors are base64-encoded, a third larger than the counted bytes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from federatedscope.core.message import Message
from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol
from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service

from ...errors import UserError
from ...rounds.parcel import Parcel

logger = logging.getLogger("federatedscope.lowrank")

#: what proves who sends a message between processes
TOKEN, PROCESS = "fs-lowrank-token", "fs-lowrank-process"
_COMPRESSION = {"deflate": grpc.Compression.Deflate, "gzip": grpc.Compression.Gzip}


class Sealed:
    """A parcel as the content of a message that stays in this process.

    The framework measures the size of a message by ``sys.getsizeof`` and its attributes, which does not include the
    storage of tensors. The parcel is therefore hidden in a closure, and ``__sizeof__`` gives its size.
    """

    __slots__ = ("_opened",)

    def __init__(self, parcel: Parcel):
        self._opened = lambda: parcel

    def opened(self) -> Parcel:
        return self._opened()

    def __sizeof__(self) -> int:
        parcel = self.opened()
        return parcel.nbytes + len(json.dumps(parcel.facts))


def text_of(parcel: Parcel) -> str:
    """``parcel`` as the content of a message to another process."""
    return base64.b64encode(parcel.to_bytes()).decode("ascii")


def parcel_of(text: object) -> Parcel:
    """The parcel that ``text_of`` wrote.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str):
        raise ValueError(f"the content is {type(text).__name__}, not a parcel of tensors")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"the content cannot be read: {str(error)[:300]}") from None
    return Parcel.of(data)


def message(kind: str, sender: int, receivers: list[int], content: object, state: int = 0, timestamp=0) -> Message:
    """A message of the framework."""
    return Message(msg_type=kind, sender=sender, receiver=receivers, state=state, timestamp=timestamp, content=content)


class Unwelcome(Exception):
    """A message is refused with a status of gRPC."""

    def __init__(self, code: grpc.StatusCode, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


Handle = Callable[[Message, str, str], Awaitable[str]]


class Listener:
    """The framework's service on a port, in an event loop of a thread of its own.

    Args:
        host, port: where to listen. cfg: the framework's section ``distribute``.
        largest: bytes of a message that is read.
        handle: gives the reply to a message, and is told the token and the process that came with it; it raises
            ``Unwelcome`` or ``ValueError`` for one that it does not take.
    Raises:
        UserError: this process cannot listen there.
    """

    def __init__(self, host: str, port: int, cfg: Any, largest: int, handle: Handle):
        self.handle, self.loop = handle, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="gRPC", daemon=True).start()
        options = [
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", cfg.grpc_max_send_message_length),
            # Two servers on one port would each get half of the messages.
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        try:
            asyncio.run_coroutine_threadsafe(self._listen(f"{host}:{port}", options, cfg), self.loop).result(30.0)
        except (RuntimeError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error}; choose another port "
                "(distribute.server_port, distribute.client_port)"
            ) from None

    async def _listen(self, address: str, options: list[tuple[str, Any]], cfg: Any) -> None:
        self._server = grpc.aio.server(options=options, compression=compression_of(cfg))
        # With bytes as they came, since gRPC prints a traceback for those that are no message.
        take = grpc.unary_unary_rpc_method_handler(
            self._take, response_serializer=protocol.MessageResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler("gRPCComServeFunc", {"sendMessage": take})
        self._server.add_generic_rpc_handlers((handlers,))
        if not self._server.add_insecure_port(address):
            raise RuntimeError("the port is in use")
        await self._server.start()

    async def _take(self, received: bytes, context: grpc.aio.ServicerContext) -> Any:
        """Whatever another process sends, it must not end this one."""
        told = dict(context.invocation_metadata() or ())
        try:
            read = Message()
            read.parse(protocol.MessageRequest.FromString(received).msg)
            reply = await self.handle(read, str(told.get(TOKEN, "")), str(told.get(PROCESS, "")))
        except Unwelcome as error:
            await context.abort(error.code, error.reason[:600])
        except Exception as error:
            logger.warning("ignored a message of %d bytes: %s: %.300s", len(received), type(error).__name__, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this message cannot be read")
        return protocol.MessageResponse(msg=reply)

    def tell(self, event: asyncio.Event) -> None:
        """Set ``event``, from any thread."""
        self.loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Stop to listen."""
        asyncio.run_coroutine_threadsafe(self._server.stop(grace=0.5), self.loop).result(5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)


class Channel:
    """The way to the framework's service of another process.

    Args:
        address: of the process. cfg: the framework's section ``distribute``.
        token, process: that are sent with every message.
    """

    def __init__(self, address: str, cfg: Any, token: str, process: str = ""):
        self.metadata = ((TOKEN, token), (PROCESS, process))
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", cfg.grpc_max_send_message_length),
            ("grpc.max_receive_message_length", cfg.grpc_max_receive_message_length),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A connection that the network has lost is noticed, and made again.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        self.channel = grpc.insecure_channel(address, options=options, compression=compression_of(cfg))
        self.stub = service.gRPCComServeFuncStub(self.channel)

    def begin(self, kind: str, sender: int, parcel: Parcel, state: int = 0, timeout: float | None = None) -> Any:
        """Begin to send a message; the future of the reply."""
        request = message(kind, sender, [0], text_of(parcel), state).transform(to_list=True)
        return self.stub.sendMessage.future(request, timeout=timeout, metadata=self.metadata)

    def close(self) -> None:
        self.channel.close()


def compression_of(cfg: Any) -> grpc.Compression:
    """What the section ``distribute`` of the framework asks for."""
    return _COMPRESSION.get(cfg.grpc_compression.lower(), grpc.Compression.NoCompression)
