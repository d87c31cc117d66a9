"""What comes after a run: its model loaded again, evaluated on a file, or asked for predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from .config import Config, load_config
from .data import CAUSAL_LM, CLASSIFICATION, Examples
from .data.examples import IGNORED_LABEL
from .data.files import SUFFIXES, read_table
from .data.sources import data_args
from .data.tables import text_columns
from .data.template import SYNONYMS, is_own, prompts
from .data.tokenize import tokenize_causal, tokenize_classification
from .errors import UserError, nearest
from .models.adapters import load_adapter
from .models.build import build_model, build_tokenizer
from .models.machine import input_device
from .models.placing import at_home
from .rounds.site import device_of
from .runs.best import KINDS
from .runs.records import read_records
from .runs.summary import perplexity
from .settings import Origin
from .training import evaluate
from .versions import check_schema


@dataclass
class FinishedRun:
    """A run that has ended.

    Attributes:
        folder: of the run. config: its own. summary: the content of its ``summary.json``.
        saved: the folder in it with what was trained: ``adapter``, ``model``, ``adapter_best`` or ``model_best``.
        tokenizer: the model's.
        labels: the classes, in the order of the model's outputs; empty for a language model.
    """

    folder: Path
    saved: Path
    config: Config
    summary: dict[str, Any]
    tokenizer: Any
    labels: list[str]

    @cached_property
    def model(self) -> nn.Module:
        """The global model with what was trained; loaded when it is first needed, so after a wrong file is refused."""
        pad, adapted = getattr(self.tokenizer, "pad_token_id", None), self.saved.name.startswith("adapter")
        classes = len(self.labels) or None
        model = build_model(self.config, classes, pad, label_names=self.labels, say_new=not adapted)
        if adapted:
            with at_home(model):
                model = load_adapter(model, self.saved)
        if self.config.model.device_map:
            return model.eval()
        return model.to(device_of(self.config)).eval()

    @property
    def which(self) -> str:
        """Which round's model this is; of the last round's also which round was better, if it was kept."""
        best = self.summary.get("best", {})
        chosen = f"round {best.get('round')}, the best by {best.get('by')}"
        if self.saved.name.endswith("_best"):
            return f"{self.saved}, of {chosen}"
        history = read_records(self.folder / "rounds.jsonl", up_to=10**9)
        number = history[-1]["round"] if history else None
        last = f"{self.saved}, of {f'round {number}, the last' if number else 'the last round'}"
        kept = self.saved.with_name(f"{self.saved.name}_best")
        if not kept.is_dir() or number == best.get("round"):
            return last
        return f"{last}; {kept.name} is of {chosen}"

    @property
    def task(self) -> str:
        return CLASSIFICATION if self.labels else CAUSAL_LM

    @property
    def tok_len(self) -> int:
        """The length in tokens that the run cut its samples to; of ``llm.tok_len: auto`` what it came to."""
        length = data_args(self.config.data).get("max_len") or self.config.llm.tok_len
        return int(self.summary["rows"]["tok_len"]) if length == "auto" else length


def load_run(folder: str | Path, best: bool = False) -> FinishedRun:
    """A finished run, with its tokenizer; its global model is loaded when it is needed.

    Args:
        best: the model after the best round by validation data (``eval.save_best``), not after the last one.
    Raises:
        UserError: the folder holds no finished run, or one of an image network; there is no best round; the tokenizer
            cannot be loaded.
    """
    folder = Path(folder)
    for name in ("config.yaml", "summary.json"):
        if not (folder / name).is_file():
            what = "no run" if not (folder / "config.yaml").is_file() else "a run that has not ended"
            raise UserError(f"{folder} holds {what}: there is no {name}; give the outdir of a finished run")
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'summary.json'} cannot be read: {error}") from error
    check_schema(summary, folder / "summary.json")
    config = load_config(folder / "config.yaml")
    if config.is_vision:
        raise UserError(
            f"{folder} is a run of {config.model.type}, an image network; this command is for models of text"
        )
    if config.model.task not in ("SequenceClassification", "CausalLM"):
        raise UserError(
            f"{folder} is a run with model.task = {config.model.task}; this command is for SequenceClassification and "
            f"CausalLM; {folder / 'adapter'} is for plain PEFT and transformers"
        )
    kinds = [f"{kind}_best" if best else kind for kind in KINDS]
    saved = next((folder / kind for kind in kinds if (folder / kind).is_dir()), None)
    if saved is None:
        where = f"{folder} has neither {kinds[0]}/ nor {kinds[1]}/"
        if not best:
            raise UserError(f"{where}; the run did not save what it trained")
        why = "eval.save_best was off" if summary.get("best") else "it evaluated no validation data (eval.split)"
        raise UserError(f"{where}: {why}; without best=True, the last round's is taken")
    if saved.name.startswith("model"):
        changed = {"model.type": f"{saved}@{config.model.type.rpartition('@')[2]}"}
        # A base that was quantised was saved as it computed.
        config = config.replace({**changed, "lowrank.dtype": config.dtype} if config.quantised else changed)
    labels = [str(name) for name in summary.get("labels") or []]
    return FinishedRun(folder, saved, config, summary, build_tokenizer(config), labels)


@dataclass
class Rows:
    """A file as examples.

    Attributes:
        table: the file. examples: of the rows ``kept``, which are indices of ``table``.
        left_out: number of rows by reason. cut: rows of which a text, or the answer, was cut to the run's length.
    """

    table: pd.DataFrame
    examples: Examples
    kept: np.ndarray
    left_out: dict[str, int]
    cut: int


def read_rows(run: FinishedRun, path: str | Path, columns: dict[str, str] | None = None, labelled: bool = True) -> Rows:
    """Read a file as the run read its data.

    Args:
        columns: names of columns by role (``text``, ``label``, …) that differ from those of the run's data.
        labelled: the classes, or answers, are needed.
    Raises:
        UserError: an unreadable file, a missing column (a second sentence, too, where the run has one, or one where it
            has none), a class that the run does not know, or no row left.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends with {', '.join(SUFFIXES)}")
    args = data_args(run.config.data, Origin())
    table = read_table(path, args.get("quoting"), "data")
    wanted = {k: v for k, v in (columns or {}).items() if v}
    if run.task == CLASSIFICATION:
        # runs of before version 0.2.0 do not say which columns they read
        known = run.summary.get("columns") or text_columns({**args, **wanted}, table)
        if wanted.get("text_pair") and not known.get("text_pair"):
            raise UserError(
                f"text_pair={wanted['text_pair']!r}: the run in {run.folder} learned from one text in a row"
            )
        return _classified(run, path, table, {**known, **wanted}, labelled)
    return _instructed(run, path, table, {**args, **wanted}, labelled)


