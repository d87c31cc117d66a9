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
import struct
import time
from collections.abc import Mapping

import grpc
import safetensors.torch
from federatedscope.core.communication import gRPCCommManager
from federatedscope.core.message import Message
from federatedscope.core.proto import gRPC_comm_manager_pb2_grpc
from safetensors import SafetensorError
from torch import Tensor

from ...algebra import nbytes
from ...errors import UserError

logger = logging.getLogger("federatedscope.lowrank")


class Parcel:
    """Named tensors and a few facts: the content of a message.

    In one process the framework measures a message with ``sys.getsizeof`` and by what its attributes hold, which
    misses the tensors' storage. A parcel keeps its content out of sight and states its size itself.
    """

    __slots__ = ("_content",)

    def __init__(self, tensors: Mapping[str, Tensor], /, **facts):
        self._content = lambda: (tensors, facts)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._content()[0]

    @property
    def facts(self) -> dict:
        return self._content()[1]

    def __sizeof__(self) -> int:
        return nbytes(self.tensors) + len(json.dumps(self.facts))

    def to_bytes(self) -> bytes:
        """As safetensors, with the facts in the header."""
        plain = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors.items()}
        return safetensors.torch.save(plain, {"facts": json.dumps(self.facts)})

    def encode(self) -> str:
        """As text for a message between machines."""
        return base64.b64encode(self.to_bytes()).decode("ascii")

    @classmethod
    def of(cls, content: object) -> Parcel:
        """The parcel in a message's content: itself, its bytes, or its text.

        Raises:
            ValueError: it is not a parcel.
        """
        if isinstance(content, cls):
            return content
        if not isinstance(content, (str, bytes)):
            raise ValueError(f"the content is {type(content).__name__}, not a parcel of tensors")
        try:
            data = base64.b64decode(content, validate=True) if isinstance(content, str) else content
            tensors = safetensors.torch.load(data)
            (length,) = struct.unpack("<Q", data[:8])
            facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["facts"])
        except (
            *(binascii.Error, SafetensorError, struct.error, RuntimeError),  # RecursionError is a RuntimeError
            *(AttributeError, KeyError, TypeError, ValueError),
        ) as error:
            raise ValueError(f"the content cannot be read: {str(error)[:300]}") from None
        if not isinstance(facts, dict):
            raise ValueError("the content cannot be read: its facts are no mapping")
        if "self" in facts:
            raise ValueError("the content cannot be read: no fact is called self")
        return cls(tensors, **facts)


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

    Takes the place of a manager that the framework has made: ``BoundedComm.take_over(manager, timeout, options)``.
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
