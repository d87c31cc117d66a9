"""``RawData``, the common form of all data sets, and its construction from tables with named columns."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.files import NESTED, as_text, as_texts, require_columns
from fs_lowrank.data.labels import (
    check_lists,
    coded,
    from_flags,
    label_text,
    numbers,
    unique,
    warn_alike,
    without_label,
)
from fs_lowrank.data.template import SYNONYMS, is_custom, prompted, prompts
from fs_lowrank.errors import UserError, counted, say_once

CLASSIFICATION = "classification"
REGRESSION = "regression"
MULTI_LABEL = "multi_label"
CAUSAL_LM = "causal_lm"
IMAGE_CLASSIFICATION = "image_classification"
#: columns of ``RawData`` of a causal language model
ROLES = ("before", "instruction", "input", "output", "messages")
#: who speaks in ShareGPT's conversations -> the role
_SHARE_GPT = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass
class RawData:
    """A data set of text or images, before tokenization.

    Attributes:
        task: ``"classification"``, ``"regression"``, ``"multi_label"``, ``"causal_lm"`` or ``"image_classification"``.
        train, validation, test: for labelled text the columns ``text``, perhaps ``text_pair``, and ``label`` (int64, an
            index into ``label_names``; float64 for regression; for sets of classes their bits); for a causal language
            model ``instruction``, ``input``, ``output``, perhaps ``before`` (a list of turns), or ``messages``; for
            images ``image`` (int64, a row of ``images``) and ``label``; and the columns in ``fields``. ``validation``
            and ``test`` are None without an official split. The index of a frame is the row number in the original file
            or table, from 0; a header and empty lines are not counted.
        label_names: empty for a causal language model; for a regression the name of the label.
        fields: further columns that a partitioner may use, such as ``domain``.
        source: a description of where the data come from.
        skipped: number of rows left out, by reason.
        columns: for classification, the column of the source of ``text``, perhaps ``text_pair``, and ``label``.
        images: uint8 ``(n, channels, height, width)``; None for text.
        mean, std: of each channel of the images, for values from 0 to 1.
    """

    task: str
    train: pd.DataFrame
    validation: pd.DataFrame | None
    test: pd.DataFrame | None
    label_names: list[str]
    fields: list[str]
    source: str
    skipped: dict[str, int] = field(default_factory=dict)
    images: np.ndarray | None = field(default=None, repr=False)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, task: str, frames: Mapping[str, pd.DataFrame], *values: Any, **options: Any) -> RawData:
        """From frames by role (``train``, maybe ``validation``, ``test``); ``values`` begins with ``label_names``."""
        return cls(task, frames["train"], frames.get("validation"), frames.get("test"), *values, **options)

    @property
    def num_labels(self) -> int:
        """Number of classes; 0 for a causal language model."""
        return len(self.label_names)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex over task, classes, and all rows or images."""
        digest = hashlib.sha256(json.dumps([self.task, self.label_names]).encode())
        for frame in (self.train, self.validation, self.test):
            if frame is None:
                digest.update(b"none")
                continue
            for column in frame:
                digest.update(json.dumps([str(column), frame[column].tolist()], default=str).encode())
        if self.images is not None:
            digest.update(f"images {self.images.shape}".encode() + self.images.tobytes())
        return digest.hexdigest()


