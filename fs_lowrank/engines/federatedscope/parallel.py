"""Standalone with ``federate.process_num`` P: the server runs in this process, the clients in P − 1 processes.

The framework's own runner needs P GPUs and a state dict of one shape in every message. This one sends what the method
sends, runs with or without GPUs, and gives tensors that are bit-identical to those of a run in one process. A clients'
process handles one message at a time and reports when it is done, so that the two ends of a connection never write at
the same time.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
from federatedscope.core.auxiliaries.data_builder import get_data
from federatedscope.core.auxiliaries.utils import setup_seed
from federatedscope.core.auxiliaries.worker_builder import get_client_cls
from federatedscope.core.fed_runner import StandaloneRunner
from federatedscope.core.message import Message

from ...config import load_config
from ...errors import RunFailed, UserError
from ...jobs.pool import Member, Pool
from ...models.adapters import load_tensors
from ...rounds.copies import copied
from ...rounds.parcel import Parcel
from ...runs.checkpoint import load_checkpoint
from .aggregator import MethodAggregator
from .config import our_method, to_framework
from .data import worker_data
from .logs import LogTo
from .session import close_session, current
from .wire import Sealed

logger = logging.getLogger("federatedscope.lowrank")

#: errors that a clients' process reports by their class, subclasses first
_FOR_USERS = (RunFailed, UserError)


class ParallelRunner(StandaloneRunner):
    """The framework's standalone runner, with the clients in further processes.

    Args:
        processes: number of processes, this one included; by default ``federate.process_num``.
    """

    def __init__(self, *args, config, processes: int = 0, **kwargs):
        if kwargs.get("client_configs"):
            raise UserError(
                "federate.process_num above 1 takes no configuration for single clients; leave --client_cfg out"
            )
        self.processes = processes or config.federate.process_num
        config = config.clone()
        config.defrost()
        config.federate.process_num = 1  # each process runs as one of its own
        config._immutable(True)
        super().__init__(*args, config=config, **kwargs)

    def _set_up(self):
        self.session = current()
        self.data = worker_data(self.session, self.cfg)
        super()._set_up()

    def _setup_client(self, client_id=-1, client_model=None, resource_info=None):
        """A stand-in for a client, which is in another process."""
        return SimpleNamespace(trainer=None, resource_info=resource_info)

    def run(self):
        """Run to the end and return the best results, as every runner of the framework does.

        Raises:
            RunFailed: a process died, did not answer within ``lowrank.timeout``, or had nothing left to do.
            UserError: what a process reports that the user can put right.
        """
        self.pool = Pool()
        self.session.on_message = self._follow
        try:
            self._begin()
            while not (self.server.is_finish and self._nothing_left()):
                self._hand_out()
                if self._nothing_left() and not self.server.is_finish:
                    raise RunFailed(
                        f"round {self.server.state + 1} cannot be completed: no process has any work left; the logs "
                        f"are in {self.session.outdir}{self._how_to_continue()}"
                    )
                self._listen()
            self.pool.dismiss()
        finally:
            self.pool.end()
        self.server._monitor.finish_fed_runner(fl_mode=self.mode)
        return self.server.best_results

    def _nothing_left(self) -> bool:
        return not self.shared_comm_queue and self.pool.idle

    def _begin(self) -> None:
        numbers, session = list(self.client), self.session
        count = min(self.processes - 1, len(numbers))
        for i in range(count):
            process = _ClientProcess(i + 1, numbers[i::count], session.config.lowrank.timeout)
            self.pool.members.append(process)
            process.send(
                Parcel(
                    {},
                    config=session.config.to_dict(),
                    outdir=str(session.outdir),
                    rank=i + 1,
                    resources={n: self.client[n].resource_info for n in numbers[i::count]},
                    resume=session.resume,
                )
            )
        self.process_of = {number: process for process in self.pool.members for number in process.numbers}

    def _follow(self, message, round: int) -> None:
        if self.session.shares_model:
            for process in self.pool.members:
                process.waiting.append(Parcel(message, kind="follow", round=round))

    def _hand_out(self) -> None:
        """Deliver the messages in the framework's queue."""
        while self.shared_comm_queue:
            message = self.shared_comm_queue.popleft()
            receivers = message.receiver if isinstance(message.receiver, list) else [message.receiver]
            if receivers == [self.server_id]:
                self._handle_msg(message)
                continue
            for number in receivers:
                self.process_of[int(number)].waiting.append(_packed(message, int(number)))
        for process in self.pool.members:
            begun = process.next()
            if begun is not None and begun.facts.get("facts", {}).get("purpose") == "train":
                self.session.on_client(
                    begun.facts["facts"]["round"], begun.facts["receiver"], self.session.config.sampled_per_round
                )

    def _listen(self) -> None:
        """Take what the processes have sent; wait for it if there is nothing else to do."""
        for process in self.pool.heard(0 if self.shared_comm_queue else 1.0):
            self._take(process, process.receive())
        if (process := self.pool.silent()) is not None:
            raise RunFailed(
                f"{process} has given no sign of life within lowrank.timeout, {process.timeout:g} s; it is ended"
                f"{self._how_to_continue()}"
            )

    def _take(self, process: _ClientProcess, parcel: Parcel | None) -> None:
        if parcel is None:
            raise RunFailed(
                f"{process} is gone (exit code {process.process.returncode}); was it killed, or out of memory?"
                f"{self._how_to_continue()}"
            )
        facts = parcel.facts
        if facts["kind"] == "done":
            process.idle = True
        elif facts["kind"] == "stopped":
            kind = next((kind for kind in _FOR_USERS if kind.__name__ == facts["error"]), RuntimeError)
            raise kind(f"{process}: {facts['reason']}")
        elif facts["kind"] == "client":
            number = facts["client"]
            self.session.site.add_spent({int(n): spent for n, spent in facts["spent"].items()})
            if parcel.tensors:
                device = self.session.site.device
                own = {n: t.to(device) for n, t in parcel.tensors.items()}
                self.session.site.personal.keep(number, self.server.round.number, own)
        else:
            self.shared_comm_queue.append(_unpacked(parcel))

    def _how_to_continue(self) -> str:
        kept = (self.session.outdir / "checkpoint").exists()
        return f"; the last checkpoint is in {self.session.outdir / 'checkpoint'}; continue with --resume" * kept


