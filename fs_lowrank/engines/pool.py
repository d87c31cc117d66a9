"""Clients trained and evaluated by several processes of this machine (``federate.process_num``).

Each process has a copy of the model, which follows the server's messages. Its base is mapped from the checkpoint where
the run takes the dtype of that, so weights that nobody changes are in memory once for all processes. A client's update
depends on its data, the tensors it starts from, the round and the seed, and not on the process that trains it. So the
result is equal to the bit to that of one process with as many threads as each of them. The engine's own process, with
the server step, has that number, too, until they end.
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
from ..jobs.pool import Call, Pool, Work, print_to
from ..jobs.workers import INSIDE
from ..methods import State
from ..models.adapters import load_tensors
from ..models.shortcuts.frozen import COMPUTED_TOGETHER
from ..rounds.codec import codec_of
from ..rounds.copies import copied, load_told
from ..rounds.evaluator import Evaluator, size_of
from ..rounds.ledger import Ledger
from ..rounds.parcel import Parcel
from ..rounds.round import Order
from ..rounds.task import Task
from ..rounds.trainer import Trainer
from ..rounds.transport import Transport
from ..rounds.workspace import Workspace
from ..runs.folder import claim, outdir_of
from ..settings import Settings
from ..settings.metrics import CLIENTS
from ..training.evaluate import BatchScore, mean_scores
from ..training.metrics import of_outputs
from .program import check_others

#: of a process, in messages
NAME = "process {} of federate.process_num"
#: pieces of work that a process is given ahead
AHEAD = 2
#: a client, its tensors, the facts of its order beside the round, and the tensors it is told, both of an exchange
Ordered = tuple[int, bytes, dict[str, Any], bytes]


def processes_of(config: Settings) -> int:
    """How many processes train the clients of a round.

    ``federate.process_num: auto`` is one for each GPU, or one for each thread that torch would use, but no more than
    clients train in a round; in a process of a suite or a search it is 1.
    """
    count = config.federate.process_num
    if count == 0:
        if os.environ.get(INSIDE):
            return 1
        gpus = torch.cuda.device_count() if config.torch_device != "cpu" else 0
        count = gpus or torch.get_num_threads()
    return min(count, config.sampled_per_round)


def on_a_gpu(config: Config, rank: int) -> Config:
    """``config`` with the GPU of process ``rank``, if it asks for one."""
    if config.torch_device == "cpu" or not torch.cuda.is_available():
        return config
    return config.replace(device=(max(int(config.device), 0) + rank) % torch.cuda.device_count())


class Processes(Transport):
    """Every client trains on the model of a process; they start at once, and load while the engine does.

    Args:
        config: of the run. count: how many.
    Raises:
        UserError: the processes would not have all that ``config`` names. RunFailed: another run writes to its folder.
    """

    shares_model = True

    def __init__(self, config: Config, count: int):
        check_others(config)
        claim(outdir_of(config)).release()  # processes write their logs there before the run locks it
        self.config, self.count = config, count
        self.codec = codec_of(config)
        self._threads_before = torch.get_num_threads()
        self.threads = max(1, self._threads_before // count)
        torch.set_num_threads(self.threads)
        self.workspace: Workspace | None = None
        self.pool = Pool(count, self._prepare, name=NAME, imports=[__name__])

    def _prepare(self, rank: int) -> Sequence[Call]:
        """Load the run's data and model; while the run goes on, at its present round."""
        log: Call = (print_to, outdir_of(self.config) / f"process_{rank + 1}.log")
        load: Call = (_load, self.config.to_dict(), rank, self.threads)
        return [log, load, self._sync()] if self.workspace else [log, load]

    def _sync(self) -> Call:
        """Sets every tensor of the model that a run may change to its value at the server."""
        assert self.workspace is not None
        workspace = self.workspace
        tensors = {
            **workspace.method.view(self.ledger.state),
            **workspace.personal.untrained,
            **workspace.changed_base(),
        }
        return _dispatch, "sync", self.ledger.stood, packed(tensors)

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:
        """See ``Transport``.

        Raises:
            UserError: a process reports that it cannot load the run's data or model.
            RunFailed: a process has died, and its successor, too.
        """
        for work in self.pool.prepared:
            self.pool.result(work)
        self.workspace, self.ledger, self.trainer = workspace, ledger, Trainer(workspace)
        self._broadcast(*self._sync())

    def follow(self, message: Mapping[str, Tensor], round: int) -> None:
        self._broadcast(_dispatch, "follow", round, packed(message))

    def _broadcast(self, *call: Any) -> None:
        for work in [self.pool.submit(rank, *call) for rank in range(self.count)]:
            self.pool.result(work)

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel]]:
        """The answers in the order of the cohorts."""
        assert self.workspace is not None
        workspace, by_client = self.workspace, {order.client: order for order in orders}
        yield from ((order, Parcel({})) for order in by_client.values() if order.purpose == "follow")
        round = max(order.round for order in by_client.values())
        cohorts = self.trainer.cohorts([order.task for order in by_client.values() if order.purpose == "train"])
        calls = (("train", round, [self._order(task) for task in cohort]) for cohort in cohorts)
        ranks = spread([cohort[0].client // self.trainer.cohort for cohort in cohorts], self.count)
        for cohort, answers in zip(cohorts, self._results(ranks, calls)):
            for task, (data, personal) in zip(cohort, answers):
                answer = Parcel.of(data)
                if personal is not None:  # undone if the update does not count in the end
                    workspace.personal.keep(task.client, round, unpacked(personal, workspace.device))
                answer.facts["followed"] = True
                yield by_client[task.client], answer

    def _order(self, task: Task) -> Ordered:
        facts = {"exchange": task.exchange, "goes_on": task.goes_on, "further": task.further}
        return *self._client(task.client, task.view), facts, packed(task.told)

    def _client(self, client: int, view: Mapping[str, Tensor]) -> tuple[int, bytes]:
        """A client, and the tensors of its model beside the base: the shared ones of ``view`` and its own."""
        assert self.workspace is not None
        return client, packed({**view, **self.workspace.personal.of(client)})

    def evaluate(self, evaluator: Evaluator, state: State) -> dict[str, dict[str, Any]]:
        """As ``Evaluator.evaluate``, each split in as many parts as there are processes."""
        assert self.workspace is not None
        workspace, count, splits = self.workspace, self.count, evaluator.splits()
        held_out = [(split, part) for split in workspace.held_out() if split in splits for part in range(count)]
        sizes = {client: size_of(examples) for client, examples in workspace.tested()} if CLIENTS in splits else {}
        ranks = [part for _, part in held_out] + [client % count for client in sizes]
        parts = (("score_part", split, part, count) for split, part in held_out)
        clients = (("score_client", *self._client(client, workspace.method.view(state, client))) for client in sizes)
        keys: list[str | int] = [*(split for split, _ in held_out), *sizes]
        scores: dict[str | int, list[BatchScore]] = {key: [] for key in keys}
        for key, batches in zip(keys, self._results(ranks, chain(parts, clients))):
            scores[key] += batches
        metrics: dict[str, dict[str, Any]]
        metrics = {split: mean_scores(scores[split], self.config.metrics) for split, part in held_out if not part}
        if sizes:
            metrics[CLIENTS] = evaluator.combined({c: {**mean_scores(scores[c]), **size} for c, size in sizes.items()})
        return metrics

    def _results(self, ranks: Sequence[int], calls: Iterable[Call]) -> Iterator[Any]:
        """The results of ``calls`` in the processes ``ranks``, in their order; a few are given out ahead."""
        waiting: deque[Work] = deque()
        for rank, call in zip(ranks, calls):
            waiting.append(self.pool.submit(rank, _dispatch, *call))
            if len(waiting) > AHEAD * self.count:
                yield self.pool.result(waiting.popleft())
        while waiting:
            yield self.pool.result(waiting.popleft())

    def end(self, error: BaseException | None = None) -> None:
        """End all processes, whatever they do."""
        self.pool.end()
        torch.set_num_threads(self._threads_before)


def spread(homes: Sequence[int], count: int) -> list[int]:
    """The process for each piece of work: its home, where its frozen states are, but in even shares."""
    limit, loads = math.ceil(len(homes) / count), Counter[int]()
    ranks = []
    for home in homes:
        rank = home % count
        if loads[rank] == limit:
            rank = min(range(count), key=loads.__getitem__)
        loads[rank] += 1
        ranks.append(rank)
    return ranks


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """``tensors`` as they go to another process."""
    return Parcel(tensors).to_bytes()


def unpacked(data: bytes, device: torch.device) -> Mapping[str, Tensor]:
    """The tensors that ``packed`` was given, on ``device``."""
    return on_device(Parcel.of(data).tensors, device)


# -- in a process --------------------------------------------------------------------------------------


class _Clients:
    """Any of the run's clients, on this process's copy of the model."""

    def __init__(self, workspace: Workspace):
        self.workspace, self.trainer, self.evaluator = workspace, Trainer(workspace), Evaluator(workspace)
        self.codec = codec_of(workspace.config)
        self.round, self.shared = 0, copied(workspace.model, workspace.method.shared)

    def sync(self, round: int, data: bytes) -> None:
        load_tensors(self.workspace.model, unpacked(data, self.workspace.device))
        self.round, self.shared = round, copied(self.workspace.model, self.workspace.method.shared)

    def follow(self, round: int, data: bytes) -> None:
        if round == self.round:  # this process has been started after the end of the round
            return
        workspace = self.workspace
        self._load_global()
        with torch.no_grad():
            workspace.method.apply(workspace.model, unpacked(data, workspace.device), round)
        self.round, self.shared = round, copied(workspace.model, workspace.method.shared)

    def _load_global(self) -> None:
        load_tensors(self.workspace.model, {**self.shared, **self.workspace.personal.untrained})

    def train(self, round: int, clients: Sequence[Ordered]) -> list[tuple[bytes, bytes | None]]:
        """By client its answer, and the tensors that stay with it, if there can be any."""
        workspace, states = self.workspace, {client: data for client, data, *_ in clients}
        tasks = [
            workspace.task(client, round, facts, unpacked(told, workspace.device) if facts["further"] else None)
            for client, _, facts, told in clients
        ]

        def load(task: Task) -> None:
            load_tensors(workspace.model, unpacked(states[task.client], workspace.device))
            load_told(workspace.model, task.told)

        return [
            (answer.to_bytes(), None if personal is None else packed(personal))
            for _, answer, personal in self.trainer.answers(tasks, load, self.codec)
        ]

    def score_client(self, client: int, data: bytes) -> list[BatchScore]:
        """The scores of a client's model on its test data."""
        load_tensors(self.workspace.model, unpacked(data, self.workspace.device))
        examples = self.workspace.test_of(client)
        assert examples is not None
        return self.evaluator.batches(examples, f"client {client} test")

    def score_part(self, split: str, part: int, parts: int) -> list[BatchScore]:
        """The scores of the global model on part number ``part`` of ``parts`` of a split."""
        self._load_global()
        workspace, owner = self.workspace, f"{split} {part + 1} of {parts}"  # a part of a file's name, too
        examples = part_of(workspace.held_out()[split], part, parts, workspace.config.eval_batch_size)
        if workspace.prefix is not None:
            workspace.prefix.budget[owner] = workspace.prefix.budget.get(split, False)
        outputs = bool(of_outputs(workspace.config.metrics))
        return self.evaluator.batches(examples, owner, outputs) if len(examples) else []


_clients: _Clients


def _load(config: dict[str, Any], rank: int, threads: int) -> None:
    """Load the run's data and model."""
    global _clients
    torch.set_num_threads(threads)
    _clients = _Clients(Workspace(on_a_gpu(load_config(config), rank), serves=False))


def _dispatch(kind: str, *arguments: Any) -> Any:
    """Call the method ``kind`` of this process's ``_Clients``."""
    return getattr(_clients, kind)(*arguments)


def part_of(examples: Examples | ImageExamples, part: int, parts: int, size: int) -> Examples | ImageExamples:
    """Part number ``part`` of ``parts``, which is evaluated in the same batches as all ``examples`` would be.

    The parts are cut from the samples sorted by length, between batches of ``size`` samples, and between batches in
    which the frozen layers' states are computed.
    """
    order = np.argsort(-examples.lengths, kind="stable")
    block = math.lcm(size, COMPUTED_TOGETHER)
    groups = math.ceil(len(order) / block)
    first, last = (groups * p // parts * block for p in (part, part + 1))
    return examples.select(order[first:last])
