"""Standalone with ``federate.process_num`` P: the server runs in this process, the clients in P − 1 processes.

The framework's own runner needs P GPUs and a state dict of one shape in every message. This one sends what the method
sends, runs with or without GPUs, and gives tensors that are bit-identical to those of a run in one process. A process
that dies ends the run, since its clients and what they remember are nowhere else.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from types import SimpleNamespace

import torch
from federatedscope.core.auxiliaries.data_builder import get_data
from federatedscope.core.auxiliaries.utils import setup_seed
from federatedscope.core.auxiliaries.worker_builder import get_client_cls
from federatedscope.core.fed_runner import StandaloneRunner
from federatedscope.core.message import Message
from torch import Tensor

from ...algebra import on_device
from ...config import load_config
from ...errors import RunFailed
from ...jobs.pool import Call, Pool
from ...models.adapters import load_tensors
from ...rounds.copies import copied
from ...rounds.parcel import Parcel
from ...runs.checkpoint import load_checkpoint
from ..pool import NAME, divided, joined, on_a_gpu
from ..program import check_others
from .aggregator import MethodAggregator
from .config import our_method, to_framework
from .data import worker_data
from .logs import LogTo
from .session import current
from .wire import Sealed


class ParallelRunner(StandaloneRunner):
    """The framework's standalone runner, with the clients in further processes.

    Args:
        processes: number of processes, this one included; by default ``federate.process_num``.
    """

    def __init__(self, *args, config, processes: int = 0, **kwargs):
        self.processes = processes or config.federate.process_num
        config = config.clone()
        config.defrost()
        config.federate.process_num = 1  # each process runs as one of its own
        config._immutable(True)
        super().__init__(*args, config=config, **kwargs)

    def _set_up(self):
        self.session = current()
        check_others(self.session.config)
        self.data = worker_data(self.session, self.cfg)
        super()._set_up()

    def _setup_client(self, client_id=-1, client_model=None, resource_info=None):
        """A stand-in for a client, which is in another process."""
        return SimpleNamespace(trainer=None, resource_info=resource_info)

    def run(self):
        """Run to the end and return the best results, as every runner of the framework does.

        Raises:
            RunFailed: a process has died, or nothing is left to do.
            UserError: what a process reports that the user can put right.
        """
        self.session.on_message = self._follow
        numbers = list(self.client)
        count = min(self.processes - 1, len(numbers))
        self.home_of = {number: place % count for place, number in enumerate(numbers)}
        self.pool = Pool(count, self._prepare, name=NAME, imports=[__name__], restarts=0)
        self.working = list(self.pool.prepared)
        try:
            while self._is_busy() or not self.server.is_finish:
                self._hand_out()
                if not (self._is_busy() or self.server.is_finish):
                    raise RunFailed(
                        f"round {self.server.state + 1} cannot be completed: no process has any work left; the logs "
                        f"are in {self.session.outdir}; run again with resume=True"
                    )
                seconds = 0.0 if self.shared_comm_queue else None
                wait([work.future for work in self.working], seconds, FIRST_COMPLETED)
                for work in [work for work in self.working if work.future.done()]:
                    self.working.remove(work)
                    if answer := self.pool.result(work):
                        self._take(Parcel.of(answer))
        finally:
            self.pool.end()
        self.server._monitor.finish_fed_runner(fl_mode=self.mode)
        return self.server.best_results

    def _is_busy(self) -> bool:
        return bool(self.shared_comm_queue or self.working)

    def _prepare(self, rank: int) -> list[Call]:
        session = self.session
        resources = {n: self.client[n].resource_info for n, home in self.home_of.items() if home == rank}
        return [(_load, session.config.to_dict(), str(session.outdir), rank, resources, session.resume)]

    def _follow(self, message, round: int) -> None:
        if self.session.shares_model:
            data = Parcel(message, kind="follow", round=round).to_bytes()
            self.working += [self.pool.submit(rank, _do, data) for rank in self.pool.executors]

    def _hand_out(self) -> None:
        """Give the processes the messages in the framework's queue."""
        while self.shared_comm_queue:
            message = self.shared_comm_queue.popleft()
            receivers = message.receiver if isinstance(message.receiver, list) else [message.receiver]
            if receivers == [self.server_id]:
                self._handle_msg(message)
                continue
            for number in map(int, receivers):
                parcel = _packed(message, number)
                facts = parcel.facts.get("facts", {})
                if facts.get("purpose") == "train":
                    self.session.on_client(facts["round"], number, self.session.config.sampled_per_round)
                self.working.append(self.pool.submit(self.home_of[number], _do, parcel.to_bytes()))

    def _take(self, answer: Parcel) -> None:
        """Take what a process has answered: what its clients have sent, and their own parts of the model."""
        facts, site, groups = answer.facts, self.session.site, divided(answer)
        site.add_spent({int(n): spent for n, spent in facts["spent"].items()})
        for group, tensors in groups.items():
            if group.startswith("personal "):
                own = on_device(tensors, site.device)
                site.personal.keep(int(group.removeprefix("personal ")), self.server.round.number, own)
        for i, message in enumerate(facts["messages"]):
            self.shared_comm_queue.append(_unpacked(Parcel(groups.get(str(i), {}), **message)))


