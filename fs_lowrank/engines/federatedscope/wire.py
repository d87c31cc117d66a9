"""The content of messages, and the framework's gRPC service for processes.

Tensors travel as safetensors, and no received bytes are unpickled. The framework's messages have fields for text but
none for bytes, so between processes tensors are base64-encoded, a third larger than the counted bytes.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from federatedscope.core.message import Message
from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol
from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc as service

from ...errors import UserError
from ...rounds.parcel import Parcel

logger = logging.getLogger("federatedscope.lowrank")

#: the metadata that proves the sender of a message between processes
TOKEN = "fs-lowrank-token"
#: either side notices that the network has lost a connection, or that the other process has stopped
_ALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000))
_COMPRESSION = {"deflate": grpc.Compression.Deflate, "gzip": grpc.Compression.Gzip}


class ParcelMessage(Message):
    """A message of the framework in this process, with a parcel as content.

    The framework would measure it by ``sys.getsizeof``, which does not include the storage of tensors.
    """

    def count_bytes(self) -> tuple[int, int]:
        """Bytes that each receiver takes, and that all of them take."""
        size: int = self.content.nbytes
        return size, size * len(self.receiver)


def text_of(parcel: Parcel) -> str:
    """``parcel`` as the content of a message to another process."""
    return base64.b64encode(parcel.to_bytes()).decode("ascii")


def parcel_of(text: Any) -> Parcel:
    """The parcel that ``text_of`` wrote.

    Raises:
        ValueError, TypeError: it is none.
    """
    return Parcel.of(base64.b64decode(text, validate=True))


def message(kind: str, sender: int, receivers: list[int], content: object, state: int = 0, timestamp=0) -> Message:
    """A message of the framework."""
    cls = ParcelMessage if isinstance(content, Parcel) else Message
    return cls(msg_type=kind, sender=sender, receiver=receivers, state=state, timestamp=timestamp, content=content)


class Unwelcome(Exception):
    """A message is refused with a status of gRPC."""

    def __init__(self, code: grpc.StatusCode, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


#: gives the reply to a message, and is told the token that came with it, and its connection
Handle = Callable[[Message, str, grpc.ServicerContext], str]


class Listener:
    """The framework's service on a port.

    Args:
        host, port: where to listen. cfg: the framework's section ``distribute``.
        threads: how many messages are answered at once.
        handle: raises ``Unwelcome`` or ``ValueError`` for a message that it does not take.
    Raises:
        UserError: this process cannot listen there.
    """

    def __init__(self, host: str, port: int, cfg: Any, threads: int, handle: Handle):
        self.handle = handle
        options = [
            ("grpc.max_receive_message_length", cfg.grpc_max_receive_message_length),
            ("grpc.max_send_message_length", cfg.grpc_max_send_message_length),
            # Two servers on one port would each get half of the messages.
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            *_ALIVE,
        ]
        pool = ThreadPoolExecutor(threads, "gRPC")
        self.server = grpc.server(pool, options=options, compression=compression_of(cfg))
        # With bytes as they came, since gRPC prints a traceback for bytes that are no message.
        take = grpc.unary_unary_rpc_method_handler(
            self._take, response_serializer=protocol.MessageResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler("gRPCComServeFunc", {"sendMessage": take})
        self.server.add_generic_rpc_handlers((handlers,))
        try:
            self.server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error}; choose another port "
                "(distribute.server_port, distribute.client_port)"
            ) from None
        self.server.start()

    def _take(self, received: bytes, context: grpc.ServicerContext) -> Any:
        """Whatever another process sends, it must not end this one."""
        token = str(dict(context.invocation_metadata()).get(TOKEN, ""))
        try:
            parsed = Message()
            parsed.parse(protocol.MessageRequest.FromString(received).msg)
            reply = self.handle(parsed, token, context)
        except Unwelcome as error:
            context.abort(error.code, error.reason[:600])
        except Exception as error:
            logger.warning("ignored a message of %d bytes: %s: %.300s", len(received), type(error).__name__, error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this message cannot be read")
        return protocol.MessageResponse(msg=reply)

    def close(self) -> None:
        """Stop to listen."""
        self.server.stop(grace=0.5).wait()


class Channel:
    """The way to the framework's service of another process.

    Args:
        address: of the process. cfg: the framework's section ``distribute``.
        token: that is sent with every message.
    """

    def __init__(self, address: str, cfg: Any, token: str):
        self.metadata = ((TOKEN, token),)
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", cfg.grpc_max_send_message_length),
            ("grpc.max_receive_message_length", cfg.grpc_max_receive_message_length),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 1000),
            *_ALIVE,
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
    """The compression of the framework's section ``distribute``."""
    return _COMPRESSION.get(cfg.grpc_compression.lower(), grpc.Compression.NoCompression)
