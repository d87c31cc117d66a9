"""The framework's server with our method's state, selection of clients and aggregation.

The framework still decides how clients join, when it evaluates, and which results are best. A round itself is that of
``fs_lowrank.rounds``, as in the embedded engine, and callbacks stop a run early and save models.
"""

from __future__ import annotations

import logging
import time

from federatedscope.core.message import Message
from federatedscope.core.workers import Server

from ...rounds.codec import codec_of
from ...rounds.parcel import Parcel
from ...rounds.round import Order, Round
from . import wire
from .aggregator import MethodAggregator
from .config import for_frameworks_workers
from .session import current
from .sums import intake_of

logger = logging.getLogger("federatedscope.lowrank")


class LowRankServer(Server):
    """A server. The framework counts rounds from 0 (``state``), our methods from 1.

    Attributes:
        round: the current round, or the last one until its evaluation is complete.
        round_open: whether updates are awaited. evaluating: whether evaluations of clients are.
        to_ask: clients that have not been sent the round's message yet, if they are asked one after another.
        only_ends: whether all rounds of the run that is resumed are done, but not its end.
        postponed: whether a round is to start when the clients' evaluation of the last round is complete.
        pending: of a round whose evaluation is not complete: its seconds, and those of each client.
    """

    def __init__(self, config=None, **kwargs):
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        super().__init__(config=for_frameworks_workers(config), **kwargs)
        self._cfg = config
        self.ledger, quantization = self.session.ledger, config.quantization
        self.codec = codec_of(quantization.method, quantization.nbits)
        self.aggregator = MethodAggregator(self.session)
        self.aggregators = [self.aggregator]
        self.models = [None]  # the framework would pickle the model to learn its size
        self.round: Round
        self.cur_timestamp: float
        self.to_ask: list[int] = []
        self.round_open = self.evaluating = self.postponed = self.stop_asked = False
        self.pending: tuple[dict, dict] | None = None
        self.session.keeper.start(self.session.resume)
        self.state = self.ledger.stood
        if self.state:
            self.ledger.forget(range(1, self.client_num + 1))  # their copies are those of the start
        self.only_ends = self.state >= self.total_round_num or self.session.keeper.ended

    def trigger_for_start(self):
        if self.only_ends:
            if self.check_client_join_in():
                self.terminate()
            return
        super().trigger_for_start()

    # -- downlink ----------------------------------------------------------------------------------

    def broadcast_model_para(self, msg_type="model_para", sample_client_num=-1, filter_unseen_clients=True):
        """Send every client of the round the messages that it lacks; for ``evaluate``, send them to all clients."""
        if msg_type == "evaluate":
            self.msg_buffer["eval"][self.state - 1] = {}
            self.evaluating = True
            for client in sorted(map(int, self.comm_manager.neighbors)):
                self._deliver(self.round.ask(client, purpose="evaluate"), msg_type, self.state - 1)
            return
        self.round_started = time.perf_counter()
        drawn = None if self._cfg.federate.sampler == "uniform" else self.sampler.sample(size=sample_client_num)
        self.round = Round(
            self.state + 1,
            self.ledger,
            None if drawn is None else map(int, drawn),
            intake=intake_of(self._cfg, self.session.site),
            codec=self.codec,
            base=self.session.site.changed_base,
        )
        self.msg_buffer["train"].setdefault(self.state, {})
        self.to_ask = list(self.round.selected)
        self.round_open = True
        self._ask(1 if self._cfg.federate.online_aggr else len(self.to_ask))
        self.advance()

    def _ask(self, count: int) -> None:
        """Send the round's message to the next ``count`` clients that will train."""
        while self.to_ask and count > 0:
            client = self.to_ask.pop(0)
            order = self.round.ask(client)
            self._deliver(order, "model_para", self.state)
            count -= order.purpose == "train"

    def _deliver(self, order: Order, kind: str, state: int) -> None:
        """Send ``order``, which has arrived by then."""
        parcel, client = order.parcel, order.client
        if self.session.shares_model:
            # The shared model already contains the merges of the message, so the client loads the state.
            view = self.session.method.view(self.ledger.state, client)
            parcel = Parcel(view, **{**parcel.facts, "whole": True})
        message = wire.message(kind, self.ID, [client], parcel, state, self.cur_timestamp)
        self.comm_manager.send(message)
        self._monitor.track_upload_bytes(order.sizes[0])
        self.round.delivered(order)

    # -- uplink ------------------------------------------------------------------------------------

    def callback_funcs_model_para(self, message: Message):
        """Take the update of a client."""
        if self.is_finish:
            return "finish"
        self.cur_timestamp = max(self.cur_timestamp, message.timestamp)
        client = int(message.sender)
        if self.round.take(client, message.content):
            self.msg_buffer["train"].setdefault(self.state, {})[client] = self.round.samples[client]
        if self.to_ask:
            self._ask(1)
        return self.advance()

    # -- a round's end -----------------------------------------------------------------------------

    def advance(self) -> bool:
        """End the round, or its evaluation, if nothing is awaited any more; whether anything was ended."""
        if self.is_finish:
            return False
        return bool(self.check_and_move_on() or self.check_and_move_on(check_eval_result=True))

    def check_buffer(self, cur_round, min_received_num, check_eval_result=False):
        if check_eval_result:
            return self.evaluating and len(self.msg_buffer["eval"][self.state - 1]) == len(self.comm_manager.neighbors)
        return self.round_open and not self.round.waiting

    def _perform_federated_aggregation(self):
        self.round_open = False
        round, session, started = self.round, self.session, time.perf_counter()
        # Also those that have not answered, else the framework's samplers would never draw them again.
        self.sampler.change_state(round.selected, "idle")
        self.aggregator.aggregate({"round": round})
        self.evaluation_started = time.perf_counter()
        seconds = {"training": started - self.round_started, "aggregation": self.evaluation_started - started}
        self.pending = seconds, dict(sorted(session.spent.items()))
        session.spent.clear()
        logger.info(
            "round %d: %d of %d clients, %d bytes up, %d bytes down",
            round.number,
            len(round.losses),
            len(round.selected),
            sum(b for b, _ in round.uplink.values()),
            sum(b for b, _ in round.downlink.values()),
        )
        if not session.evaluator.due(round.number):
            self._close_round({})
        return len(round.losses)

    def _close_round(self, metrics: dict) -> None:
        """Write the round's record, and a checkpoint where one is due."""
        if self.pending is None:
            return
        (seconds, spent), self.pending = self.pending, None
        record = self.round.record(
            metrics, {**seconds, "evaluation": time.perf_counter() - self.evaluation_started}, spent
        )
        self.session.keeper.add(record)
        self.stop_asked = bool(self.session.on_round(record)) or self.session.keeper.ended or self.stop_asked

    def _start_new_training_round(self, aggregated_num=0):
        if self.pending is not None:
            # The framework would start at once, and the clients' answers would be of two rounds.
            self.postponed = True
            return
        if self.stop_asked:
            self.save_best_results()
            self.terminate()
            self.state = self.total_round_num + 1
            return
        super()._start_new_training_round(aggregated_num)

    # -- evaluation and end ------------------------------------------------------------------------

    def eval(self):
        if self.is_finish:  # the framework evaluates again after it has stopped early
            return
        if self._cfg.federate.make_global_eval and not self.session.site.held_out():
            return self.check_and_save()  # the framework would fail without a split to evaluate
        super().eval()

    def _merge_and_format_eval_results(self):
        # Sorted by client, so that the average does not depend on the order of arrival.
        self.evaluating, round = False, self.state - 1
        answers = self.msg_buffer["eval"][round] = dict(sorted(self.msg_buffer["eval"][round].items()))
        key = self._cfg.eval.best_res_update_round_wise_key
        if any(key in metrics for metrics in answers.values() if metrics):
            super()._merge_and_format_eval_results()
        else:
            if any(answers.values()):
                logger.warning("round %d: no client that evaluated has %s; the evaluation is left out", self.state, key)
            self._close_round({})
            super().check_and_save()
        if self.postponed and not self.is_finish:
            self.postponed = False
            self._start_new_training_round()

    def callback_funcs_for_metrics(self, message: Message):
        """Take the metrics of a client; one without held-out data has none."""
        metrics = message.content if isinstance(message.content, dict) else None
        self.msg_buffer["eval"][message.state][int(message.sender)] = metrics
        return self.advance()

    def check_and_save(self):
        if self._cfg.federate.make_global_eval:
            metrics = dict(self.trainer.results)
        else:
            means = {k: v[-1] for k, v in self.history_results.get("Results_weighted_avg", {}).items()}
            metrics = {
                split: {
                    name: float(means[f"{split}_{key}"])
                    for name, key in (("loss", "avg_loss"), ("acc", "acc"))
                    if f"{split}_{key}" in means
                }
                for split in self._cfg.eval.split
            }
            metrics = {split: values for split, values in metrics.items() if values}
            answers = self.msg_buffer["eval"].get(self.state - 1, {})
            of_clients = {
                client: {
                    "loss": m["test_avg_loss"],
                    **({"acc": m["test_acc"]} if "test_acc" in m else {}),  # a regression has none
                    "samples": int(m["test_total"]),
                }
                for client, m in answers.items()
                if m and {"test_avg_loss", "test_total"} <= m.keys()
            }
            if of_clients and "test" in metrics:
                metrics["test"]["clients"] = of_clients
        own = (self.session.site.personal.of_model and metrics) or self.session.config.eval.client_scores
        if own:
            metrics["client_test"] = self.session.evaluator.clients(self.ledger.state)
        self._close_round(metrics)
        super().check_and_save()

    def terminate(self, msg_type="finish"):
        if self.is_finish:
            return
        self.is_finish = True
        self._monitor.finish_fl()
        self.session.conclude()
        everyone = list(self.comm_manager.neighbors)
        self.comm_manager.send(
            wire.message(msg_type, self.ID, everyone, "finish", self.state, timestamp=self.cur_timestamp)
        )
