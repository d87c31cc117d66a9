"""The part of the server that only distributed mode uses: clients join and are asked, and every wait has a limit.

The server's thread handles one message, or the outcome of one delivery, at a time (``_step``). A message is checked
before a handler sees it, a handler only notes what came, and a handler's failure is its message's alone. The run itself
goes on in ``advance``, which is called when nothing is awaited any more.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import grpc
from federatedscope.core.message import Message
from federatedscope.core.workers import Server

from ...errors import RunFailed, UserError
from ...rounds.joining import objection, samples_objection
from ...rounds.round import Order
from . import wire
from .comm import Misfit, Outcome, Undelivered
from .messages import Request
from .roster import Roster

logger = logging.getLogger("federatedscope.lowrank")

#: seconds between two looks at the clients that are awaited, and for the answer to one
_LOOK, _ANSWER = 1.0, 5.0


class DistributedServer(Server):
    """The base class of ``server.LowRankServer``, whose attributes it uses.

    Attributes:
        roster: the clients.
        looking: tokens of the clients that asked to join and wait for a sign of life, of their own or of another
            process; so many at a time as may wait to be read.
        arriving: by number, the clients that are being told their number.
        put_off: requests that wait until one in ``arriving``, or one of very many in ``looking``, is decided.
        decided: those that need wait no longer.
        undelivered: by client, what is on its way to it.
    """

    def _open(self) -> None:
        """Prepare what a distributed server needs."""
        self.roster = Roster(self.session.outdir / "clients.json", self.timeout, self.session.resume)
        self.looking: set[str] = set()
        self.arriving: dict[int, Request] = {}
        self.put_off: list[Message] = []
        self.decided: deque[Message] = deque()
        self.undelivered: dict[int, Order] = {}
        self._pair_tokens: dict[frozenset[int], str] = {}
        self._pinged: set[int] = set()
        self._silent: set[int] = set()  # of which the user was told that they do not answer
        self._next_look = 0.0
        self.comm_manager.monitor = self._monitor
        self.comm_manager.asked = tuple(self._cfg.federate.join_in_info)

    # -- joining -----------------------------------------------------------------------------------

    def callback_funcs_for_join_in(self, message: Message):
        """Begin to decide whether a client takes part.

        It is asked at its address for a sign of life, and so is the process that has its number, if another one has it.
        Many are asked at a time, so that those that do not answer keep nobody waiting. Who answers is told its number,
        one client for each number at a time.
        """
        if not self.distributed or message.msg_type != "join_in":
            return super().callback_funcs_for_join_in(message)
        request: Request = message.content
        known, has_own_data = self.roster.with_token(request.token), int(message.sender) == -1
        if request.token in self._under_way():
            return False  # the same request once more
        if len(self.looking) >= self.comm_manager.joins_waiting:
            self._put_off(message)
            return False
        reason = self._objection(int(message.sender), request, has_own_data, known is not None)
        if reason:
            self._refuse(request, reason)
            return False
        self.looking.add(request.token)
        self.comm_manager.ping(
            int(message.sender),
            lambda failed: self._looked_at(message, failed),
            min(self.timeout, _ANSWER),
            address=str(request.address),
            token=request.token,
            insist=self._insist(request),
        )
        return False

    def _under_way(self) -> set[str]:
        """The tokens of the clients of which it is not decided yet whether they take part."""
        waiting = (*self.arriving.values(), *(m.content for m in (*self.put_off, *self.decided)))
        return {*self.looking, *(request.token for request in waiting)}

    def _insist(self, request: Request) -> tuple[grpc.StatusCode, ...]:
        # gRPC remembers for a second that nobody listened at the address of a client that returns.
        returns = str(request.address) in self.comm_manager.neighbors.values()
        return (grpc.StatusCode.UNAVAILABLE,) if returns else ()

    def _looked_at(self, message: Message, failed: Undelivered | None) -> None:
        """A client that asked to join has given a sign of life at its address, or has not."""
        request: Request = message.content
        self._finished_looking(request)
        if failed is None:
            self._claim(message)
        elif failed.itself:
            self._refuse(
                request,
                f"the address that this client names for itself, {request.address}, is the server's own; correct its "
                "distribute.client_host and distribute.client_port",
            )
        else:
            self._unreachable(int(message.sender), request, failed)

    def _claim(self, message: Message) -> None:
        """Give the client of ``message``, which is there, the number that it wants, if it may have it."""
        request: Request = message.content
        number, has_own_data = int(message.sender), int(message.sender) == -1
        if has_own_data:
            known = self.roster.with_token(request.token)
            taken = self.roster.members.keys() | self.arriving.keys()
            free = (n for n in range(1, self.client_num + 1) if n not in taken)
            number = known.number if known else next(free, 0)
            if not number and self.arriving:
                return self._put_off(message)  # one of them may not arrive
            if reason := self._objection(number, request, True, known is not None):
                return self._refuse(request, reason)
        if number in self.arriving:
            return self._put_off(message)
        before = self.roster.members.get(number)
        if not before or before.token == request.token or before.address == str(request.address):
            return self._welcome(number, request, has_own_data)

        # Another process claims the number, and may have it if the one that has it is gone.
        def decide(failed: Undelivered | None) -> None:
            self._finished_looking(request)
            if failed is None or not failed.gone:
                where = f"client {number} has joined already, from {before.address}"
                self._refuse(request, f"{where}; choose another distribute.data_idx")
            elif number in self.arriving or self.roster.members.get(number) is not before:
                self._claim(message)  # a third one was faster
            else:
                self._welcome(number, request, has_own_data)

        self.looking.add(request.token)
        self.comm_manager.ping(number, decide, _ANSWER, before.address, before.token)

    def _put_off(self, message: Message) -> None:
        """Handle a request to join again when another one is decided."""
        if len(self.put_off) < self.comm_manager.joins_waiting:
            self.put_off.append(message)

    def _objection(self, number: int, request: Request, has_own_data: bool, known: bool) -> str:
        """The reason why a client cannot take part; empty if it can."""
        reason = objection(
            self.session.config,
            self.session.proof,
            request.config,
            request.revisions,
            request.proof,
            own_data=has_own_data,
        )
        if reason:
            return reason
        if has_own_data and self.started and not known:
            return "the run has begun; a client that comes late says which one it is by distribute.data_idx"
        if not 1 <= number <= self.client_num and not (has_own_data and number == -1):
            which = f"all {self.client_num} clients have joined" if has_own_data else f"there is no client {number}"
            return f"{which}; federate.client_num is {self.client_num}"
        return samples_objection(
            number, request.samples, self.ledger.admission, has_own_data, elsewhere="distribute.data_idx -1"
        )

    def _refuse(self, request: Request, reason: str) -> None:
        logger.warning("refused %s: %s", request.address, reason)
        message = Message("refused", self.ID, [-1], self.state, reason[: wire.LONGEST_TEXT], self.cur_timestamp)

        def told(failed: Undelivered | None) -> None:
            if failed is not None:
                self.comm_manager.answer_with(request.token, request.process, reason)

        self.comm_manager.deliver(
            -1, message, told, timeout=min(self.timeout, _ANSWER), address=str(request.address), token=request.token
        )

    def _welcome(self, number: int, request: Request, has_own_data: bool) -> None:
        """Tell a client its number. Only one that receives it at its address has joined."""
        self.arriving[number] = request
        message = Message("assign_client_id", self.ID, [number], self.state, str(number), self.cur_timestamp)
        self.comm_manager.deliver(
            number,
            message,
            lambda failed: self._arrived(number, request, has_own_data, failed),
            timeout=min(self.timeout, _ANSWER),
            insist=self._insist(request),
            address=str(request.address),
            token=request.token,
        )

    def _arrived(self, number: int, request: Request, has_own_data: bool, failed: Undelivered | None) -> None:
        self._decided(number)
        if failed is None:
            (self.own_data.add if has_own_data else self.own_data.discard)(number)
            self._joined(number, request)
        else:
            self._unreachable(number, request, failed)

    def _unreachable(self, number: int, request: Request, failed: Undelivered) -> None:
        logger.warning(
            "%s asked to join, but cannot be reached at %s: %s; correct its distribute.client_host and "
            "distribute.client_port",
            *(f"client {number}" if number > 0 else "a client", request.address, failed),
        )

    def _decided(self, number: int) -> None:
        """The request for ``number`` is decided, so those that waited are handled next."""
        del self.arriving[number]
        self.decided.extend(self.put_off)
        self.put_off.clear()

    def _finished_looking(self, request: Request) -> None:
        """The process for which ``request`` waited has given a sign of life, or has not."""
        full = len(self.looking) >= self.comm_manager.joins_waiting
        self.looking.discard(request.token)
        if full and self.put_off:
            self.decided.append(self.put_off.pop(0))

    def _joined(self, number: int, request: Request) -> None:
        """A client that has asked to join, and has been reached, takes part."""
        before, comm = self.roster.members.get(number), self.comm_manager
        if before is not None:
            comm.senders.pop(before.token, None)
        member = self.roster.add(number, request)
        comm.neighbors[number], comm.tokens[number], comm.senders[member.token] = member.address, member.token, number
        self.ledger.admission.samples[number] = request.samples
        had_joined = before is not None and before.joined
        if before is not None and had_joined and before.process == request.process:
            member.missed, member.deadline = before.missed, before.deadline
            return  # it only was not sure whether it had joined
        if had_joined or self.started:
            # Its copy of the model is that of the start, or of a round that the server does not know.
            self.ledger.forget([number])
            logger.info("client %d joined %s; it will be brought up to date", number, "again" if had_joined else "late")
            self._lost(number, "its process ended and a new one has joined")
        else:
            logger.info("client %d joined from %s", number, member.address)
        if self._cfg.federate.join_in_info:
            wire.send(self, "ask_for_join_in_info", [number], list(self._cfg.federate.join_in_info))
        if self.started and self._cfg.federate.use_ss:
            self.broadcast_client_address()

    def broadcast_client_address(self):
        """Tell every client where the others are, and the token of each pair; for secret sharing."""
        if not self.distributed:
            return super().broadcast_client_address()
        addresses = self.comm_manager.neighbors
        for client in addresses:
            others = {
                other: {"address": address, "token": self._token_of_pair(client, other)}
                for other, address in addresses.items()
                if other != client
            }
            if others:
                wire.send(self, "address", [client], others)

    def _token_of_pair(self, a: int, b: int) -> str:
        return self._pair_tokens.setdefault(frozenset((a, b)), secrets.token_hex(16))

    # -- messages ----------------------------------------------------------------------------------

    def run(self):
        """Wait for the clients, then handle messages until the run is over.

        Raises:
            RunFailed: too few clients joined in time, or are left.
        """
        try:
            self._call_known_clients()
            self._gather()
            while not self.is_finish:
                self._step()
                self._give_up_on_the_lost()
                self.advance()
        except BaseException as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            wire.send(self, "stopped", list(self.comm_manager.neighbors), reason[: wire.LONGEST_TEXT])
            raise
        finally:
            self.comm_manager.close(min(self.timeout, _ANSWER))

    def _call_known_clients(self) -> None:
        """Ask the clients of the run that is resumed to join again, as far as they still live."""
        for member in self.roster.members.values():
            message = Message("join_again", self.ID, [member.number], max(self.state, 0), "the server was resumed", 0)
            self.comm_manager.deliver(member.number, message, address=member.address, token=member.token)

    def _step(self) -> None:
        """Handle the next message, or the outcome of a delivery, if there is one.

        Raises:
            RunFailed: a file of this run cannot be written.
        """
        item = self.decided.popleft() if self.decided else self.comm_manager.receive()
        if item is None:
            return
        if isinstance(item, Outcome):
            self._alone(f"what became of a message {item.kind!r} to client {item.receiver}", item.settle)
            return
        if isinstance(item, Misfit):
            number, kind, reason = item.sender, item.kind, item.reason
        else:
            number, kind = int(item.sender), item.msg_type
            if kind != "join_in" and number in self.roster.members:
                self.roster.members[number].missed = 0  # it answers again
            reason = self._alone(f"a message {kind!r} of client {number}", partial(self.note, item))
        if reason:
            what = f"what follows from a wrong message {kind!r} of client {number}"
            self._alone(what, partial(self._wrong, number, kind, reason))

    def _alone(self, what: str, handle: Callable[[], object]) -> str:
        """Call ``handle``; whatever it leads to, it must not end the run of the others. The reason if it failed.

        Raises:
            RunFailed: a file of this run cannot be written.
        """
        try:
            handle()
        except RunFailed:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}" if str(error) else type(error).__name__
            logger.warning("ignored %s: %s", what, reason)
            logger.debug("%s", what, exc_info=True)
            return reason
        return ""

    def note(self, message: Message) -> None:
        """Take in a message that fits the schema; nothing but the message can make this fail."""
        handlers = {
            "join_in": self.callback_funcs_for_join_in,
            "join_in_info": self._take_info,
            "model_para": self.take_update,
            "metrics": self.take_metrics,
        }
        handlers[message.msg_type](message)

    def _take_info(self, message: Message) -> None:
        self.join_in_info[int(message.sender)] = message.content.model_dump(exclude_unset=True)

    def _wrong(self, number: int, kind: str, reason: str) -> None:
        """A message of a client does not fit, so the server does not wait for another."""
        if kind == "model_para" and number in self._awaited():
            self._failed(number, "refused", f"client {number}: {reason}")
        elif kind == "metrics" and self.evaluating and number in self.asked_to_evaluate - self._evaluated():
            self._not_evaluated(number, reason)

    # -- waiting -----------------------------------------------------------------------------------

    def _gather(self) -> None:
        # A run of which only the end is missing needs no clients; those that are there are told.
        deadline = time.monotonic() + (min(self.timeout, _ANSWER) if self.only_ends else self.timeout)
        say_at = time.monotonic() + _ANSWER
        while not self.started:
            self._step()
            self.join_in_client_num = len(self.comm_manager.neighbors)
            if self.join_in_client_num == self.client_num:
                self.trigger_for_start()
            if not self.started and time.monotonic() > say_at:
                say_at = math.inf  # said once
                untold = self.untold()
                logger.warning(
                    "%d of %d clients have joined at %s:%s; waiting for %s for up to %.0f s",
                    *(self.join_in_client_num, self.client_num, self.comm_manager.host, self.comm_manager.port),
                    f"what federate.join_in_info asks of clients {untold}" if untold else "the others",
                    deadline - time.monotonic(),
                )
            if not self.started and time.monotonic() > deadline:
                self._start_without_the_others()

    def untold(self) -> list[int]:
        """The clients that have joined and not told what ``federate.join_in_info`` asks for."""
        asked = self._cfg.federate.join_in_info
        return sorted(self.comm_manager.neighbors.keys() - self.join_in_info.keys()) if asked else []

    def _start_without_the_others(self) -> None:
        """Start with the clients that have joined, if they are enough and what the sampler must know is known."""
        joined, untold, seconds = self.join_in_client_num, self.untold(), f"{self.timeout:g} s"
        if not self.only_ends and joined < self.min_clients:
            raise RunFailed(
                f"{joined} of {self.client_num} clients joined within {seconds}, "
                f"lowrank.min_clients is {self.min_clients}; start them, or raise lowrank.timeout"
            )
        unknown = sorted(set(range(1, self.client_num + 1)) - self.join_in_info.keys())
        if unknown and not self.only_ends and "client_resource" in self._cfg.federate.join_in_info:
            raise RunFailed(
                f"clients {unknown} have not told their client_resource within {seconds}, and the framework's sampler "
                "needs that of every client; start them with federate.resource_info_file, or leave client_resource out "
                "of federate.join_in_info"
            )
        if joined < self.client_num:
            logger.warning("%d of %d clients joined within %s; starting with them", joined, self.client_num, seconds)
        if untold:
            logger.warning(
                "clients %s have not told what federate.join_in_info asks for within %s; starting without it",
                *(untold, seconds),
            )
        self.waits_for_all = False
        self.trigger_for_start()

    def dispatch(self, order: Order, message: Message) -> None:
        """Begin to send ``order``; its client is awaited from now on."""
        client = order.client
        self.undelivered[client] = order
        self.roster.asked(client)
        self.comm_manager.deliver(
            client, message, lambda failed: self._dispatched(order, failed), timeout=self.roster.patience(client)
        )

    def _dispatched(self, order: Order, failed: Undelivered | None) -> None:
        if failed is None:
            self.confirm(order)
            return
        if self.undelivered.get(order.client) is order:
            reason = f"it cannot be reached: {failed}"
            if not failed.gone:
                reason = f"{self.roster.missed(order.client)} ({reason})"
            self._lost(order.client, reason)

    def confirm(self, order: Order | None) -> None:
        """``order`` has arrived: its receiver says so, or has answered it."""
        if order is None or self.undelivered.get(order.client) is not order:
            return
        del self.undelivered[order.client]
        self._monitor.track_upload_bytes(order.sizes[0])
        if order.round == self.round.number:
            self.round.delivered(order)

    def _lost(self, client: int, reason: str) -> None:
        """Continue without ``client``, whether it is to train or to evaluate."""
        self.undelivered.pop(client, None)
        self.ledger.forget([client])  # a message may have arrived nevertheless
        if client in self.waiting():
            self._failed(client, "failed", reason)
        if self.evaluating and client in self.asked_to_evaluate - self._evaluated():
            self._not_evaluated(client, reason)

    def _give_up_on_the_lost(self) -> None:
        """Continue without clients whose process is gone, and without those that have not answered in time."""
        now = time.monotonic()
        if self.is_finish or now < self._next_look:
            return
        self._next_look = now + _LOOK
        evaluating = self.asked_to_evaluate - self._evaluated() if self.evaluating else set()
        for client in sorted(self._awaited() | evaluating):
            if self.roster.overdue(client):
                self._lost(client, self.roster.missed(client))
            elif client not in self._pinged:
                self._pinged.add(client)
                self.comm_manager.ping(client, lambda failed, c=client: self._looked(c, failed), _ANSWER)

    def _looked(self, client: int, failed: Undelivered | None) -> None:
        self._pinged.discard(client)
        if failed is not None and failed.gone:
            address = self.comm_manager.neighbors[client]
            self._lost(client, f"its process is gone (it does not listen on {address} any more)")
        elif failed is not None and client not in self._silent:
            self._silent.add(client)
            left = max(self.roster.members[client].deadline - time.monotonic(), 0.0)
            logger.warning("client %d does not answer (%s); waiting for it for up to %.0f s", client, failed, left)
        elif failed is None:
            self._silent.discard(client)
