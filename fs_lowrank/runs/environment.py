"""What a run ran on, and on what versions."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from ..versions import __version__

PACKAGES = ("torch", "transformers", "peft", "datasets", "safetensors", "numpy")


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Version of Python, of this package and of each that decides a result; ``not installed`` where it is missing."""
    own = {"python": platform.python_version(), "fs-lowrank": __version__}
    return {**own, **{package: _version(package) for package in PACKAGES}}


def environment() -> dict:
    """Versions and machine, as kept in ``environment.json``."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def model_fingerprint(model: nn.Module) -> str:
    """12 hexadecimal digits over names, shapes, dtypes and values of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().cpu().contiguous().view(-1)
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
