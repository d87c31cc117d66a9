"""The content of messages, and a gRPC communication manager in which every wait has a limit.

Tensors are sent as safetensors, and nothing that is received is unpickled. The framework's messages have fields for
text but none for bytes, so between processes tensors are base64-encoded, a third larger than the counted bytes.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import logging
import socket
import time

import grpc
from federatedscope.core.communication import gRPCCommManager
from federatedscope.core.message import Message
from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc

from ...errors import UserError
from ...rounds.parcel import Parcel

logger = logging.getLogger("federatedscope.lowrank")


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


def content_of(parcel: Parcel, distributed: bool) -> Sealed | str:
    """The content of a message with ``parcel``: base64 text if ``distributed``, else the parcel itself."""
    return base64.b64encode(parcel.to_bytes()).decode("ascii") if distributed else Sealed(parcel)


def parcel_of(content: object) -> Parcel:
    """The parcel in the content of a message.

    Raises:
        ValueError: there is none in it.
    """
    if isinstance(content, Sealed):
        return content.opened()
    if not isinstance(content, str):
        raise ValueError(f"the content is {type(content).__name__}, not a parcel of tensors")
    try:
        data = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the content cannot be read: {str(error)[:300]}") from None
    return Parcel.of(data)


def send(worker, kind: str, receivers: list[int], content: object, state=None, timestamp=0) -> None:
    """Send a message of ``worker``, whose round of the framework it is if ``state`` is None."""
    message = Message(
        msg_type=kind,
        sender=worker.ID,
        receiver=receivers,
        state=worker.state if state is None else state,
        timestamp=timestamp,
        content=content,
    )
    worker.comm_manager.send(message)


def with_content(message: Message, content: object) -> Message:
    """A copy of ``message`` with other content."""
    message = copy.copy(message)
    message.content = content
    return message


def require_free(host: str, port: int) -> None:
    """Raise ``UserError`` if this process cannot listen on ``host:port``.

    gRPC itself would share a port with another gRPC server, and each of the two would receive half of the messages.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # With this option a port that was closed a moment ago counts as free; one in use never does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error}; choose another port "
                "(distribute.server_port, distribute.client_port)"
            ) from None


def listening(address: str, timeout: float = 2.0) -> bool:
    """Whether some process accepts connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout):
            return True
    except TimeoutError:
        return True  # a slow process is not gone; the limit of the round applies to it
    except OSError:
        return False


class BoundedComm(gRPCCommManager):
    """The framework's gRPC manager with a limit on every send and every wait, and one open channel to each peer.

    It replaces a manager that the framework has made: ``BoundedComm.take_over(manager, timeout, max_bytes)`` changes
    its class, because the framework's worker constructs its manager itself and has bound the port by then.
    ``tests/engines/federatedscope/test_wire.py`` checks the attributes that this relies on.
    """

    @classmethod
    def take_over(cls, manager: gRPCCommManager, timeout: float, max_bytes: int) -> BoundedComm:
        manager.__class__ = cls
        manager.timeout, manager.max_bytes = timeout, max_bytes
        manager.channels, manager.lost = {}, {}
        return manager

    def _send(self, receiver_address, message):
        """Deliver ``message``, or note in ``lost`` why it could not be delivered."""
        if receiver_address not in self.channels:
            self.channels[receiver_address] = grpc.insecure_channel(
                receiver_address,
                compression=self.comp_method,
                options=(("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", self.max_bytes)),
            )
        stub = gRPC_comm_manager_pb2_grpc.gRPCComServeFuncStub(self.channels[receiver_address])
        try:
            stub.sendMessage(message.transform(to_list=True), timeout=self.timeout)
            self.lost.pop(receiver_address, None)
        except grpc.RpcError as error:
            self.channels.pop(receiver_address).close()
            self.lost[receiver_address] = f"{error.code().name.lower()}: {error.details()}"
            logger.warning(
                "could not deliver %r to %s: %s", message.msg_type, receiver_address, self.lost[receiver_address]
            )

    def receive(self, timeout: float = 0.5) -> Message | None:
        """The next message, or None if none comes within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self.server_funcs.msg_queue:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)
        message = Message()
        try:
            message.parse(self.server_funcs.msg_queue.popleft().msg)
        except (KeyError, TypeError, AttributeError) as error:
            logger.warning("ignored a message that cannot be read: %s", error)
            return None
        return message

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        self.grpc_server.stop(grace=1.0).wait(5.0)
