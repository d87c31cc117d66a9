"""The model card of a saved adapter or model: ``README.md`` with a header that the Hugging Face hub reads."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from ..draw.panels import digits
from ..errors import between, counted
from ..fetch import FETCHABLE
from ..models.build import locate, model_name
from ..settings import Settings
from ..settings.metrics import standard_error
from ..versions import __version__
from .folder import outdir_of
from .summary import for_people

_PIPELINES = {"CausalLM": "text-generation", "Seq2SeqLM": "text2text-generation"}
_plain = partial(html.escape, quote=False)
_LOADERS = {"CausalLM": "AutoModelForCausalLM", "Seq2SeqLM": "AutoModelForSeq2SeqLM"}


def model_card(
    config: Settings,
    facts: Mapping[str, Any],
    figures: Mapping[str, float],
    kind: str,
    best: str = "",
    round: int = 0,
    evaluated: int = 0,
) -> str:
    """The card as Markdown.

    Args:
        config: the run's configuration. facts: of its ``RunResult``. figures: metrics of the round ``evaluated``.
        kind: ``adapter``, for PEFT over the base model, or ``model``, a full model.
        best: of the best round, the metric by which it is; empty for the last round.
        round: its number. evaluated: the number of the round of the figures, which may be an earlier one than the last.
    """
    model, folder = model_name(config.model.type), outdir_of(config)
    # A path says nothing elsewhere, and may be the name of another model on a hub.
    base, revision = facts.get("hub") or ("", "")
    base, on_hub = base or Path(model).name, bool(base)
    header: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    if not config.is_vision:
        header |= {"base_model": base} if on_hub else {}
        header |= {"pipeline_tag": _PIPELINES.get(config.model.task, "text-classification")}
    header["tags"] = ["federated-learning", "fs-lowrank", facts["method"], *(["lora"] if kind == "adapter" else [])]
    labels = facts.get("labels") or []
    values = {name: digits(value) for name, value in for_people(figures, config.is_language).items()}
    if facts.get("majority") is not None:  # otherwise an accuracy is one of tokens or of labels
        sizes = {name: size for split, size in facts["held_out"].items() if (name := f"{split}_acc") in figures}
        values |= {name: f"{values[name]} ± {digits(standard_error(figures[name], n))}" for name, n in sizes.items()}
    card: str = _template().render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip(),
        config=config,
        facts=facts,
        kind=kind,
        best=best,
        round=round,
        evaluated=evaluated,
        base=base,
        loaded=base if on_hub else locate(model),
        revision=revision,
        fetched=f", as `fs-lowrank fetch {model}` gives it" if model in FETCHABLE and not Path(model).is_dir() else "",
        clients=counted(len(facts["clients"]), "client"),
        sizes=f"{between(facts['clients'])} samples",  # a filter of jinja2 is slow for many
        figures=values,
        labels=labels,
        names=json.dumps(labels, ensure_ascii=False),
        folder=(folder / (f"{kind}_best" if best else kind)).as_posix(),
        loader=_LOADERS.get(config.model.task, "AutoModelForSequenceClassification"),
        text=_TEXT,
        output=_OUTPUTS.get(config.model.task),
        again=shlex.quote((folder / "config.yaml").as_posix()),
        version=__version__,
    )
    return f"{card}\n"


@cache  # compiling it takes a tenth of a small run
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader(__package__), trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"plain": _plain, "cell": lambda text: _plain(text).replace("|", "\\|").replace("\n", " ")}
    return pages.get_template("card.md")


#: no text of the data, which may be private
_TEXT = "It was a good day."
_GENERATED = "tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0])"
#: the code whose output the card prints for a text, by task
_OUTPUTS = {
    "CausalLM": _GENERATED,
    "Seq2SeqLM": _GENERATED,
    "SequenceRegression": "round(model(**inputs).logits.item(), 3)",
    "MultiLabelClassification": "[model.config.id2label[i] for i, x in enumerate(model(**inputs).logits[0]) if x > 0]",
    "SequenceClassification": "model.config.id2label[model(**inputs).logits.argmax().item()]",
}
