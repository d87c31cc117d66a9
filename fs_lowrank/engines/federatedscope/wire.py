"""What travels between server and clients, and a gRPC side whose every wait has a bound.

Tensors travel as safetensors: nothing that arrives is ever unpickled. The framework's messages have text
fields but no bytes, so between processes they travel as base64, a third larger than counted.
"""

from __future__ import annotations

import base64
import binascii
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

    The framework measures a message with ``sys.getsizeof`` and by what its attributes hold, which misses the tensors'
    storage. This keeps the parcel out of sight and states its size itself.
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
    """What a message holds: the parcel itself in one process, its bytes as text between machines."""
    return base64.b64encode(parcel.to_bytes()).decode("ascii") if distributed else Sealed(parcel)


def parcel_of(content: object) -> Parcel:
    """The parcel in a message's content.

    Raises:
        ValueError: it is none.
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


def require_free(host: str, port: int) -> None:
    """Raise ``UserError`` if ``host:port`` cannot be listened on.

    gRPC itself would share a port that another gRPC server holds, and each would get half of the messages.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port that was closed a moment ago is free; one that is listened on is not, with or without this.
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
        return True  # slow is not gone; the round's own bound decides
    except OSError:
        return False


class BoundedComm(gRPCCommManager):
    """The framework's gRPC side, with a bound on every send and every wait; one channel per peer, kept open.

    Takes the place of a manager that the framework has made: ``BoundedComm.take_over(manager, timeout, max_bytes)``.
    Its class is exchanged, because the framework's worker makes its manager itself and has bound the port by then;
    ``tests/engines/federatedscope/test_wire.py`` names what is relied on.
    """

    @classmethod
    def take_over(cls, manager: gRPCCommManager, timeout: float, max_bytes: int) -> BoundedComm:
        manager.__class__ = cls
        manager.timeout, manager.max_bytes = timeout, max_bytes
        manager.channels, manager.lost = {}, {}
        return manager

    def _send(self, receiver_address, message):
        """Deliver or note in ``lost`` why not."""
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
            logger.warning("left out a message that cannot be read: %s", error)
            return None
        return message

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        self.grpc_server.stop(grace=1.0).wait(5.0)
