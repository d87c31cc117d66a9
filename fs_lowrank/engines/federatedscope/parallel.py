"""Standalone with ``federate.process_num`` P: the server in this process, the clients in P − 1 further ones.

The framework's own form of it wants P GPUs and a state dict of one shape in every message; ours sends what the method
sends, runs with GPUs or without, and ends with the tensors of a run in one process. A client's process does one message
after the other and says when each is done: neither side ever writes while the other does.
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
from .data import handed_out
from .logs import LogTo
from .session import close_session, current
from .wire import Sealed

logger = logging.getLogger("federatedscope.lowrank")

#: errors that keep their kind on the way from a process to the server's, the narrower first
_FOR_USERS = (RunFailed, UserError)


class ParallelRunner(StandaloneRunner):
    """The framework's standalone runner, with its clients in processes of their own.

    Args:
        processes: in all, with this one; of the configuration's ``federate.process_num`` where it is not given.
    """

    def __init__(self, *args, config, processes: int = 0, **kwargs):
        if kwargs.get("client_configs"):
            raise UserError(
                "federate.process_num above 1 takes no configuration for single clients; leave --client_cfg out"
            )
        self.processes = processes or config.federate.process_num
        config = config.clone()
        config.defrost()
        config.federate.process_num = 1  # in each of them all is as in one
        config._immutable(True)
        super().__init__(*args, config=config, **kwargs)

    def _set_up(self):
        self.session = current()
        self.data = handed_out(self.session, self.cfg)
        super()._set_up()

    def _setup_client(self, client_id=-1, client_model=None, resource_info=None):
        """A client's place is elsewhere; what is known of it here."""
        return SimpleNamespace(trainer=None, resource_info=resource_info)

    def run(self):
        """The best results, as every runner of the framework gives them.

        Raises:
            UserError: a process died, did not answer within ``lowrank.timeout`` or could not go on.
        """
        self.pool = Pool()
        self.session.on_message = self._follow
        try:
            self._begin()
            while not (self.server.is_finish and self._nothing_left()):
                self._hand_out()
                if self._nothing_left() and not self.server.is_finish:
                    raise RunFailed(
                        f"round {self.server.state + 1} cannot be completed: nobody has anything left to "
                        f"do; the logs are in {self.session.outdir}{self._kept()}"
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
            site = _Site(i + 1, numbers[i::count], session.config.lowrank.timeout)
            self.pool.members.append(site)
            site.send(
                Parcel(
                    {},
                    config=session.config.to_dict(),
                    outdir=str(session.outdir),
                    rank=i + 1,
                    resources={n: self.client[n].resource_info for n in numbers[i::count]},
                    resume=session.resume,
                )
            )
        self.home = {number: site for site in self.pool.members for number in site.numbers}

    def _follow(self, message, round: int) -> None:
        if self.session.shares_model:
            for site in self.pool.members:
                site.waiting.append(Parcel(message, kind="follow", round=round))

    def _hand_out(self) -> None:
        """Bring what lies in the framework's queue to its receivers."""
        while self.shared_comm_queue:
            message = self.shared_comm_queue.popleft()
            receivers = message.receiver if isinstance(message.receiver, list) else [message.receiver]
            if receivers == [self.server_id]:
                self._handle_msg(message)
                continue
            for number in receivers:
                self.home[int(number)].waiting.append(_packed(message, int(number)))
        for site in self.pool.members:
            begun = site.next()
            if begun is not None and begun.facts.get("facts", {}).get("purpose") == "train":
                self.session.on_client(
                    begun.facts["facts"]["round"], begun.facts["receiver"], self.session.config.sampled_per_round
                )

    def _listen(self) -> None:
        """Take what the processes have sent; wait for it if every one of them is at work."""
        for site in self.pool.heard(0 if self.shared_comm_queue else 1.0):
            self._take(site, site.receive())
        if (site := self.pool.silent()) is not None:
            raise RunFailed(
                f"{site} has not answered within lowrank.timeout, {site.timeout:g} s; it is ended. Raise "
                f"lowrank.timeout if its clients need longer{self._kept()}"
            )

    def _take(self, site: _Site, parcel: Parcel | None) -> None:
        if parcel is None:
            raise RunFailed(
                f"{site} is gone (exit code {site.process.returncode}); was it killed, or out of memory?{self._kept()}"
            )
        facts = parcel.facts
        if facts["kind"] == "done":
            site.idle = True
        elif facts["kind"] == "stopped":
            kind = next((kind for kind in _FOR_USERS if kind.__name__ == facts["error"]), RuntimeError)
            raise kind(f"{site}: {facts['reason']}")
        elif facts["kind"] == "client":
            number = facts["client"]
            self.session.site.add_spent({int(n): spent for n, spent in facts["spent"].items()})
            if parcel.tensors:
                device = self.session.site.device
                own = {n: t.to(device) for n, t in parcel.tensors.items()}
                self.session.site.personal.keep(number, self.server.round.number, own)
        else:
            self.shared_comm_queue.append(_unpacked(parcel))

    def _kept(self) -> str:
        kept = (self.session.outdir / "checkpoint").exists()
        return f"; the last checkpoint is in {self.session.outdir / 'checkpoint'}; continue with --resume" * kept


class _Site(Member):
    """This side of a process with some of the clients.

    Args:
        timeout: seconds that a message may take to go in or out, and a process for its answer.
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
    """Be the clients that the server's process names, until it closes the connection."""

    def send(kind: str, tensors=None, **facts) -> None:
        connection.send_bytes(Parcel(tensors or {}, kind=kind, **facts).to_bytes())

    try:
        task = Parcel.of(connection.recv_bytes()).facts
        cfg = to_framework(load_config(task["config"]))
        cfg.outdir = task["outdir"]
        if cfg.use_gpu and torch.cuda.is_available():
            cfg.device = (max(cfg.device, 0) + task["rank"]) % torch.cuda.device_count()
        cfg.wandb.use = False  # the server's process has the account of the run
        resources = {int(number): resource for number, resource in task["resources"].items()}
        with LogTo(Path(cfg.outdir) / f"process_{task['rank']}.log", cfg.verbose):
            _answer(connection, send, *_clients(cfg, resources, task["resume"]))
    except (EOFError, ConnectionError):
        return  # the server's process has ended, or ends this one
    except Exception as error:  # the server's process tells the user
        kind = next((kind.__name__ for kind in _FOR_USERS if isinstance(error, kind)), "")
        send("stopped", error=kind, reason=str(error) if kind else traceback.format_exc())
    finally:
        close_session()


def _answer(connection: Connection, send, clients: dict, queue: deque[Message]) -> None:
    session = current()
    standing = copied(session.site.model, session.method.shared) if session.shares_model else {}
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
            # Applied to the model as the round before left it, not as the last client did.
            load_tensors(session.site.model, standing)
            with torch.no_grad():
                session.method.apply(
                    session.site.model,
                    {n: t.to(session.site.device) for n, t in parcel.tensors.items()},
                    parcel.facts["round"],
                )
            standing = copied(session.site.model, session.method.shared)
        else:
            message, client = _unpacked(parcel), clients[parcel.facts["receiver"]]
            client._monitor.track_download_bytes(message.count_bytes()[0])
            client.msg_handlers[message.msg_type](message)


def _clients(cfg, resources: dict[int, object], resume: bool):
    """The workers of this process by number, and the queue that they send through."""
    torch.set_num_threads(1)
    setup_seed(cfg.seed)
    data, changed = get_data(config=cfg.clone(), client_cfgs=None)
    cfg.merge_from_other_cfg(changed)
    cfg.freeze(inform=False, save=False)
    session = current()
    # What a run goes on from is the server's; whoever shares its model or keeps personal tensors needs it too.
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
    """What stands in the place of the framework's class: ours for our methods, its own for its own."""

    def make(*args, config, **kwargs):
        runner = frameworks if our_method(config.federate.method) is None else ParallelRunner
        return runner(*args, config=config, **kwargs)

    return make
