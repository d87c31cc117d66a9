"""An adapter in a folder, in PEFT's format."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import UserError, user_errors
from ..jobs.files import replacing
from .adapters import without_deprecation
from .loaded import PUT_BACK, difference
from .prompts import text_only

if TYPE_CHECKING:
    import peft


def save_adapter(folder: str | Path, config: peft.PeftConfig, tensors: Mapping[str, Tensor]) -> Path:
    """Write an adapter in PEFT's format."""
    folder = Path(folder)
    with replacing(folder / "adapter_model.safetensors") as aside:
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, aside, metadata={"format": "pt"})
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    return folder


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """``model`` with the adapter that a run saved in ``folder``, in evaluation mode.

    Raises:
        UserError: a file cannot be read, is of an adapter for another model, or lacks tensors; it has tensors that the
            adapter has no place for, or of other shapes.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    described, file = Path(folder) / "adapter_config.json", Path(folder) / "adapter_model.safetensors"
    for path in (described, file):
        if not path.is_file():
            raise UserError(f"{path} is missing; {PUT_BACK}")
    # Not PeftModel.from_pretrained: it leaves out what does not fit, and spreads a model with a device_map anew, losing
    # where its weights are kept.
    with without_deprecation():
        with user_errors(f"{described}, read as an adapter of this model,", PUT_BACK):
            config = PeftConfig.from_pretrained(str(folder))
            config.inference_mode, config.base_model_name_or_path = True, None  # where its base lies is not asked
            wrapped = get_peft_model(model, config)
        with user_errors(f"{file}, read as an adapter of this model,", PUT_BACK):
            tensors = load_file(file)
        expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        # Of an adapted output layer, PEFT saves the weight of the base, too.
        if wrong := difference(tensors, expected, wrapped.state_dict()):
            raise UserError(f"{file}: not the adapter of {described.name} on this base model: {wrong}; {PUT_BACK}")
        set_peft_model_state_dict(wrapped, tensors)
    text_only(wrapped)
    return wrapped.eval()
