"""Clients trained and evaluated by several processes of this machine (``federate.process_num``).

Each process holds a copy of the base model, which follows the server's messages. What a client trains is decided by its
data, the tensors it starts from, the round and the seed, and not by the process that trains it. So the result is equal
to the bit to that of one process, if all compute with the same number of threads.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Config, load_config
from ..data import Examples, ImageExamples
from ..errors import RunFailed, UserError
from ..jobs.crew import INSIDE
from ..jobs.pool import Member, Pool
from ..methods import State
from ..models.adapters import load_tensors
from ..models.frozen import COMPUTED_TOGETHER
from ..rounds.copies import copied
from ..rounds.evaluator import CLIENTS, Evaluator
from ..rounds.parcel import Parcel
from ..rounds.round import Round
from ..rounds.site import Site
from ..runs.folder import outdir_of
from ..training.evaluate import BatchScore, batch_scores, mean_scores

logger = logging.getLogger("fs_lowrank")


def processes_of(config: Config) -> int:
    """How many processes train the clients of a round.

    ``federate.process_num: auto`` is one for each GPU, or one for each thread that torch would
    use, but no more than clients train in a round;
    in a process of a suite or a search it is 1.
    """
    asked = config.federate.process_num
    if asked == 0:
        if os.environ.get(INSIDE):
            return 1
        gpus = torch.cuda.device_count() if config.torch_device != "cpu" else 0
        asked = gpus or torch.get_num_threads()
    return min(asked, config.sampled_per_round)


@dataclass
class Job:
    """One item of work, for any process.

    Attributes:
        parcel: what is sent. home: the number of the process that is to do it if it is free, so that a client's frozen
            states are computed once.
        deaths: processes that died while they did it.
    """

    parcel: Parcel
    home: int
    deaths: int = 0


class Worker(Member):
    """The engine's side of one process. What it prints goes to ``process_N.log`` in the run's folder.

    Args:
        rank: from 0.
        config: of the run.
        threads: that it computes with.
    """

    def __init__(self, rank: int, config: Config, threads: int):
        folder = outdir_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            f"{__name__}:serve",
            config.lowrank.timeout,
            environment={"OMP_NUM_THREADS": str(threads)},
            log=folder / f"process_{rank + 1}.log",
        )
        self.rank = rank
        #: why the engine has ended it, if it has
        self.ended = ""
        self.send(Parcel({}, config=config.to_dict(), rank=rank, threads=threads))

    def __str__(self) -> str:
        return f"process {self.rank + 1}"

    def encode(self, item: Parcel) -> bytes:
        return item.to_bytes()

    def decode(self, data: bytes) -> Parcel:
        return Parcel.of(data)


class Workers:
    """The processes of a run.

    A process that dies is replaced, and what it did is done again by another; a second death fails that client's round,
    never the run.

    Args:
        config: of the run. The processes start at once, and load data and model meanwhile.
        count: how many.
    """

    def __init__(self, config: Config, count: int):
        self.config, self.count = config, count
        self.threads = max(1, torch.get_num_threads() // count)
        self.pool = Pool()
        self.site: Site
        self._stands: Callable[[], Parcel] = lambda: Parcel({}, kind="stand")
        self.pool.members = [Worker(rank, config, self.threads) for rank in range(count)]

    def begin(self, site: Site, state: Callable[[], State]) -> None:
        """Bring every process to where the run stands.

        Args:
            site: the engine's own. state: gives the server's state at the end of the last round.
        Raises:
            UserError: a process could not load the run's data or model.
        """
        self.site = site

        def stands() -> Parcel:
            tensors = {**site.method.view(state()), **site.personal.untrained, **site.changed_base()}
            return Parcel(tensors, kind="stand")

        self._stands = stands
        for member in self.pool.members:
            self._ready(member)

    def _ready(self, member: Worker) -> None:
        """Wait until ``member`` has loaded, and bring it to where the run stands."""
        self._hear(member)
        member.send(self._stands())
        self._hear(member)

    def _hear(self, member: Worker) -> Parcel:
        """The next word of one process that cannot be replaced.

        Raises:
            RunFailed: it died, or does not answer within ``lowrank.timeout``.
        """
        answer = member.receive()
        if answer is None:
            raise RunFailed(
                f"{member} of federate.process_num {self.count} could not start or go on "
                f"(exit code {member.process.returncode}); was it killed, or out of memory?"
            )
        member.idle = True
        return _checked(member, answer)

    def follow(self, message: Mapping[str, Tensor], round: int) -> None:
        """Bring every process to the end of ``round``."""
        for member in self.pool.members:
            member.send(Parcel(message, kind="follow", round=round))
        for rank, member in enumerate(self.pool.members):
            if (answer := member.receive()) is None:
                self._replace(rank, "while it followed the round")
            else:
                member.idle = True
                _checked(member, answer)

    def train(self, round: Round, clients: Sequence[int], state: State, on_client: Callable[[int], object]) -> None:
        """Train ``clients`` and hand what they answer to ``round``, in their order.

        Args:
            on_client: called with the number of clients that are done, when one begins.
        """
        site = self.site
        jobs = [
            Job(_parcel(site, state, client, kind="train", round=round.number), client % self.count)
            for client in clients
        ]
        for client, answer in zip(clients, self._do(jobs, on_client)):
            if isinstance(answer, str):
                round.fail(client, "failed", answer)
                continue
            facts = answer.facts
            if "error" in facts:
                round.fail(client, "failed", facts["error"])
                continue
            site.add_spent({client: facts["spent"]})
            update, personal = _parts(answer, site.device)
            parcel = Parcel(update, round=round.number, samples=facts["samples"], loss=facts["loss"])
            if round.take(client, parcel) and personal:
                site.personal.keep(client, round.number, personal)

    def evaluate(self, evaluator: Evaluator, state: State) -> dict[str, dict[str, Any]]:
        """As ``Evaluator.evaluate``.

        Raises:
            RunFailed: two processes died of the same part.
        """
        site, held_out, jobs, of = self.site, evaluator.site.held_out(), [], []
        sizes: dict[int, int] = {}
        for split in evaluator.splits():
            if split != CLIENTS:
                for part in range(self.count):
                    jobs.append(Job(Parcel({}, kind="score", split=split, part=part, parts=self.count), part))
                    of.append((split, 0))
                continue
            for client, examples in site.tested():
                jobs.append(Job(_parcel(site, state, client, kind="score"), client))
                of.append((split, client))
                sizes[client] = len(examples)
        scores: dict[tuple[str, int], list[BatchScore]] = {key: [] for key in of}
        for key, answer in zip(of, self._do(jobs)):
            if isinstance(answer, str):
                raise RunFailed(f"the evaluation of {key[0]} failed: {answer}")
            scores[key] += [(loss, correct, count) for loss, correct, count in answer.facts["scores"]]
        metrics: dict[str, dict[str, Any]]
        metrics = {split: mean_scores(scores[split, 0]) for split in held_out if (split, 0) in scores}
        clients = {client: each for (split, client), each in scores.items() if split == CLIENTS}
        if clients:
            metrics[CLIENTS] = evaluator.combined({c: mean_scores(each) for c, each in clients.items()}, sizes)
        return metrics

    def _do(self, jobs: Sequence[Job], on_begin: Callable[[int], object] = lambda done: None) -> list[Parcel | str]:
        """What the processes answered to ``jobs``, in their order; a text says why there is no answer."""
        answers: dict[int, Parcel | str] = {}
        waiting = list(range(len(jobs)))
        doing: dict[int, int] = {}
        while len(answers) < len(jobs):
            for rank, member in enumerate(self.pool.members):
                if waiting and rank not in doing:
                    # Its own first; then one from whoever has most left to do.
                    left = Counter(jobs[i].home % self.count for i in waiting)
                    home = rank if rank in left else left.most_common(1)[0][0]
                    number = next(i for i in waiting if jobs[i].home % self.count == home)
                    waiting.remove(number)
                    doing[rank] = number
                    on_begin(len(answers))
                    member.send(jobs[number].parcel)
            for member in self.pool.heard(1.0):
                answer = member.receive()
                number = doing.pop(member.rank)
                if answer is not None:
                    member.idle = True
                    answers[number] = _checked(member, answer)
                    continue
                how = self._replace(member.rank, f"while it did {_named(jobs[number])}")
                jobs[number].deaths += 1
                if jobs[number].deaths < 2:
                    waiting.insert(0, number)
                    jobs[number].home += 1  # elsewhere
                else:
                    answers[number] = f"two processes ended while they did it, the last one: {how}"
            if (silent := self.pool.silent()) is not None:
                silent.ended = f"no sign of life within lowrank.timeout, {silent.timeout:g} s"
                silent.process.kill()  # its end is heard next
        return [answers[i] for i in range(len(jobs))]

    def _replace(self, rank: int, when: str) -> str:
        """Start another process in the place of one that has died; returns how it died."""
        dead = self.pool.members[rank]
        dead.end()
        code = dead.process.returncode
        how = dead.ended or (f"signal {-code}" if code < 0 else f"exit code {code}")
        logger.warning("%s ended %s (%s); another takes its place", dead, when, how)
        self.pool.members[rank] = Worker(rank, self.config, self.threads)
        self._ready(self.pool.members[rank])
        return how

    def end(self) -> None:
        """End all processes, whatever they do."""
        self.pool.end()


def _parcel(site: Site, state: State, client: int, /, **facts: Any) -> Parcel:
    """The tensors of a client's model beside the base, ``view/NAME`` and ``personal/NAME``, and the fact ``client``."""
    tensors = {f"view/{n}": t for n, t in site.method.view(state, client).items()}
    tensors |= {f"personal/{n}": t for n, t in site.personal.of(client).items()}
    return Parcel(tensors, client=client, **facts)


