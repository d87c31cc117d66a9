"""The device that a model computes on, and what else, beside the inputs, decides the last digits of its results."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import RunFailed, UserError
from ..settings import Settings
from .kinds import unwrapped
from .quantised import version_of


def device_of(config: Settings) -> torch.device:
    """The device the configuration asks for.

    Raises:
        UserError: a GPU is asked for that is not there.
    """
    if config.torch_device == "cpu" or isinstance(config.device, str):  # the only text it accepts is cpu
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("use_gpu is True, but torch finds no GPU; set use_gpu False, or install a CUDA build of torch")
    index, count = max(config.device, 0), torch.cuda.device_count()
    if index >= count:
        raise UserError(f"device = {index}: torch finds {count} GPU{'s' * (count > 1)}; give 0 to {count - 1}, or -1")
    return torch.device("cuda", index)


def input_device(model: nn.Module) -> torch.device:
    """The device that a model's inputs go to; of a model on several (``model.device_map``) the first."""
    device = next(model.parameters()).device
    inner = unwrapped(model)
    if device.type != "meta" or not hasattr(inner, "hf_device_map"):
        return device
    placed = [d for d in inner.hf_device_map.values() if d not in ("cpu", "disk")]
    return torch.device(placed[0] if placed else "cpu")


def wait(device: torch.device) -> None:
    """Return when a GPU has computed all that it was given, so that the time it takes can be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """A context, or a decorator, in which a GPU without room for the model is an error of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"the GPU has no room for the model: {str(error).splitlines()[0]} `fs-lowrank run --cfg FILE --dry-run` "
            "says what a run takes; lowrank.dtype nf4 or bfloat16, or model.device_map auto, takes less"
        ) from error


def autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Let ``model`` compute in ``dtype`` what torch's autocast allows; its weights stay as they are."""
    for module in _entrances(model):
        _autocast(module, dtype, input_device(model).type)


def _entrances(model: nn.Module) -> list[nn.Module]:
    """The modules that are called to compute with ``model``: itself, and within PEFT's wrapper what generates text."""
    return list(dict.fromkeys((model, unwrapped(model))))


def _autocast(module: nn.Module, dtype: torch.dtype, device: str) -> None:
    opened = contextlib.ExitStack()  # of this module alone: one may call the other

    def enter(module: nn.Module, *_: Any) -> None:
        if "autocast" in vars(module):
            opened.enter_context(torch.autocast(device, dtype=dtype))

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: opened.close(), always_call=True)
    vars(module)["autocast"] = dtype


@contextlib.contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` computes in the dtype of its weights."""
    modules = [module for module in _entrances(model) if "autocast" in vars(module)]
    dtypes = [vars(module).pop("autocast") for module in modules]
    try:
        yield
    finally:
        for module, dtype in zip(modules, dtypes):
            vars(module)["autocast"] = dtype


def rounding(model: nn.Module) -> float:
    """The relative rounding error of what ``model`` computes (``eps`` of the dtype)."""
    weights = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return torch.finfo(vars(model).get("autocast", weights)).eps


def machine(model: nn.Module) -> dict[str, Any]:
    """This machine, torch's settings and the code of attention, for keys of files that machines may share."""
    device = input_device(model)
    inner = unwrapped(model)
    return {
        # not in the configuration's dictionary
        "attention": getattr(getattr(inner, "config", None), "_attn_implementation", None),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "instructions": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "products": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        **({"autocast": str(vars(model)["autocast"])} if "autocast" in vars(model) else {}),
        **({"bitsandbytes": quantised} if (quantised := version_of(model)) else {}),
    }
