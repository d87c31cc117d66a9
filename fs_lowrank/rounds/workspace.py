"""The data, the method and the model of a configuration in one process.

Checks of a configuration against them are in ``checks``, caches and shortcuts in ``shortcuts``, and the training of
clients in ``trainer``.

All randomness is derived from the seed by purpose, round and client, so that a resumed run draws what an uninterrupted
one would have drawn, on every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algebra import on_device
from ..config import Config
from ..data import Examples, ImageExamples, build_data, load_raw
from ..data.examples import rows_alike
from ..data.ragged import Lazy
from ..errors import UserError
from ..jobs.progress import line, steps
from ..methods import Client, DriftCorrection, Method, RobustMean, State, Tensors, Workbench, create_method
from ..models.adapters import load_tensors, start_at_zero
from ..models.build import build_model, build_tokenizer
from ..models.checkpointing import recompute
from ..models.fingerprints import configuration_fingerprint, model_fingerprint
from ..models.kinds import heads_by_place
from ..models.machine import autocast, device_of, enough_memory, input_device
from ..models.names import is_statistic, tags
from ..models.placing import at_home
from ..models.quantised import count, require_bitsandbytes
from ..models.shortcuts.frozen import FrozenPrefix
from ..models.shortcuts.reads import OnlyRead
from ..seeds import derive
from ..settings import OPTIMIZERS_8BIT
from ..training.schedule import schedule_of
from ..training.steady import check_steady
from .checks import (
    SPLITS,
    check_head,
    check_personal,
    check_splits,
    check_tags,
    check_task,
    of_one_client,
    say_half,
    say_turns,
    trained_in,
)
from .copies import changed_base, copied, load_told
from .personal import PersonalParts
from .shortcuts import Shortcuts
from .task import Task

#: methods give clients phases by turns; so many clients show them all
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
            c: keys["local_update_steps"] for c, keys in config.client_settings.items() if "local_update_steps" in keys
        },
        train_head=config.lowrank.train_head,
        personal=config.lowrank.personal,
        drift=DriftCorrection.from_config(config),
        robust=RobustMean.from_config(config.lowrank),
        server_optimizer={"type": server.type, "lr": server.lr, **server.extra} if config.fedopt.use else None,
        **config.method_params,
    )


class Workspace:
    """The data, the method and the model of one process.

    Args:
        config: the configuration of the run.
        serves: the server step runs in this process, so a method that chooses by validation data is given them.
        undivided: all data that this process reads belong to one client, for whose number it works.

    Attributes:
        initial_state: the method's state before round 1, on one device also where the model is on several.
        personal: by client, the tensors that stay with it. clients: each made when it is asked for.
        training: the training data of client n at position n - 1. sizes: of the training sets.
        parameters: the number of parameters of the plain model, and the largest number that a client trains.
        heads: the modules of a model without an adapter that are a head by their place (``names.is_head``).
        base_fingerprint: hash of the plain model. configured: of its configuration, empty if it has none; labelled: the
            same as development versions of 0.2.0 had it.
        new_weights: names of weights that no checkpoint had (a new head's).
        shortcuts: makes the cache of the frozen layers (``prefix``, or None) and the last layer for the positions that
            are read (``reads``, or None).
    """

    def __init__(self, config: Config, *, serves: bool = True, undivided: bool = False):
        self.config, self.undivided = config, undivided
        if config.quantised:
            require_bitsandbytes(f"lowrank.dtype = {config.quantised}")
        if (optimizer := config.train.optimizer.type) in OPTIMIZERS_8BIT:
            require_bitsandbytes(f"train.optimizer.type = {optimizer}")
        self.schedule = schedule_of(config.train.scheduler, config.source)
        self.device = device_of(config)
        self.method = method_of(config)
        self.tokenizer = build_tokenizer(config)
        with line("reading data", 1, at_once=True):
            raw = load_raw(config.data, origin=config.source, task=config.model.task)
        check_task(config, raw)
        self.data = build_data(of_one_client(config) if undivided else config, self.tokenizer, raw=raw)
        check_splits(config, self.data)
        with line("loading the model", 1, at_once=True):
            model = self.plain_model()
        self.base_fingerprint, self.configured = model_fingerprint(model), configuration_fingerprint(model)
        self.labelled = configuration_fingerprint(model, labelled=True)
        # Set by build_model; torch's types allow only tensors and modules as attributes.
        self.new_weights: list[str] = list(vars(model)["new_weights"])
        # Beside an adapter the names say it.
        self.heads = () if config.llm.adapter.use else tuple(heads_by_place(model))
        total, self.model = count(model), self.adapted(model)
        check_head(config, self.model, self.heads)
        self.method.workbench = self._workbench() if serves and self.method.needs.validation else None
        self.sizes = self.data.partition.sizes()
        self.clients = Lazy(len(self.data.clients), lambda index: self.client(index + 1))
        everyone = Lazy(config.federate.client_num, lambda _: self.data.clients[0])
        self.training: Sequence[Examples | ImageExamples] = everyone if undivided else self.data.clients
        self.initial_state = on_device(self.method.initial_state(self.model), self.device)
        check_tags(self.method, self.model, self.initial_state)
        say_half(config, {**self.initial_state, **self.changed_base()})
        self.personal = PersonalParts(copied(self.model, self.method.personal))
        check_personal(config, self.method, self.personal)
        self.parameters = {"total": total, "trainable": max(map(self._trained_by, self.kinds()))}
        say_turns(config, self.method, self.sizes)
        self.shortcuts = Shortcuts(config, self.data, self.method, self.held_out())
        if tried := self.shortcuts.tried:
            self.shortcuts.once("steady", self.model, lambda: check_steady(self.model, tried))
        saving = (self.shortcuts.frozen_prefix, self.shortcuts.only_read)
        shortcuts: list[Any] = [make(self.model) for make in steps(saving, "trying what saves work")]
        self.prefix: FrozenPrefix | None = shortcuts[0]
        self.reads: OnlyRead | None = shortcuts[1]

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

    def client(self, number: int) -> Client:
        """Client ``number``, from 1."""
        size = int(self.sizes[0 if self.undivided else number - 1])
        return Client(number, size, batches=lambda: self.in_batches(self.training[number - 1])())

    def test_of(self, number: int) -> Examples | ImageExamples | None:
        """The share of the test set that client ``number`` has; None: it has none."""
        return self.data.client_tests[0 if self.undivided else number - 1]

    def kinds(self) -> list[int]:
        """The clients to look at where clients may differ in their ranks or phases.

        They are the first ``KINDS``, or as many as the longest list of the method's parameters, such as
        ``lowrank.ranks``, has entries; and one for each rank in ``lowrank.clients``.
        """
        turns = max(KINDS, *(len(v) for v in self.config.lowrank.params.values() if isinstance(v, tuple)), 0)
        by_rank = {own.get("rank"): client for client, own in self.config.client_settings.items()}
        return sorted({*range(1, turns + 1), *by_rank.values()}.intersection(range(1, len(self.clients) + 1)))

    def tested(self) -> Iterator[tuple[int, Examples | ImageExamples]]:
        """The clients that have a share of the test set, each with its share."""
        for index in self.data.tested():
            share = self.test_of(index + 1)
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

    def held_out(self) -> dict[str, Examples | ImageExamples]:
        """The splits to evaluate on, by the names of ``eval.split``; an empty validation set is left out."""
        splits = {split: getattr(self.data, SPLITS[split]) for split in self.config.eval.split if split in SPLITS}
        return {split: examples for split, examples in splits.items() if examples is not None}

    def changed_base(self) -> dict[str, Tensor]:
        """The base weights of the model that the method has changed; not copied."""
        return changed_base(self.method, self.model)

    def task(
        self, client: int, round: int, order: Mapping[str, Any] | None = None, told: Tensors | None = None
    ) -> Task:
        """The work of ``client`` in ``round``, as far as its own side knows.

        Args:
            order: the facts of its order, by which this is an exchange of several. told: the tensors that came with it.
        """
        exchange = {n: value for n, value in (order or {}).items() if n in ("exchange", "goes_on")}
        settings = self.config.of_client(client), self.schedule
        return Task(self.method, client, round, None, *settings, **exchange, told=told)

    def load_client(self, state: State, client: int) -> None:
        """Load the tensors of ``client`` into the model."""
        self.load(self.method.view(state, client), client)

    def load(self, view: Mapping[str, Tensor], client: int, told: Tensors | None = None) -> None:
        """Load the shared tensors ``view``, the personal ones of ``client`` and those ``told`` into the model."""
        load_tensors(self.model, {**view, **self.personal.get(client, self.personal.untrained)})
        if told:
            load_told(self.model, told)

    def load_global(self, state: State) -> None:
        """Load the global tensors of ``state`` into the model."""
        load_tensors(self.model, {**self.method.view(state), **self.personal.untrained})