def _parts(parcel: Parcel, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The two halves of what ``_parcel`` packed."""
    halves: dict[str, dict[str, Tensor]] = {"view": {}, "personal": {}}
    for name, tensor in parcel.tensors.items():
        half, _, rest = name.partition("/")
        halves[half][rest] = tensor.to(device)
    return halves["view"], halves["personal"]


def _checked(member: Worker, answer: Parcel) -> Parcel:
    """``answer``, if it is none that ends the run."""
    if answer.facts.get("kind") == "stopped":
        kind = {k.__name__: k for k in (RunFailed, UserError)}.get(answer.facts["error"], RuntimeError)
        raise kind(answer.facts["reason"] if kind is not RuntimeError else f"{member}: {answer.facts['reason']}")
    return answer


def _named(job: Job) -> str:
    facts = job.parcel.facts
    return f"client {facts['client']}" if "client" in facts else f"the evaluation of {facts['split']}"


# -- in the process ------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Load the run's data and model, then do one item after the other until the engine closes the connection."""
    try:
        first = Parcel.of(connection.recv_bytes()).facts
        torch.set_num_threads(first["threads"])
        config = load_config(first["config"])
        if config.torch_device != "cpu" and torch.cuda.is_available():
            config = config.replace(device=(max(int(config.device), 0) + first["rank"]) % torch.cuda.device_count())
        worker = _Clients(Site(config, serves=False))
        answer = Parcel({}, kind="ready")
        while True:
            connection.send_bytes(answer.to_bytes())
            answer = worker.do(Parcel.of(connection.recv_bytes()))
    except (EOFError, ConnectionError):
        return  # the engine has ended, or ends this process
    except Exception as error:  # the engine tells the user
        kind = next((kind.__name__ for kind in (RunFailed, UserError) if isinstance(error, kind)), "")
        reason = str(error) if kind else traceback.format_exc()
        connection.send_bytes(Parcel({}, kind="stopped", error=kind, reason=reason).to_bytes())


class _Clients:
    """Any of the run's clients, on this process's copy of the model."""

    def __init__(self, site: Site):
        self.site = site
        self.standing = copied(site.model, site.method.shared)

    def do(self, item: Parcel) -> Parcel:
        """Do what ``item`` asks for; the answer."""
        return getattr(self, f"_{item.facts['kind']}")(item)

    def _stand(self, item: Parcel) -> Parcel:
        load_tensors(self.site.model, _on(item.tensors, self.site.device))
        self.standing = copied(self.site.model, self.site.method.shared)
        return Parcel({}, kind="stands")

    def _follow(self, item: Parcel) -> Parcel:
        site = self.site
        load_tensors(site.model, {**self.standing, **site.personal.untrained})
        with torch.no_grad():
            site.method.apply(site.model, _on(item.tensors, site.device), item.facts["round"])
        self.standing = copied(site.model, site.method.shared)
        return Parcel({}, kind="stands")

    def _load(self, item: Parcel) -> None:
        for half in _parts(item, self.site.device):
            load_tensors(self.site.model, half)

    def _train(self, item: Parcel) -> Parcel:
        site, client, round = self.site, item.facts["client"], item.facts["round"]
        self._load(item)
        try:
            update, result = site.fit(
                site.clients[client - 1], site.data.clients[client - 1], round, site.model, site.prefix
            )
        except UserError:
            raise
        except Exception as error:  # one client's failure must not end the others' round; it is recorded
            logger.debug("client %d", client, exc_info=True)
            return Parcel({}, kind="trained", error=f"{type(error).__name__}: {error}")
        tensors = {f"view/{n}": t for n, t in update.tensors.items()}
        if site.personal.untrained:
            tensors |= {f"personal/{n}": t for n, t in copied(site.model, site.method.personal).items()}
        spent = site.take_spent()[client]
        return Parcel(tensors, kind="trained", samples=update.num_samples, loss=result.loss, spent=spent)

    def _score(self, item: Parcel) -> Parcel:
        site, facts = self.site, item.facts
        config = site.config
        size = config.eval.batch_size or config.dataloader.batch_size
        examples: Examples | ImageExamples | None
        if "client" in facts:
            self._load(item)
            owner = f"client {facts['client']} test"
            examples = site.data.client_tests[facts["client"] - 1]
        else:
            load_tensors(site.model, {**self.standing, **site.personal.untrained})
            owner = f"{facts['split']} {facts['part'] + 1}/{facts['parts']}"
            examples = part_of(site.held_out()[facts["split"]], facts["part"], facts["parts"], size)
            if site.prefix is not None:
                site.prefix.budget[owner] = site.prefix.budget.get(facts["split"], False)
        assert examples is not None
        if not len(examples):
            return Parcel({}, kind="scored", scores=[])
        scores = batch_scores(site.model, examples, size, owner=owner, prefix=site.prefix, reads=site.reads)
        return Parcel({}, kind="scored", scores=scores)


def part_of(examples: Examples | ImageExamples, part: int, parts: int, size: int) -> Examples | ImageExamples:
    """Part number ``part`` of ``parts``, such that it is evaluated in the batches in which all would be.

    The parts are cut from the samples sorted by length, between batches of ``size`` samples, and between those in which
    the frozen layers' states are computed.
    """
    order = np.argsort(-examples.lengths, kind="stable")
    together = math.lcm(size, COMPUTED_TOGETHER)
    groups = math.ceil(len(order) / together)
    first, last = (groups * p // parts * together for p in (part, part + 1))
    return examples.select(order[first:last])


def _on(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {n: t.to(device) for n, t in tensors.items()}
