"""Saves the adapter or the model at the end of a run, and the clients' own adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft

from ..jobs.files import replaced, write_text
from ..models.adapters import adapter_name
from ..models.names import tags
from ..models.saved import save_adapter
from ..rounds.recorder import Callback, Recorder
from ..runs.card import model_card
from ..runs.result import RunResult, sort_configs


class Saved(Callback):
    """Saves ``adapter`` or ``model``, each with its card, and ``personal``."""

    def on_end(self, run: Recorder, result: RunResult) -> None:
        last = run.history[-1]["round"] if run.history else 0
        result.saved |= save_trained(run, result, "", result.final, last)
        if run.workspace.personal and run.workspace.personal.of_model:
            with replaced(run.outdir / "personal") as folder:
                folder.mkdir()
                _save_personal(run, folder)
                sort_configs(folder, result.facts.get("hub", ("", "")))
            result.saved["personal"] = run.outdir / "personal"


def save_trained(
    run: Recorder, result: RunResult, subfolder: str, figures: Mapping[str, Any], round: int, best: str = ""
) -> dict[str, Path]:
    """Save the adapter, or the model where it holds the result or ``lowrank.save_merged`` asks for it.

    Args:
        subfolder: for them, in the run's folder. figures, round, best: for the card (``model_card``).
    Returns:
        The folders by name, ``adapter`` and ``model``.
    """
    saving: dict[str, Callable[[Path], object]] = {}
    if not result.base_changed:
        saving["adapter"] = result.save_adapter
    if result.base_changed or run.config.lowrank.save_merged:
        saving["model"] = result.save_model
    evaluated = round if best else next((r["round"] for r in reversed(run.history) if r["metrics"]), round)
    folder = run.outdir / subfolder
    for kind, save in saving.items():
        card = model_card(run.config, result.facts, figures, kind, best, round, evaluated)
        with replaced(folder / kind) as aside:
            aside.mkdir()
            save(aside)
            if run.workspace.tokenizer is not None:
                run.workspace.tokenizer.save_pretrained(str(aside))
            write_text(aside / "README.md", card)
            sort_configs(aside)
    return {kind: folder / kind for kind in saving}


def _save_personal(run: Recorder, folder: Path) -> None:
    """Save every client's own adapter, and its own head, in PEFT's format, in ``client_K`` of ``folder``."""
    workspace, model = run.workspace, run.workspace.model
    if not isinstance(model, peft.PeftModel):
        raise TypeError(f"the clients' own adapters are saved from a PeftModel, the model is {type(model).__name__}")
    for client in workspace.personal:
        workspace.load_client(run.ledger.state, client)
        outside = {n: tensor for n, tensor in workspace.personal[client].items() if tags(n) & {"head", "base"}}
        for name in sorted({adapter_name(n) for n in workspace.personal.of_model if n not in outside}) or ["default"]:
            config = copy.copy(model.peft_config[name])
            tensors = peft.get_peft_model_state_dict(model, adapter_name=name)
            personal = {n: tensor for n, tensor in tensors.items() if "nested" not in tags(n)}
            personal |= {n: tensor for n, tensor in outside.items() if "modules_to_save" not in n}
            if config.task_type == peft.TaskType.SEQ_CLS and not any("head" in tags(n) for n in personal):
                config.task_type = None  # with it PEFT expects a head, which the saved model has
            save_adapter(folder / f"client_{client}", config, personal)
    run.global_model()
