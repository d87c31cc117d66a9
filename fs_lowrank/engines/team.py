"""The processes of an engine that train and evaluate clients (``federate.process_num``), and the jobs that they do.

A process that dies or falls silent, while it loads or later, is replaced, and what it did is done again once, by
another process if any may do it. A second death ends that job, never the run: a client's update is left out of its
round, and an evaluation is done by the engine's own process. Where two in turn die in place of a process, or the first
of them reports why it cannot take its place, the run goes on with fewer. It ends if none is left, or if the process did
what no other can: on FederatedScope each has clients of its own. Then ``resume`` goes on from the last checkpoint. An
error that a process reports, such as wrong data, ends the run at once, unless it has come to replace another.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import RaisedElsewhere, RunFailed, UserError, own_place
from ..jobs.nursery import Nursery, nursery
from ..jobs.pool import Member, Pool
from ..methods import State
from ..rounds.parcel import Parcel
from ..rounds.site import Site

logger = logging.getLogger("fs_lowrank")

#: errors that a process reports by their class, subclasses first
_FOR_USERS = (RunFailed, UserError)


class Gone(RunFailed):
    """A process has ended, or has fallen silent, while its answer was awaited."""


@dataclass(eq=False)
class Job:
    """One item of work.

    Attributes:
        parcel: what is sent.
        home: the number of the process that is to do it if it is free, so that a client's frozen states are computed
            once.
        name: what it is, for messages.
        only_there: no other process does it.
        stands: it brings its process to where the run stands, where a process that replaces it stands already.
        deaths: processes that ended while they did it.
    """

    parcel: Parcel
    home: int
    name: str
    only_there: bool = False
    stands: bool = False
    deaths: int = 0


class Worker(Member):
    """The engine's side of one process; parcels are sent and received.

    Args:
        rank: from 0.
        target, options: as for ``Member``.

    Attributes:
        ended: why the engine has ended it, if it has.
    """

    def __init__(self, target: str, rank: int, timeout: float, **options: Any):
        self.rank, self.ended = rank, ""
        super().__init__(target, timeout, **options)

    def __str__(self) -> str:
        return f"process {self.rank + 1}"

    def encode(self, item: Parcel) -> bytes:
        return item.to_bytes()

    def decode(self, data: bytes) -> Parcel:
        return Parcel.of(data)

    def checked(self, answer: Parcel) -> Parcel:
        """``answer``, if it is none that ends the run; the process is idle then."""
        self.idle = True
        if answer.facts.get("kind") == "stopped":
            reason = f"{self}: {answer.facts['reason']}"
            if kind := next((k for k in _FOR_USERS if k.__name__ == answer.facts["error"]), None):
                raise kind(reason)
            raise RaisedElsewhere(reason, answer.facts["place"])
        return answer

    @property
    def how(self) -> str:
        """How it ended; waits for the end."""
        code = self.process.wait()
        return self.ended or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def hear(self) -> Parcel:
        """The next answer, while a process loads or is brought to where the run stands.

        Raises:
            Gone: it died, or does not answer within ``lowrank.timeout``.
        """
        answer = self.receive()
        if answer is None:
            raise Gone(
                f"{self} of federate.process_num could not start or go on ({self.how}); was it killed, or out of "
                "memory?"
            )
        return self.checked(answer)


class Team(Pool):
    """The processes of a run. They start at once; ``begin`` waits until they can work.

    Args:
        count: how many.
        start: starts process number ``rank``, forked from a nursery where there is one (``jobs.nursery``).
        settle: waits until a process can work, and brings it to where the run stands.
        alike: what one does, any other could do, so that the run can go on with fewer.
        imports: the module that every process runs. environment: its variables in addition to those of this process.

    Attributes:
        jobs: that wait. doing: by the number of a process, the job that it does.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int, Nursery | None], Worker],
        settle: Callable[[Worker], object],
        alike: bool = False,
        imports: str = __name__,
        environment: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self.nursery = nursery(imports, environment or {})
        self.count, self.start, self.settle, self.alike = count, start, settle, alike
        self.jobs: list[Job] = []
        self.doing: dict[int, Job] = {}
        for rank in range(count):
            self.members.append(start(rank, self.nursery))

    def begin(self) -> None:
        """Settle every process, and replace those that die.

        Raises:
            UserError, RuntimeError: a process reports it. RunFailed: as ``_replace``.
        """
        for member in list(self.members):
            try:
                self.settle(member)
            except Gone:
                logger.warning("%s ended while it loaded (%s); another takes its place", member, member.how)
                self._replace(member, f"{member} ended while it loaded ({member.how})")

    def step(
        self, seconds: float, begins: Callable[[Job], object] = lambda job: None
    ) -> list[tuple[Job, Parcel | str]]:
        """Hand out jobs, and return those that have ended, each with its answer or a text that says why it has none.

        Args:
            seconds: to wait for the first of them.
            begins: called with each job that is handed out.
        """
        for member in self.members:
            if member.rank not in self.doing and (job := self._next(member.rank)) is not None:
                self.jobs.remove(job)
                self.doing[member.rank] = job
                begins(job)
                member.send(job.parcel)
        ended: list[tuple[Job, Parcel | str]] = []
        for member in self.heard(seconds):
            answer, job = member.receive(), self.doing.pop(member.rank)
            if answer is not None:
                ended.append((job, member.checked(answer)))
            elif (why := self._lost(member, job)) is not None:
                ended.append((job, why))
        if (silent := self.silent()) is not None:
            silent.ended = f"no sign of life within lowrank.timeout, {silent.timeout:g} s"
            silent.process.kill()  # its end is heard next
        return ended

    def _next(self, rank: int) -> Job | None:
        """The job that process ``rank`` does next: its own first, then one from the process that has most left."""
        count = self.count
        own = next((job for job in self.jobs if job.home % count == rank), None)
        left = Counter(job.home % count for job in self.jobs if not job.only_there)
        if own is not None or not left:
            return own
        busiest = left.most_common(1)[0][0]
        return next(job for job in self.jobs if not job.only_there and job.home % count == busiest)

    def _lost(self, dead: Worker, job: Job) -> str | None:
        """Replace a process that died while it did ``job``; None if that is done again, else why it is not."""
        job.deaths += 1
        again = not job.stands and job.deaths < 2
        if again:
            job.home += not job.only_there
            self.jobs.insert(0, job)
        dead.end()
        how = dead.how
        logger.warning("%s ended while it did %s (%s); another takes its place", dead, job.name, how)
        self.jobs = [j for j in self.jobs if not (j.stands and j.home == dead.rank)]
        self._replace(dead, f"{dead} ended while it did {job.name} ({how})")
        return None if again else f"two processes ended while they did it, the last one: {how}"

    def _replace(self, dead: Worker, what: str) -> None:
        """Start another process in the place of ``dead``; go on without it if two in turn do not get to where the run
        stands, or the first reports why it cannot, which the second would report again.

        Args:
            what: has happened, for messages.
        Raises:
            RunFailed: there are no others, or they cannot do what it did.
        """
        place, why = self.members.index(dead), ""
        for _ in range(2):
            try:
                self.members[place] = self.start(dead.rank, self.nursery)
                self.settle(self.members[place])
                return
            except (OSError, RuntimeError, UserError) as error:
                why = str(error).strip().splitlines()[-1]
                self.members[place].end()
                if not isinstance(error, (OSError, Gone)):
                    break
        del self.members[place]
        if not (self.members and self.alike):
            left = "" if self.members else ", and none is left"
            raise RunFailed(f"{what}, no other could take its place ({why}){left}")
        logger.warning("%s cannot be replaced (%s); the run goes on with fewer: %d", dead, why, len(self.members))

    def end(self) -> None:
        """End every process, whatever it does."""
        super().end()
        if self.nursery:
            self.nursery.end()


