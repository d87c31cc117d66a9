"""Virtual tokens before the text, which are trained where nothing of the model is changed.

PEFT keeps them in ``prompt_encoder`` of its model: as keys and values in every layer (prefix tuning), as embeddings
(prompt tuning), or as a network that gives embeddings (p-tuning).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .kinds import is_encoder_decoder
from .machine import input_device, rounding
from .shortcuts.trials import differing, failure, preserving_modes


def is_prompted(model: nn.Module) -> bool:
    """Whether ``model`` has virtual tokens."""
    return "prompt_encoder" in dict(model.named_children())


def in_cache(model: nn.Module) -> bool:
    """Whether ``model`` has virtual tokens that are keys and values in every layer."""
    from peft import PrefixEncoder

    return is_prompted(model) and any(isinstance(module, PrefixEncoder) for module in model.modules())


def text_only(model: nn.Module) -> None:
    """Let a language model with virtual tokens give logits for the tokens of the text alone, as it does without."""

    def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if output.logits.ndim == 3:
            output.logits = output.logits[:, -ids.shape[1] :]

    if is_prompted(model) and not is_encoder_decoder(model):
        model.register_forward_hook(cut, with_kwargs=True)


@contextmanager
def generating() -> Iterator[None]:
    """A context in which PEFT does not warn that it counts positions itself where virtual tokens are embeddings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Position ids are not supported", UserWarning)
        yield


def check_virtual_tokens(model: Any, method: str) -> None:
    """Try the virtual tokens of ``model`` with two short texts; a model without values is not tried.

    Args:
        method: ``adapter_method``, for the message.
    Raises:
        UserError: the model cannot compute with them, they do not reach its output, or padding changes it.
    """
    inner = model.get_base_model()
    if any(p.is_meta for p in model.parameters()):
        return
    with preserving_modes(model):
        model.eval()
        try:
            wrong = _flaw(model, inner.config.get_text_config().pad_token_id or 0)
        except Exception as error:
            wrong = failure(error)
    if wrong:
        raise UserError(
            f"llm.adapter.args: adapter_method = {method} cannot be used with {type(inner).__name__}: {wrong}; choose "
            "another adapter_method"
        )


def _flaw(model: Any, pad: int) -> str:
    first, second, third = [token for token in range(4) if token != pad][:3]
    ids = torch.tensor([[first, second, third], [first, second, pad]], device=input_device(model))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=ids.device)

    def logits(rows: slice, length: int) -> torch.Tensor:
        inputs = {"input_ids": ids[rows, :length], "attention_mask": mask[rows, :length]}
        decoder = {"decoder_input_ids": ids[rows]} if is_encoder_decoder(model) else {}
        return model(**inputs, **decoder).logits.float()

    with torch.enable_grad():
        pair, alone = logits(slice(0, 2), 3), logits(slice(1, 2), 2)[0].detach()
        tensors = [p for p in model.prompt_encoder.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(pair.square().sum(), tensors, allow_unused=True)
    if not any(g is not None and bool(g.any()) for g in gradients):
        return "virtual tokens do not reach its output"
    padded = pair[1].detach()[: len(alone)] if pair.ndim == 3 else pair[1].detach()
    wrong = differing("logits", alone, padded, rounding(model))
    return wrong and f"padding changes what it gives: {wrong}"
