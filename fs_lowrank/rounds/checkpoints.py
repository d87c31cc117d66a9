"""The checkpoints of a run: when one is due, what is in it, and how a run goes on from the last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CannotContinue
from ..models.adapters import load_tensors
from ..runs.checkpoint import Checkpoint, load_checkpoint, remove_old, save_checkpoint
from ..runs.records import read_records
from .joining import begun_with, check_continued
from .ledger import Ledger
from .workspace import Workspace


class Checkpoints:
    """The checkpoints in the folder ``outdir`` of a run, of the state in ``ledger`` and the model of ``workspace``."""

    def __init__(self, workspace: Workspace, ledger: Ledger, outdir: Path):
        self.workspace, self.ledger, self.config = workspace, ledger, workspace.config
        self.outdir, self.folder = outdir, outdir / "checkpoint"

    def due(self, round: int) -> bool:
        """Whether ``lowrank.checkpoint_freq`` asks for a checkpoint after ``round``."""
        freq = self.config.lowrank.checkpoint_freq
        return freq > 0 and (round % freq == 0 or round == self.config.federate.total_round_num)

    def save(self, round: int, records: Sequence[str]) -> None:
        """Write the checkpoint of ``round``: state, changed base weights, personal tensors and messages.

        Args:
            records: the digests of the records so far.
        Raises:
            RunFailed: it cannot be written; earlier checkpoints are unchanged.
        """
        parts, data = self.ledger.saved(round)
        parts |= {
            "base": self.workspace.changed_base(),
            "personal": {f"{c}/{n}": t for c, tensors in self.workspace.personal.items() for n, t in tensors.items()},
        }
        save_checkpoint(
            self.folder,
            round,
            {n: p for n, p in parts.items() if p},
            {**data, "records": records, **begun_with(self.workspace)},
            keep=self.config.lowrank.keep_checkpoints,
        )

    def restore(self) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
        """Continue from the last checkpoint; returns it and the records until then, or None if there is none.

        Raises:
            CannotContinue: it is of other data, another model, configuration, or revision of the method; or it or the
                records are damaged.
        """
        checkpoint = load_checkpoint(self.folder, self.workspace.device)
        if checkpoint is None:
            return None, []
        check_continued(checkpoint.meta, self.workspace, self.outdir)
        self.ledger.restore(checkpoint.round, checkpoint.parts, checkpoint.meta)
        for key, tensor in checkpoint.parts.get("personal", {}).items():
            client, name = key.split("/", 1)
            self.workspace.personal.setdefault(int(client), {})[name] = tensor
        load_tensors(self.workspace.model, checkpoint.parts.get("base", {}))
        load_tensors(self.workspace.model, self.workspace.method.view(self.ledger.state))
        records, written = self.outdir / "rounds.jsonl", checkpoint.meta.get("records")
        history = read_records(records, checkpoint.round, written or ())
        # A run from a checkpoint of the framework's (federate.restore_from) begins in a later round.
        first = 1 if written is None else checkpoint.round - len(written) + 1
        if [record["round"] for record in history] != list(range(first, checkpoint.round + 1)):
            raise CannotContinue(
                f"{records} does not hold the rounds {first} to {checkpoint.round} once each; another program wrote "
                "into it, so the run cannot be continued; start it anew with overwrite=True, or in another outdir"
            )
        remove_old(self.folder, self.config.lowrank.keep_checkpoints, checkpoint.round)
        return checkpoint, history
