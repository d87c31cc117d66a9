"""Data and models that ``run`` was given as objects, in the run's folder, where its processes and a resumed run read
them.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..algebra import digest
from ..config import Config
from ..data.objects import store
from ..data.tokenize import tokenizer_fingerprint
from ..errors import UserError
from ..jobs.files import read_json, replaced, to_json, writing
from ..models.build import loads
from ..models.fingerprints import configuration_fingerprint
from ..models.given import SUFFIX
from ..models.kinds import is_encoder_decoder
from ..models.loaded import transformers_silent
from ..settings import one_mapping
from ..settings.metrics import LANGUAGE, TASKS
from ..versions import SCHEMA
from .folder import check_outdir, claim, holds_run, outdir_of

#: the folders of the data and of the model, and in each the file with facts about them
DATA, MODEL, ABOUT = "given_data", "given_model", "about.json"
#: the entries of a model's ``about.json``, by their names in messages
NAMES = {"digest": "model", "config": "model.config", "tokenizer": "tokenizer"}


@contextmanager
def _locked(config: Config, name: str, resume: bool, overwrite: bool) -> Iterator[Path]:
    """The folder ``name`` in that of the run, which is locked during the block."""
    folder = outdir_of(config) / name
    with writing(folder), ExitStack() as stack:
        stack.callback(claim(folder.parent).release)
        if not (overwrite and holds_run(folder.parent)):
            check_outdir(config, resume)
        yield folder


def _begun(folder: Path) -> bool:
    """Whether a run has begun with the data or the model in ``folder``; one of ``compare`` is in a folder beside it."""
    return folder.exists() and any(map(holds_run, (folder.parent, *folder.parent.glob("*/"))))


def with_data(config: Config, data: Any, resume: bool, overwrite: bool = False) -> Config:
    """``config`` with ``data`` (see ``data.objects``), which are written to the folder of the run.

    Args:
        resume: a run is continued; if its folder has data, these have to be the same.
        overwrite: the caller removes the run in the folder next, all but these data, since wrong ones are refused here.
    Raises:
        UserError: data of another kind; other data than at the start of the run; or a list of another length than
            ``federate.client_num``.
    """
    if config.is_vision:
        raise UserError(
            f"data=… is for text, and model.type = {config.model.type} for images: name them by data.type, such as a "
            "folder with one subfolder for each class"
        )
    parts, count = data.get("train") if isinstance(data, Mapping) else data, config.federate.client_num
    if isinstance(parts, (list, tuple)) and len(parts) not in (0, count):
        raise UserError(f"data = a list of {len(parts)}, one for each client, and federate.client_num is {count}")
    with _locked(config, DATA, resume, overwrite) as folder:
        if resume and _begun(folder):
            facts = _matching_facts(folder, data)
        else:
            with replaced(folder) as aside:
                aside.mkdir()
                facts = {"schema": SCHEMA, **store(data, aside)}
                (aside / ABOUT).write_text(to_json(facts, indent=1), encoding="utf-8")
    clients, root = facts["clients"], folder.resolve()
    train = str(root / facts["train"]) if not clients else f"{glob.escape(str(root))}/{facts['train']}"
    args = one_mapping("data.args", config.data.args, config.source)
    args |= {split: str(root / facts[split]) for split in ("validation", "test") if split in facts}
    by_file: dict[str, Any] = {"data.splitter": "file" if clients > 1 else "iid", "data.splitter_args": []}
    return config.replace({"data.type": train, "data.args": [args] if args else [], **(by_file if clients else {})})


def with_model(
    config: Config, model: Any, tokenizer: Any, resume: bool, overwrite: bool = False
) -> tuple[Config, bool]:
    """``config`` with a model of the program's.

    A model that transformers can load from a folder is written to that of the run, for further processes and resumed
    runs; any other is held by this process.

    Returns:
        The configuration, and whether the model has to be held (``models.given.holding``).
    Raises:
        UserError: no model, no tokenizer, an adapted model, or an unknown task.
    """
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module) or isinstance(model, PeftModel):
        advice = "an adapted model: expected the one without the adapter, such as from merge_and_unload()"
        raise UserError(
            f"model = {type(model).__name__}: {advice if isinstance(model, nn.Module) else 'expected an nn.Module'}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise UserError(f"tokenizer = {type(tokenizer).__name__}: model=… needs its tokenizer, one of transformers")
    task = config.model.task or _task_of(model)
    if not task or task == "ImageClassification":
        raise UserError(
            f"model = {type(model).__name__}: for which task? set model.task to one of "
            f"{', '.join(t for t in TASKS if t != 'ImageClassification')}"
        )
    suffix = "huggingface_llm" if task in LANGUAGE else "transformers"
    config = config.replace({"model.type": f"{type(model).__name__}@{suffix}", "model.task": task})
    if not (isinstance(model, PreTrainedModel) and loads(config, model)):
        if task in LANGUAGE:
            raise UserError(
                f"model = {type(model).__name__}: transformers cannot load it from a folder for {task}; modules of "
                "your own are for SequenceClassification, SequenceRegression and MultiLabelClassification"
            )
        return config.replace({"model.type": f"{type(model).__name__}{SUFFIX}", "model.task": task}), True
    digests = _digests(model, tokenizer)
    with _locked(config, MODEL, resume, overwrite) as folder:
        if resume and _begun(folder):
            saved = _read_facts(folder)
            changed = [part for part, value in digests.items() if saved.get(part, value) != value]
            if changed:
                raise UserError(
                    f"{NAMES[changed[0]]}: not the one of the run in {folder.parent}; continue it with the same, "
                    "without model=…, or choose another outdir"
                )
        else:
            with replaced(folder) as aside, transformers_silent():
                model.save_pretrained(str(aside))
                tokenizer.save_pretrained(str(aside))
                (aside / ABOUT).write_text(to_json({"schema": SCHEMA, **digests}, indent=1), encoding="utf-8")
    return config.replace({"model.type": f"{folder.resolve()}@{suffix}", "model.task": task}), False


def _task_of(model: Any) -> str:
    """The task of a class of transformers by its name; empty if that does not say it."""
    name = type(model).__name__
    ends = {"ForCausalLM": "CausalLM", "LMHeadModel": "CausalLM", "ForSequenceClassification": "SequenceClassification"}
    if name.endswith("ForConditionalGeneration") and is_encoder_decoder(model):
        return "Seq2SeqLM"
    return next((task for end, task in ends.items() if name.endswith(end)), "")


def _digests(model: Any, tokenizer: Any) -> dict[str, str]:
    """Hashes of the weights, of the configuration and of the tokenizer, by the keys of ``NAMES``."""
    digests = {"config": configuration_fingerprint(model), "tokenizer": tokenizer_fingerprint(tokenizer, saved=True)}
    return {"digest": digest(model.state_dict()), **digests}


def _read_facts(folder: Path) -> dict[str, Any]:
    """The facts that ``folder`` has about its contents."""
    return dict(read_json(folder / ABOUT, remedy="start again with overwrite=True"))


def _matching_facts(folder: Path, data: Any) -> dict[str, Any]:
    """The facts that ``folder`` has about its data, if they are ``data``."""
    facts = _read_facts(folder)
    with TemporaryDirectory(".writing", f".{DATA}.", folder.parent) as aside:
        current = store(data, Path(aside))["digest"]
    if current != facts["digest"]:
        raise UserError(
            f"data: not the data of the run in {folder.parent} (SHA-256 {current[:12]}, then "
            f"{facts['digest'][:12]}); continue it with the same, without data=…, or choose another outdir"
        )
    return facts
