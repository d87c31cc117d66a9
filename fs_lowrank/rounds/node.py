"""The clients' side of an engine whose clients have a copy of the model of their own: one order after another."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from ..errors import UserError
from ..methods import revisions
from ..models.adapters import load_tensors
from .codec import Codec
from .copies import LostCopy, OwnCopy, apology, own_tensors
from .evaluator import Evaluator, size_of
from .joining import agreed, proof_of
from .parcel import Parcel
from .personal import PersonalParts
from .trainer import Trainer
from .workspace import Workspace


class Node:
    """Data, method and model of a process that works for whichever client an order comes to.

    A client's state (the round of its copy of the model, base weights that changed, its personal tensors) is in a
    folder of its own disk, with checksums, so that the process may end after each order.

    Args:
        workspace: of this process, which serves no rounds. codec: how tensors are encoded on their way.
    """

    def __init__(self, workspace: Workspace, codec: Codec | None = None):
        self.workspace, self.codec = workspace, codec or Codec()
        self.trainer = Trainer(workspace)
        #: the tensors that a run changes in the model, as they were at the start
        self._start = {
            **workspace.method.view(workspace.initial_state),
            **{name: tensor.clone() for name, tensor in workspace.changed_base().items()},
        }

    @cached_property
    def proof(self) -> dict[str, str]:
        """Hashes that must be equal in all processes at the start (``joining.proof_of``)."""
        load_tensors(self.workspace.model, self._start)
        return proof_of(self.workspace)

    @cached_property
    def agreed(self) -> str:
        """A hash of the configuration, revisions and proof of this process (``joining.agreed``)."""
        return agreed(self.workspace.config, self.proof)

    def introduction(self, client: int) -> Parcel:
        """The client's number, and the facts that the server compares with its own.

        Raises:
            UserError: there is no such client.
        """
        self.check(client)
        config, tests = self.workspace.config, self.workspace.test_of(client)
        sizes = size_of(tests) if tests is not None else {"samples": 0}
        return Parcel(
            {},
            client=client,
            own_data=self.workspace.undivided,
            config=config.decisive(),
            revisions=revisions(config),
            proof=self.proof,
            agreed=self.agreed,
            samples=len(self.workspace.training[client - 1]),
            tested=sizes["samples"],
            tested_tokens=sizes.get("tokens", 0),
        )

    def check(self, client: int) -> None:
        """Raise ``UserError`` if there is no such client."""
        if not 1 <= client <= (count := self.workspace.config.federate.client_num):
            raise UserError(f"there is no client {client}; federate.client_num is {count}")

    def obey(self, order: Parcel, client: int, memory: Path, identity: str) -> Parcel:
        """Bring the copy of ``client`` up to date, and train or evaluate it; the answer.

        Args:
            order: the parcel of an ``Order``.
            memory: the client's folder. identity: of the run; the state of another run there is not used.
        Returns:
            For ``train`` the update (``trainer.Fitted.answer``), for ``evaluate`` the fact ``scores``; after an error
            the fact ``error``. The fact ``followed`` says that the copy was saved as the order has it, also if training
            failed, and ``standing`` where it is now (``joining.reported_standing``).
        Raises:
            UserError: there is no such client.
        """
        self.check(client)
        workspace, round, purpose = self.workspace, order.facts["round"], order.facts["purpose"]
        load_tensors(workspace.model, self._start)
        personal = PersonalParts(workspace.personal.untrained)
        copy = OwnCopy(workspace.method, workspace.model, client, personal, self.codec, identity)
        copy.restore(memory)
        before, reply = list(copy.standing), Parcel({}, round=round)
        try:
            told = copy.catch_up(order)
            try:
                if purpose == "train":
                    task = workspace.task(client, round, order.facts, told)
                    reply = self.trainer.fit(task, workspace.model, workspace.prefix).answer(round, self.codec)
                    personal.keep(client, round, own_tensors(workspace.method, workspace.model, task))
                elif purpose == "evaluate" and (tests := workspace.test_of(client)) is not None:
                    reply.facts["scores"] = Evaluator(workspace).score(tests, f"client {client} test")
            except Exception as error:  # must not end the round of the others; the server records it
                reply = apology(round, error)
            copy.save(memory)
        except (LostCopy, UserError) as error:
            reply = apology(round, error)
            reply.facts["standing"] = before
        else:
            reply.facts |= {"standing": list(copy.standing), "followed": True}
        return reply
