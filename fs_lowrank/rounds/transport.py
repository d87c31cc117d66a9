"""The interface of an engine: a transport, which carries orders to clients and brings their answers back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..methods import State
from .codec import Codec
from .evaluator import Evaluator
from .ledger import Ledger, Standing
from .parcel import Parcel
from .round import Order
from .workspace import Workspace


@dataclass(frozen=True)
class Lost:
    """There is no answer: the client was ``absent``, its answer ``failed`` to arrive whole, or it was ``refused``."""

    kind: Literal["absent", "failed", "refused"]
    reason: str


class Transport(ABC):
    """Carries orders to clients and brings answers back. Only ``exchange`` has to be written.

    The loop (``rounds.loop``) decides who is asked for what, when a round ends, and what is recorded. A transport knows
    where clients are, how bytes get there, and how long to wait for an answer.

    Attributes:
        shares_model: clients use the server's own model, in its process or in copies that ``follow`` it. Then orders
            have no values (their tensors are on ``meta``), and the server evaluates (``evaluate``).
        codec: how tensors are encoded on their way, in both directions.
    """

    shares_model: ClassVar[bool] = False
    codec: Codec = Codec()

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:  # noqa: B027  (nothing by default)
        """The run begins, or goes on from a checkpoint if it is ``resumed``.

        Args:
            workspace: the server's data, method and model. ledger: its state, and which client has what.
        """

    def missing(self, clients: Collection[int]) -> Mapping[int, str]:
        """The members of ``clients`` that cannot be asked now, with the reason. Called before each ``exchange``."""
        return {}

    def standing(self, client: int) -> Standing | None:
        """The round of the client's copy, as it reports. None: it cannot say; then the delivered messages decide.

        A copy that reports its round can be lost, or outlive the server; one that cannot say has to be as reliable as
        the server's memory.
        """
        return None

    @abstractmethod
    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel | Lost]]:
        """Carry out ``orders``, all of one round and one purpose at most beside ``follow``; one answer for each.

        Answers may come in any order. A client makes its answer with ``rounds.node.Node.obey``, or with
        ``trainer.Fitted.answer`` and ``copies.apology``. The loop checks the content of an answer. The transport has to
        know that it comes from this client.
        """

    def personal(self) -> Mapping[int, Mapping[str, Tensor]]:
        """At the end, by client, the tensors that stayed with it, where this machine can read them; to be saved."""
        return {}

    def end(self, error: BaseException | None = None) -> None:  # noqa: B027  (nothing by default)
        """The run has ended; by ``error`` if that is not None."""

    # -- where clients share the server's model ------------------------------------------------------

    def follow(self, message: Mapping[str, Tensor], round: int) -> None:  # noqa: B027  (nothing by default)
        """``round`` has ended with ``message``, which the server's model has applied."""

    def evaluate(self, evaluator: Evaluator, state: State) -> dict[str, dict[str, Any]]:
        """The metrics of ``evaluator.evaluate(state)``."""
        return evaluator.evaluate(state)