def _column(path: Path, table: pd.DataFrame, role: str, name: str) -> pd.Series:
    if name not in table:
        there = [str(c) for c in table]
        raise UserError(
            f"{path}: no column {name!r}, which is the {role.replace('_', ' ')}{nearest(name, there)}; "
            f"name it with {role}='COLUMN'; there are: {', '.join(there)}"
        )
    return table[name]


def _text(value: Any) -> str:
    return "" if value is None or value != value else str(value)


def _classified(
    run: FinishedRun, path: Path, table: pd.DataFrame, names: dict[str, str | None], labelled: bool
) -> Rows:
    frame = pd.DataFrame({"text": _column(path, table, "text", str(names["text"])).map(_text)})
    if names.get("text_pair"):
        frame["text_pair"] = _column(path, table, "text_pair", str(names["text_pair"])).map(_text)
    filled = frame.map(lambda value: bool(value.strip())).all(axis=1)
    left_out = {"empty text": int((~filled).sum())} if not filled.all() else {}
    frame["label"] = 0
    if labelled:
        column = _column(path, table, "label", str(names["label"]))
        index = {name: i for i, name in enumerate(run.labels)}
        found = column.map(lambda value: index.get(_class(value)))
        unknown = column[found.isna() & filled]
        if len(unknown):
            raise UserError(
                f"{path}, row {unknown.index[0] + 1}: class {_class(unknown.iloc[0])!r} is none of those that the run "
                f"learned ({', '.join(run.labels[:10])}); {len(unknown)} rows have such a class"
            )
        frame["label"] = found.fillna(0).astype(np.int64)
    kept = np.flatnonzero(filled.to_numpy())
    if not len(kept):
        raise UserError(f"{path}: every row has an empty text")
    examples = tokenize_classification(frame.iloc[kept], run.tokenizer, run.tok_len)
    return Rows(table, examples, kept, left_out, examples.truncated)


def _class(value: Any) -> str:
    """A class as text; 1, "1", 1.0 and "1.0" are the same, as they are in training."""
    from .data.tables import label_text

    return label_text(value)


def _instructed(run: FinishedRun, path: Path, table: pd.DataFrame, args: dict[str, Any], labelled: bool) -> Rows:
    frame = pd.DataFrame(index=table.index)
    own = is_own(args.get("template", "auto"))
    if own:
        frame, _ = prompts(table, path, args, labelled)
    for role, names in () if own else SYNONYMS.items():
        name = args.get(role) or next((n for n in names if n in table), "")
        if role == "input" and not name or role == "output" and not labelled:
            frame[role] = "" if role == "input" else "x"
        else:
            frame[role] = _column(path, table, role, name or names[0]).map(_text)
    needed = ["instruction", *(["output"] if labelled else [])]
    filled = frame[needed].map(lambda value: bool(value.strip())).all(axis=1)
    left_out = {f"empty {' or '.join(needed)}": int((~filled).sum())} if not filled.all() else {}
    kept = np.flatnonzero(filled.to_numpy())
    if not len(kept):
        raise UserError(f"{path}: every row has an empty {' or '.join(needed)}")
    # Without answers the labels say where the prompt ends.
    options = {key: args[key] for key in ("template", *(["loss_on"] if labelled else [])) if key in args}
    examples, whole = tokenize_causal(frame.iloc[kept], run.tokenizer, run.tok_len, **options)
    if not whole.all():
        left_out["prompt too long"] = int((~whole).sum())
    return Rows(table, examples, kept[whole], left_out, examples.truncated if labelled else 0)


