"""The training of clients on the models of one process, one by one or several in one pass.

The cost of a client's training is counted here (``Fitted.spent``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

import numpy as np
from torch import Tensor, nn

from ..errors import UserError, say_once
from ..methods import Client, Update
from ..models.adapters import load_tensors
from ..models.machine import wait
from ..models.shortcuts.frozen import FrozenPrefix
from ..models.shortcuts.reads import OnlyRead
from ..models.shortcuts.trials import failure
from ..training import train_client
from ..training.cohort import Member, cohort_size, evenly, never_together, obstacle, parts_of, places, train_cohort
from ..training.local import LocalResult
from .admission import Spent, copies
from .codec import Codec
from .copies import apology, own_tensors
from .parcel import Parcel
from .reuse import Reuse
from .task import Task
from .workspace import Workspace

logger = logging.getLogger("fs_lowrank")


@dataclass(frozen=True)
class Fitted:
    """The outcome of a client's training.

    Attributes:
        update: with the model's own tensors, not copies.
        result: of the training. spent: its cost in this process.
    """

    update: Update
    result: LocalResult
    spent: Spent

    def answer(self, round: int, codec: Codec | None = None) -> Parcel:
        """The client's answer in ``round``.

        Args:
            codec: encodes copies of the tensors; None: they stay the model's own.
        """
        tensors = self.update.tensors if codec is None else codec.encode(copies(self.update.tensors))
        facts = {"samples": self.update.num_samples, "loss": self.result.loss, "spent": self.spent}
        return Parcel(tensors, round=round, **facts)


class Trainer:
    """Trains clients on the data and the models of ``workspace``.

    Attributes:
        reuse: the cache of trainings for other runs; None: there is none.
    """

    def __init__(self, workspace: Workspace):
        self.workspace, self.config = workspace, workspace.config
        self.reuse = Reuse(self.config.lowrank.reuse_clients) if self.config.lowrank.reuse_clients else None

    def fit(self, task: Task, model: nn.Module, prefix: FrozenPrefix | None) -> Fitted:
        """Train ``model`` as the client of ``task``."""
        reuse, started, client = self.reuse, time.perf_counter(), self.workspace.client(task.client)
        if not task.trains:
            return self._fitted(task, client, model, LocalResult(0.0, 0, 0), 0.0)
        examples = self.workspace.training[task.client - 1]
        config, phases, lr, seed = task.settings, task.phases, task.lr, task.seed
        key = reuse.key(config, model, examples, phases, lr=lr, seed=seed) if reuse else None
        if reuse and key and (entry := reuse.find(key)):
            tensors, facts = entry
            load_tensors(model, tensors)
            return self._fitted(task, client, model, LocalResult(**facts["result"]), facts["seconds"], reused=True)
        owner, reads = f"client {task.client}", self.reads_of(model)
        result = train_client(
            model, examples, phases, config, owner=owner, prefix=prefix, reads=reads, lr=lr, seed=seed
        )
        seconds = time.perf_counter() - started
        if reuse and key:
            reuse.keep(key, model, phases, {"result": asdict(result), "seconds": seconds})
        return self._fitted(task, client, model, result, seconds)

    def reads_of(self, model: nn.Module) -> OnlyRead | None:
        """The last layer of ``model`` for the positions that are read: the workspace's, or a copy of it."""
        reads = self.workspace.reads
        return reads if reads is None or model is self.workspace.model else OnlyRead(model, reads.checked)

    def _fitted(
        self, task: Task, client: Client, model: nn.Module, result: LocalResult, seconds: float, reused: bool = False
    ) -> Fitted:
        """The outcome of ``task`` of ``client``, whose trained tensors ``model`` holds."""
        started, method, device = time.perf_counter(), self.workspace.method, self.workspace.device
        client = replace(client, exchange=task.exchange, told=task.told)
        tensors = {n: t.detach().to(device) for n, t in method.upload(model, task.round, client).items()}
        if method.needs.own_upload:
            wait(device)
        spent: Spent = {
            "training": seconds,
            "upload": time.perf_counter() - started,
            "reused": reused,
        }
        return Fitted(Update(client.id, client.num_samples, tensors), result, spent)

    # -- clients that train together -------------------------------------------------------------------

    @cached_property
    def cohort(self) -> int:
        """How many clients train together; 1: each alone."""
        workspace, config, data = self.workspace, self.config, self.workspace.data.clients
        lengths = np.ones(1) if config.is_vision else np.concatenate([e.lengths for e in data[:1000]])
        depth = workspace.prefix.depth if workspace.prefix else 0
        largest = max(config.variants(), key=lambda settings: settings.dataloader.batch_size)
        size = min(cohort_size(workspace.model, largest, lengths, depth), config.sampled_per_round)
        size = size if config.train.cohort else evenly(size, config.sampled_per_round, places(workspace.model))
        if size < 2:
            return 1
        if workspace.method.needs.alone:
            reason = f"federate.method = {config.federate.method} asks for it"
        elif self.reuse:
            reason = "lowrank.reuse_clients stores clients that were trained alone"
        else:
            model, tried = workspace.model, workspace.shortcuts.tried
            trial = partial(never_together, model, config, self._held, tried)
            reason = workspace.shortcuts.once("cohort", model, trial)
        if reason:
            self._say_alone(reason)
        return 1 if reason else size

    @property
    def _held(self) -> set[str]:
        """Tags of the tensors in which a client may differ from others."""
        return {*self.workspace.method.shared, *self.workspace.method.personal}

    def _say_alone(self, reason: str) -> None:
        wanted = self.config.train.cohort > 1
        say_once(f"train.cohort: clients are trained one by one: {reason}", logging.WARNING if wanted else logging.INFO)

    def cohorts(self, tasks: Sequence[Task]) -> list[Sequence[Task]]:
        """``tasks`` in even groups that train together: of one learning rate, ``cohort`` at most."""
        if self.cohort == 1:
            return [[task] for task in tasks]
        groups: list[Sequence[Task]] = []
        by_rate: dict[float, list[Task]] = {}
        for task in tasks:
            by_rate.setdefault(task.lr, []).append(task)
        for group in (group for lot in by_rate.values() for group in parts_of(lot, math.ceil(len(lot) / self.cohort))):
            if len(group) > 1 and (reason := obstacle(self.workspace.model, [task.phases for task in group])):
                self._say_alone(reason)
                groups += [[task] for task in group]
            else:
                groups.append(group)
        return groups

    def answers(
        self, tasks: Sequence[Task], load: Callable[[Task], object], codec: Codec | None = None
    ) -> Iterator[tuple[Task, Parcel, dict[str, Tensor] | None]]:
        """Train the model as the client of each task: together if they are several, and one by one if that fails.

        Args:
            load: loads the tensors of a client into the model. codec: of its answer (``Fitted.answer``).
        Returns:
            for each its answer, or ``copies.apology``, and the tensors that stay with the client, None if there can be
            none; while these are in use the model holds the client's tensors.
        """
        workspace, model = self.workspace, self.workspace.model
        together = self._fit_together(tasks, load) if len(tasks) > 1 and tasks[0].trains else {}
        for task in tasks:
            try:
                load(task)
                if task.client in together:
                    result, tensors, seconds = together[task.client]
                    load_tensors(model, tensors)
                    fitted = self._fitted(task, workspace.client(task.client), model, result, seconds)
                else:
                    fitted = self.fit(task, model, workspace.prefix)
                answer, stays = fitted.answer(task.round, codec), workspace.personal.untrained or not task.alone
                personal = own_tensors(workspace.method, model, task) if stays else None
            except UserError:
                raise
            except Exception as error:  # the failure of one client is recorded and must not end the round
                logger.debug("client %d", task.client, exc_info=True)
                answer, personal = apology(task.round, error), None
            yield task, answer, personal

    def _fit_together(
        self, tasks: Sequence[Task], load: Callable[[Task], object]
    ) -> dict[int, tuple[LocalResult, Mapping[str, Tensor], float]]:
        """By client the result of one pass for all ``tasks``, its tensors, and its share of the seconds.

        Nothing if they have to be trained one by one.
        """
        workspace, started, clients = self.workspace, time.perf_counter(), [task.client for task in tasks]
        data = workspace.training
        members = [Member(f"client {t.client}", data[t.client - 1], t.phases, t.seed, t.settings) for t in tasks]
        try:
            outcomes = train_cohort(
                workspace.model,
                members,
                lambda i: load(tasks[i]),
                self._held,
                self.config,
                lr=tasks[0].lr,
                prefix=workspace.prefix,
                reads=workspace.reads,
            )
        except UserError:
            raise
        except Exception as error:  # of one client or of all, such as a lack of memory; alone the others can go on
            logger.debug("clients %s", clients, exc_info=True)
            self._say_alone(failure(error))
            return {}
        seconds, samples = time.perf_counter() - started, sum(result.samples for result, _ in outcomes)
        return {
            client: (result, tensors, seconds * result.samples / max(samples, 1))
            for client, (result, tensors) in zip(clients, outcomes)
        }
