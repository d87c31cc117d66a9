"""Shortcuts of one process: cached states of frozen layers, and a last layer for the positions that are read.

A further cache or shortcut is made here. The shortcuts of ``models.shortcuts`` are used where they are known, or tried,
to give the same results but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from ..config import Config
from ..data import Examples, FederatedData, ImageExamples
from ..data.ragged import Lazy
from ..jobs.memo import Value, memoized
from ..methods import Method
from ..models.given import is_given
from ..models.kinds import computes_by_length
from ..models.shortcuts.frozen import PASSES, FrozenPrefix, Owners
from ..models.shortcuts.reads import OnlyRead
from ..models.shortcuts.states import SharedStates, shared_folder
from ..models.shortcuts.trials import samples_to_try
from ..training.local import passes_of
from ..training.schedule import evaluation_due


class Shortcuts:
    """Makes the shortcuts for models of one process.

    Args:
        config, data, method: of the run. held_out: the data to evaluate on, by split.

    Attributes:
        states: the cache on disk of frozen layers' states, for other runs.
        tried: the samples on which a shortcut is tried; None of images.
    """

    def __init__(
        self,
        config: Config,
        data: FederatedData,
        method: Method,
        held_out: Mapping[str, Examples | ImageExamples],
    ):
        self.config, self.data, self.method, self.held_out = config, data, method, held_out
        self.states = SharedStates(shared_folder(config.train.cache_frozen_dir), config.train.cache_frozen_shared)
        self.tried = samples_to_try(data.splits())

    def _stacked(self, model: nn.Module) -> bool:
        """Whether ``model`` is one stack of layers that a batch of texts goes through once, as shortcuts need."""
        config = self.config
        prompted = bool(config.llm.adapter.use and config.adapter.virtual_tokens)
        return not (config.model.task == "Seq2SeqLM" or prompted or is_given(config) or computes_by_length(model))

    def only_read(self, model: nn.Module) -> OnlyRead | None:
        """Computes the last layer of ``model`` for the positions that are read, if a trial allows it; None: never."""
        if self.config.train.only_read != "auto" or not self.tried or not self._stacked(model):
            return None
        tried = self.tried
        return OnlyRead(model, self.once("only_read", model, lambda: OnlyRead(model).check(tried)))

    def once(self, name: str, model: nn.Module, trial: Callable[[], Value]) -> Value:
        """The outcome of ``trial`` of ``model``; within ``memoizing``, that of an equal model before."""
        return memoized(lambda: self._decides(name, model), trial, lambda _: 0)

    def _decides(self, name: str, model: nn.Module) -> dict[str, Any]:
        """All that decides the outcome of a trial of ``model``: not its values, nor those of the samples."""
        config, ends = self.config, [end(self.tried.lengths) for end in (min, max)] if self.tried else []
        train = {**asdict(config.train), "optimizer": config.train.optimizer.type}
        shapes = [(n, *p.shape, str(p.dtype), str(p.device)) for n, p in model.named_parameters()]
        return {
            "trial": [name, config.federate.method, self.data.task, self.data.source, ends, shapes],
            "keys": [train, *(asdict(section) for section in (config.model, config.llm, config.lowrank))],
        }

    def frozen_prefix(self, model: nn.Module, client: int | None = None, share: float = 1.0) -> FrozenPrefix | None:
        """The cache of the frozen layers of ``model``; None if there can be none.

        Args:
            client: whose training data are cached; None: those of all clients, and the held-out data.
            share: fraction of ``train.cache_frozen_bytes``, for several models that share it.
        """
        train = self.config.train
        if train.frozen_dropout or not self._stacked(model):
            return None
        prefix = FrozenPrefix(
            model,
            {*self.method.shared, *self.method.personal},
            limit=train.cache_frozen_bytes * share if train.cache_frozen != "off" else 0,
            shared=self.states,
            changing=self.method.changed_base(model),
            fewest=0.0 if train.cache_frozen == "all" else PASSES,
            decides=self._decides("cache_frozen", model),
        )
        rounds = range(1, self.config.federate.total_round_num + 1)
        evaluated = sum(evaluation_due(self.config, t) for t in rounds) if client is None else 0
        held_out = {} if client else {split: (examples, evaluated) for split, examples in self.held_out.items()}
        chosen = range(1, len(self.data.clients) + 1) if client is None else range(client, client + 1)
        prefix.plan(held_out, self.tried, self._owners(chosen))
        return prefix if prefix else None

    def _owners(self, clients: range) -> Owners:
        """The training data of ``clients``, and the expected number of passes of each in the run."""
        config, indices = self.config, self.data.partition.indices
        share = config.federate.total_round_num * config.sampled_per_round / config.taking_part
        rows = indices[clients.start - 1 : clients.stop - 1]
        length = 1.0 if config.is_vision else float(self.data.train.lengths.mean())
        passes = passes_of(config, rows.lengths, length) * share
        for client in filter(clients.__contains__, config.client_settings):
            i = client - clients.start
            passes[i] = passes_of(config.of_client(client), rows.lengths[i : i + 1], length)[0] * share
        return Owners(
            Lazy(len(rows), lambda i: f"client {clients[i]}"),
            rows.sums(self.data.train.lengths),
            passes,
        )
