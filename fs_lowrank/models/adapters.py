"""Putting LoRA on a model through PEFT, and loading named tensors into it, of any rank."""
from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

import peft
import torch
from torch import Tensor, nn

from ..config import AdapterSpec
from ..errors import UserError, nearest
from ..seeds import derive
from .names import HEAD_MODULES, all_tensors

_CLASSES = {"lora": peft.LoraConfig}


def layer_stack(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The model's transformer blocks: the longest ``ModuleList`` and its name; None if it has none."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda item: len(item[1]), default=None)


def add_adapter(model: nn.Module, spec: AdapterSpec, seed: int) -> nn.Module:
    """Wrap ``model`` in PEFT's model of ``spec``; the base is frozen and changed in place.

    The same ``seed`` draws the same ``lora_A`` everywhere, so a frozen half needs no message.

    Raises:
        UserError: no such module or layer (with the nearest that exists), a rank above a layer's width,
            an adapter method that is not known.
    """
    if spec.method not in _CLASSES:
        raise UserError(f"llm.adapter.args: adapter_method {spec.method!r} is not known"
                        f"{nearest(spec.method, _CLASSES)}; known: {', '.join(sorted(_CLASSES))}")
    target, layers = _targets(model, spec), _layers(model, spec)
    is_sequence_classifier = any(hasattr(model, head) for head in HEAD_MODULES)
    task = {"task_type": "SEQ_CLS"} if is_sequence_classifier else (
        {"task_type": "CAUSAL_LM"} if hasattr(model, "lm_head") else {})
    config = _CLASSES[spec.method](
        r=spec.r, lora_alpha=spec.lora_alpha, lora_dropout=spec.lora_dropout, use_rslora=spec.use_rslora,
        target_modules=target, layers_to_transform=layers, **task, **spec.extra)
    torch.manual_seed(derive(seed, "adapter"))
    with warnings.catch_warnings():
        # PEFT asks transformers for an attribute by its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        wrapped = peft.get_peft_model(model, config)
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
            widest = min(down.flatten(1).shape[1], up.shape[0])
            if spec.r > widest:
                raise UserError(f"rank {spec.r} is above the width of {name}: its weight is "
                                f"{up.shape[0]} × {down.flatten(1).shape[1]}; choose r ≤ {widest}")
    return wrapped


def _targets(model: nn.Module, spec: AdapterSpec) -> list[str] | None:
    if spec.target_modules is None:
        return None
    suffixes = {n.rsplit(".", 1)[-1] for n, m in model.named_modules()
                if not list(m.children()) and getattr(m, "weight", None) is not None and m.weight.ndim >= 2}
    names = {n for n, _ in model.named_modules()}
    for module in spec.target_modules:
        if module not in suffixes and not any(n == module or n.endswith("." + module) for n in names):
            raise UserError(f"llm.adapter.args: this model has no module {module!r}{nearest(module, suffixes)}; "
                            f"it has: {', '.join(sorted(suffixes))}")
    return list(spec.target_modules)


def _layers(model: nn.Module, spec: AdapterSpec) -> list[int] | None:
    if spec.layers is None:
        return None
    stack = layer_stack(model)
    if stack is None:
        raise UserError("llm.adapter.args: this model has no list of layers, so `layers` cannot choose among them")
    beyond = [i for i in spec.layers if not 0 <= i < len(stack[1])]
    if beyond:
        raise UserError(f"llm.adapter.args: no layer {beyond[0]}; the model's {len(stack[1])} layers are "
                        f"0 … {len(stack[1]) - 1}")
    return list(spec.layers)


_LORA_WEIGHT = re.compile(r"^(?P<module>.+)\.lora_[AB]\.(?P<adapter>[^.]+)\.weight$")


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the model's own.

    A LoRA half may come at another rank than the model's: the parameter takes the new shape and PEFT's
    scaling follows (``alpha / r``, or ``alpha / √r`` with rsLoRA), so one model serves clients of all ranks.

    Raises:
        KeyError: a name that the model does not have. ValueError: a shape that cannot be loaded.
    """
    own = all_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameter = own[name]
            if parameter.shape == tensor.shape:
                parameter.copy_(tensor)
                continue
            match = _LORA_WEIGHT.match(name)
            if match is None:
                raise ValueError(f"{name}: the model's shape is {tuple(parameter.shape)}, "
                                 f"the tensor's {tuple(tensor.shape)}")
            parameter.data = tensor.detach().clone().to(parameter)
            _set_rank(model.get_submodule(match["module"]), match["adapter"])


def _set_rank(layer: nn.Module, adapter: str) -> None:
    layer.r[adapter] = layer.lora_A[adapter].weight.shape[0]
    layer.set_scale(adapter, 1.0)


def merge_pair(model: nn.Module, down_name: str, up: Tensor, down: Tensor) -> None:
    """``W ← W + up @ down`` in the layer whose ``lora_A`` parameter is called ``down_name``.

    Args:
        up: ``(d_out, q)``, any scaling already in it. down: ``(q, d_in)``; ``q`` is free. A convolution's
            halves may come in their own shapes.
    """
    layer = model.get_submodule(_LORA_WEIGHT.match(down_name)["module"])
    weight = layer.get_base_layer().weight
    delta = up.flatten(1).to(weight.device) @ down.flatten(1).to(weight.device)
    with torch.no_grad():
        weight.add_((delta.T if getattr(layer, "fan_in_fan_out", False) else delta).reshape(weight.shape))


def base_weight_name(down_name: str) -> str:
    """The name of the frozen weight beside the ``lora_A`` parameter ``down_name``."""
    return _LORA_WEIGHT.match(down_name)["module"] + ".base_layer.weight"
