"""The files of a run: records, checkpoints, the saved adapter, plots."""

from .checkpoint import load_checkpoint, save_checkpoint
from .result import RunResult

__all__ = ["RunResult", "load_checkpoint", "save_checkpoint"]