def stands(site: Site, state: State) -> Parcel:
    """What brings a process to where the run stands: every tensor of the model that may differ from the start's.

    Args:
        site: the engine's own. state: the server's at the end of the last round.
    """
    return Parcel({**site.method.view(state), **site.personal.untrained, **site.changed_base()}, kind="stand")


# -- groups of tensors in a parcel -----------------------------------------------------------------------


def joined(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of ``groups``, under ``GROUP/NAME``."""
    return {f"{group}/{n}": t for group, tensors in groups.items() for n, t in tensors.items()}


def divided(parcel: Parcel, device: torch.device | str = "cpu") -> dict[str, dict[str, Tensor]]:
    """The groups of which ``joined`` made the parcel's tensors; a group without tensors is missing."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parcel.tensors.items():
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[rest] = tensor.to(device)
    return groups


# -- in the process ------------------------------------------------------------------------------------


@contextmanager
def reporting(connection: Connection) -> Iterator[None]:
    """Within the block, an error is reported to the engine, which tells the user; the engine's end ends the block."""
    try:
        yield
    except (EOFError, ConnectionError):
        return  # the engine has ended, or ends this process
    except Exception as error:
        kind = next((k.__name__ for k in _FOR_USERS if isinstance(error, k)), "")
        reason = str(error) if kind else traceback.format_exc()
        facts = {"error": kind, "reason": reason, "place": own_place(error)}
        connection.send_bytes(Parcel({}, kind="stopped", **facts).to_bytes())


def on_a_gpu(config: Config, rank: int) -> Config:
    """``config`` with the GPU of process ``rank``, if it asks for one."""
    if config.torch_device == "cpu" or not torch.cuda.is_available():
        return config
    return config.replace(device=(max(int(config.device), 0) + rank) % torch.cuda.device_count())