def labelled(
    tables: Mapping[str, tuple[str, pd.DataFrame]],
    args: Mapping[str, Any],
    source: str,
    task: str = CLASSIFICATION,
    names: list[str] | None = None,
    skipped: dict[str, int] | None = None,
    trained: bool = True,
) -> RawData:
    """Labelled text from tables with named columns.

    Args:
        tables: role → name for messages, and table.
        args: of ``data.args``, with the columns. task: ``CLASSIFICATION``, ``REGRESSION`` or ``MULTI_LABEL``.
        names: the classes in order; None: the names of a ``ClassLabel``, else the training labels, sorted.
        skipped: rows left out so far, by reason. trained: a model is trained on them, which needs two classes.
    """
    skipped = dict(skipped or {})
    train_name, train = tables["train"]
    columns, flags = text_columns(args, train), []
    if isinstance(columns["label"], list):  # columns of 0 and 1, one for each class
        flags, columns["label"] = columns["label"], "label"
    texts = {role: columns[role] for role in ("text", "text_pair") if columns[role]}
    column = columns["label"]
    distinct([*texts.items(), *(("label", name) for name in flags or [column])])
    frames: dict[str, pd.DataFrame] = {}
    for role, (where, table) in tables.items():
        require_columns(where, table, [*texts.values(), *(flags or [column])])
        labels = from_flags(where, table, flags) if flags else table[column]
        # The hub's test splits hide every label.
        if role != "train" and not args.get(role) and set(labels.map(label_text)) in ({"-1"}, {"None"}):
            continue
        has_label = ~without_label(labels)
        if not has_label.any():
            raise UserError(f"{where}: no row has a label in column {column!r}")
        count_skipped(skipped, "empty label", int((~has_label).sum()))
        frame = pd.DataFrame({role: as_texts(where, name, table[name][has_label]) for role, name in texts.items()})
        frame["label"] = labels[has_label]
        frame = _with_fields(frame, table, {*texts.values(), *flags, column})
        frames[role] = drop_empty(frame, ("text", "text_pair"), skipped)
        if not len(frames[role]):
            raise UserError(f"{where}: every row has an empty text")
        if task != REGRESSION:
            (check_lists if task == MULTI_LABEL else _check_single)(where, column, frames[role]["label"])
    names = names or flags or train.attrs.get("classes", {}).get(column)
    if task == REGRESSION or not names:
        names = [column] if task == REGRESSION else _names(task, train_name, column, frames["train"]["label"])
    for role, frame in frames.items():
        where, labels = tables[role][0], frame["label"]
        codes = numbers if task == REGRESSION else partial(coded, names=names, several=task == MULTI_LABEL)
        frames[role] = frame.assign(label=codes(where, column, labels))
    if task == CLASSIFICATION and trained:
        several_classes(frames["train"]["label"], train_name)
    fixed = {"text", "text_pair", "label"}
    # Which file a row is from divides training rows alone where held-out rows are in files of their own.
    everywhere = {"file", *(c for c in frames["train"] if all(c in frame for frame in frames.values()))}
    fields = [c for c in frames["train"] if c not in fixed and c in everywhere]
    return RawData.of(task, frames, names, fields, source, skipped, columns={**texts, "label": column})


def _names(task: str, where: str, column: str, labels: pd.Series) -> list[str]:
    """The names of the classes that the training labels have, in order."""
    kinds = unique(kind for value in labels for kind in value) if task == MULTI_LABEL else unique(labels)
    warn_alike(where, column, kinds)
    if task == CLASSIFICATION:
        _check_classes(where, column, labels, kinds)
    return kinds


def _check_single(where: str, column: str, labels: pd.Series) -> None:
    for row, value in labels.items():
        if isinstance(value, NESTED):
            raise UserError(
                f"{where}, row {row + 1}: label {value!r} in column {column!r}: expected one class; for "
                "sets of classes set model.task MultiLabelClassification"
            )


def _check_classes(where: str, column: str, labels: pd.Series, names: Sequence[str]) -> None:
    """Refuse numbers with fractions, and texts."""
    try:
        values = [float(str(label)) for label in labels]
    except ValueError:
        values = []
    if fractions := [label for label, n in zip(labels, values) if math.isfinite(n) and not n.is_integer()]:
        raise UserError(
            f"{where}: the labels in column {column!r} are numbers with fractions, such as {fractions[0]}, which is a "
            "regression: set model.task SequenceRegression; or write classes as words, or name another column by "
            "data.args [{label: COLUMN}]"
        )
    if len(names) > 20 and 2 * len(names) > len(labels):
        raise UserError(
            f"{where}: column {column!r} has {len(names)} different values in {len(labels)} rows; "
            "expected classes; name the column of the labels by data.args [{label: COLUMN}]"
        )


