"""Standalone with ``federate.process_num`` P: the server runs in this process, the clients in P − 1 processes.

The framework's own runner needs P GPUs and a state dict of one shape in every message. This one sends what the method
sends, runs with or without GPUs, and gives tensors that are bit-identical to those of a run in one process. A clients'
process handles one message at a time and answers it, so that the two ends of a connection never write at the same time.
A process that dies is replaced, as in the embedded engine (``team``).
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
from federatedscope.core.auxiliaries.data_builder import get_data
from federatedscope.core.auxiliaries.utils import setup_seed
from federatedscope.core.auxiliaries.worker_builder import get_client_cls
from federatedscope.core.fed_runner import StandaloneRunner
from federatedscope.core.message import Message

from ...algebra import on_device
from ...config import load_config
from ...errors import RunFailed
from ...jobs.nursery import Nursery
from ...models.adapters import load_tensors
from ...rounds.copies import apology, copied
from ...rounds.parcel import Parcel
from ...rounds.site import Site
from ...runs.checkpoint import load_checkpoint
from ..program import check_others
from ..team import Job, Team, Worker, divided, joined, on_a_gpu, reporting, stands
from .aggregator import MethodAggregator
from .config import our_method, to_framework
from .data import worker_data
from .logs import LogTo
from .session import close_session, current
from .trainer import named
from .wire import Sealed

logger = logging.getLogger("federatedscope.lowrank")


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
            RunFailed: a process cannot be replaced, or nothing is left to do.
            UserError: what a process reports that the user can put right.
        """
        self.session.on_message = self._follow
        numbers = list(self.client)
        count = min(self.processes - 1, len(numbers))
        self.parts = [numbers[i::count] for i in range(count)]
        self.home_of = {number: rank for rank, part in enumerate(self.parts) for number in part}
        self.joined: set[int] = set()
        self.team = Team(count, self._start, self._settle, imports=__name__)
        try:
            self.team.begin()
            while not (self.server.is_finish and self._nothing_left()):
                self._hand_out()
                if self._nothing_left() and not self.server.is_finish:
                    raise RunFailed(
                        f"round {self.server.state + 1} cannot be completed: no process has any work left; the logs "
                        f"are in {self.session.outdir}{self._how_to_continue()}"
                    )
                for job, answer in self.team.step(0 if self.shared_comm_queue else 1.0, self._begins):
                    if isinstance(answer, Parcel):
                        self._take(answer)
                    else:
                        self._give_up(job, answer)
            self.team.dismiss()
        finally:
            self.team.end()
        self.server._monitor.finish_fed_runner(fl_mode=self.mode)
        return self.server.best_results

    def _nothing_left(self) -> bool:
        return not (self.shared_comm_queue or self.team.jobs or self.team.doing)

    def _start(self, rank: int, nursery: Nursery | None) -> _ClientProcess:
        numbers, session = self.parts[rank], self.session
        process = _ClientProcess(rank, numbers, session.config.lowrank.timeout, nursery)
        process.send(
            Parcel(
                {},
                config=session.config.to_dict(),
                outdir=str(session.outdir),
                rank=rank + 1,
                resources={n: self.client[n].resource_info for n in numbers},
                resume=session.resume,
            )
        )
        return process

    def _settle(self, process: _ClientProcess) -> None:
        """Wait until the clients of a process have joined; bring one that replaces another to where the run stands.

        Copies of a model of their own start anew, so they are sent the whole model again, as after a lost message.
        """
        session, site = self.session, self.session.site
        if process.rank not in self.joined:
            self._take(process.hear())
            self.joined.add(process.rank)
            return
        if session.config.federate.use_ss:
            raise RunFailed(
                f"{process} is gone, and with it the secret shares that it was sent; without them no sum is left of "
                f"this round{self._how_to_continue()}"
            )
        process.hear()  # its clients join again, which the server knows
        own = {f"personal {n}": site.personal[n] for n in process.numbers if n in site.personal}
        state = stands(site, session.ledger.state).tensors if session.shares_model else {}
        process.send(Parcel(joined({"state": state, **own}), kind="stand"))
        process.hear()
        if session.shares_model:
            return
        session.ledger.forget(process.numbers)
        for job in self.team.jobs:
            if job.home == process.rank and job.parcel.facts["kind"] in ("model_para", "evaluate"):
                with suppress(ValueError):  # the round no longer waits for this client, which has dropped out
                    job.parcel = self._asked_again(job.parcel)

    def _asked_again(self, parcel: Parcel) -> Parcel:
        """The message ``parcel``, with all that a client needs whose copy has been lost."""
        facts, round = parcel.facts, self.server.round
        order = round.ask(facts["receiver"], purpose=facts["facts"]["purpose"])
        round.delivered(order)
        return Parcel(order.parcel.tensors, **{**facts, "facts": order.parcel.facts})

    def _follow(self, message, round: int) -> None:
        if self.session.shares_model:
            parcel, name = Parcel(message, kind="follow", round=round), f"the end of round {round}"
            for rank in range(len(self.parts)):
                self.team.jobs.append(Job(parcel, rank, name, only_there=True, stands=True))

    def _hand_out(self) -> None:
        """Make jobs of the messages in the framework's queue."""
        while self.shared_comm_queue:
            message = self.shared_comm_queue.popleft()
            receivers = message.receiver if isinstance(message.receiver, list) else [message.receiver]
            if receivers == [self.server_id]:
                self._handle_msg(message)
                continue
            for number in map(int, receivers):
                parcel = _packed(message, number)
                self.team.jobs.append(Job(parcel, self.home_of[number], f"client {number}", only_there=True))

    def _begins(self, job: Job) -> None:
        facts = job.parcel.facts
        if facts.get("facts", {}).get("purpose") == "train":
            clients = self.session.config.sampled_per_round
            self.session.on_client(facts["facts"]["round"], facts["receiver"], clients)

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

    def _give_up(self, job: Job, why: str) -> None:
        """Two processes have died of ``job``: in training, that costs the client's update; this one evaluates."""
        facts = job.parcel.facts
        if facts["kind"] == "evaluate":
            self._evaluate(facts)
        if facts.get("facts", {}).get("purpose") != "train":
            return
        sorry = apology(facts["facts"]["round"], RunFailed(why))
        back = {"sender": facts["receiver"], "receiver": self.server_id}
        self.shared_comm_queue.append(_unpacked(Parcel({}, **{**facts, **back, "facts": sorry.facts})))

    def _evaluate(self, facts: dict) -> None:
        """Answer in place of a client that is asked to evaluate."""
        session, client = self.session, facts["receiver"]
        metrics: dict[str, float] = {}
        logger.warning("the server's process evaluates in place of client %d, with the same result", client)
        session.site.load_client(session.ledger.state, client)
        for split, examples in session.held_out_for(client).items():
            scores = session.evaluator.score(examples, f"client {client} {split}")
            metrics |= named(split, scores, len(examples), self.cfg)
        session.site.load_global(session.ledger.state)
        back = {"sender": client, "receiver": self.server_id, "kind": "metrics", "content": metrics or "none"}
        self.shared_comm_queue.append(_unpacked(Parcel({}, **{**facts, **back})))

    def _how_to_continue(self) -> str:
        kept = (self.session.outdir / "checkpoint").exists()
        return f"; the last checkpoint is in {self.session.outdir / 'checkpoint'}; continue with resume=True" * kept


