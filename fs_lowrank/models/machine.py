"""What, beside the inputs, decides the last digits of what a model computes."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn


def machine(model: nn.Module) -> dict[str, Any]:
    """Of this machine, of torch's settings and of the code of attention; for keys of what machines may share."""
    device = next(model.parameters()).device
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    return {
        # not in the configuration's dictionary
        "attention": getattr(getattr(inner, "config", None), "_attn_implementation", None),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "instructions": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "products": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
