"""All settings of a run in one frozen dataclass, ``Settings``, and what can be read off it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import UserError, nearest
from . import framework
from .adapter import AdapterSpec
from .check import key
from .origin import Origin
from .reading import Dumper
from .sections import (
    LLM,
    VISION_MODELS,
    Data,
    Dataloader,
    EarlyStop,
    Eval,
    Federate,
    FedOpt,
    Grad,
    Lowrank,
    Model,
    Train,
    server_lr,
)
from .tree import assign, plain


@dataclass(frozen=True)
class Settings:
    """A checked configuration, as ``config.load_config`` makes it; ``config.Config`` adds how it is changed."""

    seed: int = key(0, min=0)
    #: index of the GPU, -1 for any; or ``cpu``. Counts only with ``use_gpu: True``
    device: int | str = key(-1, result=False)
    use_gpu: bool = key(False, result=False)
    outdir: str = key("exp", result=False)
    expname: str = key("", result=False)
    verbose: int = key(1, also={False: 0, True: 1}, result=False)
    federate: Federate = field(default_factory=Federate)
    data: Data = field(default_factory=Data)
    dataloader: Dataloader = field(default_factory=Dataloader)
    model: Model = field(default_factory=Model)
    llm: LLM = field(default_factory=LLM)
    train: Train = field(default_factory=Train)
    grad: Grad = field(default_factory=Grad)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    eval: Eval = field(default_factory=Eval)
    fedopt: FedOpt = field(default_factory=FedOpt)
    lowrank: Lowrank = field(default_factory=Lowrank)
    #: the framework's other keys, by dotted name, where they differ from its default
    framework: dict = field(default_factory=dict, metadata={"hidden": True})
    #: the file it came from, for messages
    source: Origin = field(default_factory=lambda: Origin(), compare=False, repr=False, metadata={"hidden": True})

    @property
    def adapter(self) -> AdapterSpec:
        """The adapter that was asked for; a method without adapters ignores it."""
        return AdapterSpec.from_args(self.llm.adapter.args[0], self.source)

    @property
    def method_params(self) -> dict[str, Any]:
        """All hyperparameters of the method: ``create_method(config.federate.method, **config.method_params)``."""
        return copy.deepcopy(self.lowrank.params)

    @property
    def is_vision(self) -> bool:
        """Whether the model is one of our networks for images."""
        return self.model.type in VISION_MODELS

    @property
    def from_scratch(self) -> bool:
        """Whether the model was not pre-trained: what carries no adapter then trains whole."""
        return self.is_vision and not self.lowrank.weights

    @property
    def sampled_per_round(self) -> int:
        """How many clients a round asks, at least 1."""
        federate = self.federate
        if federate.sample_client_rate > 0:
            # the framework's own rounding, so that both engines ask as many
            return max(1, int(federate.sample_client_rate * federate.client_num))
        return federate.client_num if federate.sample_client_num < 1 else federate.sample_client_num

    @property
    def dtype(self) -> str:
        """``float32`` or ``bfloat16``. Half precision is bfloat16: in float16, AdamW's eps vanishes and gives NaN."""
        return "bfloat16" if self.train.is_enable_half else self.lowrank.dtype

    @property
    def torch_device(self) -> str:
        """``cpu``, ``cuda`` or ``cuda:N``: what was asked for, whether or not the machine has it."""
        if not self.use_gpu or self.device == "cpu":
            return "cpu"
        return "cuda" if self.device == -1 else f"cuda:{self.device}"

    def get(self, name: str) -> Any:
        """The value of a dotted key, such as ``train.optimizer.lr``.

        Raises:
            UserError: no such key; names the nearest.
        """
        node: Any = self.to_dict()
        for part in name.split("."):
            index = int(part) if isinstance(node, list) and part.isdigit() else part
            try:
                node = node[index]
            except (KeyError, IndexError, TypeError):
                if name in framework.DEFAULTS:
                    return copy.deepcopy(framework.DEFAULTS[name])
                raise UserError(f"unknown key {name!r}{nearest(name, known_keys())}") from None
        return node

    def to_dict(self) -> dict[str, Any]:
        """Everything, resolved, as plain nested data that ``load_config`` reads back to an equal config."""
        tree = as_tree(self)
        for name, value in self.framework.items():
            assign(tree, name, copy.deepcopy(value))
        return tree

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_dict`` as YAML."""
        with open(path, "w", encoding="utf-8") as file:
            yaml.dump(self.to_dict(), file, Dumper, sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """12 hex digits over every value that decides the result."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()[:12]

    def decisive(self) -> dict[str, Any]:
        """Every value that decides the result, by dotted key: not devices, folders, or what is kept."""
        found = {name: value for name, value, meta in flat_keys(self) if meta.get("result", True)}
        found.update(
            (name, value)
            for name, value in self.framework.items()
            if not framework.decides_nothing(name, self.framework)
        )
        if self.fedopt.optimizer.lr is None:
            # Where it is not used it counts as the framework's default.
            found["fedopt.optimizer.lr"] = server_lr(self.fedopt.optimizer.type) if self.fedopt.use else 0.01
        return dict(canonical(found))


def known_keys() -> list[str]:
    """All dotted keys that a file may have, ours and the framework's, without methods' hyperparameters."""
    return sorted({name for name, _, _ in flat_keys(Settings())} | set(framework.DEFAULTS))


def infer_task(model_type: str) -> str:
    if model_type in VISION_MODELS:
        return "ImageClassification"
    suffix = model_type.rpartition("@")[2] if "@" in model_type else ""
    return {"huggingface_llm": "CausalLM", "modelscope_llm": "CausalLM", "transformers": "SequenceClassification"}.get(
        suffix, ""
    )


def flat_keys(section: Any, prefix: str = "") -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Every key below ``section``: dotted name, value, and the field's metadata."""
    keys: list[tuple[str, Any, Mapping[str, Any]]] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if f.metadata.get("hidden"):
            continue
        if dataclasses.is_dataclass(value):
            keys += flat_keys(value, f"{prefix}{f.name}.")
        elif f.metadata.get("open"):
            keys += [(prefix + key, item, f.metadata) for key, item in value.items()]
        else:
            keys.append((prefix + f.name, value, f.metadata))
    return keys


def as_tree(section: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if f.metadata.get("hidden"):
            continue
        if dataclasses.is_dataclass(value):
            tree[f.name] = as_tree(value)
        elif f.metadata.get("open"):
            tree.update(plain(value))
        else:
            tree[f.name] = plain(value)
    return tree


def canonical(value: Any) -> Any:
    """Numbers that are equal become the same text: 1 and 1.0."""
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
