"""The typed configuration: FederatedScope's keys, and the section ``lowrank`` for what it has no key for.

    config = load_config("run.yaml", federate__method="rolora", **{"train.optimizer.lr": 5e-3})
    config.train.optimizer.lr, config.adapter.r, config.method_params

Defaults are FederatedScope's (branch ``llm``), except where a comment says otherwise. Its own files load
unchanged: a key that has no field here is kept in ``config.framework`` if the framework knows it, and
``check_local`` refuses the ones that the local engine cannot honour. Anything else is an error.

``federate.method`` follows the framework where its name means something else there: ``FedAvg``, which is
also its default, averages adapters if ``llm.adapter.use`` is True. So ``fedavg``, or no method, becomes
``fedlora`` where ``llm.adapter.use`` is True, and trains all weights otherwise. All other names are ours.
The config holds the resolved name.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import logging
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import yaml

from . import _federatedscope_keys as framework_keys
from .errors import UserError, nearest

logger = logging.getLogger("fs_lowrank")

__all__ = [
    "VISION_MODELS",
    "AdapterSpec",
    "Config",
    "check_local",
    "check_method_params",
    "known_keys",
    "load_config",
    "load_for",
    "parse_overrides",
]

#: networks of ours, by ``model.type`` (``models.vision``)
VISION_MODELS = ("lenet", "fedma_cnn", "resnet10", "resnet18")


# -- sections ------------------------------------------------------------------------------------------


def _key(default: Any, **meta: Any) -> Any:
    """A key of a section.

    Meta: ``min``, ``above``, ``max``, ``below`` bound a number or each in a list (``above`` and ``below``
    exclude); ``choices``; ``items``, the choices for each item of a list; ``fold``, case does not matter;
    ``also``, other spellings; ``result=False``, does not decide the result; ``local``, the only value that the
    local engine honours; ``idle``, why the local engine has no use for it; ``open``, takes unknown keys.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Federate:
    client_num: int = _key(0)
    #: clients a round; -1 is all of them. ``sample_client_rate`` goes first if both are given
    sample_client_num: int = _key(-1, min=-1)
    sample_client_rate: float = _key(-1.0, max=1.0)
    total_round_num: int = _key(50, min=1)
    mode: str = _key("standalone", choices=("standalone", "distributed"), local="standalone")
    #: never ``FedAvg`` with adapters: see the module's docstring
    method: str = _key("fedavg")
    #: True weighs clients equally; False by their number of samples
    ignore_weight: bool = _key(False)
    #: the framework's default is False
    make_global_eval: bool = _key(True)
    sampler: str = _key("uniform", local="uniform")
    use_ss: bool = _key(False, local=False)
    merge_test_data: bool = _key(False, local=False)
    restore_from: str = _key("", local="")
    share_local_model: bool = _key(False, result=False)
    online_aggr: bool = _key(False, result=False)
    process_num: int = _key(1, result=False)
    save_to: str = _key("", result=False, idle="a run leaves its adapter or model in outdir")
    save_freq: int = _key(-1, result=False)


@dataclass(frozen=True)
class Data:
    root: str = _key("data")
    #: a data set by name, or ``FILE@…``; the framework's default is a toy of its own
    type: str = _key("")
    args: list = _key([])
    #: the framework's default is empty: data that comes in parts
    splitter: str = _key("iid")
    splitter_args: list = _key([])
    #: shares of train, validation, test
    splits: list[float] = _key([0.8, 0.1, 0.1], min=0.0)
    subsample: float = _key(1.0, above=0.0, max=1.0)
    #: of images: steps such as ``[['RandomHorizontalFlip'], ['ToTensor'], ['Normalize', {'mean': …, 'std': …}]]``,
    #: under torchvision's names; empty: normalised as is usual for the set
    transform: list = _key([])
    #: of held-out images; empty: ``transform`` without its random steps
    val_transform: list = _key([])
    test_transform: list = _key([])


@dataclass(frozen=True)
class Dataloader:
    batch_size: int = _key(64, min=1)
    shuffle: bool = _key(True)
    num_workers: int = _key(0, min=0, result=False, idle="data are in memory")
    drop_last: bool = _key(False)


@dataclass(frozen=True)
class Model:
    #: ``NAME_OR_PATH@huggingface_llm``, ``NAME_OR_PATH@transformers``, or a model of ours by name
    type: str = _key("")
    #: inferred from the suffix of ``type`` if empty; ``node`` is the framework's default and says nothing
    task: str = _key("", choices=("", "CausalLM", "SequenceClassification", "ImageClassification"), also={"node": ""})
    #: of our networks for images
    use_bias: bool = _key(True)


@dataclass(frozen=True)
class Adapter:
    #: None: as the method has it
    use: bool | None = _key(None)
    #: one mapping in a list, as in the framework; resolved to PEFT's names. Read ``config.adapter`` instead
    args: list[dict] = _key([{}])
    mv_to_cpu: bool = _key(False, result=False)


@dataclass(frozen=True)
class Chat:
    max_history_len: int = _key(10, result=False)
    max_len: int = _key(100, result=False)


@dataclass(frozen=True)
class Cache:
    #: folder for downloaded models
    model: str = _key("", result=False, idle="downloaded models lie where HF_HOME says")


@dataclass(frozen=True)
class LLM:
    #: tokens
    tok_len: int = _key(128, min=1)
    retry_on_nan_loss: bool = _key(False, local=False)
    adapter: Adapter = field(default_factory=Adapter)
    chat: Chat = field(default_factory=Chat)
    cache: Cache = field(default_factory=Cache)


_OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Adafactor",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)


@dataclass(frozen=True)
class Optimizer:
    type: str = _key("SGD", choices=_OPTIMIZERS, fold=True)
    lr: float = _key(0.1, above=0.0)
    #: further arguments: ``momentum``, ``weight_decay``, ``betas``, …
    extra: dict = _key({}, open=True)


