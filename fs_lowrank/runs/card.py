"""The model card of a saved adapter or model: ``README.md`` with a header that the Hugging Face hub reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import counted
from ..models.build import locate, model_name
from ..settings import Settings
from ..versions import __version__
from .folder import outdir_of
from .summary import for_people

_PIPELINES = {"CausalLM": "text-generation", "Seq2SeqLM": "text2text-generation"}
_LOADERS = {"CausalLM": "AutoModelForCausalLM", "Seq2SeqLM": "AutoModelForSeq2SeqLM"}


def model_card(
    config: Settings, facts: Mapping[str, Any], figures: Mapping[str, float], what: str, best: str = "", round: int = 0
) -> str:
    """The card as Markdown.

    Args:
        config: the run's configuration. facts: of its ``RunResult``. figures: metrics of the round.
        what: ``adapter``, for PEFT over the base model, or ``model``, a whole model.
        best: of the best round, the metric by which it is; empty for the last round.
        round: its number.
    """
    given, folder = model_name(config.model.type), outdir_of(config)
    local = Path(locate(given)).is_dir()  # a path says nothing elsewhere, and may be the name of another model on a hub
    base = Path(given).name if local else given
    header: dict[str, Any] = {"library_name": "peft" if what == "adapter" else "transformers"}
    if not config.is_vision:
        header |= {} if local else {"base_model": base}
        header |= {"pipeline_tag": _PIPELINES.get(config.model.task, "text-classification")}
    header["tags"] = ["federated-learning", "fs-lowrank", facts["method"], *(["lora"] if what == "adapter" else [])]
    sizes, labels = sorted(facts["clients"]), facts.get("labels") or []
    rows = [
        ("base model", f"`{base}`"),
        ("fingerprint of its weights", f"`{facts['model']}`"),
        ("method", f"`{facts['method']}`" + _params(config)),
        ("data", facts["source"]),
        _predicted(config, labels),
        ("clients", f"{len(sizes)}, of {sizes[0]} to {sizes[-1]} samples; {config.sampled_per_round} in a round"),
        ("rounds", str(config.federate.total_round_num)),
        ("client's training", _training(config)),
        ("seed", str(config.seed)),
        ("written by", f"fs-lowrank {__version__}"),
    ]
    rows.append(("round", f"{round}, " + (f"the best by {best}" if best else "the last")))
    shown = for_people(figures, config.is_language)
    measured = [(name, f"{value:.4g}") for name, value in sorted(shown.items())]
    if facts.get("majority") is not None:
        measured.append(("majority class of the test set", f"{facts['majority']:.4g}"))
    return "\n".join(
        [
            "---",
            yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip(),
            "---",
            "",
            f"# {base}, trained by {facts['method']} over {counted(len(sizes), 'client')}",
            "",
            *_table(("", ""), rows),
            "",
            f"## Figures of the {'best' if best else 'last'} round",
            "",
            *_table(("metric", "value"), measured),
            "",
            "## Use",
            "",
            "In the folder in which the run was started:",
            "",
            "```python",
            *_use(config, locate(given), labels, what, (folder / (f"{what}_best" if best else what)).as_posix()),
            "```",
            "",
            "## Again",
            "",
            "```",
            f"fs-lowrank run --cfg {shlex.quote((folder / 'config.yaml').as_posix())} outdir again",
            "```",
            "",
        ]
    )


def _predicted(config: Settings, labels: list[str]) -> tuple[str, str]:
    if config.model.task == "SequenceRegression":
        return "a number", ", ".join(labels)
    return "classes", ", ".join(map(str, labels)) if labels else "none: a language model"


def _params(config: Settings) -> str:
    given = ", ".join(f"{name} = {value}" for name, value in config.lowrank.params.items())
    return f" ({given})" if given else ""


def _training(config: Settings) -> str:
    train = config.train
    unit = "steps" if train.batch_or_epoch == "batch" else "epochs"
    loads = config.dataloader
    batch = f"{loads.batch_tokens} tokens" if loads.batch_tokens else f"{loads.batch_size} samples"
    return f"{train.local_update_steps} {unit} of {batch} a round, {train.optimizer.type} at {train.optimizer.lr:g}" + (
        f"; {len(config.own_settings)} clients by settings of their own" if config.own_settings else ""
    )


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    cells = [(a, b.replace("|", "\\|").replace("\n", " ")) for a, b in rows]
    return [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in cells)]


def _use(config: Settings, base: str, labels: list[str], what: str, folder: str) -> list[str]:
    if config.is_vision:
        loads = "from fs_lowrank.models.vision import load_vision"
        if what == "model":
            return [loads, "", f'model = load_vision("{folder}")']
        return [
            "from peft import PeftModel",
            loads,
            "",
            f'model = PeftModel.from_pretrained(load_vision("{folder}/base"), "{folder}")',
        ]
    loader = _LOADERS.get(config.model.task, "AutoModelForSequenceClassification")
    if what == "model":
        return [f"from transformers import {loader}", "", f'model = {loader}.from_pretrained("{folder}")']
    if labels:
        return [
            "from peft import AutoPeftModelForSequenceClassification",
            "from transformers import AutoTokenizer",
            "",
            "# PEFT takes the names of the classes, and how many there are, from the base model; these are the run's:",
            f"id2label = {{{', '.join(f'{i}: {json.dumps(n, ensure_ascii=False)}' for i, n in enumerate(labels))}}}",
            "model = AutoPeftModelForSequenceClassification.from_pretrained(",
            f'    "{folder}", id2label=id2label, label2id={{name: i for i, name in id2label.items()}}',
            ")",
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        ]
    return [
        "from peft import PeftModel",
        f"from transformers import AutoTokenizer, {loader}",
        "",
        f'base = {loader}.from_pretrained("{base}")',
        f'model = PeftModel.from_pretrained(base, "{folder}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
    ]
