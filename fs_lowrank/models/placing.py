"""A base spread over several GPUs, this machine's memory and its disk, by accelerate (``model.device_map``).

Weights that do not lie where they compute are brought there for each pass. What is trained lies where it computes.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import user_errors
from ..settings import Settings
from .kinds import heads_by_place
from .names import tags


def placing(config: Settings, skeleton: Any) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained`` that spread the base as ``config.model`` says.

    Args:
        skeleton: the model without weights.
    Raises:
        UserError: a size that cannot be read.
    """
    import psutil
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    wanted, limits = config.model.device_map, _sizes(config)
    if config.torch_device == "cpu":
        limits = {"cpu": limits.get("cpu", psutil.virtual_memory().available)}
    folder = config.model.offload_folder
    if not folder:
        folder = tempfile.mkdtemp(prefix="fs_lowrank_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = {"max_memory": limits or None, "offload_folder": folder}
    if config.quantised:  # transformers knows the sizes of what it quantises
        return {**options, "device_map": wanted}
    sizing: Any = {"dtype": getattr(torch, config.dtype), "no_split_module_classes": skeleton._no_split_modules}
    if wanted != "sequential":
        limits = get_balanced_memory(skeleton, limits or None, low_zero=wanted == "balanced_low_0", **sizing)
    devices = infer_auto_device_map(skeleton, limits or None, **sizing)
    first = next((device for device in devices.values() if device not in ("cpu", "disk")), "cpu")
    # A head that is trained stays where it computes.
    by_place = tuple(heads_by_place(skeleton))
    heads = [n for n in devices if "head" in tags(f"{n}.weight") or n.startswith(by_place)]
    return {**options, "device_map": {**devices, **dict.fromkeys(heads, first)}}


def _sizes(config: Settings) -> dict[int | str, int | str]:
    from accelerate.utils import convert_file_size_to_int

    sizes: dict[int | str, int | str] = {}
    for text in config.model.max_memory:
        with user_errors(f"model.max_memory: {text!r}", "expected DEVICE=SIZE, such as 0=20GiB or cpu=60GiB"):
            device, size = map(str.strip, text.split("="))
            sizes["cpu" if device.lower() == "cpu" else int(device)] = convert_file_size_to_int(size)
    return sizes


@contextlib.contextmanager
def at_home(model: nn.Module) -> Iterator[None]:
    """A context in which offloaded weights look as if they lay where they compute.

    They have no values then. PEFT puts an adapter where the weight of its layer lies.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        for name, parameter in list(module.named_parameters(recurse=False)) if device is not None else ():
            if parameter.device.type == "meta":
                replaced.append((module, name, parameter))
                value = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            setattr(module, name, parameter)


def offloaded(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of ``module`` alone that lie on the disk or in memory until it computes, with their names."""
    weights: Any = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.device.type == "meta" and weights is not None:
            yield name, weights[name]