@dataclass(frozen=True)
class Scheduler:
    type: str = _key("")
    warmup_ratio: float = _key(0.0, min=0.0, max=1.0)
    extra: dict = _key({}, open=True)


@dataclass(frozen=True)
class Train:
    local_update_steps: int = _key(1, min=1)
    batch_or_epoch: str = _key("batch", choices=("batch", "epoch"))
    #: 16-bit weights: float16 in the framework, bfloat16 in the local engine
    is_enable_half: bool = _key(False)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    #: ours: keep what the frozen layers below the first adapter put out. YAML reads a bare ``off`` as False
    cache_frozen: str = _key("auto", choices=("auto", "off"), also={False: "off", True: "auto"}, result=False)
    #: bytes
    cache_frozen_bytes: float = _key(4e9, min=0.0, result=False)
    #: in memory if empty, else a folder for memory-mapped files
    cache_frozen_dir: str = _key("", result=False)
    #: dropout in those layers; False lets their output be kept
    frozen_dropout: bool = _key(False)


@dataclass(frozen=True)
class Grad:
    #: largest norm; negative is off
    grad_clip: float = _key(-1.0)
    grad_accum_count: int = _key(1, min=1)


@dataclass(frozen=True)
class EarlyStop:
    #: evaluations without improvement; 0 is off, and the default here (5 in the framework)
    patience: int = _key(0, min=0)
    delta: float = _key(0.0, min=0.0)
    improve_indicator_mode: str = _key("best", choices=("best", "mean"), local="best")


@dataclass(frozen=True)
class Eval:
    #: rounds between evaluations; 0 or -1: after the last round only
    freq: int = _key(1, min=-1)
    #: the framework's default is an empty list
    metrics: list[str] = _key(["acc"], items=("acc", "loss"))
    split: list[str] = _key(["test", "val"], items=("train", "val", "test"))
    #: which round is the best: ``SPLIT_METRIC``
    best_res_update_round_wise_key: str = _key("val_loss")
    #: ours; 0: as ``dataloader.batch_size``
    batch_size: int = _key(0, min=0)
    report: list[str] = _key(["weighted_avg", "avg", "fairness", "raw"], result=False)
    count_flops: bool = _key(True, result=False)
    extra: dict = _key({}, open=True, result=False)


def server_lr(kind: str) -> float:
    """The default ``fedopt.optimizer.lr``: 1 for SGD, which then is FedAvg; 0.01 for the adaptive ones."""
    return 1.0 if kind.lower() == "sgd" else 0.01


@dataclass(frozen=True)
class ServerOptimizer:
    type: str = _key("SGD", choices=("SGD", "Adam", "Adagrad", "Yogi"), fold=True)
    #: None: ``server_lr`` of the type; the framework's default is 0.01 for all
    lr: float | None = _key(None, above=0.0)
    #: further arguments: ``momentum``, ``betas``, …
    extra: dict = _key({}, open=True)


@dataclass(frozen=True)
class FedOpt:
    use: bool = _key(False)
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    annealing: bool = _key(False, local=False)
    annealing_step_size: int = _key(2000, min=1)
    annealing_gamma: float = _key(0.5, above=0.0)


@dataclass(frozen=True)
class Lowrank:
    """What the framework has no key for. Every other key belongs to the method."""

    #: a round stops when fewer clients than this have sent a usable update
    min_clients: int = _key(1, min=1)
    #: the largest training set that a client may claim; an update of one that claims more is refused
    max_samples: int = _key(10**9, min=1)
    #: an update whose norm, of its change against what the client was sent, is larger is refused; 0: off
    max_update_norm: float = _key(0.0, min=0.0)
    #: the same, as a factor over the median of the round's updates; 0: off
    max_update_norm_factor: float = _key(0.0, min=0.0)
    #: when the server's step fails on admitted updates, or gives what is not finite: end the run, or leave the round
    #: out
    on_bad_round: str = _key("stop", choices=("stop", "skip"))
    #: chance that a client drops out of a round it was chosen for, drawn from the seed: to try what a method stands
    drop_rate: float = _key(0.0, min=0.0, max=1.0)
    #: seconds that a process waits for another one: between machines, and with ``federate.process_num``
    timeout: float = _key(600.0, above=0.0, result=False)
    #: of the frozen weights and the arithmetic; trained tensors are the method's business
    dtype: str = _key("float32", choices=("float32", "bfloat16"))
    #: norm of a ResNet; ``static`` is batch-norm that evaluates by the batch's own statistics
    norm: str = _key("batch", choices=("batch", "static", "group", "none"))
    #: multiplies the hidden widths of a network for images
    width: float = _key(1.0, above=0.0, max=8.0)
    #: a ``.safetensors`` file that a network for images starts from; without one it is trained from scratch
    weights: str = _key("")
    #: where layers with an adapter start in a network from scratch: at random, the adapter changing nothing; or at
    #: zero, both halves of the pair random
    base_init: str = _key("random", choices=("random", "zero"))
    #: held-out samples by which a method chooses, drawn from the validation split; fewer where it has fewer
    validation_samples: int = _key(500, min=1)
    #: seed that cuts off the test set of data that come without one; -1: the run's. It is to be the same in a search
    #: and in the runs that follow, or what the search saw lies in their test sets
    test_seed: int = _key(-1, min=-1)
    #: folder to keep clients' trained tensors in: what was trained once, from the same start on the same data, is
    #: taken from there; empty: off
    reuse_clients: str = _key("", result=False)
    #: also write the model with the adapter merged in
    save_merged: bool = _key(False, result=False)
    #: rounds between checkpoints; 0: none
    checkpoint_freq: int = _key(1, min=0, result=False)
    keep_checkpoints: int = _key(2, min=1, result=False)
    #: hyperparameters of the method, complete
    params: dict = _key({}, open=True)


