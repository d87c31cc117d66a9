"""The embedded engine: all clients on this machine.

The tensors that a client trains are swapped in and out of the model, so the memory is that of the base and the clients'
adapters. With ``federate.process_num`` P, P further processes train and evaluate, each with a copy of the base
(``workers.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..config import Config, check_local
from ..errors import described
from ..methods import State
from ..rounds.ending import end_round, ending
from ..rounds.evaluator import Evaluator
from ..rounds.keeper import RecordKeeper
from ..rounds.ledger import Ledger
from ..rounds.parcel import Parcel
from ..rounds.round import Round
from ..rounds.site import Site
from ..runs.folder import check_outdir, claim, outdir_of
from ..runs.result import RunResult
from ..runs.trackers import trackers_of
from .program import check_others
from .workers import Workers, processes_of

logger = logging.getLogger("fs_lowrank")


class ThisProcess:
    """Trains and evaluates in the engine's process; ``Workers`` does the same with several."""

    def begin(self, site: Site, state: Callable[[], State]) -> None:
        """The run begins, or goes on, with the data and the model of ``site``."""
        self.site = site

    def train(self, round: Round, clients: Sequence[int], state: State, on_client: Callable[[int], object]) -> None:
        """Train ``clients`` in their order, those of a cohort together, and hand what they answer to ``round``.

        Args:
            on_client: called with the number of clients that are done, when one begins.
        """
        site, done = self.site, 0
        for cohort in site.cohorts(clients, round.number):
            on_client(done)
            for client, fitted in site.fit_all(cohort, round.number, lambda c: site.load_client(state, c)):
                done += 1
                if isinstance(fitted, Exception):
                    round.fail(client, "failed", described(fitted))
                    continue
                update, result = fitted
                parcel = Parcel(update.tensors, round=round.number, samples=update.num_samples)
                if round.take(client, parcel, loss=result.mean):
                    site.keep_personal(client, round.number)

    def follow(self, message: Mapping[str, Tensor], round: int) -> None:
        """The engine's own model is the only one, and has followed."""

    def evaluate(self, evaluator: Evaluator, state: State) -> dict[str, dict[str, Any]]:
        """See ``Evaluator.evaluate``."""
        return evaluator.evaluate(state)

    def end(self) -> None:
        """Nothing is left to end."""


class LocalEngine:
    """One run on this machine.

    Args:
        config: the run's configuration.
        on_round: called with each round's record; the run ends early if it returns True.
        on_client: called with (round, clients done, clients of the round) as a round proceeds.
    """

    def __init__(
        self,
        config: Config,
        on_round: Callable[[dict[str, Any]], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None,
    ):
        check_local(config)
        self.config = config
        self.on_round, self.on_client = on_round or (lambda record: None), on_client or (lambda *_: None)
        count = processes_of(config)
        if count > 1:
            check_others(config)
        lock = claim(outdir_of(config)) if count > 1 else None  # processes write their logs there from the start
        # Processes load data and model while this one does.
        self.trains: ThisProcess | Workers = Workers(config, count) if count > 1 else ThisProcess()
        try:
            self.site = Site(config)
            self.evaluator = Evaluator(self.site)
            self.evaluator.check_watched()
            self.method, self.model = self.site.method, self.site.model
            parts = self.method, self.site.initial_state, self.site.clients
            self.ledger = Ledger.of(config, *parts, heads=self.site.heads)
            self.keeper = RecordKeeper(
                self.site, self.evaluator, self.ledger, outdir_of(config), lock=lock, trackers=trackers_of(config)
            )
        except BaseException:
            self.trains.end()
            if lock:
                lock.release()
            raise

    def _round(self, number: int) -> dict[str, Any]:
        started = time.perf_counter()
        round = Round(number, self.ledger, base=self.site.changed_base)
        clients = []
        for client in round.selected:
            order = round.ask(client)
            round.delivered(order)
            if order.purpose == "train":
                clients.append(client)
        self.trains.train(
            round, clients, self.ledger.state, lambda done: self.on_client(number, done, len(round.selected))
        )
        trained = time.perf_counter()
        message = end_round(round, self.keeper).message
        if message is not None:
            self.trains.follow(message, number)
        aggregated = time.perf_counter()
        metrics = self.trains.evaluate(self.evaluator, self.ledger.state) if self.evaluator.due(number) else {}
        seconds = {
            "training": trained - started,
            "aggregation": aggregated - trained,
            "evaluation": time.perf_counter() - aggregated,
        }
        return round.record(metrics, seconds, self.site.take_spent())

    def run(self, resume: bool = False) -> RunResult:
        """Run all rounds, from the start or from the last checkpoint.

        Raises:
            UserError: the folder holds another run, or cannot be continued with this configuration.
            RunFailed: something cannot be written, too few clients remain, or another run writes to the folder.
        """
        with ending(self.keeper):
            try:
                return self._run(resume)
            finally:
                self.trains.end()
                self.site.shared_states.settle()

    def _run(self, resume: bool) -> RunResult:
        checkpoint = self.keeper.start(resume)
        self.trains.begin(self.site, lambda: self.ledger.state)
        first = checkpoint.round + 1 if checkpoint else 1
        for round in range(first, self.config.federate.total_round_num + 1):
            if self.evaluator.stalled(self.keeper.history):
                break
            record = self._round(round)
            self.keeper.add(record)
            if self.on_round(record):
                break
        return self.keeper.finish()


def run(
    config: Config,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
) -> RunResult:
    """See ``fs_lowrank.run``."""
    check_outdir(config, resume)
    return LocalEngine(config, on_round, on_client).run(resume)
