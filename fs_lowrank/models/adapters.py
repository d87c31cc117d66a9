"""Add adapters to a model through PEFT, and load named tensors of any rank into it.

PEFT is imported inside functions that have a model, because its import takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import re
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..errors import UserError, nearest, user_errors
from ..seeds import derive
from ..settings import ALL_LINEAR, AdapterSpec, Key, Origin, check_keys, keys_of
from ..settings.adapter import PROMPTS
from .chain import resize
from .kinds import (
    CLASSES,
    further,
    heads_by_place,
    say_idle,
    sizes,
    task_type,
    text_part,
    vision_targets,
)
from .names import HEAD_MODULES, PEFT_HEADS, all_tensors, is_head, tags, with_owners, zero_at_start
from .prompts import check_virtual_tokens, text_only
from .quantised import is_quantised

if TYPE_CHECKING:
    import peft
    from peft.tuners.lora import LoraLayer

#: what makes an adapter of a configuration, for messages
_BY_PEFT = "llm.adapter.args: PEFT"


def layer_stack(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Name and ``ModuleList`` of the transformer blocks, the longest that a text goes through; None without."""
    inside, part = text_part(model)
    lists = [(name, m) for name, m in part.named_modules(prefix=inside) if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda item: len(item[1]), default=None)


def add_adapter(model: nn.Module, spec: AdapterSpec, seed: int) -> nn.Module:
    """Wrap ``model`` in PEFT's model for ``spec``; the base is frozen and changed in place.

    The same ``seed`` gives the same ``lora_A`` everywhere, so a frozen ``lora_A`` need not be sent.

    Raises:
        UserError: an unknown module or layer (the message suggests the nearest), a rank above the width of a layer,
            a model that does not compute with virtual tokens, or another value that PEFT refuses.
    """
    from peft import get_peft_model

    from .convolution import compose

    # a convolution is adapted as the matrix of its kernels, so its rows are as long as one kernel
    longest = max((max(p.shape[:1].numel(), p.shape[1:].numel()) for p in model.parameters()), default=1)
    config = _config(model, spec, seed)
    options = {name: copy.deepcopy(getattr(config, name)) for name in further(spec)}
    torch.manual_seed(derive(seed, "adapter"))
    with without_deprecation(), user_errors(_BY_PEFT):
        rank = max([spec.r, *(getattr(config, "rank_pattern", None) or {}).values()])
        if spec.method not in PROMPTS and rank > longest:  # before memory is taken for it
            raise UserError(f"rank {rank} is above the width of every layer; the longest has {longest}")
        wrapped = get_peft_model(model, config)
    _freeze_inside(wrapped, spec)
    compose(wrapped)
    foreign = [n for n, p in wrapped.named_parameters() if p.requires_grad and not tags(n) & {"adapter", "head"}]
    if foreign:
        raise UserError(
            f"llm.adapter.args: it would train {foreign[0]}, which is no tensor of an adapter or a head, so it would "
            "never be sent; leave out bias, trainable_token_indices and adapters on embeddings"
        )
    say_idle(wrapped, options)
    if spec.virtual_tokens:
        text_only(wrapped)
        check_virtual_tokens(wrapped, spec.method)
    _check_pairs(wrapped, "default")
    return wrapped


def _check_pairs(model: nn.Module, adapter: str) -> None:
    """Refuse pairs of a rank above the width of their layer, and on layers that give more than a product."""
    suffix = "" if adapter == "default" else f" of the {adapter} pair"
    for name, module in model.named_modules():
        if adapter not in getattr(module, "lora_A", ()):
            continue
        down, up, base = module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.get_base_layer()
        if _computes_more(base):
            raise UserError(
                f"llm.adapter.args: {name} is a {type(base).__name__}, which gives more than a product, so PEFT's pair "
                "cannot be added to it; leave it out of modules"
            )
        # For convolutions the longer side is the limit: the papers use rank 128 on layers of 64 channels.
        widest = (max if down.ndim > 2 else min)(down.flatten(1).shape[1], up.shape[0])
        if len(down) > widest:  # its own rank, by rank_pattern if that names it
            raise UserError(
                f"rank {len(down)}{suffix} is above the width of {name}: its weight is "
                f"{up.shape[0]} × {down.flatten(1).shape[1]}; choose r ≤ {widest}"
            )