class _ClientProcess(Member):
    """The server's end of a process that runs some of the clients.

    Args:
        rank: from 1. numbers: of the clients.
        timeout: seconds that sending a message may take, and that the process may take to answer.
    """

    def __init__(self, rank: int, numbers: list[int], timeout: float):
        self.rank, self.numbers = rank, numbers
        super().__init__(f"{__name__}:serve", timeout)

    def __str__(self) -> str:
        clients = ", ".join(map(str, self.numbers[:3])) + (", …" if len(self.numbers) > 3 else "")
        return f"process {self.rank} (client{'s' if len(self.numbers) > 1 else ''} {clients})"

    def encode(self, item: Parcel) -> bytes:
        return item.to_bytes()

    def decode(self, data: bytes) -> Parcel:
        return Parcel.of(data)


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

    def send(kind: str, tensors=None, **facts) -> None:
        connection.send_bytes(Parcel(tensors or {}, kind=kind, **facts).to_bytes())

    try:
        task = Parcel.of(connection.recv_bytes()).facts
        cfg = to_framework(load_config(task["config"]))
        cfg.outdir = task["outdir"]
        if cfg.use_gpu and torch.cuda.is_available():
            cfg.device = (max(cfg.device, 0) + task["rank"]) % torch.cuda.device_count()
        cfg.wandb.use = False  # only the server's process reports the run
        resources = {int(number): resource for number, resource in task["resources"].items()}
        with LogTo(Path(cfg.outdir) / f"process_{task['rank']}.log", cfg.verbose):
            _answer(connection, send, *_clients(cfg, resources, task["resume"]))
    except (EOFError, ConnectionError):
        return  # the server's process has ended, or is ending this one
    except Exception as error:  # reported by the server's process
        kind = next((kind.__name__ for kind in _FOR_USERS if isinstance(error, kind)), "")
        send("stopped", error=kind, reason=str(error) if kind else traceback.format_exc())
    finally:
        close_session()


def _answer(connection: Connection, send, clients: dict, queue: deque[Message]) -> None:
    session = current()
    shared = copied(session.site.model, session.method.shared) if session.shares_model else {}
    for client in clients.values():
        client.join_in()
    while True:
        spent = session.site.take_spent()
        for number in spent:
            send("client", session.site.personal.get(number), client=number, spent=spent)
        while queue:
            message = queue.popleft()
            for receiver in message.receiver:
                connection.send_bytes(_packed(message, int(receiver)).to_bytes())
        send("done")
        parcel = Parcel.of(connection.recv_bytes())
        if parcel.facts["kind"] == "follow":
            # The message applies to the model at the end of the last round, not to what the last client trained.
            load_tensors(session.site.model, shared)
            with torch.no_grad():
                session.method.apply(
                    session.site.model,
                    {n: t.to(session.site.device) for n, t in parcel.tensors.items()},
                    parcel.facts["round"],
                )
            shared = copied(session.site.model, session.method.shared)
        else:
            message, client = _unpacked(parcel), clients[parcel.facts["receiver"]]
            client._monitor.track_download_bytes(message.count_bytes()[0])
            client.msg_handlers[message.msg_type](message)


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
        runner = frameworks if our_method(config.federate.method) is None else ParallelRunner
        return runner(*args, config=config, **kwargs)

    return make
