"""The framework's server, with our method's state, participation and aggregation in it.

Its flow stays: who joins, when a round is full, evaluation, early stopping, best results, saving. What travels
and what becomes of it is the business of ``rounds``, the same as in the embedded engine.
"""

from __future__ import annotations

import logging
import time

from federatedscope.core.message import Message
from federatedscope.core.workers import Server

from ...errors import UserError
from ...rounds.intake import Kept, RunningMean
from ...rounds.parcel import Parcel
from ...rounds.round import Order, Round
from . import wire
from .aggregator import MethodAggregator
from .client import codec_of
from .config import for_frameworks_workers
from .distributed import Distributed
from .session import current
from .sums import Shares

logger = logging.getLogger("federatedscope.lowrank")


class LowRankServer(Distributed, Server):
    """One of the framework's servers; it counts rounds from 0, our methods from 1."""

    def __init__(
        self,
        ID=-1,
        state=0,
        config=None,
        data=None,
        model=None,
        client_num=5,
        total_round_num=10,
        device="cpu",
        strategy=None,
        unseen_clients_id=None,
        **kwargs,
    ):
        if config is None:  # the framework asks a bare worker which messages it handles
            super().__init__(ID, state)
            return
        self.session = current()
        self.distributed = config.federate.mode == "distributed"
        if self.distributed:
            wire.require_free(kwargs["host"], kwargs["port"])
        try:
            super().__init__(
                ID,
                state,
                for_frameworks_workers(config),
                data,
                model,
                client_num,
                total_round_num,
                device,
                strategy,
                unseen_clients_id,
                **kwargs,
            )
        except RuntimeError as error:
            if "bind" in str(error).lower() or "address" in str(error).lower():
                raise UserError(f"cannot listen on {kwargs.get('host')}:{kwargs.get('port')}: {error}") from error
            raise
        self._cfg = config
        lowrank = self.session.config.lowrank
        self.ledger, self.codec = self.session.ledger, codec_of(config)
        self.timeout, self.min_clients = lowrank.timeout, lowrank.min_clients
        self.aggregator = MethodAggregator(self.session)
        self.aggregators = [self.aggregator]
        if self.distributed:
            self.comm_manager = wire.BoundedComm.take_over(
                self.comm_manager, self.timeout, config.distribute.grpc_max_send_message_length
            )
        #: the round that is under way, or that is done but for its evaluation
        self.round: Round | None = None
        #: clients still to be sent this round's message, where they are asked one after the other
        self.waiting_room: list[int] = []
        self.asked_to_evaluate: set[int] = set()
        #: a round that begins when the clients' evaluation of the one before is in
        self.postponed = False
        self.started = self.stop_asked = False
        #: what is still to be told of the round when its evaluation is in: seconds, and those by client
        self.pending: tuple[dict, dict] | None = None
        self.state = self._restored(config)
        if self.state >= self.total_round_num:
            raise UserError(
                f"all {self.total_round_num} rounds are done already; raise federate.total_round_num to go on"
            )

    def _restored(self, config) -> int:
        done = self.session.begin()
        if config.federate.restore_from and not done:
            done = self.aggregator.load_model(config.federate.restore_from)
            logger.info("restored round %d from %s", done, config.federate.restore_from)
        if done:
            self.ledger.forget(range(1, self.client_num + 1))  # their copies stand at the start
        return done

    def check_client_join_in(self):
        if self.started:
            return False
        self.started = super().check_client_join_in()
        return self.started

    def trigger_for_start(self):
        # The framework pickles the model to learn its size, which only simulated resources use.
        models, self.models = self.models, [None]
        try:
            super().trigger_for_start()
        finally:
            self.models = models

    # -- downlink ----------------------------------------------------------------------------------

    def broadcast_model_para(self, msg_type="model_para", sample_client_num=-1, filter_unseen_clients=True):
        """Send every client of the round what it lacks; for ``evaluate``, every client there is."""
        if msg_type == "evaluate":
            self.asked_to_evaluate = set()
            self.msg_buffer["eval"][self.state - 1] = {}
            self.deadline = time.monotonic() + self.timeout
            for client in sorted(int(c) for c in self.comm_manager.neighbors):
                if self._deliver(self.round.ask(client, purpose="evaluate"), msg_type, self.state - 1):
                    self.asked_to_evaluate.add(client)
            if not self.asked_to_evaluate:
                self.check_and_move_on(check_eval_result=True)
            return
        self.round_started = time.perf_counter()
        self.deadline = time.monotonic() + self.timeout
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
        self.waiting_room = list(self.round.selected)
        one_by_one = self._cfg.federate.online_aggr and not self.distributed
        self._ask(1 if one_by_one else len(self.waiting_room))
        if not self.round.waiting:
            self.check_and_move_on()

    def _intake(self):
        uniform = self.session.method.setting.uniform
        if self._cfg.federate.use_ss:
            return Shares(self.client_num, uniform, self.session.site.device)
        return RunningMean(uniform) if self._cfg.federate.online_aggr else Kept()

    def _ask(self, count: int) -> None:
        """Send the round's message to the next ``count`` clients that will answer."""
        while self.waiting_room and count > 0:
            client = self.waiting_room.pop(0)
            if client not in self.comm_manager.neighbors:
                self._failed(client, "absent", "it has not joined")
                continue
            order = self.round.ask(client)
            if not self._deliver(order, "model_para", self.state):
                self._failed(client, "failed", f"it cannot be reached: {self._lost(client)}")
            elif order.purpose == "train":
                count -= 1

    def _asked(self) -> frozenset[int]:
        """The clients whose updates are waited for."""
        return self.round.waiting & self.round.trains if self.round else frozenset()

    def _deliver(self, order: Order, kind: str, state: int) -> bool:
        """Send; False if the client could not be reached, which then counts as new when it is there again."""
        parcel, client = order.parcel, order.client
        if self.session.shares_model:
            # One model for all: the merges in a message are in its base already, so the client takes what stands.
            view = self.session.method.view(self.ledger.state, client)
            parcel = Parcel(view, **{**parcel.facts, "whole": True})
        self.comm_manager.send(
            Message(
                msg_type=kind,
                sender=self.ID,
                receiver=[client],
                state=state,
                timestamp=self.cur_timestamp,
                content=wire.content_of(parcel, self.distributed),
            )
        )
        self._monitor.track_upload_bytes(order.sizes[0])
        if self.distributed and self._lost(client):
            self.ledger.forget([client])  # it may have got the message all the same
            return False
        self.round.delivered(order)
        return True

    def _lost(self, client: int) -> str:
        return self.comm_manager.lost.get(self.comm_manager.neighbors[client], "")

    # -- uplink ------------------------------------------------------------------------------------

    def _failed(self, client: int, kind: str, reason: str) -> None:
        self.round.fail(client, kind, reason)
        self._give_up_shares(client)

    def _give_up_shares(self, client: int) -> None:
        """Where clients share secrets, the others' sums lack those of a client that failed: nobody is waited for."""
        if self._cfg.federate.use_ss:
            self.waiting_room = []
            for other in sorted(self.round.waiting):
                self.round.fail(other, "failed", f"its sum is of no use without the share of client {client}")

    def callback_funcs_model_para(self, message: Message):
        if self.is_finish:
            return "finish"
        client, round = _number(message.sender), self.round
        if client is None or message.state != self.state or client not in self._asked():
            logger.info(
                "left out what client %.60r sent for the framework's round %.60r: nobody waits for it in round %d",
                message.sender,
                message.state,
                self.state + 1,
            )
            return False
        self.sampler.change_state(client, "idle")
        if isinstance(message.timestamp, (int, float)):
            self.cur_timestamp = max(self.cur_timestamp, message.timestamp)
        try:
            parcel = wire.parcel_of(message.content)
        except ValueError as error:
            self._failed(client, "refused", f"client {client}: {error}")
        else:
            self._monitor.track_download_bytes(parcel.nbytes if self.distributed else 0)
            sizes = None
            if self._cfg.federate.use_ss:
                # A client sends a share of this size to every other one, and their sum to the server.
                sizes = tuple(size * self.client_num for size in self.codec.sizes(parcel.tensors))
            if round.take(client, parcel, sizes):
                self.msg_buffer["train"].setdefault(self.state, {})[client] = round.samples[client]
            else:
                self._failed(client, "refused", f"client {client}: its answer is of another round")
        if self.waiting_room:
            self._ask(1)
        return self.check_and_move_on()

    # -- a round's end -----------------------------------------------------------------------------

    def check_buffer(self, cur_round, min_received_num, check_eval_result=False):
        if check_eval_result:
            buffers = self.msg_buffer["eval"]
            return bool(buffers) and self.asked_to_evaluate <= buffers[max(buffers)].keys()
        return self.round is not None and not self.round.waiting

    def _perform_federated_aggregation(self):
        round, session, started = self.round, self.session, time.perf_counter()
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
        self.stop_asked = bool(self.session.on_round(record)) or self.stop_asked

    def _start_new_training_round(self, aggregated_num=0):
        if self.pending is not None:
            # The framework would go on at once; what its clients answer would be of either round.
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
        if self.is_finish:  # the framework evaluates once more after it has stopped early
            return
        if self._cfg.federate.make_global_eval and not self.session.site.held_out():
            return self.check_and_save()  # nothing to evaluate, which the framework would not get over
        super().eval()

    def _merge_and_format_eval_results(self):
        # By client: what comes in any order is averaged in one.
        round = max(self.msg_buffer["eval"])
        answers = self.msg_buffer["eval"][round] = dict(sorted(self.msg_buffer["eval"][round].items()))
        if answers:
            super()._merge_and_format_eval_results()
        else:
            self._close_round({})
            super().check_and_save()
        if self.postponed and not self.is_finish:
            self.postponed = False
            self._start_new_training_round()

    def callback_funcs_for_metrics(self, message: Message):
        if not isinstance(message.content, dict):
            message.content = None  # a client without held-out data
        if int(message.sender) not in self.asked_to_evaluate or self.is_finish:
            return False
        return super().callback_funcs_for_metrics(message)

    def check_and_save(self):
        if self._cfg.federate.make_global_eval:
            metrics = dict(self.trainer.results)
            # The framework stops early by clients' averages only, which a global evaluation does not have.
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
        if self.session.role == "standalone" and self.session.site.personal.untrained and metrics:
            # Between processes personal parts stay with their clients, who evaluate them without make_global_eval.
            metrics["client_test"] = self.session.evaluator.clients(self.ledger.state)
        is_best = self._is_best(metrics)
        self._close_round(metrics)
        if is_best and self._cfg.federate.make_global_eval and self._cfg.federate.save_to:
            # With client evaluations the framework saves the best itself.
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
        self.comm_manager.send(
            Message(
                msg_type=msg_type,
                sender=self.ID,
                receiver=list(self.comm_manager.neighbors),
                state=self.state,
                timestamp=self.cur_timestamp,
                content="finish",
            )
        )


def _number(sender: object) -> int | None:
    """The client that a message says it is of; None if that is no number."""
    try:
        return int(sender)
    except (TypeError, ValueError, OverflowError):
        return None