@contextlib.contextmanager
def without_deprecation() -> Iterator[None]:
    """PEFT uses a deprecated attribute of transformers, whose warning tells a user nothing.

    Its warning that it takes another number or size of OFT's blocks than the argument is an error here.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"Invalid `\w+` .*Adjusted", UserWarning)
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _freeze_inside(wrapped: peft.PeftModel, spec: AdapterSpec) -> None:
    """Freeze modules inside the base that PEFT treats as a head and ``names.tags`` as base.

    For classifiers, PEFT copies and trains every module whose name ends in ``classifier`` or ``score``, anywhere in the
    model, also when the adapter is loaded again. The copies therefore remain, and stay equal to the base.

    Raises:
        UserError: such a module is named in ``modules_to_save``, or an adapter was requested on it or inside it, where
            PEFT adds none.
    """
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import ModulesToSaveWrapper

    inner = wrapped.get_base_model()
    copied = {
        name: module
        for name, module in inner.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and "head" not in tags(f"{name}.modules_to_save.default.weight")
    }
    named = [m for m in spec.extra.get("modules_to_save") or () if m not in HEAD_MODULES]
    plain = copy.copy(wrapped.peft_config["default"])
    plain.modules_to_save = None
    for name, module in copied.items():
        if name.endswith(tuple(named)):
            raise UserError(
                f"llm.adapter.args: modules_to_save: {name} is inside the base; by its name PEFT trains all "
                "modules that are called like it"
            )
        for part, _ in inner.named_modules():
            inside = f"{part}.".startswith(f"{name}.") and not f"{part}.".startswith(f"{name}.modules_to_save.")
            part = part.replace(".original_module", "")
            if inside and spec.method not in PROMPTS and check_target_module_exists(plain, part):
                raise UserError(
                    f"llm.adapter.args: no adapter can go on {part}: PEFT leaves out "
                    f"what is called {' or '.join(PEFT_HEADS)}, also inside the base; take other modules"
                )
        module.requires_grad_(False)


def _config(model: nn.Module, spec: AdapterSpec, seed: int = 0) -> peft.PeftConfig:
    """PEFT's config for ``spec``."""
    arguments = {**task_type(model, spec), **sizes(model, spec, seed)}
    import peft

    config_class = getattr(peft, CLASSES[spec.method])
    keys, extra = dict(keys_of(config_class)), further(spec)
    for name, key in keys.items():
        values = [member.value for kind in typing.get_args(key.hint) if isinstance(kind, type(Enum)) for member in kind]
        keys[name] = Key(key.hint, {"choices": values} if values else {})
    keys |= {"init_lora_weights": Key(Any)}  # PEFT accepts more than it lists, such as pissa_niter_16
    check_keys(extra, keys, Origin(), "llm.adapter.args.0")
    for part in spec.extra.get("modules_to_save") or ():
        _check_named(model, part, "modules_to_save: ")
    if heads := heads_by_place(model):  # what the user names as well is there once
        extra = {**extra, "modules_to_save": list(dict.fromkeys([*(extra.get("modules_to_save") or ()), *heads]))}
    if spec.method in PROMPTS:
        with user_errors(_BY_PEFT):
            return config_class(**arguments, **extra)
    targets, layers = _targets(model, spec), _layers(model, spec)
    if spec.target_modules == ALL_LINEAR:
        layers = None  # the names are those of single modules
    towers = text_part(model)[0] and not spec.pattern and spec.target_modules != ALL_LINEAR
    if towers or layers is not None and "layers_to_transform" not in keys:
        targets, layers = _in_layers(model, targets or _usual_targets(model) or [], layers), None
    chosen = {} if layers is None else {"layers_to_transform": layers}
    with user_errors(_BY_PEFT):
        config = config_class(target_modules=targets, **chosen, **arguments, **extra)
    _check_patterns(model, config)
    return config


@user_errors(_BY_PEFT)
def _check_patterns(model: nn.Module, config: peft.PeftConfig) -> None:
    """Refuse a rank, a strength or an exclusion of modules that have no adapter in any case."""
    everything = copy.copy(cast("peft.LoraConfig", config))
    everything.exclude_modules = None
    for name, scope in (("exclude_modules", everything), ("rank_pattern", config), ("alpha_pattern", config)):
        value = getattr(config, name, None) or ()
        is_regex, modules = isinstance(value, (str, Mapping)), _adapted(model, scope)
        for part in [value] if isinstance(value, str) else value:
            expression = part if is_regex else re.escape(part)
            if not any(re.fullmatch(rf"(.*\.)?({expression})", module) for module in modules):
                raise UserError(
                    f"llm.adapter.args: {name}: {part!r} is of no module with an adapter; there are: "
                    f"{', '.join(sorted({module.rpartition('.')[2] for module in modules}))}"
                )


def _inside(model: nn.Module, layers: Sequence[int] | None) -> tuple[str, ...]:
    """Prefixes of the full names of modules that a text goes through, in ``layers`` if some are chosen."""
    stack, part = layer_stack(model), text_part(model)[0]
    if layers is None or stack is None:
        return (f"{part}." if part else "",)
    return tuple(f"{stack[0]}.{layer}." for layer in layers)


