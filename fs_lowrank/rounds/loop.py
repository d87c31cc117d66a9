"""The course of a run, the same for every engine: ask, carry, take, finish, evaluate, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from safetensors import SafetensorError

from ..algebra import on_device
from ..config import Config
from ..errors import RunFailed
from ..runs.folder import outdir_of
from ..runs.result import RunResult
from ..settings.metrics import CLIENTS, measured
from ..training.schedule import evaluation_due
from .admission import LARGEST, number_of
from .ending import end_round
from .evaluator import Evaluator, size_of
from .intake import Intake
from .ledger import Ledger
from .parcel import Parcel
from .recorder import Callback, Recorder
from .round import Order, Purpose, Round
from .transport import Lost, Transport
from .workspace import Workspace

logger = logging.getLogger("fs_lowrank")


class Loop:
    """One run over a transport.

    Args:
        config: the run's configuration, whose keys the engine has checked.
        transport: that the engine is; it is ended if the run cannot be set up, and after the run.
        callbacks: they act beside training (``callbacks.callbacks_of``).
        on_round: called with each round's record; the run ends early if it returns True.
        on_client: called with (round, clients done, clients of the round) as a round proceeds.

    Attributes:
        intake: gives, for each round, where its updates go. By default they are stored until it ends.
    """

    def __init__(
        self,
        config: Config,
        transport: Transport,
        callbacks: Sequence[Callback],
        on_round: Callable[[dict[str, Any]], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None,
    ):
        self.config, self.transport = config, transport
        self.intake: Callable[[], Intake | None] = Intake
        self.on_round, self.on_client = on_round or (lambda record: None), on_client or (lambda *_: None)
        try:
            self.workspace = Workspace(config)
            self.evaluator = Evaluator(self.workspace)
            self.evaluator.check_watched()
            parts = self.workspace.method, self.workspace.initial_state, self.workspace.sizes
            self.ledger = Ledger(config, *parts, keep_messages=not transport.shares_model, heads=self.workspace.heads)
            self.recorder = Recorder(self.evaluator, self.ledger, outdir_of(config), callbacks)
        except BaseException:
            transport.end()
            raise

    def run(self, resume: bool = False) -> RunResult:
        """Run all rounds, from the start or from the last checkpoint.

        Raises:
            UserError: the folder holds another run, or cannot be continued with this configuration.
            RunFailed: something cannot be written, too few clients remain, or another run writes to the folder.
        """
        error: BaseException | None = None
        try:
            return self._run(resume)
        except (OSError, SafetensorError) as caught:
            error, folder = caught, self.recorder.outdir
            raise RunFailed(
                f"the run in {folder} stopped: {caught}; when that is mended, run again with resume=True"
            ) from caught
        except BaseException as caught:
            error = caught
            raise
        finally:
            try:
                self.transport.end(error)
            finally:
                self.recorder.release()

    def _run(self, resume: bool) -> RunResult:
        checkpoint, recorder = self.recorder.start(resume), self.recorder
        self.transport.begin(self.workspace, self.ledger, checkpoint is not None)
        done = checkpoint.round if checkpoint else self.ledger.stood
        for number in range(done + 1, self.config.federate.total_round_num + 1):
            if recorder.ended:
                break
            record = self._round(number)
            recorder.add(record)
            elsewhere = self.workspace.personal.untrained and not self.transport.shares_model
            if elsewhere and not recorder.checkpoints.due(number):
                recorder.save(number)  # a client can undo its last training, and none before that
            if self.on_round(record):
                break
        parts = self.transport.personal()
        self.workspace.personal.update({client: on_device(parts[client], self.workspace.device) for client in parts})
        return recorder.finish()

    def _round(self, number: int) -> dict[str, Any]:
        transport, base = self.transport, self.workspace.changed_base
        round = Round(number, self.ledger, intake=self.intake, codec=transport.codec, base=base)
        seconds = {"training": 0.0, "aggregation": 0.0}
        finished = None
        while finished is None:
            started = time.perf_counter()
            self._train(round)
            trained = time.perf_counter()
            finished = end_round(round, self.recorder)
            if finished is not None and finished.message is not None:
                self.transport.follow(finished.message, number)
            ended = time.perf_counter()
            seconds = {
                "training": seconds["training"] + trained - started,
                "aggregation": seconds["aggregation"] + ended - trained,
            }
        metrics = self._evaluate(round) if evaluation_due(self.config, number) else {}
        seconds["evaluation"] = time.perf_counter() - ended
        return round.record(metrics, seconds)

    def _train(self, round: Round) -> None:
        """Have the clients for which ``round`` waits train or answer."""
        for client, reason in self.transport.missing(round.selected).items():
            round.fail(client, "absent", reason)
        invited = sorted(round.waiting)
        answers = self._exchange(round, invited, "train")
        unanswered = {*invited}
        while unanswered:
            self.on_client(round.number, len(invited) - len(unanswered), len(invited))
            if (reply := next(answers, None)) is None:
                break
            order, answer = reply
            unanswered.discard(order.client)
            if isinstance(answer, Lost):
                round.fail(order.client, answer.kind, answer.reason)
            elif order.purpose == "train":
                round.take(order.client, answer)
            elif "error" in answer.facts:
                round.fail(order.client, "failed", str(answer.facts["error"])[:1000])
        for client in round.waiting:
            round.fail(client, "failed", "no answer of it is for this round")

    def _exchange(
        self, round: Round, clients: Collection[int], purpose: Purpose
    ) -> Iterator[tuple[Order, Parcel | Lost]]:
        """Bring ``clients`` up to date and have them train or evaluate; the answers, as they come.

        A client that has lost its copy of the model is asked again, with everything.
        """
        pending, retry = list(clients), not round.exchange  # of a further exchange it has lost its part, too
        while pending:
            lost = []
            orders = [round.ask(client, self.transport.standing(client), purpose) for client in pending]
            for order, answer in self.transport.exchange(orders):
                if isinstance(answer, Lost):
                    yield order, answer
                    continue
                facts = answer.facts
                if facts.get("lost") is True and retry:
                    logger.warning("client %d: %.300s; it is sent everything", order.client, facts.get("error"))
                    self.ledger.forget([order.client])
                    lost.append(order.client)
                    continue
                if "error" not in facts or facts.get("followed") is True:
                    round.delivered(order)
                yield order, answer
            pending, retry = lost, False

    def _evaluate(self, round: Round) -> dict[str, dict[str, Any]]:
        evaluator, transport = self.evaluator, self.transport
        if transport.shares_model:
            return transport.evaluate(evaluator, self.ledger.state)
        metrics: dict[str, dict[str, Any]] = evaluator.held_out()
        if CLIENTS not in evaluator.splits():
            return metrics
        sizes = {client: size_of(examples) for client, examples in self.workspace.tested()} | self.ledger.tested
        sizes = {client: size for client, size in sorted(sizes.items()) if size}
        missing = transport.missing(sizes)
        for client, reason in missing.items():
            round.leave_unevaluated(client, reason)
        names = [name for name in measured(self.config.model.task, []) if name in ("loss", "acc")]
        scores = {}
        for order, answer in self._exchange(round, [c for c in sizes if c not in missing], "evaluate"):
            if isinstance(answer, Lost):
                round.leave_unevaluated(order.client, answer.reason)
            elif values := scores_in(answer.facts, names):
                scores[order.client] = {**values, **sizes[order.client]}
            else:
                default = f"its answer has no {' and '.join(names)} that it can be"
                round.leave_unevaluated(order.client, str(answer.facts.get("error", default)))
        if scores:
            metrics[CLIENTS] = evaluator.combined(dict(sorted(scores.items())))
        return metrics


def scores_in(facts: Mapping[str, Any], metrics: Collection[str]) -> dict[str, float]:
    """The ``metrics`` of a client's own model, by the facts of its answer, which have any type.

    Empty if one of them is missing or no number that it can be.
    """
    reported = facts.get("scores")
    if not isinstance(reported, dict):
        return {}
    bounds = {"acc": (0.0, 1.0), "loss": (-LARGEST, LARGEST)}
    values = {name: number_of(reported.get(name), *bounds[name]) for name in metrics}
    return {name: value for name, value in values.items() if value is not None} if None not in values.values() else {}
