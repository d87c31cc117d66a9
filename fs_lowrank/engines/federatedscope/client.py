"""The framework's client with our method's training, and a copy of the model that follows the method's messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from federatedscope.core.message import Message
from torch import Tensor

from ...algebra import nbytes
from ...errors import RunFailed, UserError
from ...methods import RefusedUpdate
from ...rounds.codec import codec_of
from ...rounds.copies import LostCopy, OwnCopy, SharedCopy, answer, apology
from ...rounds.parcel import Parcel
from . import wire
from .config import evaluated_key, for_frameworks_workers
from .distributed_client import DistributedClient
from .logs import name_file
from .session import current
from .sums import add_shares, alike, split_secret

logger = logging.getLogger("federatedscope.lowrank")


def with_own_splits(config, data):
    """``config`` of a client that evaluates the splits of which it has rows: the framework fails on any other.

    Where the best result is of a split without rows, it is of the first split that has some.
    """
    own = [split for split in config.eval.split if data.get(split, {}).get("examples") is not None]
    if not own or own == list(config.eval.split):
        return config
    config = config.clone()
    config.defrost()
    config.eval.split = own
    config.eval.best_res_update_round_wise_key = evaluated_key(config.eval.best_res_update_round_wise_key, own)
    config._immutable(True)
    return config


class LowRankClient(DistributedClient):
    """A client.

    Attributes:
        copy: its copy of the model.
        shares: with secret sharing, by client, itself included, the share that this client holds of its update, and the
            framework's round that it is of; one of each.
        own: the facts of this client's update, of which its own share is.
        summed: the framework's round whose sum of shares was sent last.
    """

    def __init__(self, config=None, **kwargs):
        self.ready = False
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        self.distributed = config.federate.mode == "distributed"
        config = with_own_splits(config, kwargs["data"])
        super().__init__(config=for_frameworks_workers(config), **kwargs)
        self._cfg, self.ready = config, True
        self.codec = codec_of(config.quantization.method, config.quantization.nbits)
        if self.distributed and self.session.index > 0:
            self.ID = self.session.index
        self.timeout = self.session.config.lowrank.timeout
        #: messages that were received and not handled yet
        self.mail: deque[Message] = deque()
        if self.distributed:
            self._open()
        self.copy: SharedCopy
        if self.ID > 0:
            self._use_number()
        # In kbit; the framework computes from it how long a message would take.
        sent = self.session.method.expected(self.session.ledger.state, 1, max(self.ID, 1))
        self.model_size = nbytes(sent) * 8 / 1000
        self.forget_shares()

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
        """
        if not self.distributed:
            return wire.send(self, "join_in", [self.server_id], self.local_address, state=0)
        self._ask_to_join()

    def callback_funcs_for_assign_id(self, message: Message):
        if self.ID > 0 and self.ID != int(message.content):
            raise RunFailed(f"the server takes client {self.ID} for client {message.content}; start this client again")
        if self.ID < 1:
            super().callback_funcs_for_assign_id(message)
            self._use_number()
        self.welcomed_by = None

    # -- a round -----------------------------------------------------------------------------------

    def callback_funcs_for_model_para(self, message: Message):
        """Bring the copy up to date, train if asked to, and send the update; also takes shares of other clients."""
        if "ss" in message.msg_type:
            return self._take_share(int(message.sender), message.state, wire.parcel_of(message.content).tensors)
        parcel = wire.parcel_of(message.content)
        self.state, round = message.state, parcel.facts["round"]
        trains = parcel.facts["purpose"] == "train"
        if trains and any(m.msg_type == "model_para" and m.state >= message.state for m in self.mail):
            logger.info("client %d does not train in round %d: the server has asked anew since", self.ID, round)
            trains = False
        try:
            self.copy.catch_up(parcel)
            if not trains:
                return
            self.session.on_client(round, self.ID, self.session.config.sampled_per_round)
            update, samples = self._train(round)
        except Exception as error:  # this client has failed; the server records it and continues with the others
            if isinstance(error, UserError) and not self.distributed:
                raise
            if isinstance(error, OSError):
                name_file(error)
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
        timestamp = self._gen_timestamp(init_timestamp=message.timestamp, instance_number=samples)
        content = wire.content_of(parcel, self.distributed)
        answer = wire.message(self, "model_para", [self.server_id], content, timestamp=timestamp)
        self._deliver(self.server_id, answer, nbytes(parcel.tensors))

    # -- secret sharing ----------------------------------------------------------------------------

    def forget_shares(self) -> None:
        """Forget the shares of a round that is not completed."""
        self.shares: dict[int, tuple[int, Mapping[str, Tensor]]] = {}
        self.own: dict = {}
        self.summed: int | None = None

    def _others(self) -> list[int]:
        return sorted(int(n) for n in self.comm_manager.neighbors if int(n) not in (self.server_id, self.ID))

    def _share(self, update, facts: dict) -> Parcel | None:
        """Send a share to every other client; the server is sent the sum of the shares that this client was given."""
        weight = 1 if self.session.method.setting.uniform else update.num_samples
        others = self._others()
        parties = self.session.config.federate.client_num
        if len(others) != parties - 1:
            raise UserError(f"federate.use_ss: client {self.ID} knows {len(others)} of {parties - 1} other clients")
        shares = split_secret(update.tensors, weight, parties)
        for other, share in zip(others, shares[1:]):
            message = wire.message(self, "ss_model_para", [other], wire.content_of(Parcel(share), self.distributed))
            self._deliver(other, message, nbytes(share))
        self.shares[self.ID], self.own = (self.state, shares[0]), facts
        self._send_sum()
        return None

    def _take_share(self, sender: int, state: int, tensors: Mapping[str, Tensor]) -> None:
        """Take the share of another client; it may come before the server's message of the round."""
        reason = ""
        if sender not in self._others():
            reason = "it does not take part in the round"
        elif state == self.summed or sender in self.shares and self.shares[sender][0] == state:
            reason = "it has sent one already"
        if reason:
            logger.warning(
                "client %d refused a share of client %d for round %d: %s", self.ID, sender, state + 1, reason
            )
            return
        self.shares[sender] = state, tensors
        self._send_sum()

    def _send_sum(self) -> None:
        """Send the server the sum of all clients' shares, if they are there."""
        if self.ID not in self.shares:
            return
        state, own = self.shares[self.ID]
        of_round = {client: tensors for client, (of, tensors) in self.shares.items() if of == state}
        if len(of_round) < self.session.config.federate.client_num:
            return
        facts = self.own
        self.forget_shares()
        self.summed = state
        misfits = [client for client, share in sorted(of_round.items()) if not alike(share, own)]
        if misfits:
            reason = f"the share that client {misfits[0]} sent client {self.ID} has other names, shapes or types"
            parcel = apology(facts["round"], RefusedUpdate(f"{reason} than client {self.ID}'s own"))
        else:
            parcel = Parcel(add_shares(list(of_round.values())), **facts)
        self._send(parcel, Message(state=state, timestamp=0), facts["samples"])

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
