"""The embedded engine: all clients on this machine.

The tensors that a client trains are swapped in and out of the model, so the memory is that of the base and the clients'
adapters. With ``federate.process_num`` P, P further processes train and evaluate, each with a copy of the base
(``pool.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..callbacks import Callback, callbacks_of
from ..config import Config, check_local
from ..rounds.ledger import Ledger
from ..rounds.loop import Loop
from ..rounds.parcel import Parcel
from ..rounds.round import Order
from ..rounds.trainer import Trainer
from ..rounds.transport import Transport
from ..rounds.workspace import Workspace
from ..runs.folder import check_outdir
from ..runs.result import RunResult
from .pool import Processes, processes_of


class SharedModel(Transport):
    """Every client trains the server's own model, one after another or several in one pass."""

    shares_model = True

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:
        self.workspace, self.trainer = workspace, Trainer(workspace)

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel]]:
        """The answers of a cohort after another; while one is in use, the model holds that client's tensors."""
        workspace, by_client = self.workspace, {order.client: order for order in orders}
        yield from ((order, Parcel({})) for order in by_client.values() if order.purpose == "follow")
        for cohort in self.trainer.cohorts([order.task for order in by_client.values() if order.purpose == "train"]):
            for task, answer, personal in self.trainer.answers(
                cohort, lambda task: workspace.load(task.view, task.client, task.told)
            ):
                if personal is not None:  # undone if the update does not count in the end
                    workspace.personal.keep(task.client, task.round, personal)
                answer.facts["followed"] = True
                yield by_client[task.client], answer


class LocalEngine(Loop):
    """One run on this machine; see ``Loop``."""

    def __init__(
        self,
        config: Config,
        on_round: Callable[[dict[str, Any]], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        check_local(config)
        callbacks = callbacks_of(config, callbacks)
        count = processes_of(config)
        # Processes load data and model while this one does.
        transport = Processes(config, count) if count > 1 else SharedModel()
        super().__init__(config, transport, callbacks, on_round, on_client)
        self.method, self.model = self.workspace.method, self.workspace.model


def run(
    config: Config,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """See ``fs_lowrank.run``."""
    check_outdir(config, resume)
    return LocalEngine(config, on_round, on_client, callbacks).run(resume)