def _in_layers(model: nn.Module, names: Sequence[str], layers: Sequence[int] | None) -> list[str]:
    """The full names of the modules that end in one of ``names`` and are in one of ``layers``."""
    inside, ends = _inside(model, layers), tuple(f".{t}" for t in names)
    return [n for n, _ in model.named_modules() if n.startswith(inside) and n.endswith(ends)]


def target_modules(model: nn.Module, spec: AdapterSpec) -> list[str]:
    """Full names of the modules to which ``add_adapter`` would add an adapter.

    Raises:
        UserError: as for ``add_adapter``; or there is no such module.
    """
    names = _adapted(model, _config(model, spec))
    if not names:
        raise UserError("llm.adapter.args: none of the modules that it names is in the layers that it names")
    return names


@user_errors(_BY_PEFT)
def _adapted(model: nn.Module, config: peft.PeftConfig) -> list[str]:
    """Full names of the modules to which PEFT would add an adapter by ``config``."""
    from peft.tuners.tuners_utils import check_target_module_exists

    config = copy.copy(cast("peft.LoraConfig", config))
    config.target_modules = config.target_modules or _usual_targets(model)
    return [n for n, _ in model.named_modules() if config.target_modules and check_target_module_exists(config, n)]


def _usual_targets(model: nn.Module) -> list[str] | None:
    """PEFT's choice for this kind of model; None if it has none."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    kind = getattr(getattr(model, "config", None), "model_type", None)
    return TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)


def _targets(model: nn.Module, spec: AdapterSpec) -> list[str] | str | None:
    defaults = vision_targets(model)
    if spec.target_modules is None:
        if defaults is None and _usual_targets(model) is None:
            raise UserError(
                "llm.adapter.args: target_modules is missing, and there is no usual choice for this model; name some "
                f"of {', '.join(_last_names(model))}, or all-linear"
            )
        return defaults
    if spec.target_modules == ALL_LINEAR:
        return defaults or _all_linear(model, spec)
    if spec.pattern:
        return spec.pattern  # PEFT refuses one that fits no whole name of a module
    for module in spec.target_modules:
        _check_named(model, module)
    return list(spec.target_modules)


def _computes_more(module: nn.Module) -> bool:
    """Whether a linear layer has a ``forward`` of a model's own, as PhiMoE's router, which gives the chosen experts."""
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward and not is_quantised(module)


def _all_linear(model: nn.Module, spec: AdapterSpec) -> list[str]:
    """The full names of all linear modules but the head's, in the layers that ``spec`` asks for."""
    from transformers.pytorch_utils import Conv1D

    out = getattr(model, "get_output_embeddings", lambda: None)()
    inside, heads = _inside(model, _layers(model, spec)), heads_by_place(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and not _computes_more(module)
        and module is not out
        and not is_head(f"{name}.weight", heads)
        and name.startswith(inside)
    ]


def _check_named(model: nn.Module, pattern: str, key: str = "") -> None:
    """Refuse the end of a module's name that fits no module of ``model``."""
    if any(f".{name}".endswith(f".{pattern}") for name, _ in model.named_modules()):
        return
    last_parts = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    raise UserError(
        f"llm.adapter.args: {key}this model has no module {pattern!r}{nearest(pattern, last_parts)}; "
        f"it has: {', '.join(_last_names(model))}"
    )


