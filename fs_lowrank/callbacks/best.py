"""The adapter or model after the best rounds, stored while a run goes on: it may be resumed from any checkpoint.

``best/round_000012/adapter`` (or ``model``) becomes ``adapter_best`` in the end if round 12 remains the best.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CannotContinue
from ..jobs.files import remove_unfinished, replacing
from ..rounds.recorder import Callback, Recorder
from ..runs import checksums
from ..runs.checkpoint import folder_of, saved_rounds
from ..runs.checksums import KINDS
from ..runs.records import flat_metrics
from ..runs.result import RunResult
from .saved import save_trained

logger = logging.getLogger("fs_lowrank")


class Best(Callback):
    """Saves adapter or model after each round that is the best so far (``eval.save_best``); names it at the end."""

    def on_start(self, run: Recorder) -> None:
        go_back(run.outdir, run.history[-1]["round"] if run.history else 0)

    def after_round(self, run: Recorder, record: dict[str, Any]) -> None:
        keep_only(run.outdir, saved_rounds(run.outdir / "checkpoint"))
        if run.config.eval.save_best and run.evaluator.best([*run.history, record]) is record:
            run.global_model()
            metrics, folder = flat_metrics(record["metrics"]), place_of(record["round"])
            save_trained(run, run.result(), folder, metrics, record["round"], run.evaluator.best_by)
            checksums.seal(run.outdir / folder)

    def on_end(self, run: Recorder, result: RunResult) -> None:
        checkpoints = saved_rounds(run.outdir / "checkpoint")
        keep_only(run.outdir, checkpoints)
        if not (result.best and run.config.eval.save_best):
            return
        round = result.best["round"]
        saved = publish(run.outdir, round, move=not checkpoints)
        if not saved:
            logger.warning(
                "round %d was the best by %s, but the run did not save it; there is no adapter_best",
                round,
                result.best["by"],
            )
        result.saved |= saved


def place_of(round: int) -> str:
    """The folder of ``round`` in the run's folder."""
    return f"best/{folder_of(round)}"


def keep_only(outdir: Path, checkpoints: Iterable[int]) -> None:
    """Remove all rounds but the newest, and of each checkpoint the newest that is not after it."""
    rounds = saved_rounds(outdir / "best")
    needed = {*rounds[-1:], *(max((r for r in rounds if r <= c), default=0) for c in checkpoints)}
    for round in rounds:
        if round not in needed:
            checksums.unseal(outdir / place_of(round))  # a process that is killed next leaves files that nobody misses
            shutil.rmtree(outdir / place_of(round))


def go_back(outdir: Path, round: int) -> None:
    """Remove the rounds after ``round``, from which a run goes on, and unfinished files of a killed process.

    Raises:
        CannotContinue: an earlier round's files are damaged.
    """
    for earlier in saved_rounds(outdir / "best"):
        folder = outdir / place_of(earlier)
        if earlier > round:
            shutil.rmtree(folder)
            continue
        remove_unfinished(folder)
        if damage := checksums.damaged(folder):
            file, reason = damage
            raise CannotContinue(
                f"{file} is damaged ({reason}); restore it, or remove {folder} to go on without that round's model"
            )


def publish(outdir: Path, round: int, move: bool) -> dict[str, Path]:
    """Make ``adapter_best`` or ``model_best`` of the files of ``round``, without a copy where links are possible.

    Args:
        move: remove the stored rounds, because the run cannot be resumed.
    Returns:
        The folders by name.
    Raises:
        OSError: something cannot be written.
    """
    saved = {}
    for kind in KINDS:
        source, final = outdir / place_of(round) / kind, outdir / f"{kind}_best"
        if source.is_dir():
            with replacing(final) as aside:
                shutil.copytree(source, aside, copy_function=_linked)
            saved[final.name] = final
        elif final.is_dir():
            shutil.rmtree(final)
    if move:
        shutil.rmtree(outdir / "best", ignore_errors=True)
    return saved


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