def evaluate_rows(run: FinishedRun, rows: Rows) -> dict[str, Any]:
    """Scores on the rows of a file.

    Returns:
        ``rows``, ``loss``, ``acc`` and its standard error ``acc_error``; for classes ``majority``, the accuracy of the
        most frequent one, and ``classes``: name → number of rows and ``recall``; for a language model ``perplexity``
        (``acc`` is then that of the next token).
    """
    size = run.config.eval.batch_size or run.config.dataloader.batch_size
    scores: dict[str, Any] = {"rows": len(rows.examples), **evaluate(run.model, rows.examples, size)}
    if run.task == CAUSAL_LM:
        counted = int(sum((labels[1:] != IGNORED_LABEL).sum() for labels in rows.examples.columns["labels"]))
        return {
            **scores,
            "tokens": counted,
            "acc_error": math.sqrt(scores["acc"] * (1 - scores["acc"]) / max(counted, 1)),
            "perplexity": perplexity(scores["loss"]),
        }
    labels = np.asarray(rows.examples.labels)
    predicted = probabilities(run, rows.examples).argmax(axis=1)
    counts = np.bincount(labels, minlength=len(run.labels))
    return {
        **scores,
        "acc_error": math.sqrt(scores["acc"] * (1 - scores["acc"]) / len(labels)),
        "majority": float(counts.max() / len(labels)),
        "classes": {
            name: {"rows": int(counts[i]), "recall": float((predicted[labels == i] == i).mean()) if counts[i] else None}
            for i, name in enumerate(run.labels)
        },
    }


@torch.no_grad()
def probabilities(run: FinishedRun, examples: Examples) -> np.ndarray:
    """Of each class, float64 ``(n, classes)``."""
    device = input_device(run.model)
    size = run.config.eval.batch_size or run.config.dataloader.batch_size
    parts = []
    for start in range(0, len(examples), size):
        batch = examples.batch(range(start, min(start + size, len(examples))))
        batch.pop("labels")
        logits = run.model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits
        parts.append(logits.double().softmax(dim=-1).cpu().numpy())
    return np.concatenate(parts)


@torch.no_grad()
def answers(run: FinishedRun, rows: Rows, tokens: int) -> list[str]:
    """What the language model answers to each prompt, by the most likely token, at most ``tokens`` of them.

    Raises:
        UserError: the end of a prompt is not known, or a prompt is empty.
    """
    device, said = input_device(run.model), []
    for ids, labels in zip(rows.examples.columns["input_ids"], rows.examples.columns["labels"], strict=True):
        first = int(np.argmax(labels != IGNORED_LABEL))
        if not first:
            raise UserError("a row has no prompt of its own; of a run with loss_on: all, read rows with labelled=False")
        prompt = torch.from_numpy(ids[:first])[None].to(device, torch.int64)
        made = run.model.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=rows.examples.pad_id,
        )
        said.append(run.tokenizer.decode(made[0, first:], skip_special_tokens=True).strip())
    return said


def predict_rows(run: FinishedRun, rows: Rows, column: str = "prediction", tokens: int = 64) -> pd.DataFrame:
    """The file's table with a column of predictions; for classes also ``COLUMN_probability``.

    Rows that were left out have an empty prediction.

    Raises:
        UserError: the table has such a column already.
    """
    added: dict[str, Sequence[Any]]
    for name in (column, *([f"{column}_probability"] if run.labels else [])):
        if name in rows.table:
            raise UserError(f"the file has a column {name!r} already; choose another name with column='NAME'")
    if run.task == CLASSIFICATION:
        chances = probabilities(run, rows.examples)
        best = chances.argmax(axis=1)
        added = {
            column: [run.labels[i] for i in best],
            f"{column}_probability": [round(float(p), 6) for p in chances.max(axis=1)],
        }
    else:
        added = {column: answers(run, rows, tokens)}
    table = rows.table.copy()
    for name, values in added.items():
        cells = pd.Series([""] * len(table), index=table.index, dtype=object)
        cells.iloc[rows.kept] = values
        table[name] = cells
    return table


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table in the format of the file's suffix.

    Raises:
        UserError: the file exists, has another suffix, or cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends with {', '.join(SUFFIXES)}")
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            if suffix in (".csv", ".tsv"):
                table.to_csv(file, index=False, sep="," if suffix == ".csv" else "\t", lineterminator="\n")
            else:
                table.to_json(file, orient="records", lines=suffix == ".jsonl", force_ascii=False)
    except FileExistsError:
        raise UserError(f"{path} exists; remove it, or choose another name") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
