"""Secret sharing between processes: each client sends the others shares of its update, and the server a sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import grpc
from federatedscope.core.message import Message

from ...config import Config
from ...rounds.copies import apology
from ...rounds.parcel import Parcel
from .sums import add_shares, split_secret
from .wire import Channel, Listener, Unwelcome, parcel_of

#: seconds between two attempts to deliver a share
_PAUSE = 0.3
#: codes of a delivery to try again: nobody listens yet, or the other client has not been asked to train yet
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)


class Sharing:
    """Where a client takes the shares of others, and how it gives them its own.

    Args:
        cfg: the framework's section ``distribute``. config: all its clients have to share, or a client sends nothing,
            and wait ``lowrank.timeout`` for the others' shares.
        uniform: all clients have the same weight.
    """

    def __init__(self, cfg: Any, config: Config, uniform: bool):
        self.cfg, self.timeout, self.uniform = cfg, config.lowrank.timeout, uniform
        self.clients = config.federate.client_num
        self.address = f"{cfg.client_host}:{cfg.client_port}"
        #: of the round in which this client trains: by token, which opens nothing else, the other client's share
        self._shares: dict[str, Parcel | None] = {}
        self._news = threading.Condition()
        self.listener = Listener(cfg.client_host, cfg.client_port, cfg, 8, self._take)

    def _take(self, message: Message, token: str, context: grpc.ServicerContext) -> str:
        with self._news:
            if token not in self._shares:
                raise Unwelcome(grpc.StatusCode.UNAUTHENTICATED, "this process awaits no share with this token")
            if self._shares[token] is None:
                self._shares[token] = parcel_of(message.content)
                self._news.notify_all()
        return ""

    def expect(self, others: Mapping[str, tuple[str, str]]) -> None:
        """Take shares of ``others``, address and token of each by its number, from now on."""
        with self._news:
            self._shares = {token: None for _, token in others.values()}

    def summed(self, answer: Parcel, client: int, others: Mapping[str, tuple[str, str]]) -> Parcel:
        """``answer`` with the sum of this client's shares of all updates in place of its own update."""
        facts, until = answer.facts, time.monotonic() + self.timeout
        weight = 1 if self.uniform else facts["samples"]
        try:
            if len(others) + 1 < self.clients:  # a sum over fewer, or of one, would show what a client sent
                raise RuntimeError(f"{len(others) + 1} of {self.clients} clients share in this exchange; all have to")
            local, *outgoing = split_secret(answer.tensors, weight, len(others) + 1)
            for (address, token), tensors in zip(others.values(), outgoing):
                self._send(client, address, token, Parcel(tensors), until)
            with self._news:
                self._news.wait_for(lambda: None not in self._shares.values(), max(until - time.monotonic(), 0.0))
                received = {number: self._shares[token] for number, (_, token) in others.items()}
            kinds = {name: (t.shape, t.dtype) for name, t in local.items()}
            for number, share in received.items():
                if share is None:
                    raise RuntimeError(f"no share of client {number} within lowrank.timeout, {self.timeout:g} s")
                if {name: (t.shape, t.dtype) for name, t in share.tensors.items()} != kinds:
                    raise RuntimeError(f"the share of client {number} has other names, shapes or types")
            return Parcel(add_shares([local, *(share.tensors for share in received.values() if share)]), **facts)
        except (RuntimeError, ValueError) as error:
            failed = apology(facts["round"], error)
            return Parcel({}, **{**facts, **failed.facts})

    def _send(self, client: int, address: str, token: str, share: Parcel, until: float) -> None:
        channel = Channel(address, self.cfg, token)
        try:
            while True:
                try:
                    channel.begin("ss_model_para", client, share, timeout=max(until - time.monotonic(), 0.1)).result()
                    return
                except grpc.RpcError as error:
                    if error.code() not in _AGAIN or time.monotonic() > until:
                        raise RuntimeError(f"its share did not arrive at {address}: {error.details()}") from error
                    time.sleep(_PAUSE)
        finally:
            channel.close()
