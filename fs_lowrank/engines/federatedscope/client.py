"""The framework's client with our method's training, and a copy of the model that follows the method's messages."""

from __future__ import annotations

import json
import logging
import time

from federatedscope.core.message import Message
from federatedscope.core.workers import Client

from ...algebra import nbytes
from ...errors import RunFailed, UserError
from ...methods import revisions
from ...rounds.codec import Codec, Plain, Uniform
from ...rounds.copies import LostCopy, OwnCopy, SharedCopy, answer, apology
from ...rounds.parcel import Parcel
from . import wire
from .config import for_frameworks_workers
from .session import current
from .sums import add_shares, split_secret

logger = logging.getLogger("federatedscope.lowrank")


def codec_of(cfg) -> Codec:
    """The encoding of messages and updates that the framework's section ``quantization`` asks for."""
    return Uniform(cfg.quantization.nbits) if cfg.quantization.method == "uniform" else Plain()


class LowRankClient(Client):
    """A client; ``copy`` is its copy of the model, ``fragments`` and ``own`` belong to secret sharing."""

    def __init__(self, config=None, **kwargs):
        self.ready = False
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        self.distributed = config.federate.mode == "distributed"
        if self.distributed:
            wire.require_free(kwargs["host"], kwargs["port"])
        super().__init__(config=for_frameworks_workers(config), **kwargs)
        self._cfg, self.ready, self.codec = config, True, codec_of(config)
        if self.distributed and self.session.index > 0:
            self.ID = self.session.index
        self.timeout = self.session.config.lowrank.timeout
        if self.distributed:
            self.comm_manager = wire.BoundedComm.take_over(
                self.comm_manager, self.timeout, config.distribute.grpc_max_send_message_length
            )
            self.server_address = self.comm_manager.neighbors[self.server_id]
        self.copy: SharedCopy
        if self.ID > 0:
            self._use_number()
        # In kbit; the framework computes from it how long a message would take.
        sent = self.session.method.expected(self.session.ledger.state, 1, max(self.ID, 1))
        self.model_size = nbytes(sent) * 8 / 1000
        #: by round of the framework: the shares that came, and the facts of this client's update
        self.fragments: dict[int, list] = {}
        self.own: dict[int, dict] = {}

    @property
    def model(self):
        # None during construction, when the framework would pickle the model to learn its size.
        return self._model if self.ready else None

    @model.setter
    def model(self, value):
        self._model = value

    def _use_number(self) -> None:
        """Make what depends on the client's number, once it is known."""
        site = self.session.site
        parts = site.method, self._model, self.ID, site.personal
        self.copy = SharedCopy(*parts) if self.session.shares_model else OwnCopy(*parts, self.codec)
        self.trainer.number = self.ID
        self.trainer.prefix = self.session.prefix_for(self._model, self.ID)

    # -- joining -----------------------------------------------------------------------------------

    def join_in(self):
        """Ask the server to take part.

        A distributed client sends its configuration and hashes of its model, by which the server checks that both start
        from the same.

        Raises:
            RunFailed: no server answers within ``lowrank.timeout``.
        """
        content = self.local_address
        if self.distributed:
            deadline = time.monotonic() + self.timeout
            while not wire.listening(self.server_address):
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"no server answers at {self.server_address} within {self.timeout:g} s; start it, "
                        "or correct distribute.server_host and distribute.server_port"
                    )
                time.sleep(0.2)
            content = json.dumps(
                {
                    "address": self.local_address,
                    "proof": self.session.proof,
                    "config": self.session.config.to_dict(),
                    "revisions": revisions(self.session.config),
                    "samples": self.session.client(max(self.ID, 1)).num_samples,
                }
            )
        wire.send(self, "join_in", [self.server_id], content, state=0)

    def callback_funcs_for_assign_id(self, message: Message):
        super().callback_funcs_for_assign_id(message)
        self._use_number()

    # -- a round -----------------------------------------------------------------------------------

    def callback_funcs_for_model_para(self, message: Message):
        """Bring the copy up to date, train if asked to, and send the update; also takes shares of other clients."""
        if "ss" in message.msg_type:
            return self._add_fragment(int(message.state), message.sender, wire.parcel_of(message.content).tensors)
        parcel = wire.parcel_of(message.content)
        self.state, round = message.state, parcel.facts["round"]
        trains = parcel.facts["purpose"] == "train"
        try:
            self.copy.catch_up(parcel)
            if not trains:
                return
            self.session.on_client(round, self.ID, self.session.config.sampled_per_round)
            update, samples = self._train(round)
        except Exception as error:  # this client has failed; the server records it and continues with the others
            if isinstance(error, UserError) and not self.distributed:
                raise
            logger.warning("round %d: client %d failed: %s", round, self.ID, error)
            logger.debug("client %d", self.ID, exc_info=True)
            if trains:
                self._send(apology(round, error), message, 0)
            return
        if update is not None:
            self._send(update, message, samples)

    def _train(self, round: int) -> tuple[Parcel | None, int]:
        """The answer, None if it follows when all shares are in, and the number of samples processed."""
        trainer = self.trainer
        trainer.round = round
        samples, _, results = trainer.train()
        update = trainer.outcome
        self.copy.keep_personal(round)
        logger.info(self._monitor.format_eval_res(results, rnd=self.state, role=f"Client #{self.ID}", return_raw=True))
        if self._cfg.federate.use_ss:
            return self._share(update, {"round": round, "samples": update.num_samples, "loss": trainer.loss}), samples
        return answer(round, update, trainer.loss, self.codec), samples

    def _send(self, parcel: Parcel, message: Message, samples: int) -> None:
        self._monitor.track_upload_bytes(nbytes(parcel.tensors))
        timestamp = self._gen_timestamp(init_timestamp=message.timestamp, instance_number=samples)
        content = wire.content_of(parcel, self.distributed)
        wire.send(self, "model_para", [self.server_id], content, timestamp=timestamp)

    # -- secret sharing ----------------------------------------------------------------------------

    def _share(self, update, facts: dict) -> Parcel | None:
        """Send a share to every other client; the server is sent the sum of the shares that this client was given."""
        weight = 1 if self.session.method.setting.uniform else update.num_samples
        others = sorted(int(n) for n in self.comm_manager.neighbors if int(n) not in (self.server_id, self.ID))
        parties = self.session.config.federate.client_num
        if len(others) != parties - 1:
            raise UserError(f"federate.use_ss: client {self.ID} knows {len(others)} of {parties - 1} other clients")
        shares = split_secret(update.tensors, weight, parties)
        for other, share in zip(others, shares[1:]):
            self._monitor.track_upload_bytes(nbytes(share))
            wire.send(self, "ss_model_para", [other], wire.content_of(Parcel(share), self.distributed))
        self.own[self.state] = facts
        self._add_fragment(self.state, self.ID, shares[0])
        return None

    def _add_fragment(self, state: int, sender: int, tensors) -> None:
        # The share of another client may come before the server's message of the round.
        shares = self.fragments.setdefault(state, [])
        shares.append(tensors)
        if len(shares) == self.session.config.federate.client_num and state in self.own:
            parcel = Parcel(add_shares(self.fragments.pop(state)), **self.own.pop(state))
            self._send(parcel, Message(state=state, timestamp=0), parcel.facts["samples"])

    # -- evaluation and end ------------------------------------------------------------------------

    def callback_funcs_for_evaluate(self, message: Message):
        evaluates = any(self.trainer.ctx.get(f"{split}_data") is not None for split in self._cfg.eval.split)
        try:
            self.copy.catch_up(wire.parcel_of(message.content))
        except LostCopy as error:
            logger.warning("client %d does not evaluate: %s", self.ID, error)
            evaluates = False
        if not evaluates:
            wire.send(self, "metrics", [message.sender], "none", state=message.state, timestamp=message.timestamp)
            return
        super().callback_funcs_for_evaluate(wire.with_content(message, None))

    def callback_funcs_for_finish(self, message: Message):
        logger.info("client %s: the run is over", self.ID)
        self._monitor.finish_fl()

    def run(self):
        """Handle messages until the run is over; in distributed mode only.

        Raises:
            UserError: the server refused this client.
            RunFailed: the server stopped, or is gone.
        """
        next_look, silent_since = time.monotonic() + 1.0, None
        try:
            while True:
                message = self.comm_manager.receive()
                now = time.monotonic()
                if message is None:
                    if now >= next_look:
                        next_look = now + 1.0
                        alive = wire.listening(self.server_address)
                        silent_since = None if alive else (silent_since or now)
                        if silent_since is not None and now - silent_since >= min(3.0, self.timeout):
                            raise RunFailed(f"the server at {self.server_address} is gone; this client stops")
                    continue
                if message.msg_type == "refused":
                    raise UserError(f"the server refused this client: {message.content}")
                if message.msg_type == "stopped":
                    raise RunFailed(f"the server stopped: {message.content}")
                handler = self.msg_handlers.get(message.msg_type)
                if handler is None:
                    logger.warning("ignored a message of unknown type %r", message.msg_type)
                    continue
                try:
                    handler(message)
                except ValueError as error:
                    if isinstance(error, UserError):
                        raise
                    logger.warning("ignored a %s that cannot be read: %s", message.msg_type, error)
                if message.msg_type == "finish":
                    return
        finally:
            self.comm_manager.close()