def _last_names(model: nn.Module) -> list[str]:
    """The last parts of the names of modules with a matrix, by which an adapter can be asked for."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if not list(module.children()) and getattr(module, "weight", None) is not None and module.weight.ndim >= 2
        }
    )


def _layers(model: nn.Module, spec: AdapterSpec) -> list[int] | None:
    if spec.layers is None:
        return None
    stack = layer_stack(model)
    if stack is None:
        raise UserError("llm.adapter.args: this model has no list of layers, so `layers` cannot choose among them")
    beyond = [i for i in spec.layers if not 0 <= i < len(stack[1])]
    if beyond:
        raise UserError(
            f"llm.adapter.args: no layer {beyond[0]}; the model's {len(stack[1])} layers are 0 … {len(stack[1]) - 1}"
        )
    return list(spec.layers)


def start_at_zero(model: nn.Module, seed: int) -> None:
    """Initialise layers with an adapter to ``W = 0``, A and B random, as in the FedLoRU authors' code.

    Args:
        model: PEFT's model, trained from scratch. A model without adapters is not changed.
    """
    torch.manual_seed(derive(seed, "adapter", "from zero"))
    tensors = all_tensors(model)
    with torch.no_grad():
        for name in sorted(n for n in tensors if "adapter" in tags(n)):
            tensors[base_weight_name(name)].zero_()
            if zero_at_start(name) and tensors[name].ndim > 1:  # the bias of `lora_bias` stays zero
                nn.init.kaiming_uniform_(tensors[name], a=5**0.5)


_LORA_WEIGHT = re.compile(r"^(?P<module>.+)\.lora_[AB]\.(?P<adapter>[^.]+)\.weight$")
_ADAPTER_TENSOR = re.compile(r"^(?P<module>.+)\.(?:lora|hada|lokr)_\w+\.(?P<adapter>[^.]+)(?:\.(?:weight|bias))?$")


def _matched(name: str) -> re.Match[str]:
    match = _ADAPTER_TENSOR.match(name)
    if match is None:
        raise ValueError(f"{name} is not a tensor of an adapter")
    return match


def module_of(name: str) -> str:
    """The name of the layer to which adapter tensor ``name`` belongs."""
    return _matched(name)["module"]


#: name of the adapter of accumulated products; its B includes their scale (``models.accumulated``)
ACCUMULATED = "accumulated"


def add_beside(model: peft.PeftModel, name: str, seed: int, *, r: int | None = None, **extra: Any) -> peft.PeftModel:
    """Add an adapter ``name``, in float32, on the layers of the shared one; every adapter is active afterwards.

    Args:
        r: its rank in every layer; None: the ranks of the shared adapter.
        extra: further arguments of its PEFT config that differ from those of the shared one.
    Raises:
        UserError: the rank is above the width of a layer.
    """
    config = copy.deepcopy(model.peft_config["default"])
    rank = {} if r is None else {"r": r, "rank_pattern": {}}
    for key, value in {"modules_to_save": None, **rank, **extra}.items():
        setattr(config, key, value)
    torch.manual_seed(derive(seed, "adapter", name))
    tuner = model.base_model
    tuner.peft_config[name] = config
    tuner.inject_adapter(tuner.model, name)
    tuner.set_adapter(list(tuner.peft_config))
    for tensor_name, parameter in model.named_parameters():
        if name in tags(tensor_name) and parameter.is_floating_point():  # as PEFT does with the first
            parameter.data = parameter.data.float()
    _check_pairs(model, name)
    return model


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the model.

    The rank of LoRA matrices may differ from the model's: the parameter takes the new shape, and PEFT's scaling is
    updated (``alpha / r``, or ``alpha / √r`` with rsLoRA), so one model serves clients of all ranks. The same holds
    for nested pairs and factors, and for weights of layers that may grow (``models.chain``).

    Raises:
        KeyError: a name that the model does not have. ValueError: a shape that cannot be loaded.
    """
    with torch.no_grad():
        for name, (owner, parameter) in with_owners(model, tensors).items():
            tensor = tensors[name]
            if parameter.shape == tensor.shape:
                parameter.copy_(tensor)
                continue
            if getattr(owner, "may_grow", False) and parameter.ndim == tensor.ndim:
                resize(owner, tensor)
                continue
            match = _LORA_WEIGHT.match(name)
            if match is None and not tags(name) & {"nested", "factor"}:
                raise ValueError(
                    f"{name}: the model's shape is {tuple(parameter.shape)}, the tensor's {tuple(tensor.shape)}"
                )
            # In one layout, whatever the tensor's: a product's rounding depends on it, and files keep none.
            parameter.data = tensor.detach().to(parameter).clone(memory_format=torch.contiguous_format)
            if match is not None:
                _set_rank(model.get_submodule(match["module"]), match["adapter"])


def _set_rank(layer: LoraLayer, adapter: str) -> None:
    layer.r[adapter] = layer.lora_A[adapter].weight.shape[0]
    layer.set_scale(adapter, 1.0)
    if adapter == ACCUMULATED:
        layer.scaling[adapter] = 1.0


def lora_scales(model: nn.Module) -> dict[str, float]:
    """PEFT's scale of each LoRA pair, which depends on its rank, by the name of its second module."""
    ups = ((name, module) for name, module in model.named_modules() if name.endswith(".lora_B"))
    return {
        f"{name}.{adapter}": cast("Any", model.get_submodule(name.removesuffix(".lora_B"))).scaling[adapter]
        for name, module in ups
        for adapter in cast("nn.ModuleDict", module)
    }


def adapter_name(name: str) -> str:
    """The adapter to which tensor ``name`` belongs; the shared one is PEFT's ``default``."""
    return _matched(name)["adapter"]


def base_weight_name(name: str) -> str:
    """The name of the frozen weight of the layer of adapter tensor ``name``."""
    return module_of(name) + ".base_layer.weight"