# -- the adapter ---------------------------------------------------------------------------------------

#: short spellings of PEFT's names
_SHORT = {
    "modules": "target_modules",
    "layers": "layers_to_transform",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rank": "r",
}
_LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "use_rslora")
#: names that PEFT has besides; only to tell a misspelling from an argument of a later version
_PEFT_KEYS = (
    "alpha_pattern",
    "arrow_config",
    "bias",
    "corda_config",
    "decompose_both",
    "decompose_factor",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "init_weights",
    "layer_replication",
    "layers_pattern",
    "loftq_config",
    "lora_bias",
    "megatron_config",
    "megatron_core",
    "module_dropout",
    "modules_to_save",
    "rank_dropout",
    "rank_dropout_scale",
    "rank_pattern",
    "runtime_config",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_effective_conv2d",
    "use_qalora",
)
_LOW_RANK_METHODS = ("lora", "lokr", "loha")
_ADAPTER_METHODS = (*_LOW_RANK_METHODS, "prefix", "prompt", "p-tuning")


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter that ``llm.adapter.args`` asks for.

    Attributes:
        method: ``lora``, ``lokr``, ``loha`` (the framework also has ``prefix``, ``prompt``, ``p-tuning``).
        lora_dropout: of the adapter's input; for ``lokr`` and ``loha`` it is PEFT's ``rank_dropout``.
        target_modules: names of modules, or None for PEFT's choice.
        layers: indices from 0, or None for all.
        extra: further arguments of PEFT's config, as they came.
    """

    method: str = "lora"
    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    use_rslora: bool = False
    extra: dict = field(default_factory=dict)

    def scale(self, rank: int | None = None) -> float:
        """What multiplies ``B A``: ``alpha / r``, with rsLoRA ``alpha / √r``; for another rank if one is given."""
        rank = self.r if rank is None else rank
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def to_args(self) -> dict[str, Any]:
        """The mapping for ``llm.adapter.args``, in PEFT's names."""
        args: dict[str, Any] = {"adapter_package": "peft", "adapter_method": self.method}
        if self.method in _LOW_RANK_METHODS:
            args.update(
                r=self.r, lora_alpha=self.lora_alpha, lora_dropout=self.lora_dropout, use_rslora=self.use_rslora
            )
            if self.target_modules is not None:
                args["target_modules"] = list(self.target_modules)
            if self.layers is not None:
                args["layers_to_transform"] = list(self.layers)
        return {**args, **copy.deepcopy(self.extra)}

    @classmethod
    def from_args(cls, args: Mapping[str, Any], origin: _Origin | None = None) -> AdapterSpec:
        """Read ``llm.adapter.args[0]``, in PEFT's names or the short ones.

        Raises:
            UserError: a value of the wrong type or out of range, two spellings of one argument.
        """
        origin, at = origin or _Origin(), "llm.adapter.args.0."
        named: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in args.items():
            name = _SHORT.get(key, key)
            if name in spelled:
                origin.fail(at + key, f"and {spelled[name]!r} are two spellings of one argument; keep one")
            named[name], spelled[name] = value, key

        def take(name: str, default: Any, hint: Any, **meta: Any) -> Any:
            if name not in named:
                return default
            return _value(at + spelled[name], named.pop(name), hint, meta, origin)

        take("adapter_package", "peft", str, choices=("peft",))
        method = take("adapter_method", "lora", str, choices=_ADAPTER_METHODS, fold=True)
        if method not in _LOW_RANK_METHODS:
            return cls(method=method, extra=named)
        for name in ("target_modules", "layers_to_transform"):
            if name in named and isinstance(named[name], (str, int)) and not isinstance(named[name], bool):
                named[name] = [named[name]]
            if name in named and named[name] == []:
                origin.fail(at + spelled[name], "is an empty list: nothing would train; name some, or leave it out")
        modules = take("target_modules", None, list[str] | None)
        layers = take("layers_to_transform", None, list[int] | None, min=0)
        alpha = take("lora_alpha", 16, float, above=0.0)
        spec = cls(
            method=method,
            r=take("r", 8, int, min=1),
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
            lora_dropout=take("lora_dropout", 0.0, float, min=0.0, below=1.0),
            target_modules=None if modules is None else tuple(modules),
            layers=None if layers is None else tuple(layers),
            use_rslora=take("use_rslora", False, bool),
            extra=named,
        )
        known = ("adapter_package", "adapter_method", *_SHORT, *_LORA_KEYS, *_PEFT_KEYS)
        for key in named:
            if key not in known and (close := _misspelt(key, known)):
                origin.fail(at + key, f"is not an argument; did you mean {close!r}?")
        return spec


