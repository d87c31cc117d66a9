"""Adapters as products ``s B A`` that are added to the weights of the base, and the layers on which that cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .adapters import module_of
from .names import sharing

#: prefix of the wrapped model in PEFT's model
_OF_PEFT = "base_model.model."


def _adapted(model: nn.Module) -> list[str]:
    """The layers with an adapter of any kind."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return sorted(name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def check_products(model: nn.Module, method: str, merges: bool) -> None:
    """Refuse layers on which an adapter has no product ``s B A`` that ``method`` could compute with, or merge.

    PEFT's pair on a convolution has its stride and padding, but no groups and no dilation, and PEFT's adapters of all
    kinds pad with zeros.

    Args:
        model: with the shared adapter, whose pairs have no bias.
        merges: whether the products are added to the weights of the base.
    Raises:
        UserError: the message names the layer, and says what to do.
    """
    adapted = _adapted(model)
    shared = sharing(model, adapted)
    for name in adapted:
        layer: Any = model.get_submodule(name)
        base, is_pair = layer.get_base_layer(), hasattr(layer, "lora_A")
        kernel = zip(getattr(base, "dilation", ()), getattr(base, "kernel_size", ()))
        advice = ", or set lowrank.merge = False if the method has that key"
        if is_pair and getattr(base, "groups", 1) > 1:
            flaw = f"has {base.groups} groups: PEFT's pair is no product of two matrices then"
            advice = ", or choose another method"
        elif merges and is_pair and any(step > 1 and size > 1 for step, size in kernel):
            flaw, advice = "is dilated while PEFT's pair is not: no kernel is the sum of both", ""
        elif merges and getattr(base, "padding_mode", "zeros") != "zeros":
            flaw = f"has padding_mode = {base.padding_mode} while adapters pad with zeros: no kernel is the sum of both"
        elif merges and name in shared:
            flaw = f"shares its weight with {shared[name].removeprefix(_OF_PEFT)}: a merge would change that, too"
        else:
            continue
        raise UserError(
            f"llm.adapter.args: {method} takes no adapter on {name.removeprefix(_OF_PEFT)}, which {flaw}; "
            f"leave it out of modules{advice}"
        )


def untie(model: nn.Module) -> None:
    """Give each adapted layer a weight of its own, so that its adapter can be merged into it alone."""
    for name in (shared := sharing(model, _adapted(model))):
        base: Any = model.get_submodule(name).get_base_layer()  # type: ignore[operator]
        base.weight = nn.Parameter(base.weight.detach().clone(), base.weight.requires_grad)
    if shared and hasattr(config := getattr(model, "config", None), "tie_word_embeddings"):
        config.tie_word_embeddings = False  # type: ignore[union-attr]


def merge_pair(model: nn.Module, down_name: str, up: Tensor, down: Tensor) -> None:
    """``W ← W + up @ down`` in the layer whose ``lora_A`` parameter is ``down_name``.

    Args:
        up: ``(d_out, q)``, including any scale. down: ``(q, d_in)``, for any ``q``. The pair of a convolution may
            have its 4-D shapes.
    """
    layer: Any = model.get_submodule(module_of(down_name))
    weight = layer.get_base_layer().weight
    up, down = up.flatten(1).to(weight), down.flatten(1).to(weight)
    with torch.no_grad():
        if getattr(layer, "fan_in_fan_out", False):
            weight.addmm_(down.T, up.T)
        else:
            weight.view(weight.shape[0], -1).addmm_(up, down)


def merge_adapter(model: nn.Module, names: Iterable[str]) -> None:
    """``W ← W + ΔW`` of the shared adapter, including its scale, in the layers of the tensors ``names``."""
    for module in sorted(set(map(module_of, names))):
        layer: Any = model.get_submodule(module)
        with torch.no_grad():
            weight = layer.get_base_layer().weight
            weight.add_(layer.get_delta_weight("default").to(weight.dtype))
