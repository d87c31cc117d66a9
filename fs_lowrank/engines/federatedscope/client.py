"""The framework's client with our method's training, and a copy of the model that follows the method's messages."""

from __future__ import annotations

import copy
import logging

from federatedscope.core.message import Message
from federatedscope.core.workers import Client

from ...algebra import nbytes
from ...errors import UserError
from ...rounds.codec import codec_of
from ...rounds.copies import OwnCopy, apology, own_tensors
from ...rounds.parcel import Parcel
from ...rounds.task import Task
from . import wire
from .config import for_frameworks_workers
from .session import current

logger = logging.getLogger("federatedscope.lowrank")


class LowRankClient(Client):
    """A client.

    Attributes:
        copy: its copy of the model, if it has one of its own. evaluates: it has held-out rows.
    """

    #: the framework would pickle a model here, to learn its size
    model = None

    def __init__(self, config=None, **kwargs):
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        # The framework fails on a split of which the client has no rows.
        splits = [split for split in config.eval.split if kwargs["data"].get(split, {}).get("examples") is not None]
        super().__init__(config=for_frameworks_workers(config, splits), **kwargs)
        self.evaluates = bool(splits)
        self.codec = codec_of(self.session.config)
        workspace = self.session.workspace
        if not self.session.shares_model:
            parts = workspace.method, kwargs["model"], self.ID, workspace.personal
            self.copy = OwnCopy(*parts, self.codec)
        self.trainer.number, self.trainer.prefix = self.ID, self.session.prefix_for(kwargs["model"], self.ID)
        # In kbit; the framework computes from it how long a message would take.
        sent = self.session.method.expected(self.session.ledger.state, 1, self.ID)
        self.model_size = nbytes(sent) * 8 / 1000

    # -- a round -----------------------------------------------------------------------------------

    def callback_funcs_for_model_para(self, message: Message):
        """Bring the copy up to date, train if asked to, and send the update."""
        parcel = message.content
        self.state, round = message.state, parcel.facts["round"]
        try:
            task = self._catch_up(parcel)
            if parcel.facts["purpose"] == "follow":
                return
            self.session.on_client(round, self.ID, self.session.config.sampled_per_round)
            update, samples = self._train(task)
        except UserError:
            raise
        except Exception as error:  # this client has failed; the server records it and continues with the others
            logger.warning("round %d: client %d failed: %s", round, self.ID, error)
            logger.debug("client %d", self.ID, exc_info=True)
            update, samples = apology(round, error), 0
        self._send(update, message, samples)

    def _catch_up(self, parcel: Parcel) -> Task:
        """Bring the model up to date; the client's work."""
        workspace = self.session.workspace
        if self.session.shares_model:  # it contains the merges of the message already
            task = self.session.tasks.pop(self.ID)
            workspace.load(task.view, self.ID, task.told)
            return task
        told = self.copy.catch_up(parcel)
        return workspace.task(self.ID, parcel.facts["round"], parcel.facts, told)

    def _train(self, task: Task) -> tuple[Parcel, int]:
        """The answer, and the number of samples processed."""
        trainer, workspace = self.trainer, self.session.workspace
        trainer.task = task
        samples, _, results = trainer.train()
        workspace.personal.keep(self.ID, task.round, own_tensors(workspace.method, trainer.ctx.model, task))
        logger.info(self._monitor.format_eval_res(results, rnd=self.state, role=f"Client #{self.ID}", return_raw=True))
        return trainer.fitted.answer(task.round, self.codec), samples

    def _send(self, parcel: Parcel, message: Message, samples: int) -> None:
        timestamp = self._gen_timestamp(init_timestamp=message.timestamp, instance_number=samples)
        self.comm_manager.send(wire.message("model_para", self.ID, [self.server_id], parcel, self.state, timestamp))
        self._monitor.track_upload_bytes(parcel.nbytes)

    # -- evaluation --------------------------------------------------------------------------------

    def callback_funcs_for_evaluate(self, message: Message):
        self._catch_up(message.content)
        if not self.evaluates:
            self.comm_manager.send(
                wire.message("metrics", self.ID, [message.sender], "none", message.state, message.timestamp)
            )
            return
        request = copy.copy(message)
        request.content = None  # the copy has it
        super().callback_funcs_for_evaluate(request)
