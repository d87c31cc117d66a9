"""Clients trained and evaluated by several processes of this machine (``federate.process_num``).

Each process has a copy of the model, which follows the server's messages. Its base is mapped from the checkpoint where
the run takes the dtype of that, so weights that nobody changes are in memory once for all processes. What a client
trains is decided by its data, the tensors it starts from, the round and the seed, and not by the process that trains
it. So the result is equal to the bit to that of one process that has as many threads as each of them. The engine's own
process, with the server step, has that number, too, until they end.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algebra import on_device
from ..config import Config, load_config
from ..data import Examples, ImageExamples
from ..errors import described
from ..jobs.crew import INSIDE
from ..jobs.pool import Call, Pool, Work
from ..methods import State
from ..models.adapters import load_tensors
from ..models.shortcuts.frozen import COMPUTED_TOGETHER
from ..rounds.copies import copied
from ..rounds.evaluator import CLIENTS, Evaluator
from ..rounds.ledger import Ledger
from ..rounds.parcel import Parcel
from ..rounds.round import Order
from ..rounds.site import Site
from ..rounds.trainer import Trainer
from ..rounds.transport import Transport
from ..runs.folder import outdir_of
from ..settings import Settings
from ..training.evaluate import BatchScore, batch_scores, mean_scores
from ..training.metrics import of_outputs

#: of a process, in messages
NAME = "process {} of federate.process_num"
#: pieces of work that a process is given ahead
AHEAD = 2


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


def on_a_gpu(config: Config, rank: int) -> Config:
    """``config`` with the GPU of process ``rank``, if it asks for one."""
    if config.torch_device == "cpu" or not torch.cuda.is_available():
        return config
    return config.replace(device=(max(int(config.device), 0) + rank) % torch.cuda.device_count())


class Processes(Transport):
    """Every client trains on the model of a process; they start at once, and load while the engine does.

    Args:
        config: of the run. count: how many.
    """

    shares_model = True

    def __init__(self, config: Config, count: int):
        self.config, self.count = config, count
        self._threads_before = torch.get_num_threads()
        self.threads = max(1, self._threads_before // count)
        torch.set_num_threads(self.threads)
        self.site: Site | None = None
        folder = outdir_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.pool = Pool(
            count,
            self._prepare,
            name=NAME,
            imports=[__name__],
            log=lambda rank: folder / f"process_{rank + 1}.log",
        )

    def _prepare(self, rank: int) -> Sequence[Call]:
        """Load the run's data and model; while the run goes on, take it up where it is."""
        load: Call = (_load, self.config.to_dict(), rank, self.threads)
        return [load, self._stand()] if self.site else [load]

    def _stand(self) -> Call:
        """Sets every tensor of the model that may differ from the start's to what it is at the server."""
        assert self.site is not None
        site = self.site
        tensors = {**site.method.view(self.ledger.state), **site.personal.untrained, **site.changed_base()}
        return _do, "stand", Parcel(tensors, round=self.ledger.stood).to_bytes()

    def begin(self, site: Site, ledger: Ledger, resumed: bool) -> None:
        """See ``Transport``.

        Raises:
            UserError: a process reports that it cannot load the run's data or model.
            RunFailed: one has died, and so has that in its place.
        """
        for work in self.pool.prepared:
            self.pool.result(work)
        self.site, self.ledger, self.trainer = site, ledger, Trainer(site)
        self._everywhere(*self._stand())

    def follow(self, message: Mapping[str, Tensor], round: int) -> None:
        self._everywhere(_do, "follow", Parcel(message, round=round).to_bytes())

    def _everywhere(self, *call: Any) -> None:
        for work in [self.pool.submit(rank, *call) for rank in range(self.count)]:
            self.pool.result(work)

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel]]:
        """The answers in the order of the cohorts."""
        assert self.site is not None
        site, asked = self.site, {order.client: order for order in orders}
        yield from ((order, Parcel({})) for order in asked.values() if order.purpose == "follow")
        round = max(order.round for order in asked.values())
        cohorts = self.trainer.cohorts([order.task for order in asked.values() if order.purpose == "train"])
        parcels = (_parcel(site, {task.client: task.view for task in cohort}, round=round) for cohort in cohorts)
        ranks = spread([cohort[0].client // self.trainer.cohort for cohort in cohorts], self.count)
        for cohort, answer in zip(cohorts, self._done("train", ranks, parcels)):
            groups = divided(answer, site.device)
            for client, facts in zip((task.client for task in cohort), answer.facts["clients"]):
                update, personal = groups.get(f"view of {client}", {}), groups.get(f"personal of {client}", {})
                if "error" not in facts:
                    site.personal.keep(client, round, personal)  # undone if the update does not count
                yield asked[client], Parcel(self.codec.encode(update), **facts, round=round, followed=True)

    def evaluate(self, evaluator: Evaluator, state: State) -> dict[str, dict[str, Any]]:
        """As ``Evaluator.evaluate``, each split in as many parts as there are processes."""
        assert self.site is not None
        site, count, splits = self.site, self.count, evaluator.splits()
        held_out = [split for split in site.held_out() if split in splits]
        sizes = {client: len(examples) for client, examples in site.tested()} if CLIENTS in splits else {}
        of: list[str | int] = [split for split in held_out for _ in range(count)] + list(sizes)
        parts = [Parcel({}, split=split, part=part, parts=count) for split in held_out for part in range(count)]
        ranks = [part.facts["part"] for part in parts] + [client % count for client in sizes]
        parcels = chain(parts, (_parcel(site, {client: site.method.view(state, client)}) for client in sizes))
        scores: dict[str | int, list[BatchScore]] = {key: [] for key in of}
        for key, answer in zip(of, self._done("score", ranks, parcels)):
            scores[key] += map(tuple, answer.facts["scores"])
        metrics: dict[str, dict[str, Any]]
        metrics = {split: mean_scores(scores[split], self.config.metrics) for split in held_out}
        if sizes:
            metrics[CLIENTS] = evaluator.combined({client: mean_scores(scores[client]) for client in sizes}, sizes)
        return metrics

    def _done(self, kind: str, ranks: Sequence[int], parcels: Iterable[Parcel]) -> Iterator[Parcel]:
        """What the processes ``ranks`` answer to ``parcels``, in their order; a few are given out ahead."""
        waiting: deque[Work] = deque()
        for rank, parcel in zip(ranks, parcels):
            waiting.append(self.pool.submit(rank, _do, kind, parcel.to_bytes()))
            if len(waiting) > AHEAD * self.count:
                yield Parcel.of(self.pool.result(waiting.popleft()))
        while waiting:
            yield Parcel.of(self.pool.result(waiting.popleft()))

    def end(self, error: BaseException | None = None) -> None:
        """End all processes, whatever they do."""
        self.pool.end()
        torch.set_num_threads(self._threads_before)


def spread(homes: Sequence[int], count: int) -> list[int]:
    """The process that does each piece of work: that of its home, where its frozen states are, but in even shares."""
    most, taken = math.ceil(len(homes) / count), Counter[int]()
    ranks = []
    for home in homes:
        rank = home % count
        if taken[rank] == most:
            rank = min(range(count), key=taken.__getitem__)
        taken[rank] += 1
        ranks.append(rank)
    return ranks


def _parcel(site: Site, views: Mapping[int, Mapping[str, Tensor]], /, **facts: Any) -> Parcel:
    """The tensors of the models of some clients beside the base, by client the shared ones; the fact ``clients``."""
    groups = {}
    for client, view in views.items():
        groups[f"view of {client}"] = view
        groups[f"personal of {client}"] = site.personal.of(client)
    return Parcel(joined(groups), clients=list(views), **facts)


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


# -- in a process --------------------------------------------------------------------------------------


class _Clients:
    """Any of the run's clients, on this process's copy of the model."""

    def __init__(self, site: Site):
        self.site, self.trainer = site, Trainer(site)
        self.round, self.standing = 0, copied(site.model, site.method.shared)

    def stand(self, item: Parcel) -> Parcel:
        load_tensors(self.site.model, on_device(item.tensors, self.site.device))
        self.round, self.standing = item.facts["round"], copied(self.site.model, self.site.method.shared)
        return Parcel({})

    def follow(self, item: Parcel) -> Parcel:
        site, round = self.site, item.facts["round"]
        if round == self.round:  # this process has been started after the end of the round
            return Parcel({})
        self._load_global()
        with torch.no_grad():
            site.method.apply(site.model, on_device(item.tensors, site.device), round)
        self.round, self.standing = round, copied(site.model, site.method.shared)
        return Parcel({})

    def _load_global(self) -> None:
        load_tensors(self.site.model, {**self.standing, **self.site.personal.untrained})

    def _load(self, groups: Mapping[str, Mapping[str, Tensor]], client: int) -> None:
        for of in ("view of", "personal of"):
            load_tensors(self.site.model, groups.get(f"{of} {client}", {}))

    def train(self, item: Parcel) -> Parcel:
        site, given = self.site, divided(item, self.site.device)
        groups: dict[str, Mapping[str, Tensor]] = {}
        answers: list[dict[str, Any]] = []
        tasks = [site.task(client, item.facts["round"]) for client in item.facts["clients"]]
        for task, fitted in self.trainer.fit_all(tasks, lambda task: self._load(given, task.client)):
            client = task.client
            if isinstance(fitted, Exception):
                answers.append({"error": described(fitted)})
                continue
            update = fitted.update
            groups[f"view of {client}"] = {n: t.clone() for n, t in update.tensors.items()}
            if site.personal.untrained:
                groups[f"personal of {client}"] = copied(site.model, site.method.personal)
            answers.append({"samples": update.num_samples, "spent": fitted.spent, "loss": fitted.result.loss})
        return Parcel(joined(groups), clients=answers)

    def score(self, item: Parcel) -> Parcel:
        if "clients" in item.facts:
            (client,) = item.facts["clients"]
            self._load(divided(item, self.site.device), client)
        else:
            self._load_global()
        return Parcel({}, scores=scores_of(self.site, item.facts))


_here: _Clients


def _load(config: dict[str, Any], rank: int, threads: int) -> None:
    """Load the run's data and model."""
    global _here
    torch.set_num_threads(threads)
    _here = _Clients(Site(on_a_gpu(load_config(config), rank), serves=False))


def _do(kind: str, data: bytes) -> bytes:
    """Do what a parcel asks for; the answer."""
    answer: Parcel = getattr(_here, kind)(Parcel.of(data))
    return answer.to_bytes()


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
