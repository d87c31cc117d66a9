"""The machine and the package versions of a run."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..jobs.files import cannot_read, from_json, to_json, write_text
from ..versions import SCHEMA, __version__

logger = logging.getLogger("fs_lowrank")

PACKAGES = ("torch", "transformers", "peft", "datasets", "safetensors", "numpy")


@cache
def versions() -> dict[str, str]:
    """Versions of Python, of this package, and of the packages that affect a result."""
    packages = {package: version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "fs-lowrank": __version__, **packages}


def machine(device: torch.device) -> dict[str, Any]:
    """Cores, threads, and the name of the GPU that the device of a run is; None for the CPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, and the machine of a run on ``device``, for ``environment.json``."""
    return {"versions": versions(), "platform": platform.platform(), **machine(device)}


def write_environment(path: Path, new_weights: Sequence[str], resumed_after: int | None, device: torch.device) -> None:
    """Write ``environment.json``; a resumed run adds its environment under ``resumed`` to that of the start.

    If versions, the number of cores or threads, or the GPU (None: the CPU) have changed, a warning says that results
    may differ in their last digits. Before version 0.2.0 the GPU was the machine's, also of a run on the CPU.

    Args:
        path: the file.
        new_weights: names of the weights that no checkpoint of the model had.
        resumed_after: the last round of the interrupted run; None for a run that begins.
        device: of the run.
    Raises:
        RunFailed: the file cannot be written.
    """
    current = environment(device)
    content: dict[str, Any] = {"schema": SCHEMA, **current, "new_weights": list(new_weights)}
    if resumed_after is not None:
        try:
            before, changed = _before(path, current)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s", cannot_read(path, error, "the run's first environment is unknown"))
        else:
            content = {**before, "resumed": [*before.get("resumed", []), {"after_round": resumed_after, **current}]}
            if changed:
                logger.warning(
                    "resumed with another environment (%s): results may differ from those of an uninterrupted run in "
                    "their last digits, or more where a library changed",
                    ", ".join(changed),
                )
    write_text(path, to_json(content, indent=1))


def changed_since(path: Path, device: torch.device) -> list[str]:
    """The changes, in words, since the run of the ``environment.json`` at ``path`` ended, if it went on on ``device``:
    of versions and the GPU, on which new and quantised weights depend. If they are not known, it says so.
    """
    try:
        _, changed = _before(path, environment(device))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{path} cannot be read, so the run's versions are not known"]
    return [words for words in changed if words.split()[0] in ("fs-lowrank", "torch", "transformers", "gpu")]


def _before(path: Path, current: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The content of the ``environment.json`` at ``path``, and how ``current`` differs from where its run ended."""
    content = from_json(path.read_bytes())
    old, new = _decisive([content, *content.get("resumed", [])][-1]), _decisive(current)
    return content, [f"{name} {old.get(name)} → {new[name]}" for name in new if old.get(name) != new[name]]


def _decisive(environment: dict[str, Any]) -> dict[str, Any]:
    """The entries of an environment that affect results."""
    return {**environment["versions"], **{name: environment[name] for name in ("cpus", "threads", "gpu")}}
