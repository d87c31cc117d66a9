"""Layers whose activations are computed again in the backward pass instead of being kept (``train.checkpointing``)."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError
from .adapters import layer_stack
from .kinds import unwrapped
from .prompts import in_cache


def recompute(model: nn.Module) -> None:
    """Let a model of transformers keep only the inputs of its layers for the backward pass, but for the last layer.

    The last layer is the first that the backward pass needs, so that nothing is saved by computing it again.

    Raises:
        UserError: the model does not support it.
    """
    inner = unwrapped(model)
    stack = layer_stack(model)
    if stack is None or not getattr(inner, "supports_gradient_checkpointing", False):
        raise UserError(
            f"train.checkpointing = True: {type(inner).__name__} does not compute its layers again; leave the key out"
        )
    if in_cache(model):
        raise UserError(
            "train.checkpointing = True: layers that are computed again take no keys and values of virtual tokens, as "
            "adapter_method = prefix has them; leave the key out, or take prompt or p-tuning"
        )
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    last: Any = stack[1][-1]
    last.gradient_checkpointing = False


def recomputes(model: nn.Module) -> bool:
    """Whether layers of ``model`` are computed again."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
