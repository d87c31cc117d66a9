"""Writes a Flower app: ``pyproject.toml`` and the configuration, and no code."""

from __future__ import annotations

from pathlib import Path

from ...config import load_config
from ...errors import UserError
from ...jobs.files import write_text
from .keys import check

CONFIG = "run.yaml"
_PROJECT = f"""\
# Written by fs-lowrank. The run is configured in {CONFIG}. Its relative paths are from the folders where the SuperLink
# and the SuperNodes were started.
[project]
name = "fs-lowrank-run"
version = "1.0.0"
description = "A federated low-rank fine-tuning run"
license = "Apache-2.0"
# fs-lowrank is installed where the SuperLink and the SuperNodes are, so there is nothing to install for a run.
dependencies = []

[tool.flwr.app]
publisher = "fs-lowrank"

[tool.flwr.app.components]
serverapp = "fs_lowrank.engines.flower.app:server"
clientapp = "fs_lowrank.engines.flower.app:client"

# flwr run . --run-config 'resume=true'
[tool.flwr.app.config]
cfg = "{CONFIG}"
resume = false
overwrite = false
"""


def write_app(folder: Path, cfg: Path) -> list[Path]:
    """Write the app for the configuration ``cfg`` to ``folder``; returns the files.

    Raises:
        UserError: the configuration is wrong, or has keys that the engine does not honour; the folder has other files
            of these names. OSError, RunFailed: they cannot be written.
    """
    check(load_config(cfg))
    content = {"pyproject.toml": _PROJECT, CONFIG: cfg.read_text(encoding="utf-8")}
    paths = {folder / name: text for name, text in content.items()}
    for path, text in paths.items():
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise UserError(f"{path} exists and says something else; remove it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        write_text(path, text)
    return list(paths)
