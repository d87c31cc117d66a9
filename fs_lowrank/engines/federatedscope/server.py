"""The framework's server, with our method's state, participation and aggregation in it.

Its flow stays: who joins, when a round is full, evaluation, early stopping, best results, saving. What travels
and what becomes of it is ``engines.server``'s business, the same as in the embedded engine.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pickle import UnpicklingError

import torch
from federatedscope.core.aggregators import Aggregator
from federatedscope.core.message import Message
from federatedscope.core.workers import Server
from torch import Tensor

from ...algebra import nbytes
from ...errors import RunFailed, UserError
from ...methods import RefusedUpdate, Update, check_update
from ...models.adapters import load_tensors
from ...rounds.record import round_record
from ..server import TooFewClients, without_head
from . import wire
from .session import Session, current, differing
from .sums import RunningMean, add_shares, dequantise, quantise, recover
from .wire import Parcel
from .worker import stock

logger = logging.getLogger("federatedscope.lowrank")


class MethodAggregator(Aggregator):
    """The method's server step and its state, where the framework expects an aggregator."""

    def __init__(self, session: Session):
        super().__init__()
        self.session, self.model = session, session.site.model

    def aggregate(self, agg_info):
        """Finish round ``agg_info["round"]`` with what the session's server has received; the message."""
        return self.session.server.finish(agg_info["round"])

    def save_model(self, path, cur_round=-1):
        """The shared tensors under the names of the framework's own adapters, and what else a run goes on from."""
        session, server = self.session, self.session.server
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        changed = set(session.method.changed_base(self.model))
        torch.save(
            {
                "cur_round": cur_round,
                "method": session.method.name,
                "model": {n: t.detach().cpu() for n, t in session.method.view(server.state).items()},
                "state": {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in server.state.items()},
                "base": {n: p.detach().cpu() for n, p in self.model.named_parameters() if n in changed},
            },
            path,
        )

    def load_model(self, path):
        """Take up where the file at ``path`` was saved; returns the rounds that were done.

        Raises:
            UserError: no such file, or one of another method or model.
        """
        session = self.session
        if not os.path.exists(path):
            raise UserError(f"federate.restore_from: there is no file {path}")
        try:
            saved = torch.load(path, map_location=session.site.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError) as error:
            raise UserError(f"federate.restore_from: cannot read {path}: {error}") from error
        if not isinstance(saved, dict) or "model" not in saved:
            raise UserError(f"federate.restore_from: {path} was not saved by a run of this framework")
        now = session.method.view(session.server.state)
        then = saved["model"]
        bad = sorted(
            n for n in now.keys() | then.keys() if n not in now or n not in then or now[n].shape != then[n].shape
        )
        if bad:
            raise UserError(
                f"federate.restore_from: {path} does not fit this method and model: {bad[0]!r} differs"
                f" ({len(bad)} tensors in all)"
            )
        if saved.get("method", session.method.name) != session.method.name:
            raise UserError(
                f"federate.restore_from: {path} is of method {saved['method']!r}, this run's is {session.method.name!r}"
            )
        # A file of the framework's own has the tensors only.
        session.server.state = dict(saved.get("state") or {**session.server.state, **then})
        load_tensors(self.model, saved.get("base", {}))
        load_tensors(self.model, session.method.view(session.server.state))
        return int(saved.get("cur_round", 0))

    def reset(self):
        """The framework calls this before every broadcast where it aggregates online; each round starts anew here."""


