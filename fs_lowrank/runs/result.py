"""The result of a run, in Python and on disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UserError
from ..models.adapters import ACCUMULATED, one_adapter, save_adapter
from ..models.factorised import plain
from ..models.loaded import transformers_silent


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        history: one record per round, as in ``rounds.jsonl``.
        final: metrics of the last evaluated round, such as ``{"test_acc": …, "test_loss": …}``, and ``best_round``
            by ``eval.best_res_update_round_wise_key``.
        best: the best round by validation data: its number as ``round``, the metric as ``by``, and its metrics as in
            ``final``; empty if no validation data were evaluated.
        outdir: folder of the run's files.
        model: the adapted model with the global tensors.
        base_changed: whether the method trained or changed base weights, so that no adapter holds the result.
        saved: paths of written files by name (``adapter``, ``model``, ``adapter_best``, ``model_best``, ``curves``).
        facts: method, source of the data, sizes of clients, majority class, fingerprints.
    """

    history: list[dict[str, Any]]
    final: dict[str, float]
    outdir: Path
    model: nn.Module
    base_changed: bool
    saved: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> Mapping[str, int]:
        """Bytes sent in the whole run, in both directions, with and without the head."""
        keys = ("uplink_bytes", "uplink_bytes_without_head", "downlink_bytes", "downlink_bytes_without_head")
        return {key: sum(record[key] for record in self.history) for key in keys}

    def bytes_to(self, target: float, metric: str = "test_acc") -> int | None:
        """Bytes sent in both directions until the end of the first evaluated round that reached ``target``.

        None if no round reached it. ``metric`` is a key of ``final``; a loss must be at most the target.
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

        For an image network, the folder ``base`` has the network with everything trained outside the adapter;
        ``PeftModel.from_pretrained(load_vision(folder / "base"), folder)`` loads both.

        Raises:
            UserError: the method trained or changed the base weights, so that an adapter cannot represent the result.
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
        """Save the model with any adapter merged into it, for transformers.

        Image networks are loaded with ``fs_lowrank.models.vision.load_vision``.
        """
        model: Any = copy.deepcopy(self.model)
        if hasattr(model, "peft_config"):
            model = model.merge_and_unload()
        model = plain(model)
        with transformers_silent():
            model.save_pretrained(str(folder))
        return Path(folder)


def sort_configs(folder: Path) -> None:
    """Sort the lists of names in PEFT's ``adapter_config.json`` files; PEFT writes sets in an order that varies."""
    for path in folder.rglob("adapter_config.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for key, value in content.items():
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                content[key] = sorted(value)
        path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
