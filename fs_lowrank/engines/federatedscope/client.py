"""The framework's client with our method's training, and a copy of the model that follows the method's messages."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping

from federatedscope.core.message import Message
from federatedscope.core.workers import Client
from torch import Tensor

from ...algebra import nbytes
from ...errors import UserError
from ...rounds.codec import codec_of
from ...rounds.copies import LostCopy, OwnCopy, SharedCopy, answer, apology
from ...rounds.parcel import Parcel
from . import wire
from .config import evaluated_key, for_frameworks_workers
from .logs import name_file
from .session import current
from .sums import add_shares, split_secret

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


class LowRankClient(Client):
    """A client.

    Attributes:
        copy: its copy of the model.
        shares: with secret sharing, by the framework's round and by client, itself included, the share that this client
            holds of its update.
        own: the facts of this client's update, of which its own share is.
    """

    def __init__(self, config=None, **kwargs):
        self.ready = False
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        config = with_own_splits(config, kwargs["data"])
        super().__init__(config=for_frameworks_workers(config), **kwargs)
        self._cfg, self.ready = config, True
        self.codec = codec_of(config.quantization.method, config.quantization.nbits)
        site = self.session.site
        parts = site.method, self._model, self.ID, site.personal
        self.copy: SharedCopy = SharedCopy(*parts) if self.session.shares_model else OwnCopy(*parts, self.codec)
        self.trainer.number, self.trainer.prefix = self.ID, self.session.prefix_for(self._model, self.ID)
        # In kbit; the framework computes from it how long a message would take.
        sent = self.session.method.expected(self.session.ledger.state, 1, self.ID)
        self.model_size = nbytes(sent) * 8 / 1000
        self.shares: dict[int, dict[int, Mapping[str, Tensor]]] = {}
        self.own: dict = {}

    @property
    def model(self):
        # None during construction, when the framework would pickle the model to learn its size.
        return self._model if self.ready else None

    @model.setter
    def model(self, value):
        self._model = value

    # -- a round -----------------------------------------------------------------------------------

    def callback_funcs_for_model_para(self, message: Message):
        """Bring the copy up to date, train if asked to, and send the update; also takes shares of other clients."""
        parcel = message.content.opened()
        if "ss" in message.msg_type:
            return self._take_share(int(message.sender), message.state, parcel.tensors)
        self.state, round = message.state, parcel.facts["round"]
        trains = parcel.facts["purpose"] == "train"
        try:
            self.copy.catch_up(parcel)
            if not trains:
                return
            self.session.on_client(round, self.ID, self.session.config.sampled_per_round)
            update, samples = self._train(round)
        except Exception as error:  # this client has failed; the server records it and continues with the others
            if isinstance(error, UserError):
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
            self._share(update, {"round": round, "samples": update.num_samples, "loss": trainer.loss})
            return None, samples
        return answer(round, update, trainer.loss, self.codec), samples

    def _send(self, parcel: Parcel, message: Message, samples: int) -> None:
        timestamp = self._gen_timestamp(init_timestamp=message.timestamp, instance_number=samples)
        self._deliver(wire.message("model_para", self.ID, [self.server_id], wire.Sealed(parcel), self.state, timestamp))

    def _deliver(self, message: Message) -> None:
        self.comm_manager.send(message)
        self._monitor.track_upload_bytes(message.content.opened().nbytes)

    # -- secret sharing ----------------------------------------------------------------------------

    def _share(self, update, facts: dict) -> None:
        """Send a share to every other client; the server is sent the sum of the shares that this client was given."""
        weight = 1 if self.session.method.setting.uniform else update.num_samples
        others = sorted(int(n) for n in self.comm_manager.neighbors if int(n) not in (self.server_id, self.ID))
        shares = split_secret(update.tensors, weight, len(others) + 1)
        for other, share in zip(others, shares[1:]):
            self._deliver(wire.message("ss_model_para", self.ID, [other], wire.Sealed(Parcel(share)), self.state))
        self.own = facts
        self._take_share(self.ID, self.state, shares[0])

    def _take_share(self, sender: int, state: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a share; that of another client may come before the server's message of the round."""
        shares = self.shares.setdefault(state, {})
        shares[sender] = tensors
        if self.ID in shares and len(shares) == self.session.config.federate.client_num:
            total = add_shares(list(self.shares.pop(state).values()))
            self._send(Parcel(total, **self.own), Message(state=state, timestamp=0), self.own["samples"])

    # -- evaluation and end ------------------------------------------------------------------------

    def callback_funcs_for_evaluate(self, message: Message):
        evaluates = any(self.trainer.ctx.get(f"{split}_data") is not None for split in self._cfg.eval.split)
        try:
            self.copy.catch_up(message.content.opened())
        except LostCopy as error:
            logger.warning("client %d does not evaluate: %s", self.ID, error)
            evaluates = False
        if not evaluates:
            self.comm_manager.send(
                wire.message("metrics", self.ID, [message.sender], "none", message.state, message.timestamp)
            )
            return
        asked = copy.copy(message)
        asked.content = None  # the copy has it
        super().callback_funcs_for_evaluate(asked)

    def callback_funcs_for_finish(self, message: Message):
        logger.info("client %s: the run is over", self.ID)
        self._monitor.finish_fl()