class _ClientProcess(Worker):
    """The server's end of a process that runs some of the clients.

    Args:
        numbers: of the clients. rank, timeout, nursery: as for ``Worker``.
    """

    def __init__(self, rank: int, numbers: list[int], timeout: float, nursery: Nursery | None = None):
        self.numbers = numbers
        super().__init__(f"{__name__}:serve", rank, timeout, nursery=nursery)

    def __str__(self) -> str:
        clients = ", ".join(map(str, self.numbers[:3])) + (", …" if len(self.numbers) > 3 else "")
        return f"{super().__str__()} (client{'s' if len(self.numbers) > 1 else ''} {clients})"


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


def serve(connection: Connection) -> None:
    """Run the clients that the server's process names, until it closes the connection."""
    try:
        with reporting(connection):
            task = Parcel.of(connection.recv_bytes()).facts
            cfg = to_framework(on_a_gpu(load_config(task["config"]), task["rank"]))
            cfg.outdir = task["outdir"]
            cfg.wandb.use = False  # only the server's process reports the run
            resources = {int(number): resource for number, resource in task["resources"].items()}
            with LogTo(Path(cfg.outdir) / f"process_{task['rank']}.log", cfg.verbose):
                clients, queue = _clients(cfg, resources, task["resume"])
                _answer(connection, clients, queue)
    finally:
        close_session()


def _answer(connection: Connection, clients: dict, queue: deque[Message]) -> None:
    session = current()
    site, method, shares_model = session.site, session.method, session.shares_model
    shared = copied(site.model, method.shared) if shares_model else {}
    for client in clients.values():
        client.join_in()
    while True:
        connection.send_bytes(_done(site, queue).to_bytes())
        parcel = Parcel.of(connection.recv_bytes())
        kind = parcel.facts["kind"]
        if kind == "stand":
            groups = divided(parcel, site.device)
            load_tensors(site.model, groups.pop("state", {}))
            site.personal.update({int(name.partition(" ")[2]): own for name, own in groups.items()})
        elif kind == "follow":
            # The message applies to the model at the end of the last round, not to what the last client trained.
            load_tensors(site.model, shared)
            with torch.no_grad():
                tensors = on_device(parcel.tensors, site.device)
                method.apply(site.model, tensors, parcel.facts["round"])
        else:
            message, client = _unpacked(parcel), clients[parcel.facts["receiver"]]
            client._monitor.track_download_bytes(message.count_bytes()[0])
            client.msg_handlers[message.msg_type](message)
            continue
        shared = copied(site.model, method.shared) if shares_model else {}


def _done(site: Site, queue: deque[Message]) -> Parcel:
    """The answer to one message: what the clients have sent meanwhile, and the own parts of those that trained."""
    messages = []
    while queue:
        message = queue.popleft()
        messages += [_packed(message, int(receiver)) for receiver in message.receiver]
    spent = site.take_spent()
    own = {f"personal {n}": site.personal[n] for n in spent if n in site.personal}
    tensors = joined({**{str(i): m.tensors for i, m in enumerate(messages)}, **own})
    return Parcel(tensors, kind="done", messages=[m.facts for m in messages], spent=spent)


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
