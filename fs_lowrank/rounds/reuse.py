"""Trained tensors of clients in a cache on disk, so that the same training is not repeated.

Local training is determined by the client's data, the tensors it starts from, the numbers that the modules apply beside
them, the phases, and the settings of the training loop; its last digits also by the machine and the versions of the
libraries. The key of an entry is a hash over all of them and nothing else, so runs whose methods differ only in the
server step share their clients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..algebra import digest
from ..data import Examples, ImageExamples
from ..errors import RunFailed
from ..jobs.files import from_json
from ..methods import Phase
from ..models.fingerprints import configuration_fingerprint
from ..models.given import is_given
from ..models.machine import machine
from ..models.names import all_tensors, is_statistic, select
from ..models.quantised import beside
from ..models.shortcuts.entries import read_entry, write_entry
from ..runs.environment import versions
from ..settings import Settings

#: sections of the configuration that the training loop reads; the learning rate of the round is hashed separately
_SECTIONS = ("train.", "dataloader.", "grad.", "model.", "llm.", "data.transform")
_KEYS = tuple(["seed", *(f"lowrank.{name}" for name in ("dtype", "compute_dtype", "double_quant", "norm", "width"))])
#: the keys of ``train`` that change rounding only
_ROUNDING = ("blocks", "only_read", "cache_frozen", "cache_frozen_bytes")
#: attributes of modules: scales of nested pairs and of an adapter's pairs, probabilities of dropout
_APPLIED = ("scale", "scaling", "p")


def _beside_tensors(model: nn.Module) -> dict[str, Any]:
    """By name, the numbers of the modules of ``model`` that a method sets beside their tensors, and the batches that
    norms have counted, over which one with ``momentum=None`` averages."""
    numbers = {f"{name}.{n}": vars(module).get(n) for name, module in model.named_modules() for n in _APPLIED}
    counted = {name: int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float, dict))} | counted


def _pixels(examples: Examples | ImageExamples) -> str:
    """A hash over the first image as the model reads it; its usual normalisation follows from the source."""
    return digest(examples.batch([0])) if isinstance(examples, ImageExamples) else ""


class Reuse:
    """A folder of trained tensors."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()

    @staticmethod
    def key(
        config: Settings,
        model: nn.Module,
        examples: Examples | ImageExamples,
        phases: Sequence[Phase],
        *,
        lr: float,
        seed: int,
    ) -> str | None:
        """The key of a training that is about to start; None for one with code of the method's or a module of the
        user's, which cannot be hashed.

        Args:
            model: with the tensors that training starts from.
            examples, phases, lr, seed: as for ``train_client``.
        """
        if any(phase.has_code for phase in phases) or is_given(config):
            return None
        settings = {
            k: v
            for k, v in config.decisive().items()
            if k in _KEYS or k.startswith(_SECTIONS) and k != "train.scheduler.type"
        }
        determined = {
            "settings": settings,
            "rounding": {name: getattr(config.train, name) for name in _ROUNDING},
            "lr": lr,
            "seed": seed,
            "data": [examples.fingerprint(), _pixels(examples)],
            "start": digest({**all_tensors(model), **beside(model)}),
            "model": [configuration_fingerprint(model), _beside_tensors(model)],
            "machine": machine(model),
            "versions": versions(),
            "adapter": config.adapter.to_args() if config.llm.adapter.use else None,
            "phases": [[sorted(phase.train), phase.steps, *phase.turns] for phase in phases],
        }
        return hashlib.sha256(json.dumps(determined, sort_keys=True, default=repr).encode()).hexdigest()[:24]

    def find(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and facts stored under ``key``; None if there are none, or they cannot be read."""

        def intact(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
            facts = from_json(metadata["facts"])
            return bool(facts["key"] == key and facts["digest"] == digest(tensors))

        entry = read_entry(self.folder / f"{key}.safetensors", intact)
        return None if entry is None else (entry[0], from_json(entry[1]["facts"]))

    def keep(self, key: str, model: nn.Module, phases: Iterable[Phase], facts: Mapping[str, Any]) -> None:
        """Store the tensors of ``model`` that were trained, and its running statistics.

        Raises:
            RunFailed: it cannot be written.
        """
        named = all_tensors(model)
        names = {*select(named, {t for phase in phases for t in phase.train}), *filter(is_statistic, named)}
        tensors = {n: named[n].detach().cpu().contiguous().clone() for n in sorted(names)}
        try:
            metadata = {"facts": json.dumps({**facts, "key": key, "digest": digest(tensors)})}
            write_entry(self.folder / f"{key}.safetensors", tensors, metadata)
        except OSError as error:
            raise RunFailed(
                f"lowrank.reuse_clients: could not store a client in {self.folder}: {error}; "
                "make room, or leave the key out"
            ) from error
