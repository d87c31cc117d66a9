"""The machine and the package versions of a run."""

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
    """Versions of Python, of this package and of those that affect a result; ``not installed`` for a missing one."""
    own = {"python": platform.python_version(), "fs-lowrank": __version__}
    return {**own, **{package: _version(package) for package in PACKAGES}}


def environment() -> dict:
    """Versions and machine, for ``environment.json``."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def model_fingerprint(model: nn.Module) -> str:
    """A hash over names, shapes, dtypes and values of all parameters, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().cpu().contiguous().view(-1)
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
