"""The data, the method and the model of a configuration in one process, and the training of clients there.

All randomness is derived from the seed by purpose, round and client, so that a resumed run draws what an uninterrupted
one would have drawn, on every engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algebra import on_device
from ..config import Config
from ..data import Examples, ImageExamples, build_data, load_raw
from ..data.examples import rows_alike
from ..data.ragged import Lazy
from ..errors import UserError, say_once
from ..methods import Client, Method, RobustMean, State, Update, Workbench, create_method
from ..models.adapters import load_tensors, start_at_zero
from ..models.build import build_model, build_tokenizer
from ..models.checkpointing import recompute
from ..models.fingerprints import configuration_fingerprint, fingerprint_of
from ..models.given import is_given
from ..models.kinds import computes_by_length, heads_by_place
from ..models.machine import autocast, check_half, device_of, enough_memory, input_device, wait
from ..models.names import is_statistic, tags
from ..models.placing import at_home
from ..models.quantised import count, require_bitsandbytes
from ..models.shortcuts.frozen import FrozenPrefix, Owners
from ..models.shortcuts.reads import OnlyRead
from ..models.shortcuts.slots import Apart
from ..models.shortcuts.states import SharedStates, shared_folder
from ..models.shortcuts.trials import samples_to_try
from ..seeds import derive
from ..settings import OPTIMIZERS_8BIT
from ..training import train_client
from ..training.cohort import Member, apart, cohort_size, evenly, never_together, parts_of, places, train_cohort
from ..training.local import LocalResult, passes_of
from ..training.schedule import evaluation_due, schedule_of
from ..training.steady import check_steady
from .copies import changed_base, copied
from .fits import (
    SPLITS,
    check_head,
    check_personal,
    check_splits,
    check_tags,
    check_task,
    of_one_client,
    say_half,
    trained_in,
)
from .personal import PersonalParts
from .record import Spent
from .reuse import Reuse
from .task import Task

logger = logging.getLogger("fs_lowrank")

#: methods give clients ranks and phases by turns; so many clients show them all
KINDS = 100


def method_of(config: Config) -> Method:
    """The configured method."""
    server = config.fedopt.optimizer
    return create_method(
        config.federate.method,
        adapter=config.adapter,
        rounds=config.federate.total_round_num,
        seed=config.seed,
        uniform=config.federate.ignore_weight,
        from_scratch=config.from_scratch,
        with_adapter=bool(config.llm.adapter.use),
        only_sums=config.federate.use_ss or config.federate.online_aggr,
        local_steps=config.train.local_update_steps,
        own_steps={
            client: own["local_update_steps"]
            for client, own in config.own_settings.items()
            if "local_update_steps" in own
        },
        train_head=config.lowrank.train_head,
        personal=config.lowrank.personal,
        robust=RobustMean.of(config.lowrank),
        server_optimizer={"type": server.type, "lr": server.lr, **server.extra} if config.fedopt.use else None,
        **config.method_params,
    )


@dataclass(frozen=True)
class _Trained:
    """A client after its training: what the model does not hold yet, and under what to keep it for other runs."""

    tensors: Mapping[str, Tensor]
    result: LocalResult
    seconds: float
    key: str | None = None
    reused: bool = False


def _kept(found: tuple[dict[str, Tensor], dict[str, Any]] | None, device: torch.device) -> _Trained | None:
    if found is None:
        return None
    tensors, facts = found
    return _Trained(tensors, LocalResult.of(facts["result"], device), facts["seconds"], reused=True)


class Site:
    """The data, the method and the model of one process, and the clients that train there.

    Args:
        config: the configuration of the run.
        serves: the server step runs in this process, so a method that chooses by validation data is given them.
        undivided: all data that this process reads belong to one client.

    Attributes:
        initial_state: the method's state before round 1, on one device also where the model is on several.
        personal: by client, the tensors that stay with it. clients: each made when it is asked for.
        sizes: of their training sets.
        parameters: the number of parameters of the plain model, and the largest number that a client trains.
        heads: the modules of a model without an adapter that are a head by their place (``names.is_head``).
        base_fingerprint: hash of the plain model. configured: of its configuration, empty if it has none.
        shared_states: what is kept for other runs. new_weights: names of weights that no checkpoint had (a new head's).
    """

    def __init__(self, config: Config, *, serves: bool = True, undivided: bool = False):
        self.config = config
        if config.quantised:
            require_bitsandbytes(f"lowrank.dtype = {config.quantised}")
        if (optimizer := config.train.optimizer.type) in OPTIMIZERS_8BIT:
            require_bitsandbytes(f"train.optimizer.type = {optimizer}")
        self.schedule = schedule_of(config.train.scheduler, config.source)
        self.device = device_of(config)
        for name, asked in (("train.autocast", config.train.autocast), ("lowrank.dtype", config.dtype)):
            if asked == "bfloat16":
                check_half(self.device, f"{name} = {asked}")
        self.method = method_of(config)
        self.tokenizer = build_tokenizer(config)
        raw = load_raw(config.data, origin=config.source, task=config.model.task)
        check_task(config, raw)
        self.data = build_data(of_one_client(config) if undivided else config, self.tokenizer, raw=raw)
        check_splits(config, self.data)
        model = self.plain_model()
        self.base_fingerprint, self.configured = fingerprint_of(model), configuration_fingerprint(model)
        # Set by build_model; torch's types allow only tensors and modules as attributes.
        self.new_weights: list[str] = list(vars(model)["new_weights"])
        # Beside an adapter the names say it.
        self.heads = () if config.llm.adapter.use else tuple(heads_by_place(model))
        total, self.model = count(model), self.adapted(model)
        check_head(config, self.model, self.heads)
        self.method.workbench = self._workbench() if serves and self.method.needs.validation else None
        self.sizes = self.data.partition.sizes()
        self.clients = Lazy(len(self.data.clients), self._client)
        self.initial_state = on_device(self.method.initial_state(self.model), self.device)
        check_tags(self.method, self.model, self.initial_state)
        say_half(config, {**self.initial_state, **self.changed_base()})
        self.personal = PersonalParts(copied(self.model, self.method.personal))
        check_personal(config, self.method, self.personal.untrained)
        self.reuse = Reuse(config.lowrank.reuse_clients) if config.lowrank.reuse_clients else None
        self._spent: dict[int, Spent] = {}
        self.parameters = {"total": total, "trainable": max(map(self._trained_by, self.kinds()))}
        self.shared_states = SharedStates(shared_folder(), config.train.cache_frozen_shared)
        self.tried = samples_to_try(self.data.splits())
        if self.tried:
            check_steady(self.model, self.tried)
        self.prefix = self.frozen_prefix(self.model)
        self.reads = None
        if config.train.only_read == "auto" and self.tried and not self._unknown:
            self.reads = OnlyRead(self.model)
            self.reads.check(self.tried)

    @property
    def _unknown(self) -> bool:
        """Whether the model is not one stack of layers that a batch of texts goes through once, as shortcuts need."""
        config = self.config
        prompted = bool(config.llm.adapter.use and config.adapter.virtual_tokens)
        return config.model.task == "Seq2SeqLM" or prompted or is_given(config) or computes_by_length(self.model)

    @enough_memory()
    def plain_model(self) -> nn.Module:
        """The model before the method puts anything on it; the same at every call."""
        data = self.data
        return build_model(self.config, data.num_labels, self.tokenizer, data.image_shape, data.label_names)

    @enough_memory()
    def adapted(self, model: nn.Module) -> nn.Module:
        """``model`` with the method's parts on it, on the run's device."""
        with at_home(model):
            model = self.method.adapt(model)
        config = self.config
        if config.lowrank.base_init == "zero":
            start_at_zero(model, config.seed)
        if config.model.device_map:
            self.device = input_device(model)
        else:
            model = model.to(self.device)
        if config.train.autocast != "off":
            autocast(model, getattr(torch, config.train.autocast))
        if config.train.checkpointing and not config.is_vision:
            recompute(model)
        return model

    def _client(self, index: int) -> Client:
        return Client(index + 1, int(self.sizes[index]), batches=lambda: self.in_batches(self.data.clients[index])())

    def kinds(self) -> range:
        """The clients that are looked at where clients may differ in their ranks or phases: no more than ``KINDS``."""
        return range(1, min(len(self.clients), KINDS) + 1)

    def tested(self) -> Iterator[tuple[int, Examples | ImageExamples]]:
        """The clients that have a share of the test set, each with its share."""
        for index in self.data.tested():
            share = self.data.client_tests[index]
            assert share is not None
            yield index + 1, share

    def _trained_by(self, client: int) -> int:
        """The number of parameters that ``client`` trains in any phase of any round."""
        trained = trained_in(self.method, client, self.config.federate.total_round_num, self.model)
        held = {**self.method.view(self.initial_state, client), **self.personal.untrained}
        return sum(t.numel() for n, t in held.items() if tags(n) & trained and not is_statistic(n))

    def in_batches(
        self, examples: Examples | ImageExamples, size: int = 0
    ) -> Callable[[], Iterator[dict[str, Tensor]]]:
        """A function that goes through ``examples`` once as model inputs without padding (``Client.batches``)."""
        size = size or self.config.dataloader.batch_size
        return lambda: (examples.batch(rows) for rows in rows_alike(examples.lengths, size))

    def _workbench(self) -> Workbench | None:
        """Held-out samples by which the server step chooses; the same for every method.

        Raises:
            UserError: there is no validation split.
        """
        held_out, config = self.data.validation, self.config
        if held_out is None:
            raise UserError(
                f"federate.method = {config.federate.method} chooses among models by validation data, and "
                f"there are none; give data.splits a share for them (now {list(config.data.splits)})"
            )
        draw = np.random.default_rng(derive(config.seed, "validation"))
        chosen = np.sort(draw.permutation(len(held_out))[: config.lowrank.validation_samples])
        return Workbench(
            self.model,
            self.in_batches(held_out.select(chosen), config.eval.batch_size),
            derive(config.seed, "workbench"),
        )

    def frozen_prefix(self, model: nn.Module, client: int | None = None, share: float = 1.0) -> FrozenPrefix | None:
        """The cache of the frozen layers of ``model``; None if there can be none.

        Args:
            client: whose training data are kept; None: those of all clients, and the held-out data.
            share: fraction of ``train.cache_frozen_bytes``, for several models that share it.
        """
        train = self.config.train
        if train.frozen_dropout or self._unknown:
            return None
        prefix = FrozenPrefix(
            model,
            {*self.method.shared, *self.method.personal},
            limit=train.cache_frozen_bytes * share if train.cache_frozen == "auto" else 0,
            folder=train.cache_frozen_dir or None,
            shared=self.shared_states,
            changing=self.method.changed_base(model),
        )
        rounds = range(1, self.config.federate.total_round_num + 1)
        evaluated = sum(evaluation_due(self.config, t) for t in rounds) if client is None else 0
        held_out = {} if client else {split: (examples, evaluated) for split, examples in self.held_out().items()}
        chosen = range(1, len(self.clients) + 1) if client is None else range(client, client + 1)
        prefix.plan(held_out, self._owners(chosen), self.tried)
        return prefix if prefix else None

    def reads_of(self, model: nn.Module) -> OnlyRead | None:
        """``reads`` for ``model``: the site's own, or a copy of it."""
        return self.reads if self.reads is None or model is self.model else self.reads.like(model)

    def _owners(self, clients: range) -> Owners:
        """The training data of ``clients``, and how often each is expected to go through its own in the run."""
        config, indices = self.config, self.data.partition.indices
        share = config.federate.total_round_num * config.sampled_per_round / config.taking_part
        rows = indices[clients.start - 1 : clients.stop - 1]
        length = 1.0 if config.is_vision else float(self.data.train.lengths.mean())
        passes = passes_of(config, rows.lengths, length) * share
        for client in filter(clients.__contains__, config.own_settings):
            i = client - clients.start
            passes[i] = passes_of(config.of_client(client), rows.lengths[i : i + 1], length)[0] * share
        return Owners(
            Lazy(len(rows), lambda i: f"client {clients[i]}"),
            rows.sums(self.data.train.lengths),
            passes,
            lambda i: self.data.clients[clients[i] - 1],
        )

    def held_out(self) -> dict[str, Examples | ImageExamples]:
        """The splits to evaluate on, by the names of ``eval.split``; an empty validation set is left out."""
        splits = {split: getattr(self.data, SPLITS[split]) for split in self.config.eval.split if split in SPLITS}
        return {split: examples for split, examples in splits.items() if examples is not None}

    def changed_base(self) -> dict[str, Tensor]:
        """The base weights of the model that the method has changed; not copied."""
        return changed_base(self.method, self.model)

    def task(self, client: int, round: int) -> Task:
        """What ``client`` does in ``round``, as far as its own side knows."""
        return Task(self.method, client, round, None, self.config.of_client(client), self.schedule)

    def fit(
        self,
        client: Client,
        examples: Examples | ImageExamples,
        round: int,
        model: nn.Module,
        prefix: FrozenPrefix | None,
        task: Task | None = None,
    ) -> tuple[Update, LocalResult]:
        """Train ``model`` as ``client`` in ``round``; the update holds the model's own tensors, not copies."""
        started, reuse, task = time.perf_counter(), self.reuse, task or self.task(client.id, round)
        config, phases, lr, seed = task.settings, task.phases, task.lr, task.seed
        key = reuse.key(config, model, examples, phases, lr=lr, seed=seed) if reuse else None
        trained = _kept(reuse.find(key), self.device) if reuse and key else None
        if trained is None:
            owner, reads = f"client {client.id}", self.reads_of(model)
            result = train_client(
                model, examples, phases, config, owner=owner, prefix=prefix, reads=reads, lr=lr, seed=seed
            )
            wait(self.device)
            trained = _Trained({}, result, time.perf_counter() - started, key)
        return self._answer(task, client, model, trained), trained.result

    def _answer(self, task: Task, client: Client, model: nn.Module, trained: _Trained) -> Update:
        """The update of ``client``, with whose tensors ``model`` was loaded before it was trained."""
        if trained.tensors:
            load_tensors(model, trained.tensors)
        if self.reuse and trained.key:
            facts = {"result": trained.result.facts(), "seconds": trained.seconds}
            self.reuse.keep(trained.key, model, task.phases, facts)
        started = time.perf_counter()
        tensors = {n: t.detach().to(self.device) for n, t in self.method.upload(model, task.round, client).items()}
        if self.method.needs.own_upload:
            wait(self.device)
        spent = {"training": trained.seconds, "upload": time.perf_counter() - started, "reused": trained.reused}
        self._spent[client.id] = spent
        return Update(client.id, client.num_samples, tensors)

    # -- clients that train together -------------------------------------------------------------------

    @cached_property
    def cohort(self) -> int:
        """How many clients train together; 1: each alone."""
        config, data = self.config, self.data.clients
        lengths = np.ones(1) if config.is_vision else np.concatenate([e.lengths for e in data[:1000]])
        depth = self.prefix.depth if self.prefix else 0
        largest = max(config.variants(), key=lambda own: own.dataloader.batch_size)
        size = min(cohort_size(self.model, largest, lengths, depth), config.sampled_per_round)
        size = size if config.train.cohort else evenly(size, config.sampled_per_round, places(self.model))
        if size < 2:
            return 1
        asked = f"federate.method = {config.federate.method} asks for it" if self.method.needs.alone else ""
        reason = asked or never_together(self.model, config, self._held, self.tried)
        if reason:
            self._say_alone(reason)
        return 1 if reason else size

    @property
    def _held(self) -> set[str]:
        """Tags of what a client may hold that others do not."""
        return {*self.method.shared, *self.method.personal}

    def _say_alone(self, reason: str) -> None:
        asked = self.config.train.cohort > 1
        say_once(f"train.cohort: clients are trained one by one: {reason}", logging.WARNING if asked else logging.INFO)

    def cohorts(self, tasks: Sequence[Task]) -> list[Sequence[Task]]:
        """``tasks`` in even groups that train together: of one learning rate, ``cohort`` at most."""
        if self.cohort == 1:
            return [[task] for task in tasks]
        groups: list[Sequence[Task]] = []
        by_rate: dict[float, list[Task]] = {}
        for task in tasks:
            by_rate.setdefault(task.lr, []).append(task)
        for group in (group for of in by_rate.values() for group in parts_of(of, math.ceil(len(of) / self.cohort))):
            if len(group) > 1 and (reason := apart(self.model, self.config, [task.phases for task in group])):
                self._say_alone(reason)
                groups += [[task] for task in group]
            else:
                groups.append(group)
        return groups

    def fit_all(
        self, tasks: Sequence[Task], load: Callable[[Task], object]
    ) -> Iterator[tuple[Task, tuple[Update, LocalResult] | Exception]]:
        """Train the model as the client of each task: together if they are several, and one by one if that fails.

        Args:
            load: loads the tensors of a client into the model.
        Returns:
            for each what ``fit`` gives, or why it failed; while that is in use the model holds the client's tensors.
        """
        together = self._fit_together(tasks, load) if len(tasks) > 1 else {}
        for task in tasks:
            place = task.client - 1
            own = self._client(place)
            fitted: tuple[Update, LocalResult] | Exception
            try:
                load(task)
                if trained := together.get(task.client):
                    fitted = self._answer(task, own, self.model, trained), trained.result
                else:
                    examples = self.data.clients[place]
                    fitted = self.fit(own, examples, task.round, self.model, self.prefix, task)
            except UserError:
                raise
            except Exception as error:  # the failure of one client is recorded and must not end the round
                logger.debug("client %d", task.client, exc_info=True)
                fitted = error
            yield task, fitted

    def _fit_together(self, tasks: Sequence[Task], load: Callable[[Task], object]) -> dict[int, _Trained]:
        """By client what one pass for all ``tasks`` gives; nothing if they have to be trained one by one."""
        config, reuse, lr, started = self.config, self.reuse, tasks[0].lr, time.perf_counter()
        clients = [task.client for task in tasks]
        examples = [self.data.clients[client - 1] for client in clients]
        members = [Member(f"client {t.client}", own, t.phases, t.seed, t.settings) for t, own in zip(tasks, examples)]
        keys: list[str | None] = [None] * len(tasks)
        try:
            if reuse:
                for i, (task, own) in enumerate(zip(tasks, examples)):
                    load(task)
                    keys[i] = reuse.key(task.settings, self.model, own, task.phases, lr=lr, seed=task.seed)
                keys = reuse.keys_together(keys)
                kept = [_kept(reuse.find(key), self.device) if key else None for key in keys]
                if all(kept):
                    return {client: trained for client, trained in zip(clients, kept) if trained}
            found = train_cohort(
                self.model,
                members,
                lambda i: load(tasks[i]),
                self._held,
                config,
                lr=lr,
                prefix=self.prefix,
                reads=self.reads,
            )
            wait(self.device)
        except UserError:
            raise
        except Apart as error:
            self._say_alone(str(error))
            return {}
        except Exception as error:  # of one client or of all, such as a lack of memory; alone the others can go on
            logger.debug("clients %s", clients, exc_info=True)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            say_once(f"train.cohort: clients are trained one by one where they fail together ({reason})")
            return {}
        seconds, samples = time.perf_counter() - started, sum(result.samples for result, _ in found)
        return {
            client: _Trained(tensors, result, seconds * result.samples / max(samples, 1), key)
            for client, key, (result, tensors) in zip(clients, keys, found)
        }

    def take_spent(self) -> dict[int, Spent]:
        """What was spent on each client trained here since the last call."""
        spent, self._spent = dict(sorted(self._spent.items())), {}
        return spent

    def add_spent(self, spent: Mapping[int, Spent]) -> None:
        """Add what another process spent on clients."""
        self._spent.update(spent)

    def load_client(self, state: State, client: int) -> None:
        """Load the tensors of ``client`` into the model."""
        self.load(self.method.view(state, client), client)

    def load(self, view: Mapping[str, Tensor], client: int) -> None:
        """Load the shared tensors ``view`` and the personal ones of ``client`` into the model."""
        load_tensors(self.model, {**view, **self.personal.get(client, self.personal.untrained)})

    def load_global(self, state: State) -> None:
        """Load the global tensors of ``state`` into the model."""
        load_tensors(self.model, {**self.method.view(state), **self.personal.untrained})

    def keep_personal(self, client: int, round: int) -> None:
        """Note the personal tensors of the model, which ``client`` has trained in ``round``."""
        if self.personal.untrained:
            self.personal.keep(client, round, copied(self.model, self.method.personal))
