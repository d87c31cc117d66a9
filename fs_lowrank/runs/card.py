"""The model card of a saved adapter or model: ``README.md`` with a header that the Hugging Face hub reads."""

from __future__ import annotations

import html
import json
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data.fetch import FETCHABLE
from ..errors import counted
from ..models.build import locate, model_name
from ..models.machine import input_device
from ..seeds import drawing
from ..settings import Settings
from ..versions import __version__
from .folder import outdir_of
from .summary import for_people

logger = logging.getLogger("fs_lowrank")

_PIPELINES = {"CausalLM": "text-generation", "Seq2SeqLM": "text2text-generation"}
_LOADERS = {"CausalLM": "AutoModelForCausalLM", "Seq2SeqLM": "AutoModelForSeq2SeqLM"}


def model_card(
    config: Settings, facts: Mapping[str, Any], figures: Mapping[str, float], what: str, best: str = "", round: int = 0
) -> str:
    """The card as Markdown.

    Args:
        config: the run's configuration. facts: of its ``RunResult``, and ``example``. figures: metrics of the round.
        what: ``adapter``, for PEFT over the base model, or ``model``, a whole model.
        best: of the best round, the metric by which it is; empty for the last round.
        round: its number.
    """
    given, folder = model_name(config.model.type), outdir_of(config)
    # A path says nothing elsewhere, and may be the name of another model on a hub.
    base, revision = facts.get("hub") or ("", "")
    base, on_hub = base or Path(given).name, bool(base)
    header: dict[str, Any] = {"library_name": "peft" if what == "adapter" else "transformers"}
    if not config.is_vision:
        header |= {"base_model": base} if on_hub else {}
        header |= {"pipeline_tag": _PIPELINES.get(config.model.task, "text-classification")}
    header["tags"] = ["federated-learning", "fs-lowrank", facts["method"], *(["lora"] if what == "adapter" else [])]
    sizes, labels = sorted(facts["clients"]), facts.get("labels") or []
    rows = [
        ("base model", f"`{base}`" + (f", revision `{revision}`" if revision else "") + _fetched(given)),
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
    card: str = _template().render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip(),
        config=config,
        facts=facts,
        what=what,
        best=best,
        base=base,
        loaded=base if on_hub else locate(given),
        revision=revision,
        clients=counted(len(sizes), "client"),
        rows=rows,
        measured=measured,
        labels=labels,
        names=json.dumps(labels, ensure_ascii=False),
        folder=(folder / (f"{what}_best" if best else what)).as_posix(),
        loader=_LOADERS.get(config.model.task, "AutoModelForSequenceClassification"),
        text=_TEXT,
        shown=_SHOWN.get(config.model.task),
        example=facts.get("example", ""),
        fetched=_fetched(given),
        again=shlex.quote((folder / "config.yaml").as_posix()),
    )
    return card


def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    pages = Environment(
        loader=PackageLoader(__package__), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    pages.filters |= {"plain": _plain, "cell": lambda text: _plain(text).replace("|", "\\|").replace("\n", " ")}
    return pages.get_template("card.md")


def _plain(text: str) -> str:
    return html.escape(text, quote=False)


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


def _fetched(given: str) -> str:
    return f", as `fs-lowrank fetch {given}` gives it" if given in FETCHABLE and not Path(given).is_dir() else ""


_TEXT = "It was a good day."
_GENERATED = "tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0])"
#: what the card prints for a text, by task
_SHOWN = {
    "CausalLM": _GENERATED,
    "Seq2SeqLM": _GENERATED,
    "SequenceRegression": "round(model(**inputs).logits.item(), 3)",
    "MultiLabelClassification": "[model.config.id2label[i] for i, x in enumerate(model(**inputs).logits[0]) if x > 0]",
    "SequenceClassification": "model.config.id2label[model(**inputs).logits.argmax().item()]",
}


def example(model: Any, tokenizer: Any, config: Settings) -> str:
    """What the last line of the card's code prints of ``model``; empty where it has none.

    The text is no text of the data, which may be private.
    """
    if tokenizer is None or config.model.task not in _SHOWN or not hasattr(model, "config"):
        return ""
    inputs = tokenizer(_TEXT, return_tensors="pt", return_token_type_ids=False).to(input_device(model))
    model.eval()
    try:
        with torch.no_grad(), drawing(0):
            return str(eval(_SHOWN[config.model.task], {"model": model, "tokenizer": tokenizer, "inputs": inputs}))
    except Exception as error:  # a model that needs more than a text; the run has ended well all the same
        logger.debug("the card shows no prediction: %s", error)
        return ""
