"""A run that has ended: its configuration, tokenizer and model, loaded again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import Config, load_config
from ..data import CAUSAL_LM, CLASSIFICATION
from ..data.sources import length_of
from ..data.user_data import LABELS
from ..errors import UserError, say_once
from ..jobs.files import read_json
from ..models.build import build_model, build_tokenizer, model_name
from ..models.fingerprints import configuration_fingerprint, model_fingerprint
from ..models.machine import autocast, device_of
from ..models.placing import at_home
from ..models.saved import load_adapter
from ..runs.checksums import KINDS, check_finished
from ..runs.environment import changed_since
from ..runs.records import read_records

#: the files of its folder that are read beside the trained tensors
_READ = ("config.yaml", "summary.json", "rounds.jsonl", "environment.json")


@dataclass
class FinishedRun:
    """A run that has ended.

    Attributes:
        folder: of the run. config: its own. summary: the content of its ``summary.json``.
        saved: the folder of the trained tensors: ``adapter``, ``model``, ``adapter_best`` or ``model_best`` in it.
        tokenizer: the one that was saved with it; of runs that saved none, the base's.
        labels: the classes, in the order of the model's outputs; of a regression, the name of what it predicts; empty
            for a language model.
    """

    folder: Path
    saved: Path
    config: Config
    summary: dict[str, Any]
    tokenizer: Any
    labels: list[str]

    @cached_property
    def model(self) -> nn.Module:
        """The global model with its trained tensors; loaded when it is first needed, after a wrong file is refused."""
        adapted = self.saved.name.startswith("adapter")
        classes = len(self.labels) or None
        config = _on_device(self.config)
        model = build_model(config, classes, self.tokenizer, label_names=self.labels, say_new=not adapted)
        if adapted:
            self._check_base(model)
            with at_home(model):
                model = load_adapter(model, self.saved)
        if not config.model.device_map:
            model = model.to(device_of(config))
        if config.train.autocast != "off":
            autocast(model, getattr(torch, config.train.autocast))
        return model.eval()

    def _check_base(self, model: nn.Module) -> None:
        """Compare the base with the run's by the fingerprints in its summary (of version 0.1.0: the weights).

        New and quantised weights, and the settings that a configuration's class adds, also depend on versions and on
        the machine: where these differ, it is a warning.

        Raises:
            UserError: it is another one.
        """
        current = {"model": model_fingerprint(model), "configuration": configuration_fingerprint(model)}
        wrong = [name for name, value in current.items() if self.summary.get(name, value) != value]
        if not wrong:
            return
        kind = "weights" if wrong[0] == "model" else "settings in its config.json"
        message = (
            f"model.type: {self.config.model.type!r} has other {kind} than when the run in {self.folder} trained its "
            f"adapter on them (fingerprint {current[wrong[0]]}, then {self.summary[wrong[0]]})"
        )
        if changed := changed_since(self.folder / "environment.json", device_of(_on_device(self.config))):
            say_once(f"{message}; if its files are the same, that is by what has changed here: {', '.join(changed)}")
            return
        raise UserError(f"{message}; put back the files that were there, or train again")

    @property
    def which(self) -> str:
        """Which round's model this is; for the last round's also which round was better, if its model was saved."""
        best = self.summary.get("best", {})
        chosen = f"round {best.get('round')}, the best by {best.get('by')}"
        if self.saved.name.endswith("_best"):
            return f"{self.saved}, of {chosen}"
        history = read_records(self.folder / "rounds.jsonl", up_to=10**9)
        number = history[-1]["round"] if history else None
        last = f"{self.saved}, of {f'round {number}, the last' if number else 'the last round'}"
        best_folder = self.saved.with_name(f"{self.saved.name}_best")
        if not best_folder.is_dir() or number == best.get("round"):
            return last
        return f"{last}; {best_folder.name} is of {chosen}"

    @property
    def task(self) -> str:
        """What kind of data it learned from: ``classification``, ``regression``, ``multi_label`` or ``causal_lm``."""
        return LABELS.get(self.config.model.task, CLASSIFICATION) if self.labels else CAUSAL_LM

    @property
    def paired(self) -> bool:
        """Whether an encoder reads the prompt and a decoder writes the answer."""
        return self.config.model.task == "Seq2SeqLM"

    @property
    def tok_len(self) -> int:
        """The length in tokens that the run cut its samples to; with ``llm.tok_len: auto`` the computed length."""
        _, length = length_of(self.config)
        return int(self.summary["rows"]["tok_len"] if length == "auto" else length)


def _on_device(config: Config) -> Config:
    """``config`` on a device that this machine has: the run's, else, with a warning, the first GPU or the CPU."""
    device, count = torch.device(config.torch_device), torch.cuda.device_count()
    if device.type == "cpu" or (device.index or 0) < count:
        return config
    where = "the first GPU" if count else "the CPU"
    say_once(f"the run computed on {device}, which torch does not find here; its model is on {where}")
    return config.replace(use_gpu=count > 0, device=-1)


def load_run(folder: str | Path, best: bool = False, base: str = "") -> FinishedRun:
    """A finished run, with its tokenizer; its global model is loaded when it is needed.

    Args:
        best: the model after the best round by validation data (``eval.save_best``), not after the last one.
        base: where the base of its adapter is, if not where the run had it; its weights are compared.
    Raises:
        UserError: the folder holds no finished run, or one of an image network; there is no best round; the tokenizer
            cannot be loaded; a file is not what the run left (``checksums.json``).
    """
    folder = Path(folder)
    for name in ("config.yaml", "summary.json"):
        if not (folder / name).is_file():
            state = "no run" if not (folder / "config.yaml").is_file() else "a run that has not ended"
            raise UserError(f"{folder} holds {state}: there is no {name}; give the outdir of a finished run")
    summary = read_json(folder / "summary.json")
    if kinds := summary.get("personal"):
        say_once(
            f"{' and '.join(kinds)} stayed with the clients of {folder}, and have their start values in the global "
            f"model, which is taken here; the clients' own models are in {folder / 'personal'}"
        )
    check_finished(folder, _READ)
    config = load_config(folder / "config.yaml")
    if config.is_vision:
        raise UserError(
            f"{folder} is a run of {config.model.type}, an image network; this command is for models of text"
        )
    kinds = [f"{kind}_best" if best else kind for kind in KINDS]
    saved = next((folder / kind for kind in kinds if (folder / kind).is_dir()), None)
    if saved is None:
        where = f"{folder} has neither {kinds[0]}/ nor {kinds[1]}/"
        if not best:
            raise UserError(f"{where}; the run did not save its trained tensors")
        reason = "eval.save_best was off" if summary.get("best") else "it evaluated no validation data (eval.split)"
        raise UserError(f"{where}: {reason}; without best=True, the last round's is taken")
    check_finished(folder, [saved.name])
    if saved.name.startswith("model"):
        changed = {"model.type": f"{saved}@{config.model.type.rpartition('@')[2]}"}
        # A base that was quantised was saved as it computed.
        config = config.replace({**changed, "lowrank.dtype": config.dtype} if config.quantised else changed)
    elif base:
        config = config.replace({"model.type": f"{base}@{config.model.type.rpartition('@')[2]}"})
    elif (path := Path(model_name(config.model.type))).is_absolute() and not path.exists():
        raise UserError(f"the base model of {folder} is no longer at {path}; say where it is with base='FOLDER'")
    labels = [str(name) for name in summary.get("labels") or []]
    tokenizer = saved if (saved / "tokenizer_config.json").is_file() else None
    return FinishedRun(folder, saved, config, summary, build_tokenizer(config, tokenizer), labels)
