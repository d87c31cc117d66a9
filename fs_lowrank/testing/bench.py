"""Where a method is run by the checks: engines on the small models, each in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .. import load_config
from ..config import Config
from ..engines.local import LocalEngine
from ..models.machine import input_device
from ..rounds.workspace import method_of
from . import small

#: the checks' name of a small model -> its ``model.task``
TASKS = {"encoder": "SequenceClassification", "causal": "CausalLM", "vision": "ImageClassification"}


class Bench:
    """Makes engines that run a method on a small encoder, causal model or image network.

    Args:
        folder: for models, data and runs; it is empty or does not exist.
        keys: configuration keys of every run, for all methods or ``keys(method)`` for each.
    """

    def __init__(self, folder: str | Path, keys: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None):
        self.folder = Path(folder)
        self._keys = keys if callable(keys) else lambda method: keys or {}
        self._runs = 0

    @cached_property
    def bases(self) -> dict[str, Path]:
        """Folders of the models below the adapters; an image network is saved beside its own adapter."""
        return {
            "encoder": small.save_encoder(self._new("encoder")),
            "causal": small.save_causal(self._new("causal")),
        }

    @cached_property
    def data(self) -> dict[str, Path]:
        return {
            "encoder": small.save_reviews(self._new("reviews")),
            "causal": small.save_instructions(self._new("instructions")),
            "vision": small.save_images(self._new("images")),
        }

    def _new(self, name: str) -> Path:
        (self.folder / name).mkdir(parents=True)
        return self.folder / name

    def settings(self, task: str, outdir: str | Path) -> dict[str, Any]:
        """A small run of ``task`` as a mapping for ``load_config``."""
        if task == "vision":
            return small.vision_settings(self.data[task], outdir)
        make = small.encoder_settings if task == "encoder" else small.causal_settings
        return make(self.bases[task], self.data[task], outdir)

    def make(self, task: str, method: str, keys: Mapping[str, Any] | None = None, **callbacks: Any) -> LocalEngine:
        """An engine with an outdir of its own, of 3 clients and 3 rounds of one step, or of one for each half.

        Unless the keys ask for it, nothing is evaluated before the last round, kept to resume from, or drawn.
        """
        return LocalEngine(self.config(task, method, keys), **callbacks)

    def config(self, task: str, method: str, keys: Mapping[str, Any] | None = None) -> Config:
        """The configuration of that engine."""
        self._runs += 1
        outdir = self.folder / "runs" / str(self._runs)
        defaults = {
            "federate.method": method,
            "federate.client_num": 3,
            "federate.total_round_num": 3,
            "train.local_update_steps": 1,
            "eval.freq": -1,
            "lowrank.checkpoint_freq": 0,
            "lowrank.pictures": False,
            "eval.save_best": False,
        }
        config = load_config(self.settings(task, outdir), {**defaults, **self._keys(method), **(keys or {})})
        # Of halves that train by turns each has a step, so that an update changes the product of both.
        halves = max(len(phase.turns) for phase in method_of(config).phases(1))
        steps = max(config.train.local_update_steps, halves)
        return config.replace({"train.local_update_steps": steps, **(keys or {})})


@contextlib.contextmanager
def quietly(folder: str | Path) -> Iterator[None]:
    """One thread, which is faster for models this small, and a home of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.dict(os.environ, {"FS_LOWRANK_HOME": str(Path(folder) / "home")}):
            yield
    finally:
        torch.set_num_threads(threads)


# -- states, logits and records that the checks compare --------------------------------------------------


def state_of(engine: LocalEngine) -> dict[str, Any]:
    """A copy of the server's state."""
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in engine.ledger.state.items()}


def equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states are equal to the bit."""
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) if isinstance(a[n], Tensor) else a[n] == b[n] for n in a
    )


def logits(model: nn.Module, examples: Any, count: int = 6) -> Tensor:
    """The model's logits for the first examples, without padding; on the CPU, whatever the model's device."""
    batch = examples.batch(range(min(count, len(examples))))
    batch.pop("labels")
    device = input_device(model)
    model.eval()
    with torch.no_grad():
        out = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.cpu()
    return out[batch["attention_mask"].bool()] if out.ndim == 3 else out


def without_dropout(engine: LocalEngine) -> LocalEngine:
    """``engine``, with dropout off in its model."""
    for module in engine.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return engine


def without_seconds(history: Any) -> list[dict[str, Any]]:
    """The records of a run, without the times."""
    return [
        {k: v for k, v in json.loads(json.dumps(r)).items() if k not in ("seconds", "client_seconds")} for r in history
    ]


def plain_model(task: str, place: str | Path) -> nn.Module:
    """The model in a folder, loaded by transformers alone (an image network: by its own loader)."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from ..models.vision import load_vision

    if task == "vision":
        return load_vision(place)
    if task == "causal":
        return AutoModelForCausalLM.from_pretrained(str(place))
    return AutoModelForSequenceClassification.from_pretrained(str(place), num_labels=2)
