"""The framework's client, with a copy of the model that follows our method's messages."""

from __future__ import annotations

import json
import logging
import time

import torch
from federatedscope.core.message import Message
from federatedscope.core.workers import Client
from torch import Tensor, nn

from ...algebra import FlatTensors, nbytes
from ...errors import RunFailed, UserError
from ...models.adapters import load_tensors
from ...models.names import named_tensors
from ..server import without_head
from . import wire
from .session import Session, current
from .sums import add_shares, dequantise, quantise, split_secret
from .wire import Parcel
from .worker import stock

logger = logging.getLogger("federatedscope.lowrank")


def shared_tensors(session: Session, model: nn.Module | None = None) -> dict[str, Tensor]:
    """A copy of what the method shares of ``model``, or of the session's own."""
    return {n: p.detach().clone() for n, p in named_tensors(model or session.site.model, session.method.shared).items()}


class SharedCopy:
    """A client whose model is everyone's: before it trains, its tensors are put in."""

    def __init__(self, session: Session, model: nn.Module, number: int):
        self.session, self.model, self.number = session, model, number

    def catch_up(self, parcel: Parcel) -> None:
        load_tensors(self.model, parcel.tensors)
        self._load_personal()

    def _load_personal(self) -> None:
        load_tensors(self.model, self.session.site.personal.get(self.number, self.session.site.untrained_personal))

    def keep_personal(self) -> None:
        self.session.site.keep_personal(self.number, self.model)


class OwnCopy(SharedCopy):
    """A client with a model of its own, which stands at the end of some round.

    What its training changes is put back before the next message, so that a message meets the copy that the
    server thinks it has.
    """

    def __init__(self, session: Session, model: nn.Module, number: int):
        super().__init__(session, model, number)
        self.stands_at = 0
        load_tensors(model, session.method.view(session.method.initial_state(model), number))
        self.standing = shared_tensors(session, model)

    def catch_up(self, parcel: Parcel) -> None:
        """Apply what came, up to the end of the round before ``parcel.facts["round"]``."""
        load_tensors(self.model, self.standing)
        last = parcel.facts["round"] - 1
        tensors = {n: t.to(next(self.model.parameters()).device) for n, t in parcel.tensors.items()}
        if parcel.facts.get("whole"):
            load_tensors(self.model, tensors)
        elif last > self.stands_at:
            if parcel.facts.get("quantised"):
                tensors = dequantise(tensors, self.standing)
            with torch.no_grad():
                self.session.method.apply(self.model, tensors, last)
        if last > self.stands_at:
            self.stands_at, self.standing = last, shared_tensors(self.session, self.model)
        self._load_personal()