class LowRankServer(Server):
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
                stock(config),
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
        self.core = self.session.server
        self.timeout, self.min_clients = lowrank.timeout, lowrank.min_clients
        self.aggregator = MethodAggregator(self.session)
        self.aggregators = [self.aggregator]
        if self.distributed:
            self.comm_manager = wire.BoundedComm.take_over(
                self.comm_manager, self.timeout, config.distribute.grpc_max_send_message_length
            )
        #: clients whose model stands at the start although the run is further: a resumed run's, or a process that came
        self.fresh: set[int] = set()
        self.asked: set[int] = set()
        self.heard: set[int] = set()
        #: clients still to be sent this round's message, where they are asked one after the other
        self.waiting_room: list[int] = []
        self.asked_to_evaluate: set[int] = set()
        #: a round that begins when the clients' evaluation of the one before is in
        self.postponed = False
        #: the round of a fresh client's parcel, and the changed base weights as they stood at its start
        self.standing: tuple[int, dict[str, Tensor]] = (-1, {})
        self.started = self.stop_asked = False
        self.pending: dict | None = None
        self.shares: dict[int, dict[str, Tensor]] = {}
        self.running: RunningMean | None = None
        if config.federate.use_ss or config.federate.online_aggr:
            self.core.min_clients = 1  # it sees one update, the mean; how many it came from is counted here
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
            self.fresh = set(range(1, self.client_num + 1))
        return done

    # -- joining -----------------------------------------------------------------------------------

    def callback_funcs_for_join_in(self, message: Message):
        if "info" in message.msg_type:
            return super().callback_funcs_for_join_in(message)
        sender, content = int(message.sender), message.content
        if self.distributed:
            try:
                told = json.loads(content)
                address = {"host": str(told["address"]["host"]), "port": int(told["address"]["port"])}
                proof, config = dict(told["proof"]), dict(told["config"])
            except (TypeError, ValueError, KeyError):
                logger.warning("left out a request to join that cannot be read: is it a client with this plug-in?")
                return False
            reason = self._objection(sender, proof, config)
            if reason:
                logger.warning("refused %s:%s: %s", address["host"], address["port"], reason)
                self._tell(address, "refused", reason)
                return False
            content = address
        known = sender in self.comm_manager.neighbors
        if known or self.started:
            # It begins with the seed's tensors whatever the process before it had.
            self.comm_manager.add_neighbors(neighbor_id=sender, address=content)
            self.fresh.add(sender)
            logger.info("client %d has come %s; it will be brought up to date", sender, "again" if known else "late")
            if sender in self.asked - self.heard:
                self._failed(sender, "failed", "its process ended and another one took its place")
                return self.check_and_move_on()
            return False
        return super().callback_funcs_for_join_in(
            Message(
                msg_type=message.msg_type,
                sender=sender,
                receiver=message.receiver,
                state=message.state,
                timestamp=message.timestamp,
                content=content,
            )
        )

    def _objection(self, sender: int, proof: dict, config: dict) -> str:
        """Why this client cannot take part; empty if it can."""
        from ...config import load_config

        try:
            theirs = load_config(config)
        except UserError as error:
            return f"its configuration is wrong: {error}"
        keys = differing(theirs, self.session.config, own_data=sender == -1)
        if keys:
            return f"it was started with another configuration than the server; they differ in {', '.join(keys)}"
        mine = self.session.proof
        wrong = sorted(n for n in mine.keys() | proof.keys() if mine.get(n) != proof.get(n))
        if wrong:
            return (
                f"its model is not the server's at the start: {wrong[0]} differs"
                + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
                + "; the same seed, model files and versions of torch, transformers and peft give the same"
            )
        if sender != -1 and not 1 <= sender <= self.client_num:
            return f"there is no client {sender}; federate.client_num is {self.client_num}"
        if sender == -1 and self.started:
            return "the run has begun; a client that comes late says which one it is by distribute.data_idx"
        address = self.comm_manager.neighbors.get(sender)
        if address is not None and wire.listening(address):
            return f"client {sender} has joined already, from {address}; choose another distribute.data_idx"
        return ""

    def _tell(self, address: dict, kind: str, text: str) -> None:
        where = f"{address['host']}:{address['port']}"
        self.comm_manager._send(
            where,
            Message(
                msg_type=kind,
                sender=self.ID,
                receiver=[-1],
                state=self.state,
                timestamp=self.cur_timestamp,
                content=text,
            ),
        )

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
                parcel = self._parcel(client, round=self.state + 1, train=False)
                if self._deliver(client, msg_type, parcel, self.state - 1):
                    self.asked_to_evaluate.add(client)
            if not self.asked_to_evaluate:
                self.check_and_move_on(check_eval_result=True)
            return
        round = self.state + 1
        self.round_started = time.perf_counter()
        self.deadline = time.monotonic() + self.timeout
        if self._cfg.federate.sampler == "uniform":
            selected = self.core.select(round)
        else:
            selected = sorted(int(c) for c in self.sampler.sample(size=sample_client_num))
        self.selected, self.failed, self.losses, self.samples = selected, [], {}, {}
        self.uplink, self.downlink = {}, {}
        self.before = dict(self.core.synced), dict(self.session.site.personal)
        self.asked, self.heard, self.shares = set(), set(), {}
        self.running = RunningMean() if self._cfg.federate.online_aggr else None
        self.msg_buffer["train"].setdefault(self.state, {})
        self.waiting_room = list(selected)
        self._ask(1 if self.running is not None and not self.distributed else len(selected))
        if not self.waiting_room and self.asked <= self.heard:
            self.check_and_move_on()

    def _ask(self, count: int) -> None:
        """Send the round's message to the next ``count`` clients that will answer."""
        round = self.state + 1
        while self.waiting_room and count > 0:
            client = self.waiting_room.pop(0)
            drops = self.core.drops_out(client, round)
            if client not in self.comm_manager.neighbors:
                self._failed(client, "absent", "it has not joined")
                continue
            parcel = self._parcel(client, round, train=not drops)
            if not self._deliver(client, "model_para", parcel, self.state):
                self._failed(client, "failed", f"it cannot be reached: {self._lost(client)}")
                continue
            if drops:
                self._failed(client, "dropped", "drawn by lowrank.drop_rate")
                continue
            self.asked.add(client)
            count -= 1

    def _parcel(self, client: int, round: int, train: bool) -> Parcel:
        """What brings ``client`` to the start of ``round``; its bytes are noted."""
        method, session = self.session.method, self.session
        whole = client in self.fresh
        changes = self.core.downlink(client, round)
        if whole:
            # Its copy stands at the start, and what everyone else has got is not kept: it gets all that is.
            if self.standing[0] != round:
                changed = set(method.changed_base(session.site.model))
                self.standing = (
                    round,
                    {n: p.detach().clone() for n, p in session.site.model.named_parameters() if n in changed},
                )
            changes = {**method.view(self.core.state, client), **self.standing[1]}
            self.fresh.discard(client)
        sizes = self.core.sizes(changes)
        if self._cfg.quantization.method == "uniform" and not whole and changes:
            sizes = self._quantised_sizes(changes)
        before = self.downlink.get(client, (0, 0)) if train else (0, 0)
        self.downlink[client] = (before[0] + sizes[0], before[1] + sizes[1])
        self._monitor.track_upload_bytes(sizes[0])
        facts = {"round": round, "train": train}
        if session.shares_model:
            # One model for all: the merges in a message are in its base already, so the client takes what stands.
            return Parcel(method.view(self.core.state, client), whole=True, counted=sizes[0], **facts)
        if not whole and self._cfg.quantization.method == "uniform" and changes:
            changes, facts["quantised"] = quantise(changes, self._cfg.quantization.nbits), True
        return Parcel(changes, whole=whole, **facts)

    def _quantised_sizes(self, tensors) -> tuple[int, int]:
        step = self._cfg.quantization.nbits // 8

        def size(part):
            return sum(
                t.numel() * step + t.element_size() if t.is_floating_point() else nbytes({n: t})
                for n, t in part.items()
            )

        return size(tensors), size(without_head(tensors))

    def _deliver(self, client: int, kind: str, parcel: Parcel, state: int) -> bool:
        """Send; False if the client could not be reached, which then counts as new when it is there again."""
        content = parcel.encode() if self.distributed else parcel
        self.comm_manager.send(
            Message(
                msg_type=kind,
                sender=self.ID,
                receiver=[client],
                state=state,
                timestamp=self.cur_timestamp,
                content=content,
            )
        )
        if self.distributed and self._lost(client):
            self.fresh.add(client)
            return False
        return True

    def _lost(self, client: int) -> str:
        return self.comm_manager.lost.get(self.comm_manager.neighbors[client], "")

    # -- uplink ------------------------------------------------------------------------------------

    def _failed(self, client: int, kind: str, reason: str) -> None:
        self.failed.append({"client": client, "kind": kind, "reason": reason})
        self.heard.add(client)
        if self._cfg.federate.use_ss:
            # The others' sums lack its share: nobody is worth waiting for.
            self.heard, self.waiting_room = self.heard | self.asked, []
        if kind != "dropped":
            logger.warning("round %d: client %d: %s", self.state + 1, client, reason)

    def callback_funcs_model_para(self, message: Message):
        if self.is_finish:
            return "finish"
        client, round = int(message.sender), self.state + 1
        if message.state != self.state or client not in self.asked - self.heard:
            logger.info(
                "left out what client %d sent for round %d: nobody waits for it in round %d",
                client,
                message.state + 1,
                round,
            )
            return False
        self.sampler.change_state(client, "idle")
        self.cur_timestamp = max(self.cur_timestamp, message.timestamp)
        try:
            self._take(client, round, Parcel.of(message.content))
        except (RefusedUpdate, ValueError) as error:
            if isinstance(error, UserError):
                raise
            text = str(error) if str(error).startswith("client ") else f"client {client}: {error}"
            self._failed(client, "refused", text)
        else:
            self.heard.add(client)
        if self.waiting_room:
            self._ask(1)
        return self.check_and_move_on()

    def _take(self, client: int, round: int, parcel: Parcel) -> None:
        facts = parcel.facts
        if "error" in facts:
            if facts.get("fatal"):
                raise UserError(f"client {client}: {facts['error']}")
            return self._failed(client, "failed", str(facts["error"]))
        samples, loss = facts.get("samples"), facts.get("loss")
        if not isinstance(samples, int) or not isinstance(loss, (int, float)):
            raise RefusedUpdate(f"client {client}: its update does not say its samples and loss")
        expected = self.session.method.expected(self.core.state, round, client)
        tensors = parcel.tensors
        self._monitor.track_download_bytes(0 if not self.distributed else nbytes(tensors))
        sizes = self.core.sizes(tensors)
        if facts.get("shares"):
            self._take_shares(client, samples, tensors, expected)
            sizes = (int(facts["sent_bytes"]), int(facts["sent_bytes_without_head"]))
        else:
            if self._cfg.quantization.method == "uniform":
                tensors = dequantise(tensors, expected)
                sizes = self._quantised_sizes(tensors)
            update = Update(client, samples, {n: t.to(self.session.site.device) for n, t in tensors.items()})
            if self.running is None:
                self.core.receive(update, round)
            else:
                checked = check_update(update, expected)
                weight = 1 if self.session.method.setting.uniform else samples
                self.running.add(checked.tensors, weight)
        self.uplink[client], self.losses[client], self.samples[client] = sizes, float(loss), samples
        self.msg_buffer["train"].setdefault(self.state, {})[client] = samples

    def _take_shares(self, client: int, samples: int, tensors, expected) -> None:
        for name, want in expected.items():
            if name not in tensors or tensors[name].shape != want.shape or tensors[name].dtype != torch.int64:
                raise RefusedUpdate(f"client {client}: its sum of shares of {name!r} is missing or misshapen")
        self.shares[client] = tensors

    # -- a round's end -----------------------------------------------------------------------------

    def check_buffer(self, cur_round, min_received_num, check_eval_result=False):
        if check_eval_result:
            buffers = self.msg_buffer["eval"]
            return bool(buffers) and self.asked_to_evaluate <= buffers[max(buffers)].keys()
        return not self.waiting_room and self.asked <= self.heard

    def _perform_federated_aggregation(self):
        round, session, method = self.state + 1, self.session, self.session.method
        started = time.perf_counter()
        session.site.load_global(session.server.state)  # what stands in the model may be the last client's
        try:
            self._condense(round)
            message = self.aggregator.aggregate({"round": round})
        except TooFewClients as error:
            self.core.synced, session.site.personal = self.before
            kept = session.keeper.keep_last(round)
            reasons = "; ".join(f["reason"] for f in self.failed[:3]) or "nobody failed"
            raise RunFailed(f"{error} ({reasons}); {kept}") from error
        if self._cfg.quantization.method == "uniform":
            message = self._as_sent(message, round)
        with torch.no_grad():
            method.apply(session.site.model, message, round)
        session.on_message(message, round)
        finished = time.perf_counter()
        self.pending = {
            "round": round,
            "selected": self.selected,
            "failed": self.failed,
            "losses": self.losses,
            "uplink": self.uplink,
            "downlink": self.downlink,
            "samples": self.samples,
            "spent": session.site.take_spent(),
            "seconds": {"training": started - self.round_started, "aggregation": finished - started},
        }
        self.evaluation_started = finished
        total = {d: sum(b for b, _ in sent.values()) for d, sent in (("up", self.uplink), ("down", self.downlink))}
        logger.info(
            "round %d: %d of %d clients, %d bytes up, %d bytes down",
            round,
            len(self.losses),
            len(self.selected),
            total["up"],
            total["down"],
        )
        if not session.evaluator.due(round):
            self._close_round({})
        return len(self.losses)

    def _condense(self, round: int) -> None:
        """Where the server sees only a sum, give the method the mean as one update."""
        if self.running is None and not self._cfg.federate.use_ss:
            return
        if self._cfg.federate.use_ss and self.failed:
            raise TooFewClients(f"round {round}: with federate.use_ss the shares of every client are needed")
        if len(self.losses) < self.min_clients or not self.losses:
            raise TooFewClients(
                f"round {round}: {len(self.losses)} usable updates, lowrank.min_clients is {self.min_clients}"
            )
        if self.running is not None:
            tensors = self.running.mean()
        else:
            uniform = self.session.method.setting.uniform
            weight = len(self.samples) if uniform else sum(self.samples.values())
            expected = self.session.method.expected(self.core.state, round, next(iter(self.losses)))
            recovered = recover(add_shares(list(self.shares.values())), weight, expected)
            tensors = {n: t.to(self.session.site.device) for n, t in recovered.items()}
        self.core.updates = [check_update(Update(1, sum(self.samples.values()), tensors), tensors)]

    def _as_sent(self, message, round: int) -> dict:
        """The message as clients will get it: rounded. The server's own copy follows, so that all stay one."""
        sent = dequantise(quantise(message, self._cfg.quantization.nbits), message)
        for name, tensor in sent.items():
            if name in self.core.state:
                self.core.state[name] = tensor
            if name in self.core.outbox and self.core.keep_messages:
                self.core.outbox[name] = (round, tensor)
        return sent

    def _close_round(self, metrics: dict) -> None:
        """Write the round's record, and a checkpoint where one is due."""
        if self.pending is None:
            return
        session, pending = self.session, self.pending
        self.pending = None
        pending["seconds"]["evaluation"] = time.perf_counter() - self.evaluation_started
        record = round_record(
            session.method.view(session.server.state), pending.pop("round"), metrics=metrics, **pending
        )
        session.keeper.add(record)
        self.stop_asked = bool(session.on_round(record)) or self.stop_asked

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
        if self.session.role == "standalone" and self.session.site.untrained_personal and metrics:
            # Between processes personal parts stay with their clients, who evaluate them without make_global_eval.
            metrics["client_test"] = self.session.evaluator.clients(self.session.server.state)
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

    # -- distributed: every wait has a bound -----------------------------------------------------------

    def run(self):
        """Wait for the clients, then handle messages until the run is over.

        Raises:
            UserError: too few clients came in time, or are left.
        """
        try:
            self._gather()
            while not self.is_finish:
                self._handle(self.comm_manager.receive())
                self._give_up_on_the_lost()
        except BaseException as error:
            self._stop_clients(f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error))
            raise
        finally:
            self.comm_manager.close()

    def _handle(self, message: Message | None) -> None:
        if message is None:
            return
        handler = self.msg_handlers.get(message.msg_type)
        if handler is None:
            logger.warning("left out a message of unknown type %r", message.msg_type)
        elif message.msg_type not in ("join_in", "join_in_info") and message.sender not in self.comm_manager.neighbors:
            logger.warning("left out a %s of client %s, which has not joined", message.msg_type, message.sender)
        else:
            handler(message)

    def _gather(self) -> None:
        self.deadline = time.monotonic() + self.timeout
        while not self.started:
            self._handle(self.comm_manager.receive())
            if self.started or time.monotonic() < self.deadline:
                continue
            joined = len(self.comm_manager.neighbors)
            if joined < self.min_clients:
                raise RunFailed(
                    f"{joined} of {self.client_num} clients joined within {self.timeout:g} s, "
                    f"lowrank.min_clients is {self.min_clients}; start them, or raise lowrank.timeout"
                )
            logger.warning(
                "%d of %d clients joined within %g s; starting with them", joined, self.client_num, self.timeout
            )
            self.client_num_expected, self.join_in_client_num = self.client_num, self.client_num
            self.trigger_for_start()

    def _give_up_on_the_lost(self) -> None:
        """Go on without clients whose process is gone, at once, and without those that are silent, after the bound."""
        now = time.monotonic()
        if self.is_finish or now < getattr(self, "next_look", 0.0):
            return
        self.next_look = now + 1.0
        if self.asked_to_evaluate and self.pending is not None:
            missing = self.asked_to_evaluate - self.msg_buffer["eval"].get(max(self.msg_buffer["eval"]), {}).keys()
            gone = {c for c in missing if now > self.deadline or not wire.listening(self.comm_manager.neighbors[c])}
            if gone:
                logger.warning("no evaluation from clients %s", sorted(gone))
                self.asked_to_evaluate -= gone
                self.check_and_move_on(check_eval_result=True)
        missing = sorted(self.asked - self.heard)
        for client in missing:
            if not wire.listening(self.comm_manager.neighbors[client]):
                self._failed(
                    client,
                    "failed",
                    f"its process is gone (nothing listens on {self.comm_manager.neighbors[client]} any more)",
                )
                self.fresh.add(client)
            elif now > self.deadline:
                self._failed(client, "failed", f"no answer within lowrank.timeout, {self.timeout:g} s")
                self.fresh.add(client)
        if missing and self.asked <= self.heard:
            self.check_and_move_on()

    def _stop_clients(self, reason: str) -> None:
        self.comm_manager.timeout = min(self.timeout, 5.0)
        for client in list(self.comm_manager.neighbors):
            self.comm_manager.send(
                Message(
                    msg_type="stopped",
                    sender=self.ID,
                    receiver=[client],
                    state=self.state,
                    timestamp=self.cur_timestamp,
                    content=reason,
                )
            )
