"""Clients trained and evaluated by several processes of this machine (``federate.process_num``).

Each process has a copy of the model, which follows the server's messages. Its base is mapped from the checkpoint where
the run takes the dtype of that, so weights that nobody changes are in memory once for all processes. What a client
trains is decided by its data, the tensors it starts from, the round and the seed, and not by the process that trains
it. So the result is equal to the bit to that of one process that has as many threads as each of them. The engine's own
process, with the server step, has that number, too, until they end.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algebra import on_device, values_of
from ..config import Config, load_config
from ..data import Examples, ImageExamples
from ..errors import described, say_once
from ..jobs.crew import INSIDE
from ..jobs.nursery import Nursery
from ..methods import State
from ..models.adapters import load_tensors
from ..models.frozen import COMPUTED_TOGETHER
from ..rounds.copies import copied
from ..rounds.evaluator import CLIENTS, Evaluator
from ..rounds.ledger import Ledger
from ..rounds.parcel import Parcel
from ..rounds.round import Order
from ..rounds.site import Site
from ..rounds.transport import Transport
from ..runs.folder import outdir_of
from ..settings import Settings
from ..training.evaluate import BatchScore, batch_scores, mean_scores
from ..training.metrics import of_outputs
from . import team
from .team import Job, Team, divided, joined, on_a_gpu, reporting

logger = logging.getLogger("fs_lowrank")

#: the tensors of a client that others see, and its personal ones
Halves = tuple[dict[str, Tensor], dict[str, Tensor]]


def processes_of(config: Settings) -> int:
    """How many processes train the clients of a round.

    ``federate.process_num: auto`` is one for each GPU, or one for each thread that torch would use, but no more than
    clients train in a round; in a process of a suite or a search it is 1.
    """
    asked = config.federate.process_num
    if asked == 0:
        if os.environ.get(INSIDE):
            return 1
        gpus = torch.cuda.device_count() if config.torch_device != "cpu" else 0
        asked = gpus or torch.get_num_threads()
    return min(asked, config.sampled_per_round)


class Worker(team.Worker):
    """The engine's side of one process. What it prints goes to ``process_N.log`` in the run's folder.

    Args:
        rank: from 0.
        config: of the run.
        threads: that it computes with.
        nursery: that it is forked from.
    """

    def __init__(self, rank: int, config: Config, threads: int, nursery: Nursery | None = None):
        folder = outdir_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            f"{__name__}:serve",
            rank,
            config.lowrank.timeout,
            environment={"OMP_NUM_THREADS": str(threads)},
            log=folder / f"process_{rank + 1}.log",
            nursery=nursery,
        )


class Workers(Transport):
    """The processes of a run; one that dies is replaced (``team``).

    Args:
        config: of the run. The processes start at once, and load data and model while this one does.
        count: how many.
    """

    shares_model = True

    def __init__(self, config: Config, count: int):
        self.config, self.count = config, count
        self._threads_before = torch.get_num_threads()
        self.threads = max(1, self._threads_before // count)
        torch.set_num_threads(self.threads)
        self.site: Site
        self.ledger: Ledger
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        self.team = Team(count, self._start, self._stand, alike=True, imports=__name__, environment=threads)

    def _start(self, rank: int, nursery: Nursery | None) -> Worker:
        member = Worker(rank, self.config, self.threads, nursery)
        member.send(Parcel({}, config=self.config.to_dict(), rank=rank, threads=self.threads))
        return member

    def begin(self, site: Site, ledger: Ledger, resumed: bool) -> None:
        """Bring every process to where the run stands.

        Raises:
            UserError: a process reports that it cannot load the run's data or model.
            RunFailed: all have died, and so have those that were to replace the last one.
        """
        self.site, self.ledger = site, ledger
        self.team.begin()

    def _stand(self, member: team.Worker) -> None:
        """Wait until a process has loaded data and model, and bring it to where the run stands."""
        member.hear()
        member.send(team.stands(self.site, self.ledger.state))
        member.hear()

    def follow(self, message: Mapping[str, Tensor], round: int) -> None:
        """Bring every process to the end of ``round``."""
        parcel = Parcel(message, kind="follow", round=round)
        name = f"the end of round {round}"
        self._do([Job(parcel, member.rank, name, only_there=True, stands=True) for member in self.team.members])

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel]]:
        """The answers in the order of the cohorts."""
        site, asked = self.site, {order.client: order for order in orders}
        yield from ((order, Parcel({})) for order in asked.values() if order.purpose == "follow")
        train = [client for client, order in asked.items() if order.purpose == "train"]
        round = max(order.round for order in asked.values())
        for client, facts, (update, personal) in self._answers(round, site.cohorts(train, round), self.ledger.state):
            if "error" not in facts:
                site.personal.keep(client, round, personal)  # undone if the update does not count
            yield asked[client], Parcel(update, **facts, round=round, followed=True)

    def _answers(
        self, round: int, cohorts: Sequence[Sequence[int]], state: State
    ) -> Iterator[tuple[int, dict[str, Any], Halves]]:
        """What came of each client of ``cohorts``, in their order: facts, its update, and its personal tensors."""
        site = self.site
        jobs = [
            Job(
                _parcel(site, state, cohort, kind="train", round=round),
                cohort[0] // site.cohort,
                f"client {', '.join(map(str, cohort))}",
            )
            for cohort in cohorts
        ]
        for cohort, answer in zip(cohorts, self._do(jobs)):
            if not isinstance(answer, str):
                groups = divided(answer, site.device)
                yield from ((c, facts, _halves(groups, c)) for c, facts in zip(cohort, answer.facts["clients"]))
            elif len(cohort) == 1:
                yield cohort[0], {"error": answer}, ({}, {})
            else:  # two processes have died of them together
                yield from self._answers(round, [[client] for client in cohort], state)

    def evaluate(self, evaluator: Evaluator, state: State) -> dict[str, dict[str, Any]]:
        """As ``Evaluator.evaluate``. This process evaluates what two processes have died of."""
        site, held_out, jobs, of = self.site, evaluator.site.held_out(), [], []
        sizes: dict[int, int] = {}
        for split in evaluator.splits():
            if split != CLIENTS:
                for part in range(self.count):
                    parcel = Parcel({}, kind="score", split=split, part=part, parts=self.count)
                    jobs.append(Job(parcel, part, f"the evaluation of {split}"))
                    of.append((split, 0))
                continue
            for client, examples in site.tested():
                parcel = _parcel(site, state, [client], kind="score")
                jobs.append(Job(parcel, client, f"client {client}"))
                of.append((split, client))
                sizes[client] = len(examples)
        scores: dict[tuple[str, int], list[BatchScore]] = {key: [] for key in of}
        for key, job, answer in zip(of, jobs, self._do(jobs)):
            found = self._scores(job, state) if isinstance(answer, str) else answer.facts["scores"]
            scores[key] += [tuple(score) for score in found]
        metrics: dict[str, dict[str, Any]]
        extras = self.config.metrics
        metrics = {split: mean_scores(scores[split, 0], extras) for split in held_out if (split, 0) in scores}
        clients = {client: each for (split, client), each in scores.items() if split == CLIENTS}
        if clients:
            metrics[CLIENTS] = evaluator.combined({c: mean_scores(each) for c, each in clients.items()}, sizes)
        return metrics

    def _scores(self, job: Job, state: State) -> list[BatchScore]:
        """What a process would have answered to ``job``, computed in this one."""
        say_once(
            "federate.process_num: two processes have ended while they evaluated the same samples; the run's own "
            "process evaluates these, with the same result"
        )
        facts, site = job.parcel.facts, self.site
        for client in facts.get("clients", ()):
            site.load_client(state, client)
        scores = scores_of(site, facts)
        site.load_global(state)
        return scores

    def _do(self, jobs: Sequence[Job]) -> list[Parcel | str]:
        """What the processes answered to ``jobs``, in their order; a text says why there is no answer."""
        answers: dict[Job, Parcel | str] = {}
        self.team.jobs += jobs
        while len(answers) < len(jobs):
            answers.update(self.team.step(1.0))
        return [answers[job] for job in jobs]

    def end(self) -> None:
        """End all processes, whatever they do."""
        self.team.end()
        torch.set_num_threads(self._threads_before)


def _parcel(site: Site, state: State, clients: Sequence[int], /, **facts: Any) -> Parcel:
    """The tensors of the models of ``clients`` beside the base, and the fact ``clients``."""
    groups: dict[str, Mapping[str, Tensor]] = {}
    for client in clients:
        groups |= _groups(client, site.method.view(state, client), site.personal.of(client))
    return Parcel(joined(groups), clients=list(clients), **facts)


def _groups(client: int, view: Mapping[str, Tensor], personal: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    return {f"view of {client}": view, f"personal of {client}": personal}


def _halves(groups: Mapping[str, dict[str, Tensor]], client: int) -> Halves:
    """The two groups about ``client``."""
    return groups.get(f"view of {client}", {}), groups.get(f"personal of {client}", {})


# -- in the process ------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Load the run's data and model, then do one item after the other until the engine closes the connection."""
    with reporting(connection):
        first = Parcel.of(connection.recv_bytes()).facts
        torch.set_num_threads(first["threads"])
        config = on_a_gpu(load_config(first["config"]), first["rank"])
        worker = _Clients(Site(config, serves=False))
        answer = Parcel({}, kind="ready")
        while True:
            connection.send_bytes(answer.to_bytes())
            answer = worker.do(Parcel.of(connection.recv_bytes()))


