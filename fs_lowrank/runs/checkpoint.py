"""Checkpoints in safetensors and JSON, written atomically, with checksums that are verified when they are read.

``checkpoint/round_000012/`` contains ``<part>.safetensors`` for each part (the method's state, changed base weights,
the clients' personal tensors) and ``meta.json`` with everything that is not a tensor, the SHA-256 of every file, and
its own. A folder without a valid ``meta.json`` is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..algebra import on_device
from ..errors import CannotContinue
from ..jobs.files import file_digest, read_json, replaced
from ..versions import SCHEMA, NewerSchema

logger = logging.getLogger("fs_lowrank")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the last round it includes, its tensors by part, its metadata."""

    round: int
    parts: dict[str, dict[str, Tensor]]
    meta: dict


def _meta_sum(meta: Mapping) -> str:
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def save_checkpoint(
    folder: str | Path, round: int, parts: Mapping[str, Mapping[str, Tensor]], meta: Mapping, keep: int = 2
) -> Path:
    """Write the checkpoint of ``round``, and then delete all but the newest ``keep``.

    Raises:
        RunFailed: it could not be written, for instance on a full disk; earlier checkpoints are unchanged.
    """
    folder = Path(folder)
    final = folder / folder_of(round)
    with replaced(final) as aside:
        aside.mkdir()
        sums = {}
        for part, tensors in parts.items():
            path = aside / f"{part}.safetensors"
            save_file({n: t.detach().contiguous().cpu() for n, t in tensors.items()}, path)
            sums[path.name] = file_digest(path)
        content = {"schema": SCHEMA, "round": round, "files": sums, **meta}
        (aside / "meta.json").write_text(json.dumps({"sha256": _meta_sum(content), **content}))
    remove_old(folder, keep)
    return final


def folder_of(round: int) -> str:
    """The name of the folder for ``round``."""
    return f"round_{round:06d}"


def saved_rounds(folder: Path) -> list[int]:
    """The rounds that have a folder in ``folder``, valid or not, in order; not copies that have another name."""
    numbers = {int(match[1]) for path in folder.glob("round_*") if (match := re.fullmatch(r"round_(\d+)", path.name))}
    return sorted(round for round in numbers if (folder / folder_of(round)).exists())


def remove_old(folder: Path, keep: int, loaded: int = 0) -> None:
    """Remove all checkpoints but the newest ``keep``, and unfinished files of a killed process.

    Args:
        loaded: the round of a checkpoint that stays, because newer ones may be damaged.
    """
    for name in (*map(folder_of, saved_rounds(folder)[:-keep]), *(path.name for path in folder.glob(".*"))):
        if name != folder_of(loaded):
            shutil.rmtree(folder / name, ignore_errors=True)


def _read(path: Path, device: torch.device | str) -> Checkpoint:
    meta = read_json(path / "meta.json", remedy="")
    if meta.pop("sha256") != _meta_sum(meta):
        raise ValueError("meta.json is damaged: its checksum does not match")
    for name, expected in meta["files"].items():
        if file_digest(path / name) != expected:
            raise ValueError(f"{name} is damaged: its checksum does not match")
    parts = {name.removesuffix(".safetensors"): on_device(load_file(path / name), device) for name in meta["files"]}
    return Checkpoint(round=int(meta["round"]), parts=parts, meta=meta)


def load_checkpoint(folder: str | Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """Load the newest valid checkpoint, with its tensors on ``device``; None if there is no checkpoint.

    If a checkpoint is damaged, a warning names it, and the previous one is used.

    Raises:
        CannotContinue: all checkpoints are damaged. NewerSchema: the newest is of a newer version of fs-lowrank.
    """
    folder = Path(folder)
    checkpoints = [folder / folder_of(round) for round in reversed(saved_rounds(folder))]
    for path in checkpoints:
        try:
            return _read(path, device)
        except NewerSchema:  # going back to an older checkpoint would undo rounds that are done
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("checkpoint %s cannot be used (%s); trying the one before", path.name, error)
    if checkpoints:
        raise CannotContinue(
            f"every checkpoint in {folder} is damaged, so the run cannot be continued; start it anew with "
            "overwrite=True in place of resume=True, or in another outdir"
        )
    return None