class LowRankClient(Client):
    """One of the framework's clients."""

    def __init__(
        self,
        ID=-1,
        server_id=None,
        state=-1,
        config=None,
        data=None,
        model=None,
        device="cpu",
        strategy=None,
        is_unseen_client=False,
        *args,
        **kwargs,
    ):
        self.ready = False
        if config is None:  # the framework asks a bare worker which messages it handles
            super().__init__(ID, server_id, state)
            return
        self.session = current()
        self.distributed = config.federate.mode == "distributed"
        if self.distributed:
            wire.require_free(kwargs["host"], kwargs["port"])
        super().__init__(
            ID, server_id, state, stock(config), data, model, device, strategy, is_unseen_client, *args, **kwargs
        )
        self._cfg, self.ready = config, True
        if self.distributed and self.session.index > 0:
            self.ID = self.session.index
        self.timeout = self.session.config.lowrank.timeout
        if self.distributed:
            self.comm_manager = wire.BoundedComm.take_over(
                self.comm_manager, self.timeout, config.distribute.grpc_max_send_message_length
            )
            self.server_address = self.comm_manager.neighbors[server_id]
        self.copy: SharedCopy | None = None
        if self.ID > 0:
            self._settle()
        # kbit, from which the framework simulates how long a message takes
        sent = self.session.method.expected(self.session.server.state, 1, max(self.ID, 1))
        self.model_size = nbytes(sent) * 8 / 1000
        self.fragments: dict[int, list] = {}
        self.own: dict[int, dict] = {}

    @property
    def model(self):
        # The framework pickles the model when a client is made, to learn its size; there is no need to.
        return self._model if self.ready else None

    @model.setter
    def model(self, value):
        self._model = value

    def _settle(self) -> None:
        """Take up the client's number: its copy of the model, its data, its random numbers."""
        kind = SharedCopy if self.session.shares_model else OwnCopy
        self.copy = kind(self.session, self._model, self.ID)
        self.trainer.number = self.ID
        self.trainer.prefix = self.session.prefix_for(self._model, self.ID)

    # -- joining -----------------------------------------------------------------------------------

    def join_in(self):
        """Ask the server to take part, with the proof that this process starts from what the server starts from.

        Raises:
            UserError: no server answers within ``lowrank.timeout``.
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
                {"address": self.local_address, "proof": self.session.proof, "config": self.session.config.to_dict()}
            )
        self.comm_manager.send(
            Message(msg_type="join_in", sender=self.ID, receiver=[self.server_id], timestamp=0, content=content)
        )

    def callback_funcs_for_assign_id(self, message: Message):
        super().callback_funcs_for_assign_id(message)
        self._settle()

    # -- a round -----------------------------------------------------------------------------------

    def callback_funcs_for_model_para(self, message: Message):
        """Catch up, train, send."""
        if "ss" in message.msg_type:
            return self._add_fragment(int(message.state), message.sender, Parcel.of(message.content).tensors)
        parcel = Parcel.of(message.content)
        self.state, round = message.state, parcel.facts["round"]
        self.copy.catch_up(parcel)
        if not parcel.facts["train"]:
            return
        self.session.on_client(round, self.ID, self.session.config.sampled_per_round)
        try:
            parcel, samples = self._train(round)
        except Exception as error:  # one client's failure must not end the others' round; the server records it
            if isinstance(error, UserError) and not self.distributed:
                raise
            logger.warning("round %d: client %d failed: %s", round, self.ID, error)
            logger.debug("client %d", self.ID, exc_info=True)
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            return self._send(Parcel({}, error=reason, fatal=isinstance(error, UserError)), message, 0)
        if parcel is not None:
            self._send(parcel, message, samples)

    def _train(self, round: int) -> tuple[Parcel | None, int]:
        trainer = self.trainer
        trainer.round = round
        samples, _, results = trainer.train()
        update = trainer.outcome
        self.copy.keep_personal()
        logger.info(self._monitor.format_eval_res(results, rnd=self.state, role=f"Client #{self.ID}", return_raw=True))
        facts = {"samples": update.num_samples, "loss": trainer.loss}
        if self._cfg.federate.use_ss:
            return self._share(update, facts), samples
        # Where clients share a model, the next one trains before this is read.
        flat = len({t.dtype for t in update.tensors.values()}) == 1
        tensors = FlatTensors.pack(update.tensors) if flat else {n: t.clone() for n, t in update.tensors.items()}
        if self._cfg.quantization.method == "uniform":
            tensors = quantise(tensors, self._cfg.quantization.nbits)
        return Parcel(tensors, **facts), samples

    def _send(self, parcel: Parcel, message: Message, samples: int) -> None:
        self._monitor.track_upload_bytes(nbytes(parcel.tensors))
        timestamp = self._gen_timestamp(init_timestamp=message.timestamp, instance_number=samples)
        self.comm_manager.send(
            Message(
                msg_type="model_para",
                sender=self.ID,
                receiver=[self.server_id],
                state=self.state,
                timestamp=timestamp,
                content=parcel.encode() if self.distributed else parcel,
            )
        )

    # -- secret sharing ----------------------------------------------------------------------------

    def _share(self, update, facts: dict) -> Parcel | None:
        """Give every other client a share; the server gets the sum of the shares that this one was given."""
        weight = 1 if self.session.method.setting.uniform else update.num_samples
        others = sorted(int(n) for n in self.comm_manager.neighbors if int(n) not in (self.server_id, self.ID))
        parties = self.session.config.federate.client_num
        if len(others) != parties - 1:
            raise UserError(f"federate.use_ss: client {self.ID} knows {len(others)} of {parties - 1} other clients")
        shares = split_secret(update.tensors, weight, parties)
        for other, share in zip(others, shares[1:]):
            parcel = Parcel(share)
            self._monitor.track_upload_bytes(nbytes(share))
            self.comm_manager.send(
                Message(
                    msg_type="ss_model_para",
                    sender=self.ID,
                    receiver=[other],
                    state=self.state,
                    timestamp=0,
                    content=parcel.encode() if self.distributed else parcel,
                )
            )
        sent = [nbytes(shares[0]), nbytes(without_head(shares[0]))]
        self.own[self.state] = {
            **facts,
            "shares": True,
            "sent_bytes": sent[0] * parties,
            "sent_bytes_without_head": sent[1] * parties,
        }
        self._add_fragment(self.state, self.ID, shares[0])
        return None

    def _add_fragment(self, state: int, sender: int, tensors) -> None:
        # A quick neighbour's share may come before the server's message of the round.
        have = self.fragments.setdefault(state, [])
        have.append(tensors)
        if len(have) == self.session.config.federate.client_num and state in self.own:
            parcel = Parcel(add_shares(self.fragments.pop(state)), **self.own.pop(state))
            self._send(parcel, Message(state=state, timestamp=0), parcel.facts["samples"])

    # -- evaluation and end ------------------------------------------------------------------------

    def callback_funcs_for_evaluate(self, message: Message):
        self.copy.catch_up(Parcel.of(message.content))
        if not any(self.trainer.ctx.get(f"{split}_data") is not None for split in self._cfg.eval.split):
            self.comm_manager.send(
                Message(
                    msg_type="metrics",
                    sender=self.ID,
                    receiver=[message.sender],
                    state=message.state,
                    timestamp=message.timestamp,
                    content="none",
                )
            )
            return
        super().callback_funcs_for_evaluate(
            Message(
                msg_type=message.msg_type,
                sender=message.sender,
                receiver=message.receiver,
                state=message.state,
                timestamp=message.timestamp,
                content=None,
            )
        )

    def callback_funcs_for_finish(self, message: Message):
        logger.info("client %s: the run is over", self.ID)
        self._monitor.finish_fl()

    def run(self):
        """Handle messages until the run is over.

        Raises:
            UserError: the server refused this client, stopped, or is gone.
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
                    logger.warning("left out a message of unknown type %r", message.msg_type)
                    continue
                try:
                    handler(message)
                except ValueError as error:
                    if isinstance(error, UserError):
                        raise
                    logger.warning("left out a %s that cannot be read: %s", message.msg_type, error)
                if message.msg_type == "finish":
                    return
        finally:
            self.comm_manager.close()
