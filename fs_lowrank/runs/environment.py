"""The machine and the package versions of a run."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import version

import torch
from torch import nn

from ..algebra import digest
from ..versions import __version__

PACKAGES = ("torch", "transformers", "peft", "datasets", "safetensors", "numpy")


@cache
def versions() -> dict[str, str]:
    """Versions of Python, of this package, and of the packages that affect a result."""
    own = {"python": platform.python_version(), "fs-lowrank": __version__}
    return {**own, **{package: version(package) for package in PACKAGES}}


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
    return digest(dict(model.named_parameters()))[:12]