# -- the whole -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A checked configuration; made by ``load_config``, changed by ``replace``."""

    seed: int = _key(0, min=0)
    #: index of the GPU, -1 for any; or ``cpu``. Counts only with ``use_gpu: True``
    device: int | str = _key(-1, result=False)
    use_gpu: bool = _key(False, result=False)
    outdir: str = _key("exp", result=False)
    expname: str = _key("", result=False)
    verbose: int = _key(1, also={False: 0, True: 1}, result=False)
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
    source: _Origin = field(default_factory=lambda: _Origin(), compare=False, repr=False, metadata={"hidden": True})

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
                if name in framework_keys.DEFAULTS:
                    return copy.deepcopy(framework_keys.DEFAULTS[name])
                raise UserError(f"unknown key {name!r}{nearest(name, known_keys())}") from None
        return node

    def to_dict(self) -> dict[str, Any]:
        """Everything, resolved, as plain nested data that ``load_config`` reads back to an equal config."""
        tree = _tree(self)
        for name, value in self.framework.items():
            _assign(tree, name, copy.deepcopy(value))
        return tree

    def dump(self, path: str | os.PathLike) -> None:
        """Write ``to_dict`` as YAML."""
        with open(path, "w", encoding="utf-8") as file:
            yaml.dump(self.to_dict(), file, _Dumper, sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """12 hex digits over every value that decides the result."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()[:12]

    def decisive(self) -> dict[str, Any]:
        """Every value that decides the result, by dotted key: not devices, folders, or what is kept."""
        found = {name: value for name, value, meta in _flat(self) if meta.get("result", True)}
        found.update(
            (name, value)
            for name, value in self.framework.items()
            if not framework_keys.decides_nothing(name, self.framework)
        )
        if self.fedopt.optimizer.lr is None:
            # Where it is not used it counts as the framework's default.
            found["fedopt.optimizer.lr"] = server_lr(self.fedopt.optimizer.type) if self.fedopt.use else 0.01
        return _canonical(found)

    def replace(self, overrides: Mapping[str, Any] | Sequence[str] | None = None, /, **keys: Any) -> Config:
        """A changed copy, checked anew. Keys as in ``load_config``.

        A new ``federate.method`` is taken as our name (``fedavg`` then trains all weights). It keeps the
        hyperparameters that it shares with the old method and that are not at the old default, and drops the
        rest; whether adapters are used is decided anew, unless the new method takes either.
        """
        changes = {**_flatten(_overrides(overrides)), **_flatten(_overrides(keys))}
        changes = {_resolved_name(key): value for key, value in changes.items()}
        tree = self.to_dict()
        method = changes.get("federate.method")
        if isinstance(method, str):
            old, new = _method_class(self.federate.method, self.source), _method_class(method, self.source)
            if old is not new:
                kept, defaults, takes = self.lowrank.params, _defaults(old), _params_fields(new)
                for name in kept:
                    if name not in takes or kept[name] == defaults.get(name):
                        del tree["lowrank"][name]
                if not getattr(new, "either", False):
                    tree["llm"]["adapter"]["use"] = False if method.lower() in framework_keys.WITH_ADAPTERS else None
        if "model.type" in changes and self.model.task == _infer_task(self.model.type):
            tree["model"]["task"] = ""
        _merge(tree, changes)
        return _build(tree, dataclasses.replace(self.source, overridden=self.source.overridden | set(changes)))


def load_config(
    path: str | os.PathLike | Mapping[str, Any] | Config | None = None,
    /,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    **keys: Any,
) -> Config:
    """Read a configuration and check it.

    Args:
        path: a YAML file, or a mapping in its place (nested, dotted, or both).
        overrides: values that go first: a mapping, or ``key value`` pairs as on the command line.
        keys: more of them, which go before all: ``federate__method="rolora"`` or
            ``**{"federate.method": "rolora"}``.
    Raises:
        UserError: no such file, bad YAML, an unknown key, a wrong type, a value out of range. The message
            names file, line, dotted key, value, and what was expected.
    """
    if isinstance(path, Config):
        return path.replace(overrides, **keys) if overrides is None else path.replace(overrides).replace(**keys)
    return _build(*_content(path, _overrides(overrides), _overrides(keys)))


def load_for(
    path: str | os.PathLike | Mapping[str, Any] | Config | None,
    methods: Sequence[str],
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
) -> tuple[Config, dict[str, dict[str, Any]]]:
    """Read a configuration that several methods are to run.

    Args:
        path: as for ``load_config``. What it has in ``lowrank`` is its own method's.
        methods: their names.
        overrides: values that go first; those in ``lowrank`` may belong to any of ``methods``.
    Returns:
        The configuration with its own method; by resolved name of a method, the overrides that belong to it.
    Raises:
        UserError: as ``load_config``; an unknown method, one that is given twice, or none; an override in ``lowrank``
            that none of the methods has.
    """
    classes = [_method_class(name, _Origin()) for name in methods]
    if not classes or len({cls.name for cls in classes}) < len(classes):
        raise UserError(f"compare needs distinct methods, got {', '.join(methods) or 'none'}")
    flat, general = _flatten(_overrides(overrides)), _general_keys()
    own = {key: value for key, value in flat.items() if key.startswith("lowrank.") and key.split(".")[1] not in general}
    for key in own:
        if not any(_taken(cls, [key]) for cls in classes):
            _unknown_parameter(key.split(".")[1], classes, _Origin(overridden=frozenset(own)))
    shared = {key: value for key, value in flat.items() if key not in own}
    config = path.replace(shared) if isinstance(path, Config) else _build(*_content(path, shared), own)
    return config, {cls.name: {key: own[key] for key in _taken(cls, own)} for cls in classes}


def _content(path: Any, *changes: Mapping[str, Any]) -> tuple[dict[str, Any], _Origin]:
    """What ``path`` holds, with ``changes`` made to it in turn, and where every value came from."""
    tree: dict[str, Any] = {}
    origin, content = (_Origin(), path or {}) if path is None or isinstance(path, Mapping) else _read(path)
    _merge(tree, content)
    for mapping in changes:
        _merge(tree, mapping)
        origin = dataclasses.replace(origin, overridden=origin.overridden | set(_flatten(mapping)))
    return tree, origin


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """``["train.optimizer.lr", "5e-3", …]`` as a mapping; values are read as YAML.

    Raises:
        UserError: a key without a value, or a value that is not YAML.
    """
    pairs = list(pairs)
    for key in pairs[::2]:
        if key.startswith("-") or "=" in key:
            plain = key.lstrip("-").split("=")[0]
            raise UserError(f"override {key!r}: write overrides as pairs, `{plain} VALUE`")
    if len(pairs) % 2:
        raise UserError(f"override {pairs[-1]!r} has no value: overrides come in pairs, `key value key value`")
    parsed: dict[str, Any] = {}
    for key, text in zip(pairs[::2], pairs[1::2]):
        try:
            parsed[key] = yaml.load(text, _Loader) if text.strip() else ""
        except yaml.YAMLError as error:
            if text.lstrip()[:1] in tuple("[{"):
                raise UserError(
                    f"override {key} = {text!r} is not valid YAML: {getattr(error, 'problem', None) or error}"
                ) from None
            parsed[key] = text
    return parsed


def check_local(config: Config) -> None:
    """Refuse what only the framework can do, and name what is left out; the local engine calls it before a run.

    Raises:
        UserError: names every such key at once.
    """
    refused = [(name, value) for name, value, meta in _flat(config) if "local" in meta and value != meta["local"]]
    refused += [
        (name, value)
        for name, value in config.framework.items()
        if not framework_keys.decides_nothing(name, config.framework)
    ]
    method = config.adapter.method
    if config.llm.adapter.use and method not in _LOW_RANK_METHODS:
        refused.append(("llm.adapter.args.0.adapter_method", method))
    defaults = Config()
    for name, value, meta in _flat(config):
        if "idle" in meta and value != defaults.get(name):
            logger.warning("%s = %s is left out by this engine: %s", name, _show(value), meta["idle"])
    if refused:
        file, lines = config.source.file, config.source.lines
        listed = [
            f"{name} = {_show(value)}" + (f" (line {lines[name]})" if name in lines else "") for name, value in refused
        ]
        raise UserError(
            f"{file + ': ' if file else ''}honoured only by --engine federatedscope; remove, or run with "
            "that engine:\n  " + "\n  ".join(listed)
        )


def known_keys() -> list[str]:
    """All dotted keys that a file may have, ours and the framework's, without methods' hyperparameters."""
    return sorted({name for name, _, _ in _flat(Config())} | set(framework_keys.DEFAULTS))


# -- reading -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """Where values came from."""

    file: str = ""
    #: dotted key -> line, from 1
    lines: Mapping[str, int] = field(default_factory=dict)
    #: keys that an override has set
    overridden: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """``"FILE, line N: "``, or as much of it as is known."""
        parts = key.split(".")
        if key not in self.lines and any(name.startswith(key + ".") for name in self.overridden):
            return "override: "
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if name in self.overridden:
                return "override: "
            if name in self.lines:
                return f"{self.file}, line {self.lines[name]}: "
        return f"{self.file}: " if self.file else ""

    def fail(self, key: str, message: str) -> NoReturn:
        raise UserError(f"{self.where(key)}{key} {message}")

    def wrong(self, key: str, value: Any, expected: str) -> NoReturn:
        self.fail(key, f"= {_show(value)}: expected {expected}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as the framework reads it, except that ``5e-3`` is a number and ``2026-01-01`` is text."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back: text such as ``5e-3`` needs quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
                    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.X,
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _read(path: str | os.PathLike) -> tuple[_Origin, dict[str, Any]]:
    name = os.path.expanduser(os.fspath(path))
    try:
        with open(name, encoding="utf-8-sig") as file:
            text = file.read()
    except FileNotFoundError:
        folder = os.path.dirname(name) or "."
        others = [f for f in os.listdir(folder) if f.endswith((".yaml", ".yml"))] if os.path.isdir(folder) else []
        raise UserError(f"{name}: no such file{nearest(os.path.basename(name), others)}") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder: expected a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None
    lines: dict[str, int] = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return _Origin(name), {}
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            raise UserError(f"{name} holds {kind}: expected sections and keys, such as `federate:`")
        _lines(node, "", lines, name, ())
        content = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise UserError(f"{name}{at}: invalid YAML: {problem}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: invalid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return _Origin(name, lines), content


def _lines(node: yaml.Node, prefix: str, lines: dict[str, int], file: str, above: tuple[int, ...]) -> None:
    """Note the line of every key, and refuse one that is given twice: YAML would keep the last without a word."""
    if id(node) in above:
        raise UserError(f"{file}, line {node.start_mark.line + 1}: an alias that contains itself")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag.endswith(":merge") or not isinstance(key, yaml.ScalarNode):
                continue
            name, line = prefix + key.value, key.start_mark.line + 1
            if name in lines:
                raise UserError(f"{file}, line {line}: {name} is given twice; first in line {lines[name]}")
            lines[name] = line
            _lines(value, name + ".", lines, file, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _lines(item, f"{prefix}{index}.", lines, file, above)


def _overrides(given: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {key.replace("__", ".") if isinstance(key, str) else key: value for key, value in given.items()}
    if isinstance(given, str):
        raise UserError(f"overrides = {given!r}: expected a mapping, or a list of keys and values in turn")
    return parse_overrides(given)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; sections, however deep, are taken apart, lists are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str):
            raise UserError(
                f"unknown key {prefix}{key!r}: expected text (YAML reads a bare on, off, yes, no as "
                "a truth value and digits as a number)"
            )
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = _plain(value)
    return flat


def _merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put ``changes`` into ``tree``: sections merge, anything else is replaced."""
    for key, value in _flatten(changes).items():
        if value == {} and isinstance(value, dict):
            if _lookup(tree, key) is None:
                _assign(tree, key, {})
        else:
            _assign(tree, key, value)


def _assign(tree: Any, key: str, value: Any) -> None:
    """Set a dotted key; a segment that is a number is an index, and one past the end of a list adds to it."""
    parts = key.split(".")
    if "" in parts:
        raise UserError(f"unknown key {key!r}: a name is missing beside a dot")
    node = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        fresh: Any = None if last else [] if parts[depth + 1].isdigit() else {}
        if isinstance(node, list):
            if not part.isdigit() or int(part) > len(node):
                raise UserError(
                    f"{key}: {'.'.join(parts[:depth])} is a list of {len(node)}; "
                    f"expected an index up to {len(node)}, not {part!r}"
                )
            index: Any = int(part)
            if index == len(node):
                node.append(fresh)
        else:
            index = part
        if last:
            node[index] = value
            return
        child = node[index] if isinstance(node, list) else node.get(index)
        if child is None:
            child = node[index] = fresh
        if not isinstance(child, (dict, list)):
            raise UserError(
                f"unknown key {key!r}: {'.'.join(parts[: depth + 1])} is a value ({_show(child)}), not a section"
            )
        node = child


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _plain(value: Any) -> Any:
    """``value`` as YAML can write it: lists for tuples, Python's numbers for NumPy's, text for paths."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return value.item()
    return value


# -- checking ------------------------------------------------------------------------------------------


def _build(tree: Mapping[str, Any], origin: _Origin, own: Mapping[str, Any] | None = None) -> Config:
    """The checked config; of ``own``, overrides in ``lowrank``, its method takes what it has and leaves the rest."""
    others: dict[str, Any] = {}
    config = _section(Config, tree, "", origin, others)
    named = _lookup(tree, "federate.method") is not None
    method, use = _resolve_method(config, named, origin)
    federate = dataclasses.replace(config.federate, method=method.name)
    adapter = dataclasses.replace(config.llm.adapter, use=use, args=[_adapter_args(config.llm.adapter.args, origin)])
    task = config.model.task or _infer_task(config.model.type)
    params = dict(config.lowrank.params)
    for key in _taken(method, own or ()):
        _assign(params, key.removeprefix("lowrank."), own[key])
        origin = dataclasses.replace(origin, overridden=origin.overridden | {key})
    params = check_method_params(method, params, origin)
    config = dataclasses.replace(
        config,
        federate=federate,
        framework=others,
        source=origin,
        model=dataclasses.replace(config.model, task=task),
        llm=dataclasses.replace(config.llm, adapter=adapter),
        lowrank=dataclasses.replace(config.lowrank, params=params),
    )
    _check_together(config, origin)
    tasks = getattr(method, "tasks", (task,))
    if task and task not in tasks:
        origin.fail(
            "federate.method",
            f"= {method.name} is not for model.type = {config.model.type} ({task}); "
            f"it takes models of {', '.join(tasks)}",
        )
    return config


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a class, evaluated: which takes longer than all checks by them."""
    return typing.get_type_hints(cls)


def _section(cls: type, raw: Any, prefix: str, origin: _Origin, others: dict[str, Any]) -> Any:
    """An instance of ``cls`` from its part of the file; the framework's further keys go to ``others``."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        origin.wrong(prefix.rstrip("."), raw, "a section with keys of its own")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if not (f.metadata.get("open") or f.metadata.get("hidden"))}
    rest = next((f.name for f in dataclasses.fields(cls) if f.metadata.get("open")), None)
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in raw.items():
        name = prefix + key
        if key in fields:
            values[key] = (
                _section(hints[key], value, name + ".", origin, others)
                if dataclasses.is_dataclass(hints[key])
                else _value(name, value, hints[key], fields[key].metadata, origin)
            )
        elif _framework_key(name, value, origin, others):
            continue
        elif rest is None:
            _unknown(name, origin)
        else:
            # the section takes any key, so only a clear misspelling can be told
            close = _misspelt(key, fields) if rest == "extra" else None
            if close and (key.lower() == close or cls is Eval):
                raise UserError(f"{origin.where(name)}unknown key {name!r}; did you mean {prefix + close!r}?")
            extra[key] = value
    return cls(**values, **({rest: extra} if rest else {}))


def _unknown(name: str, origin: _Origin, more: Sequence[str] = ()) -> NoReturn:
    candidates = [*known_keys(), *more]
    candidates += {key.rsplit(".", depth)[0] for key in candidates for depth in range(1, key.count(".") + 1)}
    # a key of the same section is meant more often than a like-sounding one elsewhere
    section = name.rpartition(".")[0]
    beside = [key for key in candidates if key.rpartition(".")[0] == section]
    close = _misspelt(name.rpartition(".")[2], [key.rpartition(".")[2] for key in beside], 0.6)
    hint = f"; did you mean {(section + '.' if section else '') + close!r}?" if close else nearest(name, candidates)
    raise UserError(f"{origin.where(name)}unknown key {name!r}{hint}")


def _framework_key(name: str, value: Any, origin: _Origin, others: dict[str, Any]) -> bool:
    """True if the framework has this key; noted in ``others`` unless it is at its default."""
    if name in framework_keys.DEFAULTS:
        default = framework_keys.DEFAULTS[name]
        value = _value(name, value, type(default), {}, origin)
        if value != default:
            others[name] = value
        return True
    if framework_keys.within(name, framework_keys.OPEN) and name not in framework_keys.OPEN:
        others[name] = value
        return True
    if name not in framework_keys.OPEN and not any(key.startswith(name + ".") for key in framework_keys.DEFAULTS):
        return False
    if value is not None and not isinstance(value, Mapping):
        origin.wrong(name, value, "a section with keys of its own")
    for key, item in (value or {}).items():
        if not _framework_key(f"{name}.{key}", item, origin, others):
            _unknown(f"{name}.{key}", origin)
    return True


_EXPECTED = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "nothing",
}


def _expected(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (list, tuple) and args:
        return {
            int: "a list of whole numbers",
            float: "a list of numbers",
            str: "a list of texts",
            dict: "a list of mappings",
        }.get(args[0], "a list")
    return _EXPECTED.get(origin or hint, getattr(hint, "__name__", str(hint)))


class _Mismatch(Exception):
    pass


def _coerce(value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` has it, if that takes no guess: an int for a float, a number written as text."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        exact = [arg for arg in args if type(value) is (typing.get_origin(arg) or arg)]
        for arg in (*exact, *args):
            try:
                return _coerce(value, arg)
            except _Mismatch:
                continue
        raise _Mismatch
    if origin is typing.Literal:
        if value in args:
            return value
    elif hint is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise _Mismatch from None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint in (bool, str, type(None)):
        if isinstance(value, hint):
            return value
    elif (origin or hint) in (list, tuple, Sequence):
        if isinstance(value, (list, tuple)):
            kind = tuple if (origin or hint) is tuple else list
            fixed = origin is tuple and args and args[-1] is not ...
            if fixed and len(args) != len(value):
                raise _Mismatch
            hints = args if fixed else [args[0] if args else Any] * len(value)
            return kind(_coerce(item, arg) for item, arg in zip(value, hints))
    elif (origin or hint) in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    else:
        return value
    raise _Mismatch


def _value(name: str, value: Any, hint: Any, meta: Mapping[str, Any], origin: _Origin) -> Any:
    """``value`` checked against the key's type and bounds."""
    given = value
    for spelling, meant in meta.get("also", {}).items():
        if type(value) is type(spelling) and value == spelling:
            value = meant
    try:
        value = _coerce(_plain(value), hint)
    except _Mismatch:
        expected, choices = _expected(hint), meta.get("choices")
        origin.wrong(name, given, f"one of {', '.join(map(str, choices))}" if choices else expected)
    if meta.get("fold"):
        value = {choice.lower(): choice for choice in meta["choices"]}.get(value.lower(), value)
    items = value if isinstance(value, (list, tuple)) else [value]
    for choices, shape, chosen in (
        (meta.get("choices"), "one of", [value]),
        (meta.get("items"), "a list of any of", items),
    ):
        for item in chosen:
            if choices and item is not None and item not in choices:
                listed = ", ".join(str(choice) or "''" for choice in choices)
                origin.wrong(name, given, f"{shape} {listed}{nearest(item, choices)}")
    bounds = [(meta[bound], holds, words) for bound, holds, words in _BOUNDS if meta.get(bound) is not None]
    for item in items:
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        if is_number and not all(holds(item, limit) for limit, holds, _ in bounds):
            wanted = " and ".join(f"{words} {limit:g}" for limit, _, words in bounds)
            origin.wrong(name, given, f"{_expected(hint)}, {wanted}")
    return value


_BOUNDS = (
    ("min", operator.ge, "at least"),
    ("above", operator.gt, "above"),
    ("max", operator.le, "at most"),
    ("below", operator.lt, "below"),
)


def _check_together(config: Config, origin: _Origin) -> None:
    """What one key alone does not show."""
    federate = config.federate
    if federate.client_num < 1:
        origin.fail("federate.client_num", f"= {federate.client_num}: set it to the number of clients, 1 or more")
    if federate.sample_client_num == 0:
        origin.wrong("federate.sample_client_num", 0, "clients a round, 1 or more; or -1 for all")
    if federate.sample_client_num > federate.client_num:
        origin.wrong(
            "federate.sample_client_num",
            federate.sample_client_num,
            f"at most federate.client_num, which is {federate.client_num}",
        )
    if federate.sample_client_rate <= 0 and federate.sample_client_rate != -1:
        origin.wrong(
            "federate.sample_client_rate", federate.sample_client_rate, "a share above 0 and at most 1; or -1 for all"
        )
    if config.lowrank.min_clients > config.sampled_per_round:
        origin.wrong(
            "lowrank.min_clients",
            config.lowrank.min_clients,
            f"at most the clients of a round, {config.sampled_per_round}",
        )
    if config.is_vision and config.model.task != "ImageClassification":
        origin.wrong("model.task", config.model.task, f"ImageClassification, or nothing, with {config.model.type}")
    for key, value, default in (
        ()
        if config.is_vision
        else (
            ("norm", config.lowrank.norm, "batch"),
            ("width", config.lowrank.width, 1.0),
            ("weights", config.lowrank.weights, ""),
            ("base_init", config.lowrank.base_init, "random"),
        )
    ):
        if value != default:
            origin.fail(
                f"lowrank.{key}",
                f"= {value!r} is for networks of ours ({', '.join(VISION_MODELS)}); "
                f"model.type is {config.model.type!r}",
            )
    if config.lowrank.base_init == "zero" and not config.from_scratch:
        origin.fail(
            "lowrank.base_init",
            "= 'zero' would wipe out the pre-trained weights of lowrank.weights; it is for training from scratch",
        )
    splits = config.data.splits
    if len(splits) != 3 or abs(sum(splits) - 1) > 1e-6:
        origin.wrong("data.splits", splits, "three shares, of train, validation and test, that add up to 1")
    if (
        isinstance(config.device, str)
        and config.device != "cpu"
        or isinstance(config.device, int)
        and config.device < -1
    ):
        origin.wrong("device", config.device, "the index of a GPU, -1 for any, or cpu")
    if config.train.optimizer.extra:
        from .training.local import check_optimizer  # imports torch, which reading a config's schema should not

        try:
            check_optimizer(config.train.optimizer)
        except UserError as error:
            raise UserError(f"{origin.where('train.optimizer')}{error}") from None
    best = config.eval.best_res_update_round_wise_key
    if not re.fullmatch(r"(\w+\.)?(train|val|test|client_test)_\w+", best):
        origin.wrong("eval.best_res_update_round_wise_key", best, "SPLIT_METRIC, such as val_loss or test_acc")


def _infer_task(model_type: str) -> str:
    if model_type in VISION_MODELS:
        return "ImageClassification"
    suffix = model_type.rpartition("@")[2] if "@" in model_type else ""
    return {"huggingface_llm": "CausalLM", "modelscope_llm": "CausalLM", "transformers": "SequenceClassification"}.get(
        suffix, ""
    )


def _resolved_name(key: str) -> str:
    """The key as a resolved config has it: PEFT's name for a short spelling."""
    section, _, name = key.rpartition(".")
    return f"{section}.{_SHORT[name]}" if section == "llm.adapter.args.0" and name in _SHORT else key


def _adapter_args(args: list[dict], origin: _Origin) -> dict[str, Any]:
    if len(args) > 1:
        origin.wrong("llm.adapter.args", args, f"a list of one mapping, not {len(args)}")
    return AdapterSpec.from_args(args[0] if args else {}, origin).to_args()


# -- the method ----------------------------------------------------------------------------------------


def _method_class(name: str, origin: _Origin) -> Any:
    from .methods import get_method_class  # imports torch, which reading a config's schema should not

    try:
        return get_method_class(name.lower())
    except UserError as error:
        raise UserError(f"{origin.where('federate.method')}{error}") from None


def _resolve_method(config: Config, named: bool, origin: _Origin) -> tuple[Any, bool]:
    """The method's class, and whether it uses adapters; see the module's docstring."""
    name, use = config.federate.method.lower(), config.llm.adapter.use
    if name in framework_keys.WITH_ADAPTERS:
        if use:
            name = framework_keys.WITH_ADAPTERS[name]
        elif use is None and not named and any(config.llm.adapter.args):
            origin.fail(
                "federate.method",
                "is missing, and llm.adapter.args is given without llm.adapter.use: the "
                "framework would ignore the adapter and train all weights; say which method, such as fedlora, "
                "or set llm.adapter.use",
            )
    cls = _method_class(name, origin)
    adapts = "adapter" in getattr(cls, "shared", ("adapter",)) or (bool(use) and getattr(cls, "either", False))
    if use is False and adapts:
        origin.fail(
            "llm.adapter.use",
            f"= False, but federate.method = {cls.name} trains adapters; "
            "remove the key, or choose fedavg to train all weights",
        )
    return cls, adapts if use is None else use


def _params_fields(cls: Any) -> dict[str, dataclasses.Field]:
    params = getattr(cls, "Params", None)
    return {f.name: f for f in dataclasses.fields(params) if f.init} if params is not None else {}


def _defaults(cls: Any) -> dict[str, Any]:
    made = {}
    for name, f in _params_fields(cls).items():
        if f.default_factory is not dataclasses.MISSING:
            made[name] = f.default_factory()
        elif f.default is not dataclasses.MISSING:
            made[name] = f.default
    return made


def _general_keys() -> list[str]:
    """The keys of ``lowrank`` that are not a method's."""
    return [f.name for f in dataclasses.fields(Lowrank) if not f.metadata.get("open")]


def _taken(cls: Any, keys: Iterable[str]) -> list[str]:
    """Those of ``keys``, such as ``lowrank.ranks``, that are the method's."""
    fields = _params_fields(cls)
    return [key for key in keys if key.split(".")[1] in fields]


def _unknown_parameter(key: str, classes: Sequence[Any], origin: _Origin) -> NoReturn:
    name, fields = f"lowrank.{key}", list(dict.fromkeys(field for cls in classes for field in _params_fields(cls)))
    has = (
        f"the method {classes[0].name} has"
        if len(classes) == 1
        else f"the methods {', '.join(cls.name for cls in classes)} have"
    )
    raise UserError(
        f"{origin.where(name)}unknown key {name!r}{nearest(key, [*_general_keys(), *fields])}; {has} "
        + (f"the keys {', '.join(fields)}" if fields else f"no keys of {'its' if len(classes) == 1 else 'their'} own")
    )


def check_method_params(cls: Any, given: Mapping[str, Any], origin: _Origin | None = None) -> dict[str, Any]:
    """All hyperparameters of the method: the given ones checked, the others at their defaults."""
    fields, origin = _params_fields(cls), origin or _Origin()
    hints = _hints(cls.Params) if fields else {}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = f"lowrank.{key}"
        if key not in fields:
            _unknown_parameter(key, [cls], origin)
        values[key] = _value(name, value, hints[key], fields[key].metadata, origin)
    missing = [key for key in fields if key not in values and key not in _defaults(cls)]
    if missing:
        origin.fail(f"lowrank.{missing[0]}", f"is missing: federate.method = {cls.name} needs it")
    if not fields:
        return {}
    try:
        made = cls.Params(**values)
    except ValueError as error:
        raise UserError(f"{origin.where('lowrank')}lowrank ({cls.name}): {error}") from None
    return {key: getattr(made, key) for key in fields}


# -- helpers -------------------------------------------------------------------------------------------


def _flat(section: Any, prefix: str = "") -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Every key below ``section``: dotted name, value, and the field's metadata."""
    keys: list[tuple[str, Any, Mapping[str, Any]]] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if f.metadata.get("hidden"):
            continue
        if dataclasses.is_dataclass(value):
            keys += _flat(value, f"{prefix}{f.name}.")
        elif f.metadata.get("open"):
            keys += [(prefix + key, item, f.metadata) for key, item in value.items()]
        else:
            keys.append((prefix + f.name, value, f.metadata))
    return keys


def _tree(section: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if f.metadata.get("hidden"):
            continue
        if dataclasses.is_dataclass(value):
            tree[f.name] = _tree(value)
        elif f.metadata.get("open"):
            tree.update(_plain(value))
        else:
            tree[f.name] = _plain(value)
    return tree


def _canonical(value: Any) -> Any:
    """Numbers that are equal become the same text: 1 and 1.0."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _misspelt(key: str, known: Any, cutoff: float = 0.8) -> str | None:
    """The known name that ``key`` was surely meant to be, or None."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(key.lower(), list(lower), n=1, cutoff=cutoff)
    return lower[close[0]] if close else None


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