class _Clients:
    """Any of the run's clients, on this process's copy of the model."""

    def __init__(self, site: Site):
        self.site = site
        self.standing = copied(site.model, site.method.shared)

    def do(self, item: Parcel) -> Parcel:
        """Do what ``item`` asks for; the answer."""
        answer: Parcel = getattr(self, f"_{item.facts['kind']}")(item)
        self.site.shared_states.settle()  # who has the answer may end this process
        return answer

    def _stand(self, item: Parcel) -> Parcel:
        load_tensors(self.site.model, on_device(item.tensors, self.site.device))
        self.standing = copied(self.site.model, self.site.method.shared)
        return Parcel({}, kind="stands")

    def _follow(self, item: Parcel) -> Parcel:
        site = self.site
        load_tensors(site.model, {**self.standing, **site.personal.untrained})
        with torch.no_grad():
            site.method.apply(site.model, on_device(item.tensors, site.device), item.facts["round"])
        self.standing = copied(site.model, site.method.shared)
        return Parcel({}, kind="stands")

    def _load(self, halves: Halves) -> None:
        for half in halves:
            load_tensors(self.site.model, half)

    def _train(self, item: Parcel) -> Parcel:
        site, round, given = self.site, item.facts["round"], divided(item, self.site.device)
        groups: dict[str, Mapping[str, Tensor]] = {}
        answers: list[dict[str, Any]] = []
        means: dict[int, Tensor] = {}  # by place in the answers
        for client, fitted in site.fit_all(item.facts["clients"], round, lambda c: self._load(_halves(given, c))):
            if isinstance(fitted, Exception):
                answers.append({"error": described(fitted)})
                continue
            update, result = fitted
            personal = copied(site.model, site.method.personal) if site.personal.untrained else {}
            groups |= _groups(client, {n: t.clone() for n, t in update.tensors.items()}, personal)
            spent = site.take_spent()[client]
            means[len(answers)] = result.mean
            answers.append({"samples": update.num_samples, "spent": spent})
        for place, loss in zip(means, values_of(means.values())):
            answers[place]["loss"] = loss
        return Parcel(joined(groups), kind="trained", clients=answers)

    def _score(self, item: Parcel) -> Parcel:
        if "clients" in item.facts:
            (client,) = item.facts["clients"]
            self._load(_halves(divided(item, self.site.device), client))
        else:
            load_tensors(self.site.model, {**self.standing, **self.site.personal.untrained})
        return Parcel({}, kind="scored", scores=scores_of(self.site, item.facts))


def scores_of(site: Site, facts: Mapping[str, Any]) -> list[BatchScore]:
    """The scores of the model of ``site``, as it is, on what ``facts`` name: a client's test data (``clients``), or a
    part of a split (``split``, ``part``, ``parts``)."""
    config = site.config
    size = config.eval_batch_size
    examples: Examples | ImageExamples | None
    if "clients" in facts:
        (client,) = facts["clients"]
        owner = f"client {client} test"
        examples = site.data.client_tests[client - 1]
    else:
        owner = f"{facts['split']} {facts['part'] + 1} of {facts['parts']}"  # a part of a file's name, too
        examples = part_of(site.held_out()[facts["split"]], facts["part"], facts["parts"], size)
        if site.prefix is not None:
            site.prefix.budget[owner] = site.prefix.budget.get(facts["split"], False)
    assert examples is not None
    if not len(examples):
        return []
    outputs = bool(of_outputs(config.metrics)) and "clients" not in facts
    return batch_scores(site.model, examples, size, outputs=outputs, owner=owner, prefix=site.prefix, reads=site.reads)


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
