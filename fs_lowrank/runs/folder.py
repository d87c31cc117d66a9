"""The folder of a run: where it is, whether a run may begin in it, and how its files are removed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock

from ..errors import CannotContinue, RunFailed, UserError
from ..jobs.files import remove, writing
from ..jobs.locks import take
from ..settings import Settings
from . import checksums

#: the names that a run writes to its folder, and ``overwrite`` removes
CONTENTS = (
    *("rounds.jsonl", "checkpoint", "summary.json", "environment.json", "data.json", "rows.npz", "config.yaml"),
    *(f"{name}.{kind}" for name in ("curves", "clients", "test") for kind in ("png", "pdf")),
    *(f"{name}.{kind}" for name in ("summary", "client_scores") for kind in ("csv", "tex")),
    *("lowrank.yaml", "adapter", "model", "personal", "best", "adapter_best", "model_best", "before.json"),
    checksums.FILE,
    *("local.json", "given_data", "given_model", "flower", "answers.jsonl", "tensorboard"),
    *("exp_print.log", "eval_results.log", "system_metrics.log"),  # of FederatedScope
)
#: of further processes
_LOGS = "process_[0-9]*.log"


def outdir_of(config: Settings) -> Path:
    """The folder that a run writes to."""
    return Path(config.outdir) / config.expname


def holds_run(folder: Path) -> bool:
    """Whether a run has begun, or ended, in ``folder``."""
    return any((folder / name).exists() for name in ("checkpoint", "summary.json", "rounds.jsonl"))


def claim(folder: Path) -> FileLock:
    """Lock the folder of a run; the lock ends when it is released, or with this process.

    Raises:
        RunFailed: another run writes to it, or it cannot be written.
    """
    with writing(folder):
        lock = take(folder / ".lock")
    if lock is None:
        raise RunFailed(f"another run is writing into {folder}; wait for it, or choose another outdir")
    return lock


def check_outdir(config: Settings, resume: bool) -> None:
    """Check whether a run may begin in its folder; cheap enough to call before data and model are made.

    Raises:
        UserError: the folder holds a run that this one does not continue, or cannot be made.
        CannotContinue: it holds one that cannot be continued.
    """
    folder = outdir_of(config)
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "not writable" if nearest.is_dir() else "no folder"
        raise UserError(f"outdir: the folder {folder} cannot be made ({nearest} is {reason}); choose another outdir")
    records = folder / "rounds.jsonl"
    checkpoint, finished = (folder / "checkpoint").exists(), (folder / "summary.json").exists()
    if not resume and (checkpoint or finished or (records.exists() and records.stat().st_size)):
        raise UserError(
            f"{folder} holds a run already; continue it with resume=True, replace it with overwrite=True, or choose "
            "another outdir"
        )
    if resume and finished and not checkpoint:
        raise CannotContinue(
            f"{folder} holds a finished run without a checkpoint (lowrank.checkpoint_freq), so there is "
            "nothing to continue; replace it with overwrite=True, or choose another outdir"
        )


def remove_run(folder: Path, keep: Iterable[str] = ()) -> None:
    """Remove the files of a run from its folder; other files stay, and those of the names ``keep``.

    Raises:
        RunFailed: another run is writing to the folder, or something cannot be removed.
    """
    if not folder.is_dir():
        return
    with writing(folder), ExitStack() as stack:
        stack.callback(claim(folder).release)
        for path in (*(folder / name for name in CONTENTS if name not in keep), *folder.glob(_LOGS)):
            remove(path)
