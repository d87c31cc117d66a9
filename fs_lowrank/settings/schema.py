"""``Settings``: all settings of a run in one frozen dataclass, and values derived from them."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, nearest
from ..jobs.files import write_text
from . import framework
from .adapter import AdapterSpec
from .check import key, keys_of
from .clients import FULL_KEYS, by_group
from .metrics import CLIENTS, LANGUAGE, extras
from .origin import Origin
from .reading import Dumper
from .sections import (
    LLM,
    QUANTISED,
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
from .tree import assign, lookup, plain


@dataclass(frozen=True)
class Settings:
    """A checked configuration. ``config.Config``, which ``load_config`` returns, adds ``replace``."""

    #: seed of everything that is drawn: split, start, clients of a round, order of samples
    seed: int = key(0, min=0)
    #: index of the GPU, -1 for any; or ``cpu``. Has an effect only with ``use_gpu: True``
    device: int | str = key(-1, result=False)
    #: compute on a GPU
    use_gpu: bool = key(False, result=False)
    #: folder of the run's files
    outdir: str = key("exp", filled=True, words="the path of a folder", result=False)
    #: subfolder of ``outdir`` for the run's files; empty: ``outdir`` itself
    expname: str = key("", result=False)
    #: how much FederatedScope logs
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
    #: other keys of FederatedScope whose values differ from its defaults, by dotted name
    framework: dict = field(default_factory=dict, metadata={"hidden": True})
    #: the file it was read from, for messages
    source: Origin = field(default_factory=lambda: Origin(), compare=False, repr=False, metadata={"hidden": True})

    @property
    def adapter(self) -> AdapterSpec:
        """The configured adapter; methods without adapters ignore it."""
        return AdapterSpec.from_args(self.llm.adapter.args[0], self.source)

    @property
    def method_params(self) -> dict[str, Any]:
        """All hyperparameters of the method: ``create_method(config.federate.method, **config.method_params)``."""
        params = copy.deepcopy(self.lowrank.params)
        if client_ranks := {client: entry["rank"] for client, entry in self.client_settings.items() if "rank" in entry}:
            ranks = params["ranks"] or (self.adapter.r,)
            clients = range(1, self.federate.client_num + 1)
            params["ranks"] = tuple(client_ranks.get(client, ranks[(client - 1) % len(ranks)]) for client in clients)
        return params

    @cached_property
    def client_settings(self) -> dict[int, dict[str, Any]]:
        """The settings in ``lowrank.clients`` by client."""
        return {client: settings for clients, settings in by_group(self.lowrank.clients) for client in clients}

    def of_client(self, client: int) -> Settings:
        """The settings by which ``client`` trains."""
        return self._client_variants.get(client, self)

    def variants(self) -> list[Settings]:
        """All distinct settings by which clients train, these first."""
        return [self, *{id(variant): variant for variant in self._client_variants.values()}.values()]

    @cached_property
    def _client_variants(self) -> dict[int, Settings]:
        """The settings of the clients that train by other settings; clients with equal settings share one object."""
        groups = [(clients, self._with(overrides)) for clients, overrides in by_group(self.lowrank.clients)]
        return {client: variant for clients, variant in groups for client in clients}

    def _with(self, overrides: Mapping[str, Any]) -> Settings:
        factor = {"lr": self.train.optimizer.lr * overrides["lr_factor"]} if "lr_factor" in overrides else {}
        settings = self
        for name, value in (dict(overrides) | factor).items():
            if name in FULL_KEYS:
                settings = _replace(settings, FULL_KEYS[name].split("."), value)
        return settings

    @property
    def is_vision(self) -> bool:
        """Whether the model is one of our image networks."""
        return self.model.type in VISION_MODELS

    @property
    def is_language(self) -> bool:
        """Whether it is a language model, whose accuracy is that of the next token."""
        return self.model.task in LANGUAGE

    @property
    def metrics(self) -> list[str]:
        """The metrics beside loss and accuracy."""
        return extras(self.model.task, self.eval.metrics)

    @property
    def watched(self) -> tuple[str, str]:
        """Split and metric of ``eval.best_res_update_round_wise_key``; FederatedScope's ``avg_loss`` is our loss."""
        name = self.eval.best_res_update_round_wise_key.rpartition(".")[2]
        split = CLIENTS if name.startswith(CLIENTS) else name.partition("_")[0]
        return split, name.removeprefix(f"{split}_").removeprefix("avg_")

    @property
    def from_scratch(self) -> bool:
        """Whether the model is not pre-trained. Then all layers without an adapter are trained in full."""
        return self.is_vision and not self.lowrank.weights

    @property
    def alone(self) -> int:
        """The only client that trains (``federate.client_idx_for_local_train``); 0: all clients train.

        The data are divided among all clients, and the run is then one of a single client, whose number is 1.
        """
        return int(self.framework.get("federate.client_idx_for_local_train", 0))

    @property
    def taking_part(self) -> int:
        """The number of clients of the run."""
        return 1 if self.alone else self.federate.client_num

    @property
    def eval_batch_size(self) -> int:
        """The number of samples of a batch in evaluation."""
        return self.eval.batch_size or self.dataloader.batch_size

    @property
    def sampled_per_round(self) -> int:
        """The number of clients selected in a round, at least 1."""
        federate = self.federate
        if self.alone:
            return 1
        if federate.sample_client_rate > 0:
            # FederatedScope's rounding, so that both engines select equally many
            return max(1, int(federate.sample_client_rate * federate.client_num))
        return federate.client_num if federate.sample_client_num < 1 else federate.sample_client_num

    @property
    def dtype(self) -> str:
        """``float32`` or ``bfloat16``: of the computation and of all weights that are not quantised.

        Half precision is bfloat16: in float16, AdamW's eps vanishes and gives NaN.
        """
        configured = self.lowrank.compute_dtype if self.quantised else self.lowrank.dtype
        return "bfloat16" if self.train.is_enable_half else configured

    @property
    def quantised(self) -> str:
        """``int8`` or ``nf4``; empty if no weights are quantised."""
        return self.lowrank.dtype if self.lowrank.dtype in QUANTISED else ""

    @property
    def torch_device(self) -> str:
        """``cpu``, ``cuda`` or ``cuda:N``, as configured; the machine may not have it."""
        if not self.use_gpu or self.device == "cpu":
            return "cpu"
        return "cuda" if self.device == -1 else f"cuda:{self.device}"

    def get(self, name: str) -> Any:
        """The value of a dotted key, such as ``train.optimizer.lr``.

        Raises:
            UserError: unknown key; the message suggests the nearest.
        """
        value = lookup(self.to_dict(), name, framework.DEFAULTS.get(name, known_keys))
        if value is known_keys:
            raise UserError(f"unknown key {name!r}{nearest(name, known_keys())}")
        return copy.deepcopy(value)

    def to_dict(self) -> dict[str, Any]:
        """The complete configuration as plain nested data, from which ``load_config`` makes an equal config."""
        tree: dict[str, Any] = {}
        for name, value in (*((name, value) for name, value, _ in flat_keys(self)), *self.framework.items()):
            assign(tree, name, plain(value))
        return tree

    def to_yaml(self) -> str:
        """``to_dict`` as YAML."""
        text: str = yaml.dump(self.to_dict(), None, Dumper, sort_keys=False, allow_unicode=True)
        return text

    def dump(self, path: str | Path) -> None:
        """Write ``to_yaml``.

        Raises:
            RunFailed: as of ``write_text``.
        """
        write_text(path, self.to_yaml())

    def fingerprint(self) -> str:
        """A hash of ``decisive()``, 12 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()[:12]

    def decisive(self) -> dict[str, Any]:
        """Every value that affects the result, by dotted key; devices, folders and saved files do not."""
        values = {
            name: value
            for name, value, meta in flat_keys(self)
            if meta.get("result", True) and ("later" not in meta or value != meta["later"])
        }
        values.update(
            (name, value)
            for name, value in self.framework.items()
            if not framework.decides_nothing(name, self.framework)
        )
        values.update((name, self.framework.get(name, framework.DEFAULTS[name])) for name in framework.HASHED)
        if self.fedopt.optimizer.lr is None:
            # Without fedopt.use, the value is FederatedScope's default, so that it does not change the hash.
            values["fedopt.optimizer.lr"] = server_lr(self.fedopt.optimizer.type) if self.fedopt.use else 0.01
        return dict(canonical(values))


def known_keys() -> list[str]:
    """All dotted keys that a file may have, ours and FederatedScope's, without hyperparameters of methods."""
    return sorted({name for name, _, _ in flat_keys(Settings())} | set(framework.DEFAULTS))


#: suffix of ``model.type`` -> the task, for models other than our image networks
_TASKS = {"huggingface_llm": "CausalLM", "modelscope_llm": "CausalLM", "transformers": "SequenceClassification"}


def infer_task(model_type: str) -> str:
    name, _, suffix = model_type.rpartition("@")
    return "ImageClassification" if model_type in VISION_MODELS else _TASKS.get(suffix, "") if name else ""


def flat_keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Every key below ``section``: dotted name, value, and metadata of the field."""
    for name, spec in keys_of(section.__class__).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value) and "hidden" not in spec.meta:
            yield from flat_keys(value, f"{prefix}{name}.")
        elif "open" in spec.meta:
            yield from ((prefix + key, item, spec.meta) for key, item in value.items())
        elif "hidden" not in spec.meta:
            yield prefix + name, value, spec.meta


def _replace(section: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of ``section`` with one value below it replaced."""
    head, *tail = path
    return dataclasses.replace(section, **{head: _replace(getattr(section, head), tail, value) if tail else value})


def canonical(value: Any) -> Any:
    """``value`` with equal numbers in the same form, so that 1 and 1.0 give the same hash."""
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