def _packed(message: Message, receiver: int) -> Parcel:
    content = message.content
    facts = {
        "kind": message.msg_type,
        "sender": int(message.sender),
        "receiver": receiver,
        "state": message.state,
        "timestamp": message.timestamp,
    }
    if isinstance(content, Sealed):
        parcel = content.opened()
        return Parcel(parcel.tensors, facts=parcel.facts, **facts)
    return Parcel({}, content=content, **facts)


def _unpacked(parcel: Parcel) -> Message:
    facts = parcel.facts
    content = facts["content"] if "content" in facts else Sealed(Parcel(parcel.tensors, **facts["facts"]))
    return Message(
        msg_type=facts["kind"],
        sender=facts["sender"],
        receiver=[facts["receiver"]],
        state=facts["state"],
        timestamp=facts["timestamp"],
        content=content,
    )


# -- in a client's process -----------------------------------------------------------------------------


class _Here:
    """What this process has loaded: its clients by number, and the queue into which they send."""

    clients: dict
    queue: deque[Message]
    #: the shared tensors at the end of the last round, if the clients share one model
    shared: dict[str, Tensor]


def _load(config: dict, outdir: str, rank: int, resources: dict[int, object], resume: bool) -> bytes:
    """Load data and models of the clients that have ``resources``; what they send to join."""
    cfg = to_framework(on_a_gpu(load_config(config), rank + 1))
    cfg.outdir = outdir
    cfg.wandb.use = False  # only the server's process reports the run
    LogTo(Path(outdir) / f"process_{rank + 1}.log", cfg.verbose).__enter__()  # until the process ends
    _Here.clients, _Here.queue = _clients(cfg, resources, resume)
    _Here.shared = _shared()
    for client in _Here.clients.values():
        client.join_in()
    return _done()


def _do(data: bytes) -> bytes:
    """Give a message to the client that it is for, or bring the model that all share to the end of a round."""
    parcel, site = Parcel.of(data), current().site
    if parcel.facts["kind"] == "follow":
        # The message applies to the model at the end of the last round, not to what the last client trained.
        load_tensors(site.model, _Here.shared)
        with torch.no_grad():
            site.method.apply(site.model, on_device(parcel.tensors, site.device), parcel.facts["round"])
        _Here.shared = _shared()
        return _done()
    message, client = _unpacked(parcel), _Here.clients[parcel.facts["receiver"]]
    client._monitor.track_download_bytes(message.count_bytes()[0])
    client.msg_handlers[message.msg_type](message)
    return _done()


def _shared() -> dict[str, Tensor]:
    session = current()
    return copied(session.site.model, session.method.shared) if session.shares_model else {}


def _done() -> bytes:
    """The answer to one message: what the clients have sent meanwhile, and the own parts of those that trained."""
    messages, site = [], current().site
    while _Here.queue:
        message = _Here.queue.popleft()
        messages += [_packed(message, int(receiver)) for receiver in message.receiver]
    spent = site.take_spent()
    own = {f"personal {n}": site.personal[n] for n in spent if n in site.personal}
    tensors = joined({**{str(i): m.tensors for i, m in enumerate(messages)}, **own})
    site.shared_states.settle()  # who has the answer may end this process
    return Parcel(tensors, messages=[m.facts for m in messages], spent=spent).to_bytes()


def _clients(cfg, resources: dict[int, object], resume: bool):
    """The clients of this process by number, and the queue into which they send."""
    torch.set_num_threads(1)
    setup_seed(cfg.seed)
    data, changed = get_data(config=cfg.clone(), client_cfgs=None)
    cfg.merge_from_other_cfg(changed)
    cfg.freeze(inform=False, save=False)
    session = current()
    # Clients that share a model or keep personal tensors need the checkpoint as the server does.
    checkpoint = load_checkpoint(session.outdir / "checkpoint", session.site.device) if resume else None
    if checkpoint:
        session.keeper.restore(checkpoint)
    elif cfg.federate.restore_from:
        MethodAggregator(session).load_model(cfg.federate.restore_from)
    queue: deque[Message] = deque()
    make = get_client_cls(cfg)
    return {
        number: make(
            ID=number,
            server_id=0,
            config=cfg,
            data=data[number],
            model=session.next_model(),
            device=session.site.device,
            shared_comm_queue=queue,
            resource_info=resource,
        )
        for number, resource in resources.items()
    }, queue


def choose_runner(frameworks):
    """A function that makes a ``ParallelRunner`` for our methods, and a runner of class ``frameworks`` for others."""

    def make(*args, config, **kwargs):
        if our_method(config.federate.method) is None:
            return frameworks(*args, config=config, **kwargs)
        return without_client_cfgs(ParallelRunner)(*args, config=config, **kwargs)

    return make


def without_client_cfgs(frameworks):
    """A function that makes a runner; that of our methods, whose configuration has the settings of single clients
    already, is not given those of ``--client_cfg``."""

    def make(*args, config, client_configs=None, **kwargs):
        others = our_method(config.federate.method) is None
        return frameworks(*args, config=config, client_configs=client_configs if others else None, **kwargs)

    return make
