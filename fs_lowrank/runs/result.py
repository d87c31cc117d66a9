"""The result of a run, in Python and on disk."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UserError
from ..models.adapters import ACCUMULATED, one_adapter, save_adapter
from ..models.factorised import plain


@dataclass
class RunResult:
    """What a run gave.

    Attributes:
        history: one record a round, as in ``rounds.jsonl``.
        final: metrics of the last evaluated round, as ``{"test_acc": …, "test_loss": …}``, with ``best_round``
            by ``eval.best_res_update_round_wise_key``.
        outdir: where the run left its files.
        model: the adapted model with the global tensors in it.
        saved: what was written, by name (``adapter``, ``model``, ``curves``), as paths.
        facts: about the run: method, source of the data, sizes of clients, majority class, fingerprints.
    """

    history: list[dict[str, Any]]
    final: dict[str, float]
    outdir: Path
    model: nn.Module
    base_changed: bool
    saved: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> Mapping[str, int]:
        """Bytes handed over in the whole run, both directions, with and without the head."""
        keys = ("uplink_bytes", "uplink_bytes_without_head", "downlink_bytes", "downlink_bytes_without_head")
        return {key: sum(record[key] for record in self.history) for key in keys}

    def bytes_to(self, target: float, metric: str = "test_acc") -> int | None:
        """Bytes handed over, both ways, by the end of the first evaluated round that reached ``target``.

        None if none did. ``metric`` is a split and a metric, as in ``final``; a loss is to fall to the target.
        """
        split, _, name = metric.rpartition("_")
        total = 0
        for record in self.history:
            total += int(record["uplink_bytes"] + record["downlink_bytes"])
            value = record["metrics"].get(split, {}).get(name)
            if value is not None and (value <= target if name == "loss" else value >= target):
                return total
        return None

    def save_adapter(self, folder: str | Path) -> Path:
        """Save the global adapter (and head) in PEFT's format.

        A network for images comes with it, in the folder ``base``: what it trained beside the adapter is in there.
        ``PeftModel.from_pretrained(load_vision(folder / "base"), folder)`` is the whole.

        Raises:
            UserError: there is no adapter that holds the result: the method trained or changed the base.
        """
        model: Any = self.model
        peft_config = getattr(model, "peft_config", {})
        if self.base_changed or "default" not in peft_config:
            raise UserError(
                "this method changes the base weights, so no adapter holds its result; "
                "save the whole model with save_model(folder)"
            )
        if ACCUMULATED in peft_config:
            return save_adapter(folder, *one_adapter(self.model))
        model.save_pretrained(str(folder), selected_adapters=["default"])
        if self.facts.get("images"):
            copy.deepcopy(model).unload().save_pretrained(Path(folder) / "base")
        return Path(folder)

    def save_model(self, folder: str | Path) -> Path:
        """Save the whole model, any adapter merged into it; loads with plain transformers.

        A network for images loads with ``fs_lowrank.models.vision.load_vision``.
        """
        model: Any = copy.deepcopy(self.model)
        if hasattr(model, "peft_config"):
            model = model.merge_and_unload()
        model = plain(model)
        model.save_pretrained(str(folder))
        return Path(folder)
