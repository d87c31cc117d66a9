"""The part of the server that only distributed mode uses: clients join, and every wait has a limit."""

from __future__ import annotations

import json
import logging
import time

from federatedscope.core.message import Message
from federatedscope.core.workers import Server

from ...config import load_config
from ...errors import RunFailed, UserError
from ...methods import revisions
from ...rounds.admission import is_whole
from . import wire
from .session import differing

logger = logging.getLogger("federatedscope.lowrank")


class DistributedServer(Server):
    """The base class of ``server.LowRankServer``, whose attributes it uses."""

    # -- joining -----------------------------------------------------------------------------------

    def callback_funcs_for_join_in(self, message: Message):
        if "info" in message.msg_type:
            return super().callback_funcs_for_join_in(message)
        sender, content, samples = int(message.sender), message.content, None
        if self.distributed:
            try:
                request = json.loads(content)
                samples = request["samples"]
                address = {"host": str(request["address"]["host"]), "port": int(request["address"]["port"])}
                proof, config = dict(request["proof"]), dict(request["config"])
                reason = self._objection(sender, proof, config, samples, dict(request["revisions"]))
            except (TypeError, ValueError, KeyError):
                logger.warning("ignored a request to join that cannot be read: is it a client with this plug-in?")
                return False
            if reason:
                logger.warning("refused %s:%s: %s", address["host"], address["port"], reason)
                self._tell(address, "refused", reason)
                return False
            content = address
        known = sender in self.comm_manager.neighbors
        if known or self.started:
            # Its copy of the model is that of the start, whatever the copy of an earlier process was.
            self.comm_manager.add_neighbors(neighbor_id=sender, address=content)
            self.ledger.forget([sender])
            logger.info("client %d joined %s; it will be brought up to date", sender, "again" if known else "late")
            if sender in self._awaited():
                self._failed(sender, "failed", "its process ended and a new one has joined")
                return self.check_and_move_on()
            return False
        if sender == -1:  # the framework assigns the next number; the client has data of its own
            self.ledger.admission.samples[self.join_in_client_num + 1] = samples
        message = wire.with_content(message, content)
        message.sender = sender
        return super().callback_funcs_for_join_in(message)

    def _objection(self, sender: int, proof: dict, config: dict, samples: object, versions: dict) -> str:
        """The reason why a client cannot take part; empty if it can. ``versions``: the ``revisions`` of its methods."""
        try:
            theirs = load_config(config)
        except UserError as error:
            return f"its configuration is wrong: {error}"
        keys = differing(theirs, self.session.config, own_data=sender == -1)
        if keys:
            return f"it was started with another configuration than the server; they differ in {', '.join(keys)}"
        own = revisions(self.session.config)
        for name in sorted(own.keys() | versions.keys()):
            if own.get(name, 1) != versions.get(name, 1):
                return (
                    f"it has revision {versions.get(name, 1)} of {name}, the server has revision {own.get(name, 1)}, "
                    "which computes another result; install the same version of fs-lowrank on both"
                )
        mine = self.session.proof
        wrong = sorted(n for n in mine.keys() | proof.keys() if mine.get(n) != proof.get(n))
        if wrong:
            return (
                f"its model is not the server's at the start: {wrong[0]} differs"
                + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
                + "; the same seed, model files and versions of torch, transformers and peft give the same"
            )
        if sender != -1 and not 1 <= sender <= self.client_num:
            return f"there is no client {sender}; federate.client_num is {self.client_num}"
        admission = self.ledger.admission
        if not is_whole(samples) or not 1 <= samples <= admission.max_samples:
            return (
                f"it declares {repr(samples)[:60]} training samples; expected a whole number from 1 to "
                f"lowrank.max_samples, {admission.max_samples}"
            )
        if sender != -1 and samples != admission.samples[sender]:
            return (
                f"it declares {samples} training samples, and the server's division of the data gives client {sender} "
                f"{admission.samples[sender]}; their data files differ (distribute.data_idx -1 is for data of its own)"
            )
        if sender == -1 and self.started:
            return "the run has begun; a client that comes late says which one it is by distribute.data_idx"
        address = self.comm_manager.neighbors.get(sender)
        if address is not None and wire.listening(address):
            return f"client {sender} has joined already, from {address}; choose another distribute.data_idx"
        return ""

    def _tell(self, address: dict, kind: str, text: str) -> None:
        message = Message(kind, self.ID, [-1], self.state, text, self.cur_timestamp)
        self.comm_manager._send(f"{address['host']}:{address['port']}", message)

    # -- waiting -----------------------------------------------------------------------------------

    def run(self):
        """Wait for the clients, then handle messages until the run is over.

        Raises:
            RunFailed: too few clients joined in time, or are left.
        """
        try:
            self._gather()
            while not self.is_finish:
                self._handle(self.comm_manager.receive())
                self._give_up_on_the_lost()
        except BaseException as error:
            self._stop_clients(f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error))
            raise
        finally:
            self.comm_manager.close()

    def _handle(self, message: Message | None) -> None:
        if message is None:
            return
        handler = self.msg_handlers.get(message.msg_type)
        if handler is None:
            logger.warning("ignored a message of unknown type %r", message.msg_type)
        elif message.msg_type not in ("join_in", "join_in_info") and message.sender not in self.comm_manager.neighbors:
            logger.warning("ignored a %s of client %s, which has not joined", message.msg_type, message.sender)
        else:
            handler(message)

    def _gather(self) -> None:
        self.deadline = time.monotonic() + self.timeout
        while not self.started:
            self._handle(self.comm_manager.receive())
            if self.started or time.monotonic() < self.deadline:
                continue
            joined = len(self.comm_manager.neighbors)
            if joined < self.min_clients:
                raise RunFailed(
                    f"{joined} of {self.client_num} clients joined within {self.timeout:g} s, "
                    f"lowrank.min_clients is {self.min_clients}; start them, or raise lowrank.timeout"
                )
            logger.warning(
                "%d of %d clients joined within %g s; starting with them", joined, self.client_num, self.timeout
            )
            self.client_num_expected, self.join_in_client_num = self.client_num, self.client_num
            self.trigger_for_start()

    def _give_up_on_the_lost(self) -> None:
        """Continue without clients whose process is gone, and without those that have not answered in time."""
        now = time.monotonic()
        if self.is_finish or now < getattr(self, "next_look", 0.0):
            return
        self.next_look = now + 1.0
        if self.asked_to_evaluate and self.pending is not None:
            missing = self.asked_to_evaluate - self.msg_buffer["eval"].get(max(self.msg_buffer["eval"]), {}).keys()
            gone = {c for c in missing if now > self.deadline or not wire.listening(self.comm_manager.neighbors[c])}
            if gone:
                logger.warning("no evaluation from clients %s", sorted(gone))
                self.asked_to_evaluate -= gone
                self.check_and_move_on(check_eval_result=True)
        missing = sorted(self._awaited())
        for client in missing:
            if not wire.listening(self.comm_manager.neighbors[client]):
                self.ledger.forget([client])
                self._failed(
                    client,
                    "failed",
                    f"its process is gone (nothing listens on {self.comm_manager.neighbors[client]} any more)",
                )
            elif now > self.deadline:
                self.ledger.forget([client])
                self._failed(client, "failed", f"no answer within lowrank.timeout, {self.timeout:g} s")
        if missing and not self.round.waiting:
            self.check_and_move_on()

    def _stop_clients(self, reason: str) -> None:
        self.comm_manager.timeout = min(self.timeout, 5.0)
        wire.send(self, "stopped", list(self.comm_manager.neighbors), reason, timestamp=self.cur_timestamp)
