"""The framework's server with our method's state, selection of clients and aggregation.

The framework still decides how clients join, what an evaluation is, and which results are best. A round itself is that
of ``fs_lowrank.rounds``, as in the embedded engine, and callbacks stop a run early and save models.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from federatedscope.core.message import Message
from federatedscope.core.workers import Server

from ...rounds.codec import codec_of
from ...rounds.ending import end_round
from ...rounds.evaluator import average, size_of
from ...rounds.round import Order, Round
from ...training.schedule import evaluation_due
from . import wire
from .config import for_frameworks_workers
from .session import current
from .sums import intake_of

logger = logging.getLogger("federatedscope.lowrank")


class LowRankServer(Server):
    """A server. The framework counts rounds from 0 (``state``), our methods from 1.

    Attributes:
        round: the current round, or the last one until its evaluation is complete.
        seconds: that the parts of the round took.
        to_ask: clients that have not been sent the round's message yet, if they are asked one after another.
        to_draw: numbers of clients, by round, that the framework's sampler drew before the run was resumed.
        only_ends: whether all rounds of the resumed run are done, but not its end.
    """

    round: Round
    seconds: dict[str, float]
    cur_timestamp: float

    def __init__(self, config=None, **kwargs):
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        rows = [split for split, examples in self.session.workspace.held_out().items() if len(examples)]
        super().__init__(config=for_frameworks_workers(config, rows), **kwargs)
        self.ledger, self.codec = self.session.ledger, codec_of(self.session.config)
        self.online = config.federate.online_aggr
        self.aggregator.save_model = lambda path, cur_round: None  # callbacks save
        self.models = [None]  # the framework would pickle the model to learn its size
        self.to_ask: list[int] = []
        checkpoint = self.session.recorder.start(self.session.resume)
        self.state = checkpoint.round if checkpoint else self.ledger.stood
        self.to_draw = [len(record["selected"]) for record in self.session.recorder.history]
        if self.state:
            self.ledger.forget(range(1, self.client_num + 1))  # their copies are those of the start
        self.only_ends = self.state >= self.total_round_num or self.session.recorder.ended

    def trigger_for_start(self):
        if not self.only_ends:
            super().trigger_for_start()
        elif self.check_client_join_in():
            self.terminate()

    # -- downlink ----------------------------------------------------------------------------------

    def broadcast_model_para(self, msg_type="model_para", sample_client_num=-1, filter_unseen_clients=True):
        """Send every client of the round the messages that it lacks; for ``evaluate``, send them to all clients."""
        if msg_type == "evaluate":
            self.msg_buffer["eval"][self.state - 1] = {}
            for client in sorted(map(int, self.comm_manager.neighbors)):
                self._deliver(self.round.ask(client, purpose="evaluate"), msg_type, self.state - 1)
            return
        self.round_started = time.perf_counter()
        self.round = Round(
            self.state + 1,
            self.ledger,
            None if self._cfg.federate.sampler == "uniform" else self._draw(sample_client_num),
            intake=partial(intake_of, self.session.cfg, self.session.workspace),
            codec=self.codec,
            base=self.session.workspace.changed_base,
        )
        self.to_ask = list(self.round.selected)
        self._ask(1 if self.online else len(self.to_ask))
        self._advance()

    def _draw(self, count: int) -> list[int]:
        """The clients that the framework's sampler draws; after a resume it first repeats its draws of before."""
        for before in self.to_draw:
            self.sampler.change_state(self.sampler.sample(size=before), "idle")
        self.to_draw = []
        return [int(client) for client in self.sampler.sample(size=count)]

    def _ask(self, count: int) -> None:
        """Send the round's message to the next ``count`` clients that will train."""
        while self.to_ask and count > 0:
            order = self.round.ask(self.to_ask.pop(0))
            self._deliver(order, "model_para", self.state)
            count -= order.purpose == "train"

    def _deliver(self, order: Order, kind: str, state: int) -> None:
        """Send ``order``, which has arrived by then."""
        if self.session.shares_model:
            self.session.tasks[order.client] = order.task
        self.comm_manager.send(wire.message(kind, self.ID, [order.client], order.parcel, state, self.cur_timestamp))
        self._monitor.track_upload_bytes(order.sizes[0])
        self.round.delivered(order)

    # -- uplink, and a round's end -----------------------------------------------------------------

    def callback_funcs_model_para(self, message: Message):
        """Take the update of a client."""
        self.cur_timestamp = max(self.cur_timestamp, message.timestamp)
        self.round.take(int(message.sender), message.content)
        self._ask(1)
        self._advance()

    def _advance(self) -> None:
        """End the round if no update is awaited any more: the server step, then the evaluation if one is due."""
        round, session, started = self.round, self.session, time.perf_counter()
        if round.waiting:
            return
        if end_round(round, session.recorder) is None:  # the same clients are asked once more
            self.to_ask = sorted(round.waiting)
            self._ask(1 if self.online else len(self.to_ask))
            return
        # Also the clients without an answer, else the framework's samplers would never draw them again.
        self.sampler.change_state(round.selected, "idle")
        self.state += 1
        self.evaluation_started = time.perf_counter()
        self.seconds = {"training": started - self.round_started, "aggregation": self.evaluation_started - started}
        logger.info(
            "round %d: %d of %d clients, %d bytes up, %d bytes down",
            round.number,
            len(round.losses),
            len(round.selected),
            sum(b for b, _ in round.uplink.values()),
            sum(b for b, _ in round.downlink.values()),
        )
        if evaluation_due(session.config, round.number):
            self.eval()
        else:
            self._close_round({})

    def _close_round(self, metrics: dict) -> None:
        """Write the round's record, and a checkpoint where one is due; then begin the next round, or end the run."""
        session, self.seconds["evaluation"] = self.session, time.perf_counter() - self.evaluation_started
        record = self.round.record(metrics, self.seconds)
        session.recorder.add(record)
        if not session.on_round(record) and not session.recorder.ended and self.state < self.total_round_num:
            self._start_new_training_round()
            return
        self.save_best_results()
        if metrics and not self._cfg.federate.make_global_eval:
            self.save_client_eval_results()
        self.terminate()

    # -- evaluation and end ------------------------------------------------------------------------

    def eval(self):
        if self._cfg.federate.make_global_eval and not self.session.workspace.held_out():
            self.check_and_save()  # the framework would fail without a split to evaluate
        else:
            super().eval()

    def callback_funcs_for_metrics(self, message: Message):
        """Take the metrics of a client; one without held-out data has none."""
        answers = self.msg_buffer["eval"][message.state]
        answers[int(message.sender)] = message.content if isinstance(message.content, dict) else None
        if len(answers) < len(self.comm_manager.neighbors):
            return
        # Sorted by client, so that the average does not depend on the order of arrival.
        self.msg_buffer["eval"][message.state] = dict(sorted(answers.items()))
        key = self._cfg.eval.best_res_update_round_wise_key
        if any(key in metrics for metrics in answers.values() if metrics):
            self._merge_and_format_eval_results()
        else:
            if any(answers.values()):
                logger.warning("round %d: no client that evaluated has %s; the evaluation is left out", self.state, key)
            self._close_round({})

    def check_and_save(self):
        """Close the round with the metrics of its evaluation, which the framework has merged and compared."""
        if self._cfg.federate.make_global_eval:
            metrics = dict(self.trainer.results)
        else:
            metrics = self._client_means()
        evaluated = (self.session.workspace.personal.of_model and metrics) or self.session.config.eval.client_scores
        if evaluated:
            metrics["client_test"] = self.session.evaluator.clients(self.ledger.state)
        self._close_round(metrics)

    def _client_means(self) -> dict:
        """The means of the clients' metrics by split; those of the test set with the metrics of each client."""
        answers = {client: m for client, m in self.msg_buffer["eval"][self.state - 1].items() if m}
        metrics: dict[str, dict] = {}
        for split in self._cfg.eval.split:
            names = {"loss": f"{split}_avg_loss", "acc": f"{split}_acc"}  # a regression has no accuracy
            names["samples"] = f"{split}_total"  # of a language model tokens
            answered = {client: m for client, m in answers.items() if f"{split}_total" in m}
            scores = {c: {n: m[key] for n, key in names.items() if key in m} for c, m in answered.items()}
            if scores:
                metrics[split] = {n: average(scores, n) for n in next(iter(scores.values())) if n != "samples"}
            if scores and split == "test":
                tests = dict(self.session.workspace.tested())
                metrics[split]["clients"] = {
                    c: {**score, **(size_of(tests[c]) if c in tests else {})} for c, score in scores.items()
                }
        return metrics

    def terminate(self, msg_type="finish"):
        self.is_finish = True
        self._monitor.finish_fl()
        self.session.workspace.load_global(self.ledger.state)
        self.session.result = self.session.recorder.finish()
        everyone = list(self.comm_manager.neighbors)
        self.comm_manager.send(
            wire.message(msg_type, self.ID, everyone, None, self.state, timestamp=self.cur_timestamp)
        )
