"""The framework's server with our method's state, selection of clients and aggregation.

The framework still decides how clients join, when it evaluates, stops early and saves, and which results are best. A
round itself is that of ``fs_lowrank.rounds``, as in the embedded engine.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from federatedscope.core.message import Message

from ...errors import UserError
from ...methods import RefusedUpdate
from ...rounds.codec import codec_of
from ...rounds.fits import SPLITS
from ...rounds.intake import Kept, RunningMean
from ...rounds.parcel import Parcel
from ...rounds.round import Order, Round
from ...settings.metrics import measured
from . import wire
from .aggregator import MethodAggregator
from .config import for_frameworks_workers
from .distributed_server import DistributedServer
from .scores import check_scores
from .session import current
from .sums import Shares

logger = logging.getLogger("federatedscope.lowrank")


class Unmerged(RuntimeError):
    """The framework cannot merge the clients' metrics of one evaluation."""


class LowRankServer(DistributedServer):
    """A server. The framework counts rounds from 0 (``state``), our methods from 1.

    Attributes:
        round: the current round, or the last one until its evaluation is complete.
        round_open: whether updates are awaited. evaluating: whether evaluations of clients are.
        to_ask: clients that have not been sent the round's message yet, if they are asked one after another.
        asked_to_evaluate: clients whose evaluation is awaited.
        own_data: clients that have joined with data of their own, of which the server does not know how many there are.
        waits_for_all: whether the first round waits for all clients, and for what they are asked when they join.
        only_ends: whether all rounds of the run that is resumed are done, but not its end.
        postponed: whether a round is to start when the clients' evaluation of the last round is complete.
        pending: of a round whose evaluation is not complete: its seconds, and those of each client.
    """

    def __init__(self, config=None, **kwargs):
        if config is None:  # the framework asks a worker without a configuration which messages it handles
            super().__init__(**kwargs)
            return
        self.session = current()
        self.distributed = config.federate.mode == "distributed"
        super().__init__(config=for_frameworks_workers(config), **kwargs)
        self._cfg = config
        lowrank = self.session.config.lowrank
        self.ledger, quantization = self.session.ledger, config.quantization
        self.codec = codec_of(quantization.method, quantization.nbits)
        self.timeout, self.min_clients = lowrank.timeout, lowrank.min_clients
        self.aggregator = MethodAggregator(self.session)
        self.aggregators = [self.aggregator]
        self.round: Round
        self.cur_timestamp: float
        self.to_ask: list[int] = []
        self.asked_to_evaluate: set[int] = set()
        self.own_data: set[int] = set()
        self.round_open = self.evaluating = self.postponed = self.started = self.stop_asked = False
        self.waits_for_all = True
        self.pending: tuple[dict, dict] | None = None
        if self.distributed:
            self._open()
        self.state = self._restored(config)
        ended = self.state >= self.total_round_num or self.session.keeper.ended
        self.only_ends = self.session.resume and ended
        if self.state >= self.total_round_num and not self.only_ends:
            raise UserError(
                f"all {self.total_round_num} rounds are done already; raise federate.total_round_num to go on"
            )

    def _restored(self, config) -> int:
        done = self.session.begin()
        if config.federate.restore_from and not done:
            done = self.aggregator.load_model(config.federate.restore_from)
            logger.info("restored round %d from %s", done, config.federate.restore_from)
        if done:
            self.ledger.forget(range(1, self.client_num + 1))  # their copies are those of the start
        return done

    def check_client_join_in(self):
        if self.started:
            return False
        complete = self.join_in_client_num == self.client_num and not self.untold()
        self.started = complete or not self.waits_for_all
        return self.started

    def trigger_for_start(self):
        if self.only_ends:
            if self.check_client_join_in():
                self.terminate()
            return
        # The framework would pickle the model to learn its size.
        models, self.models = self.models, [None]
        try:
            super().trigger_for_start()
        finally:
            self.models = models

    # -- downlink ----------------------------------------------------------------------------------

    def broadcast_model_para(self, msg_type="model_para", sample_client_num=-1, filter_unseen_clients=True):
        """Send every client of the round the messages that it lacks; for ``evaluate``, send them to all clients."""
        if msg_type == "evaluate":
            self.msg_buffer["eval"][self.state - 1] = {}
            self.asked_to_evaluate, self.evaluating = {int(c) for c in self.comm_manager.neighbors}, True
            for client in sorted(set(range(1, self.client_num + 1)) - self.asked_to_evaluate):
                if self._has_rows(client):
                    self._not_evaluated(client, "it has not joined")
            for client in sorted(self.asked_to_evaluate):
                self._deliver(self.round.ask(client, purpose="evaluate"), msg_type, self.state - 1)
            return
        self.round_started = time.perf_counter()
        drawn = None if self._cfg.federate.sampler == "uniform" else self.sampler.sample(size=sample_client_num)
        self.round = Round(
            self.state + 1,
            self.ledger,
            None if drawn is None else map(int, drawn),
            intake=self._intake(),
            codec=self.codec,
            base=self.session.site.changed_base,
        )
        self.msg_buffer["train"].setdefault(self.state, {})
        self.to_ask = list(self.round.selected)
        one_by_one = self._cfg.federate.online_aggr and not self.distributed
        self.round_open = True
        self._ask(1 if one_by_one else len(self.to_ask))
        if not self.distributed:
            self.advance()

    def _intake(self):
        uniform = self.session.method.setting.uniform
        if self._cfg.federate.use_ss:
            return Shares(self.client_num, uniform, self.session.site.device)
        return RunningMean(uniform) if self._cfg.federate.online_aggr else Kept()

    def _ask(self, count: int) -> None:
        """Send the round's message to the next ``count`` clients that will train."""
        while self.to_ask and count > 0:
            client = self.to_ask.pop(0)
            if client not in self.comm_manager.neighbors:
                self._failed(client, "absent", "it has not joined")
                continue
            order = self.round.ask(client)
            self._deliver(order, "model_para", self.state)
            count -= order.purpose == "train"

    def waiting(self) -> frozenset[int]:
        """The clients of the round that have neither answered nor failed."""
        return self.round.waiting if self.round_open else frozenset()

    def _awaited(self) -> frozenset[int]:
        """The clients whose updates are awaited."""
        return self.waiting() & self.round.trains if self.round_open else frozenset()

    def _deliver(self, order: Order, kind: str, state: int) -> None:
        """Send ``order``; in standalone mode it has arrived by then."""
        parcel, client = order.parcel, order.client
        if self.session.shares_model:
            # The shared model already contains the merges of the message, so the client loads the state.
            view = self.session.method.view(self.ledger.state, client)
            parcel = Parcel(view, **{**parcel.facts, "whole": True})
        content = wire.content_of(parcel, self.distributed)
        message = wire.message(self, kind, [client], content, state, self.cur_timestamp)
        if self.distributed:
            return self.dispatch(order, message)
        self.comm_manager.send(message)
        self._monitor.track_upload_bytes(order.sizes[0])
        self.round.delivered(order)

    # -- uplink ------------------------------------------------------------------------------------

    def _failed(self, client: int, kind: Literal["absent", "failed", "refused"], reason: str) -> None:
        """Note that ``client`` failed; with secret sharing the round then fails for all, whose sums lack its shares."""
        self.round.fail(client, kind, reason)
        if self._cfg.federate.use_ss:
            self.to_ask = []
            for other in sorted(self.round.waiting):
                self.round.fail(other, "failed", f"its sum cannot be used without the share of client {client}")

    def callback_funcs_model_para(self, message: Message):
        if self.is_finish:
            return "finish"
        self.take_update(message)
        return self.advance()

    def take_update(self, message: Message) -> None:
        """Take the update of a client, if it is awaited."""
        client, round = int(message.sender), self.round
        if message.state != self.state or client not in self._awaited():
            logger.info(
                "ignored what client %d sent for the framework's round %d: it is not awaited in round %d",
                *(client, message.state, self.state + 1),
            )
            return
        if self.distributed:
            self.confirm(self.undelivered.get(client))
        self.cur_timestamp = max(self.cur_timestamp, message.timestamp)
        parcel = wire.parcel_of(message.content)
        sizes = None
        if self._cfg.federate.use_ss:
            # A client sends a share of this size to every other client, and a sum of shares to the server.
            sizes = tuple(size * self.client_num for size in self.codec.sizes(parcel.tensors, self.ledger.heads))
        if round.take(client, parcel, sizes):
            self.msg_buffer["train"].setdefault(self.state, {})[client] = round.samples[client]
        else:
            self._failed(client, "refused", f"client {client}: its answer is of another round")
        if self.to_ask:
            self._ask(1)

    # -- a round's end -----------------------------------------------------------------------------

    def advance(self) -> bool:
        """End the round, or its evaluation, if nothing is awaited any more; whether anything was ended."""
        if self.is_finish:
            return False
        return bool(self.check_and_move_on() or self.check_and_move_on(check_eval_result=True))

    def check_buffer(self, cur_round, min_received_num, check_eval_result=False):
        if check_eval_result:
            return self.evaluating and self.asked_to_evaluate <= self.msg_buffer["eval"][self.state - 1].keys()
        return self.round_open and not self.round.waiting

    def _perform_federated_aggregation(self):
        self.round_open = False
        round, session, started = self.round, self.session, time.perf_counter()
        # Also those that have not answered, else the framework's samplers would never draw them again.
        self.sampler.change_state(round.selected, "idle")
        finished = self.aggregator.aggregate({"round": round})
        if finished.message is not None:
            session.on_message(finished.message, round.number)
        self.evaluation_started = time.perf_counter()
        seconds = {"training": started - self.round_started, "aggregation": self.evaluation_started - started}
        self.pending = seconds, session.site.take_spent()
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
        told = {client: metrics for client, metrics in answers.items() if metrics}
        if told and not any(key in metrics for metrics in told.values()):
            logger.warning("round %d: no client that evaluated has %s; the evaluation is left out", self.state, key)
            told = {}
        try:
            if told:
                super()._merge_and_format_eval_results()
        except Unmerged as error:
            for client in told:
                self._not_evaluated(client, str(error))
            told = {}
        if not told:
            self._close_round({})
            super().check_and_save()
        if self.postponed and not self.is_finish:
            self.postponed = False
            self._start_new_training_round()

    def merge_eval_results_from_all_clients(self):
        try:
            return super().merge_eval_results_from_all_clients()
        except UserError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # what numbers can cause, not disks
            reason = f"the framework cannot merge the metrics: {type(error).__name__}: {str(error)[:300]}"
            raise Unmerged(reason) from error

    def _evaluated(self) -> set[int]:
        """The clients whose evaluation has come."""
        return set(self.msg_buffer["eval"].get(self.state - 1, ()))

    def _not_evaluated(self, client: int, reason: str) -> None:
        """Leave out the evaluation of ``client``, and do not wait for another."""
        self.asked_to_evaluate.discard(client)
        self.round.leave_unevaluated(client, reason, logger)

    def _may_report(self, client: int) -> dict[str, int]:
        """The splits on which ``client`` may evaluate, and how many samples of each it can have."""
        admission, rows = self.ledger.admission, self.session.held_out_rows(client)
        known = {split: len(share) for split, share in rows.items()}
        sizes = dict.fromkeys(SPLITS, admission.max_samples) if client in self.own_data else known
        sizes["train"] = admission.declared(client) or admission.max_samples
        return {split: sizes[split] for split in self._cfg.eval.split if split in sizes}

    def _has_rows(self, client: int) -> bool:
        """Whether ``client`` has held-out data to evaluate on, as far as the server knows them."""
        return any(split in self._cfg.eval.split for split in self.session.held_out_rows(client))

    def callback_funcs_for_metrics(self, message: Message):
        self.take_metrics(message)
        return self.advance()

    def take_metrics(self, message: Message) -> None:
        """Take the metrics of a client, if they are awaited; there are none of one without held-out data."""
        client, awaited = int(message.sender), self.asked_to_evaluate - self._evaluated()
        if not self.evaluating or message.state != self.state - 1 or client not in awaited:
            logger.info("ignored metrics of client %d for the framework's round %d", client, message.state)
            return
        if self.distributed:
            self.confirm(self.undelivered.get(client))
        metrics = message.content if isinstance(message.content, dict) else None
        accurate = "acc" in self._cfg.eval.metrics and "acc" in measured(self.session.config.model.task, [])
        try:
            check_scores(client, metrics or {}, self._may_report(client), accurate)
        except RefusedUpdate as error:
            return self._not_evaluated(client, str(error))
        if not metrics and client not in self.own_data and self._has_rows(client):
            return self._not_evaluated(client, "it has sent no metrics; its own log says why")
        self.msg_buffer["eval"][message.state][client] = metrics

    def check_and_save(self):
        if self._cfg.federate.make_global_eval:
            metrics = dict(self.trainer.results)
            # The framework stops early only by the clients' averages, which a global evaluation does not have.
            if "Results_raw" in self.history_results:
                self.history_results["Results_weighted_avg"] = self.history_results["Results_raw"]
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
        own = (self.session.site.personal.untrained and metrics) or self.session.config.eval.client_scores
        if self.session.role == "standalone" and own:
            # In distributed mode only the clients have their personal parts; make_global_eval False evaluates them.
            metrics["client_test"] = self.session.evaluator.clients(self.ledger.state)
        is_best = self._is_best(metrics)
        self._close_round(metrics)
        if is_best and self._cfg.federate.make_global_eval and self._cfg.federate.save_to:
            # If clients evaluate, the framework itself saves the best model.
            self.aggregator.save_model(self._cfg.federate.save_to, self.state)
        super().check_and_save()

    def _is_best(self, metrics: dict) -> bool:
        key = self.session.evaluator.key_value
        now = key({"metrics": metrics})
        before = [key(r) for r in self.session.keeper.history if r["metrics"]]
        return now is not None and all(b is None or now < b for b in before)

    def terminate(self, msg_type="finish"):
        if self.is_finish:
            return
        self.is_finish = True
        self._monitor.finish_fl()
        self.session.conclude()
        wire.send(self, msg_type, list(self.comm_manager.neighbors), "finish", timestamp=self.cur_timestamp)