def _with_fields(frame: pd.DataFrame, table: pd.DataFrame, excluded: Collection[Any]) -> pd.DataFrame:
    """``frame`` with the other columns of ``table`` by which rows may be divided, of the same rows."""
    fields = [c for c in table if c not in excluded and c not in frame and _is_field(table[c])]
    return frame.join(table[fields])


def _is_field(column: pd.Series) -> bool:
    return all(value is None or isinstance(value, (str, int, float, bool, np.generic)) for value in column)


def instructions(
    table: pd.DataFrame, where: str | Path, args: Mapping[str, Any], answered: bool = True
) -> tuple[pd.DataFrame, list[str], dict[str, int]]:
    """``(frame, fields, skipped)`` from instruction data, or from conversations in the column ``messages``.

    Args:
        table: its index holds the numbers of its rows.
        answered: the table has the answers; without them a stand-in takes their place.
    """
    skipped: dict[str, int] = {}
    used: set[str | None]
    custom = is_custom(args.get("template", "auto"))
    earlier = [] if custom else _earlier(where, table)
    if custom:
        frame, columns = prompts(table, where, args, answered)
        frame = drop_empty(frame, ("instruction", "output") if prompted(args["template"]) else ("output",), skipped)
        used = set(columns)
    elif (chats := conversation_column(table)) and "instruction" not in args:
        turns = [_conversation(f"{where}, row {row + 1}", chats, talk, answered) for row, talk in table[chats].items()]
        if any("weight" in turn for talk in turns for turn in talk):
            say_once(f"{where}: the 'weight' of a turn is not read: the model learns the last turn")
        if any(earlier):
            turns = [talk if talk[0]["role"] == "system" else [*before, *talk] for before, talk in zip(earlier, turns)]
        frame = pd.DataFrame({"messages": pd.Series(turns, index=table.index, dtype=object)})
        full = frame["messages"].map(lambda messages: bool(messages[-1]["content"].strip())).astype(bool)
        count_skipped(skipped, "empty last answer", int((~full).sum()))
        frame = frame[full]
        used = {chats}
    else:
        chosen = {role: _role(where, table, args, role) for role in SYNONYMS if answered or role != "output"}
        distinct(chosen.items())
        texts = {role: "" if name is None else as_texts(where, name, table[name]) for role, name in chosen.items()}
        frame = pd.DataFrame({**texts, "output": texts.get("output", "x")}, index=table.index)
        if any(earlier):
            frame["before"] = pd.Series(earlier, index=table.index, dtype=object)
        frame = drop_empty(frame, ("instruction", "output"), skipped)
        used = set(chosen.values())
    if not len(frame):
        raise UserError(f"{where}: every row has an empty instruction or answer")
    category = args.get("category")
    if category:
        require_columns(where, table, [category])
        frame["category"] = table[category].reindex(frame.index)
        used.add(category)
    frame = _with_fields(frame, table, {*used, *ROLES})
    return frame, [c for c in frame if c not in ROLES], skipped


def _role(where: str | Path, table: pd.DataFrame, args: Mapping[str, Any], role: str) -> str | None:
    """The column of a role of ``SYNONYMS``; None for a missing input."""
    if args.get(role):
        require_columns(where, table, [args[role]])
    column = args.get(role) or next((name for name in SYNONYMS[role] if name in table), None)
    if column is None and role != "input":
        raise UserError(
            f"{where}: no column is the {role} ({', '.join(SYNONYMS[role])}); name it by data.args "
            f"[{{{role}: COLUMN}}], or that of plain text by [{{template: '{{COLUMN}}', output: COLUMN}}]; there are: "
            + ", ".join(map(str, table))
        )
    return column


def conversation_column(columns: Iterable[Any]) -> str:
    """The column of conversations among ``columns``; empty if there is none."""
    return next((name for name in ("messages", "conversations") if name in set(columns)), "")


