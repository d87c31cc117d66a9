"""The part of a client that only distributed mode uses: it joins, stays with its server, and joins again."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial

import grpc
from federatedscope.core.message import Message
from federatedscope.core.workers import Client

from ...errors import RunFailed, UserError
from ...methods import revisions
from . import wire
from .comm import Outcome, Undelivered
from .messages import Neighbour
from .roster import own_token

logger = logging.getLogger("federatedscope.lowrank")

#: seconds that a client waits for the server before it says so
_PATIENCE = 5.0


class DistributedClient(Client):
    """The base class of ``client.LowRankClient``, whose attributes it uses.

    Attributes:
        token: proves who this client is; a restart of the same command has the same one.
        welcomed_by: until when the server is to have accepted this client; None once it has.
        silent_since: since when the server does not answer; None while it does.
    """

    def _open(self) -> None:
        """Prepare what a distributed client needs."""
        comm = self.comm_manager
        self.server_address = comm.neighbors[self.server_id]
        self.token = own_token(self.session.outdir / f"token_{comm.port}")
        comm.tokens[self.server_id] = self.token
        comm.senders[self.token] = self.server_id
        comm.monitor = self._monitor
        self.welcomed_by: float | None = None
        self.silent_since: float | None = None
        self._ping_every = min(5.0, max(0.5, self.timeout / 10))
        self._next_ping, self._pinged = time.monotonic() + self._ping_every, False
        self._next_request, self._asking = 0.0, False

    # -- joining -----------------------------------------------------------------------------------

    def _ask_to_join(self) -> None:
        self.welcomed_by = time.monotonic() + 2 * self.timeout
        self._say_at = time.monotonic() + _PATIENCE
        self._request()

    def _request(self) -> None:
        """Ask to join; asked again until there is an answer, because a server that is resumed has lost the request."""
        session = self.session
        request = {
            "address": self.local_address,
            "token": self.token,
            "process": self.comm_manager.process,
            "proof": session.proof,
            "config": session.config.to_dict(),
            "revisions": revisions(session.config),
            "samples": session.client(max(self.ID, 1)).num_samples,
        }
        number = session.index if session.index > 0 else -1
        # Without escapes, of which the server refuses those of lone surrogates, as a folder's name may have.
        message = Message("join_in", number, [self.server_id], 0, json.dumps(request, ensure_ascii=False), 0)
        self._asking = True
        self.comm_manager.deliver(self.server_id, message, self._asked, insist=(grpc.StatusCode.UNAVAILABLE,))

    def _asked(self, failed: Undelivered | None) -> None:
        self._asking, self._next_request = False, time.monotonic() + 2 * self._ping_every
        if failed is None:
            if self.welcomed_by is not None:
                self.welcomed_by = min(self.welcomed_by, time.monotonic() + self.timeout)
            return
        if failed.refused:
            raise UserError(f"the server refused this client: {failed.details}")
        if failed.itself:
            raise UserError(
                f"{self.server_address}, where the server is expected, is this client's own address; correct "
                "distribute.client_host and distribute.client_port, or distribute.server_host and "
                "distribute.server_port"
            )
        raise RunFailed(
            f"no server answers at {self.server_address} within {self.timeout:g} s ({failed}); start it, or correct "
            "distribute.server_host and distribute.server_port"
        )

    def callback_funcs_for_join_again(self, message: Message) -> None:
        """The server was resumed, or does not know this client any more."""
        if self.welcomed_by is None:
            logger.warning("client %d joins the server at %s again: %s", self.ID, self.server_address, message.content)
            self._ask_to_join()

    def callback_funcs_for_address(self, message: Message) -> None:
        if not self.distributed:
            return super().callback_funcs_for_address(message)
        neighbours: dict[int, Neighbour] = message.content
        comm = self.comm_manager
        for number, neighbour in neighbours.items():
            before = comm.tokens.get(number, neighbour.token)
            if before != neighbour.token:
                # The server was resumed, and begins its round again, with new shares.
                comm.senders.pop(before, None)
                self.forget_shares()
            comm.add_neighbors(number, neighbour.address)
            comm.tokens[number] = neighbour.token
            comm.senders[neighbour.token] = number

    # -- staying -----------------------------------------------------------------------------------

    def _deliver(self, receiver: int, message: Message, size: int = 0) -> None:
        """Send ``message``, with ``size`` bytes of tensors, which count as sent when it has arrived."""
        if not self.distributed:
            self.comm_manager.send(message)
            self._monitor.track_upload_bytes(size)
            return

        def then(failed: Undelivered | None) -> None:
            if failed is None:
                self._monitor.track_upload_bytes(size)
            elif failed.unknown and receiver == self.server_id:
                self._join_again("it does not know this client")
            else:
                to = "" if receiver == self.server_id else f" to client {receiver}"
                logger.warning("client %d: its %s%s did not arrive: %s", self.ID, message.msg_type, to, failed)

        # A server that is resumed listens again; another client may not have been told of this one yet.
        code = grpc.StatusCode.UNAVAILABLE if receiver == self.server_id else grpc.StatusCode.UNAUTHENTICATED
        self.comm_manager.deliver(receiver, message, then, insist=(code,))

    def _join_again(self, reason: str) -> None:
        self.callback_funcs_for_join_again(wire.message(self, "join_again", [self.ID], reason))

    def _look(self) -> None:
        """Ask from time to time whether the server is there and knows this client.

        Raises:
            RunFailed: it has not answered within ``lowrank.timeout``, or not accepted this client.
        """
        now = time.monotonic()
        if self.welcomed_by is not None and now > self.welcomed_by:
            raise RunFailed(
                f"the server at {self.server_address} has not accepted this client within {self.timeout:g} s; it must "
                f"be able to reach this client at {self.comm_manager.host}:{self.comm_manager.port} "
                "(distribute.client_host, distribute.client_port)"
            )
        if self.welcomed_by is not None and now > self._say_at:
            self._say_at = math.inf  # said once
            logger.warning(
                "the server at %s has not accepted this client yet; waiting for it for up to %.0f s",
                *(self.server_address, min(self.welcomed_by - now, self.timeout)),
            )
        if self.welcomed_by is not None and not self._asking and now > self._next_request:
            self._request()
        if self.silent_since is not None and now - self.silent_since > self.timeout:
            raise RunFailed(
                f"the server at {self.server_address} is gone: it has not answered for {self.timeout:g} s; this client "
                "stops"
            )
        if now >= self._next_ping and not self._pinged and self.welcomed_by is None:
            self._pinged = True
            self.comm_manager.ping(self.server_id, self._looked, 2 * self._ping_every)

    def _looked(self, failed: Undelivered | None) -> None:
        self._pinged, self._next_ping = False, time.monotonic() + self._ping_every
        if failed is not None and not failed.unknown:
            if self.silent_since is None:
                self.silent_since = time.monotonic()
                logger.warning(
                    "the server at %s does not answer (%s); waiting for it for up to %g s",
                    *(self.server_address, failed, self.timeout),
                )
            return
        self.silent_since = None
        if failed is not None:
            self._join_again("it does not know this client")

    def _next_message(self) -> Message | None:
        while (item := self.comm_manager.receive(0.0 if self.mail else 0.3)) is not None:
            if isinstance(item, Outcome):
                self._alone(f"what became of a {item.kind}", item.settle)
            elif isinstance(item, Message):
                self.mail.append(item)
        return self.mail.popleft() if self.mail else None

    def _alone(self, what: str, handle: Callable[[], object]) -> bool:
        """Call the handler of a message or an outcome, which must not end the client; whether it did not fail.

        Raises:
            UserError: the user can mend it.
            OSError: of this machine, such as a full disk.
        """
        try:
            handle()
        except (UserError, OSError):
            raise
        except Exception as error:
            logger.warning("client %d: ignored %s: %s: %s", self.ID, what, type(error).__name__, error)
            logger.debug("client %d", self.ID, exc_info=True)
            return False
        return True

    def run(self):
        """Handle messages until the run is over; in distributed mode only.

        Raises:
            UserError: the server refused this client.
            RunFailed: the server stopped, or is gone.
        """
        handlers = {**self.msg_handlers, "join_again": self.callback_funcs_for_join_again}
        try:
            while True:
                message = self._next_message()
                self._look()
                if message is None:
                    continue
                self.silent_since = None
                if message.msg_type == "refused":
                    raise UserError(f"the server refused this client: {message.content}")
                if message.msg_type == "stopped":
                    raise RunFailed(f"the server stopped: {message.content}")
                if not self._alone(f"a {message.msg_type}", partial(handlers[message.msg_type], message)):
                    self._could_not(message)
                if message.msg_type == "finish":
                    return
        finally:
            self.comm_manager.close()

    def _could_not(self, message: Message) -> None:
        """Tell the server that it need not wait for an answer to ``message``."""
        if message.msg_type == "evaluate":
            answer = wire.message(self, "metrics", [self.server_id], "none", message.state, message.timestamp)
            self._deliver(self.server_id, answer)
