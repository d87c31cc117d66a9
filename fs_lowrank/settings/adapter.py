"""The arguments of the adapter, ``llm.adapter.args``."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .check import Key, check_value, key, keys_of
from .origin import Origin

#: short spellings of PEFT's names
SHORT = {
    "modules": "target_modules",
    "layers": "layers_to_transform",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rank": "r",
}
#: the arguments that choose layers
OF_LAYERS = ("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules")
_LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "use_rslora")
#: PEFT's names of the arguments checked here -> ours
_CHECKED = {"adapter_method": "method", "layers_to_transform": "layers"}
_CHECKED |= {name: name for name in ("target_modules", "lora_alpha", "r", "lora_dropout", "use_rslora")}
#: arguments of PEFT's first versions, with the values that agree with later versions, which lack the arguments
FORMER = {"enable_lora": None, "merge_weights": False}
#: entries of PEFT's configs about a saved adapter of any kind; here PEFT sets them itself
OF_PEFT = tuple("peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode task_type".split())
#: ``target_modules`` for every linear module but the head's
ALL_LINEAR = ("all-linear",)
#: adapters that are added to a weight
ADDED = ("lora", "lokr", "loha")
#: virtual tokens before the text: keys and values in every layer, embeddings, or a network that gives embeddings
PROMPTS = ("prefix", "prompt", "p-tuning")
#: the adapters that our methods train -> their arguments among ``r``, ``lora_alpha`` and ``lora_dropout``
TRAINED = {
    **dict.fromkeys(ADDED, ("r", "lora_alpha", "lora_dropout")),
    "vera": ("r", "lora_dropout"),
    "oft": ("r", "lora_dropout"),
    "ia3": (),
    **dict.fromkeys(PROMPTS, ()),
}
#: ``adapter_method`` -> the argument whose default is not PEFT's, and PEFT's default
OTHER_DEFAULTS = {
    "lora": ("lora_alpha", "8 in PEFT and FederatedScope"),
    "lokr": ("lora_alpha", "8 in PEFT"),
    "loha": ("lora_alpha", "8 in PEFT"),
    "vera": ("r", "256 in PEFT"),
    "oft": ("r", "blocks of 32 (oft_block_size) in PEFT"),
}


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of ``llm.adapter.args``."""

    #: ``lora``, ``lokr``, ``loha``, ``vera``, ``oft``, ``ia3``, ``prefix``, ``prompt``, ``p-tuning``
    method: str = key("lora", choices=tuple(TRAINED), fold=True)
    #: the rank
    r: int = key(8, min=1)
    #: the pair counts `alpha / r` times
    lora_alpha: int | float = key(16, above=0.0, words="a number")
    #: dropout of the adapter's input; for ``lokr`` and ``loha``, PEFT's ``rank_dropout``, for ``oft`` its
    #: ``module_dropout``
    lora_dropout: float = key(0.0, min=0.0, below=1.0)
    #: names of modules, ``all-linear``, a text that is a regular expression for whole names, or None for PEFT's choice
    target_modules: tuple[str, ...] | None = None
    #: indices from 0, or None for all
    layers: tuple[int, ...] | None = key(None, min=0)
    #: the pair counts `alpha / √r` times instead
    use_rslora: bool = False
    #: further arguments of PEFT's config, unchanged
    extra: dict = field(default_factory=dict)

    @property
    def is_additive(self) -> bool:
        """Whether the weight of a layer is the base's plus the adapter's."""
        return self.method in ADDED and not self.extra.get("use_dora")

    @property
    def moves_base(self) -> str:
        """``init_lora_weights`` if it moves a part of the base's weights into the pair (PiSSA, OLoRA, LoftQ, CorDA);
        else empty.
        """
        start = self.extra.get("init_lora_weights", True)
        return "" if start in (True, False, "gaussian", "orthogonal", "eva") else str(start)

    @property
    def pattern(self) -> str:
        """The regular expression that modules' whole names have to match, if ``target_modules`` is one; else empty."""
        name = self.target_modules[0] if self.target_modules and len(self.target_modules) == 1 else ""
        return name if re.search(r"[][\\^$*+?(){}|]", name) else ""

    @property
    def virtual_tokens(self) -> int:
        """The number of virtual tokens before the text; 0 for an adapter of layers."""
        return self.extra.get("num_virtual_tokens", 0) if self.method in PROMPTS else 0

    def scale(self, rank: int | None = None) -> float:
        """The factor on ``B A`` for ``rank`` (default: ``r``): ``alpha / r``, with rsLoRA ``alpha / √r``."""
        rank = self.r if rank is None else rank
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def to_args(self) -> dict[str, Any]:
        """The mapping for ``llm.adapter.args``, in PEFT's names."""
        args: dict[str, Any] = {"adapter_package": "peft", "adapter_method": self.method}
        names = ("r", "lora_alpha", "lora_dropout")
        args |= {name: getattr(self, name) for name in names if name in TRAINED[self.method]}
        if self.method in ADDED:
            args["use_rslora"] = self.use_rslora
        if self.target_modules is not None:
            single = self.pattern or self.target_modules == ALL_LINEAR
            args["target_modules"] = self.target_modules[0] if single else list(self.target_modules)
        if self.layers is not None:
            args["layers_to_transform"] = list(self.layers)
        return {**args, **copy.deepcopy(self.extra)}

    @classmethod
    def from_args(cls, args: Mapping[str, Any], origin: Origin | None = None) -> AdapterSpec:
        """Read ``llm.adapter.args[0]``, in PEFT's names or the short ones.

        Raises:
            UserError: a value of the wrong type or out of range, two spellings of one argument.
        """
        origin, prefix = origin or Origin(), "llm.adapter.args.0."
        arguments: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for spelling, value in args.items():
            name = SHORT.get(spelling, spelling)
            if name in spelled:
                origin.fail(prefix + spelling, f"and {spelled[name]!r} are two spellings of one argument; keep one")
            arguments[name], spelled[name] = value, spelling
        for name in ("target_modules", "layers_to_transform"):
            if name in arguments and isinstance(arguments[name], (str, int)) and not isinstance(arguments[name], bool):
                arguments[name] = [arguments[name]]
            if name in arguments and arguments[name] == []:
                origin.fail(prefix + spelled[name], "is an empty list: nothing would train; name some, or leave it out")
        if (package := arguments.pop("adapter_package", "peft")) != "peft":
            origin.wrong(f"{prefix}adapter_package", package, "one of peft")
        keys = keys_of(cls)  # type: ignore[arg-type]  # classes are hashable
        values = {
            ours: check_value(prefix + spelled[name], arguments.pop(name), keys[ours], origin)
            for name, ours in _CHECKED.items()
            if name in arguments
        }
        spec = cls(**values, extra=arguments)
        common = _LORA_KEYS if spec.method in PROMPTS else ("r", "lora_alpha", "lora_dropout")
        if foreign := [name for name in common if name in spelled and name not in TRAINED[spec.method]]:
            origin.fail(prefix + spelled[foreign[0]], f"is no argument of adapter_method {spec.method}; leave it out")
        if spec.use_rslora and spec.method != "lora":
            origin.fail(prefix + spelled["use_rslora"], f"is LoRA's, and adapter_method is {spec.method}; leave it out")
        if spec.method in PROMPTS:
            if "num_virtual_tokens" not in arguments:
                origin.fail(prefix + "num_virtual_tokens", f"is missing; say how many {spec.method} trains, such as 20")
            check_value(prefix + "num_virtual_tokens", arguments["num_virtual_tokens"], Key(int, {"min": 1}), origin)
        return spec


def defaulted(args: Mapping[str, Any]) -> str:
    """The argument missing in ``args`` whose default is not PEFT's; empty if there is none."""
    name, _ = OTHER_DEFAULTS.get(str(args.get("adapter_method", "lora")).lower(), ("", ""))
    return "" if name in (SHORT.get(spelling, spelling) for spelling in args) or "oft_block_size" in args else name


def resolved_name(key: str) -> str:
    """The key as in a loaded config, with PEFT's name instead of a short spelling."""
    section, _, name = key.rpartition(".")
    return f"{section}.{SHORT[name]}" if section == "llm.adapter.args.0" and name in SHORT else key