def _earlier(where: str | Path, table: pd.DataFrame) -> list[list[dict[str, str]]]:
    """The turns before each row's own, in LLaMA-Factory's columns: a text for the system, and ``history``, pairs of a
    question and its answer. Empty if the table lacks these columns.
    """
    present = [name for name in ("system", "system_prompt", "history", "tools") if name in table]
    unread: dict[str, None] = {}
    earlier = []
    for row in table[present].to_dict("records") if present else ():
        texts = [row[name] for name in ("system", "system_prompt") if isinstance(row.get(name), str)]
        turns = [{"role": "system", "content": text} for text in texts if text.strip()][:1]
        pairs = row.get("history")
        if isinstance(pairs, list) and all(isinstance(p, list) and list(map(type, p)) == [str, str] for p in pairs):
            turns += [{"role": r, "content": text} for pair in pairs for r, text in zip(("user", "assistant"), pair)]
        elif as_text(pairs).strip():
            unread["history"] = None
        if as_text(row.get("tools")).strip() not in ("", "[]"):
            unread["tools"] = None
        earlier.append(turns)
    for name in unread:
        say_once(f"{where}: the column {name!r} is not read")
    return earlier


def _conversation(where: str, column: str, talk: Any, answered: bool = True) -> list[dict[str, Any]]:
    """The turns of a conversation with ``role`` and ``content``, also from ShareGPT's ``from`` and ``value``."""
    turns = [_turn(turn) for turn in talk] if isinstance(talk, list) else []
    good = [isinstance(t, dict) and isinstance(t.get("role"), str) and isinstance(t.get("content"), str) for t in turns]
    if all(good) and turns and not answered:
        turns = [*(turns[:-1] if turns[-1]["role"] == "assistant" else turns), {"role": "assistant", "content": "x"}]
    if len(turns) < 2 or not all(good) or turns[-1]["role"] != "assistant":
        raise UserError(
            f"{where}: {column!r} must be a list of objects with role and content that ends with 'assistant', or, as "
            f"ShareGPT has them, with from ({', '.join(_SHARE_GPT)}) and value, that ends with 'gpt'"
        )
    return turns


def _turn(turn: Any) -> Any:
    if isinstance(turn, dict) and "from" in turn and turn.get("role") is None:
        return {"role": _SHARE_GPT.get(str(turn["from"])), "content": turn.get("value")}
    return turn


def text_columns(args: Mapping[str, Any], columns: Iterable[Any]) -> dict[str, Any]:
    """The columns of labelled text: from ``data.args``, and a ``text_pair`` if it is among ``columns``."""
    pair = args.get("text_pair") or ("text_pair" if "text_pair" in set(columns) else None)
    return {"text": args.get("text", "text"), "text_pair": pair, "label": args.get("label", "label")}


def drop_empty(frame: pd.DataFrame, columns: tuple[str, ...], skipped: dict[str, int]) -> pd.DataFrame:
    """``frame`` without rows whose text is empty in one of ``columns``; counts them in ``skipped``, keeps the index."""
    keep = np.ones(len(frame), dtype=bool)
    for column in columns:
        if column in frame:
            keep &= np.array([bool(value.strip()) for value in frame[column]], dtype=bool)
    count_skipped(skipped, f"empty {' or '.join(c for c in columns if c in frame)}", int((~keep).sum()))
    return frame[keep]


def count_skipped(skipped: dict[str, int], reason: str, count: int) -> None:
    if count:
        skipped[reason] = skipped.get(reason, 0) + count


def distinct(columns: Iterable[tuple[str, str | None]]) -> None:
    """Refuse one column for two roles, each with its column, such as ``text`` and ``label``."""
    roles: dict[str, str] = {}
    for role, column in columns:
        if column in roles:
            raise UserError(f"data.args: {roles[column]} and {role} are the same column {column!r}; name one for each")
        if column is not None:
            roles[column] = role


def several_classes(labels: pd.Series, where: str) -> None:
    if labels.nunique() < 2:
        raise UserError(f"{where}: one class in {counted(len(labels), 'row')}; a classifier needs at least two")
