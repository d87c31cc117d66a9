"""``RawData``, the common form of all data sets, and its construction from tables with named columns."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.files import NESTED, as_text, as_texts
from fs_lowrank.data.labels import kinds_of, label_text, numbers, say_near, sets, without_label
from fs_lowrank.data.template import SYNONYMS, is_own, prompted, prompts
from fs_lowrank.errors import UserError, nearest, say_once

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
            images ``image`` (int64, a row of ``images``) and ``label``; and those in ``fields``. ``validation`` and
            ``test`` are None without an official split. The index of a frame is the row number in the original file or
            table, from 0; a header and empty lines are not counted.
        label_names: empty for a causal language model; of a regression, the name of the label.
        fields: further columns that a partitioner may use, such as ``domain``.
        source: a description of where the data come from.
        skipped: number of rows left out, by reason.
        columns: of classification, the column of the source that is ``text``, perhaps ``text_pair``, and ``label``.
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
    fingerprint: str = ""
    images: np.ndarray | None = field(default=None, repr=False)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, task: str, frames: Mapping[str, pd.DataFrame], *rest: Any, **more: Any) -> RawData:
        """From frames by role (``train``, maybe ``validation``, ``test``); ``rest`` begins with ``label_names``."""
        return cls(task, frames["train"], frames.get("validation"), frames.get("test"), *rest, **more)

    def __post_init__(self) -> None:
        self.fingerprint = self.fingerprint or fingerprint(self)

    @property
    def num_labels(self) -> int:
        """Number of classes; 0 for a causal language model."""
        return len(self.label_names)


def classified(
    tables: Mapping[str, tuple[str, pd.DataFrame]],
    columns: Mapping[str, str | None],
    source: str,
    names: list[str] | None,
    task: str = CLASSIFICATION,
    **more: Any,
) -> RawData:
    """Labelled text from tables with named columns.

    Args:
        names: the classes in order, and labels are then their numbers. None: labels are classes, which are sorted.
        task: ``CLASSIFICATION``, ``REGRESSION`` or ``MULTI_LABEL``. more: attributes of ``RawData``.
    """
    skipped: dict[str, int] = {}
    frames: dict[str, pd.DataFrame] = {}
    used = [column for column in columns.values() if column]
    distinct(columns)
    for role, (where, table) in tables.items():
        require_columns(where, table, used)
        unlabelled = without_label(table[columns["label"]])
        if unlabelled.all():
            raise UserError(f"{where}: no row has a label in column {columns['label']!r}")
        count_skipped(skipped, "empty label", int(unlabelled.sum()))
        table = table[~unlabelled]
        frame = pd.DataFrame({"text": table[columns["text"]]})
        if columns.get("text_pair"):
            frame["text_pair"] = table[columns["text_pair"]]
        frame["label"] = table[columns["label"]]
        frame = _with_fields(frame, table, used)
        for text in ("text", "text_pair"):
            if text in frame:
                frame[text] = as_texts(where, str(columns[text]), frame[text])
        frames[role] = drop_empty(frame, ("text", "text_pair"), skipped)
        if not len(frames[role]):
            raise UserError(f"{where}: every row has an empty text")
    names = _coded(task, frames, tables, str(columns["label"]), names)
    fixed = {"text", "text_pair", "label"}
    # Which file a row is from divides training rows alone where held-out rows are in files of their own.
    everywhere = {"file", *(c for c in frames["train"] if all(c in frame for frame in frames.values()))}
    fields = [c for c in frames["train"] if c not in fixed and c in everywhere]
    named = {role: column for role, column in columns.items() if column}
    return RawData.of(task, frames, names, fields, source, skipped, columns=named, **more)


def _coded(
    task: str,
    frames: dict[str, pd.DataFrame],
    tables: Mapping[str, tuple[str, pd.DataFrame]],
    column: str,
    names: list[str] | None,
) -> list[str]:
    """Code the labels of ``frames``; the names of the classes, or of the label."""
    train_where = tables["train"][0]
    if task == REGRESSION:
        for role, frame in frames.items():
            frames[role] = frame.assign(label=numbers(tables[role][0], column, frame["label"]))
        return [column]
    if task == MULTI_LABEL:
        index = None if names is None else {str(i): i for i in range(len(names))}
        for role, frame in frames.items():  # training is the first
            coded, index = sets(tables[role][0], column, frame["label"], index)
            frames[role] = frame.assign(label=coded)
        return names or list(index or ())
    for role, frame in frames.items():
        _check_single(tables[role][0], column, frame["label"])
    if names is None:
        _check_classes(train_where, column, frames["train"]["label"])
        kinds = kinds_of(frames["train"]["label"])
        names = [str(kind) for kind in kinds]
        say_near(train_where, column, names)
        rows = len(frames["train"])
        if len(names) > 20 and 2 * len(names) > rows:
            raise UserError(
                f"{train_where}: column {column!r} has {len(names)} different values in {rows} rows; "
                "expected classes; name the column of the labels by data.args [{label: COLUMN}]"
            )
        index = {str(kind): i for i, kind in enumerate(kinds)}
    else:
        index = {str(i): i for i in range(len(names))}
    for role, frame in frames.items():
        label = frame["label"].map(lambda value: index.get(label_text(value)))
        if label.isna().any():
            unknown = frame["label"][label.isna()].iloc[0]
            raise UserError(
                f"{tables[role][0]}: label {unknown!r} does not occur in training{nearest(str(unknown), names)}; "
                f"its labels are {', '.join(names[:10])}"
            )
        frames[role] = frame.assign(label=label.astype(np.int64))
    several_classes(frames["train"]["label"], train_where)
    return names


def with_fraction(labels: pd.Series) -> Any:
    """The first number with a fraction among ``labels``; None if there is none, or if some are not numbers."""
    try:
        numbers = [float(str(value)) for value in labels]
    except ValueError:
        return None
    fractions = (v for v, n in zip(labels, numbers) if math.isfinite(n) and not n.is_integer())
    return next(fractions, None)


def _check_single(where: str, column: str, labels: pd.Series) -> None:
    for row, value in labels.items():
        if isinstance(value, NESTED):
            raise UserError(
                f"{where}, row {row + 1}: label {value!r} in column {column!r}: expected one class; for "
                "sets of classes set model.task MultiLabelClassification"
            )


def _check_classes(where: str, column: str, labels: pd.Series) -> None:
    """Refuse numbers with fractions, and say that whole floating-point numbers are taken as classes."""
    fraction = with_fraction(labels)
    if fraction is not None:
        raise UserError(
            f"{where}: the labels in column {column!r} are numbers with fractions, such as {fraction}, which is a "
            "regression: set model.task SequenceRegression; or write classes as words, or name another column by "
            "data.args [{label: COLUMN}]"
        )
    if any(isinstance(value, float) or re.fullmatch(r"-?\d+\.0+", str(value).strip()) for value in labels):
        names = ", ".join(map(str, kinds_of(labels)[:10]))
        say_once(f"{where}: column {column!r} has floating-point numbers; each is taken as a class: {names}")


def _with_fields(frame: pd.DataFrame, table: pd.DataFrame, without: Collection[Any]) -> pd.DataFrame:
    """``frame`` with the other columns of ``table`` by which rows may be divided, of the same rows."""
    others = [c for c in table if c not in without and c not in frame and _is_field(table[c])]
    return frame.join(table[others])


def _is_field(column: pd.Series) -> bool:
    return all(value is None or isinstance(value, (str, int, float, bool, np.generic)) for value in column)


def instructions(
    table: pd.DataFrame, where: str | Path, args: Mapping[str, Any], whole: bool = True, answered: bool = True
) -> tuple[pd.DataFrame, list[str], dict[str, int]]:
    """``(frame, fields, skipped)`` from instruction data, or from conversations in the column ``messages``.

    Args:
        table: its index are the numbers of its rows. whole: it is not a part of a table, which may be empty.
        answered: the table has the answers; without them they are a stand-in.
    """
    skipped: dict[str, int] = {}
    used: set[str | None]
    own = is_own(args.get("template", "auto"))
    earlier = None if own else _earlier(where, table)
    earlier = None if whole and not any(earlier or ()) else earlier
    if own:
        frame, columns = prompts(table, where, args, answered)
        frame = drop_empty(frame, ("instruction", "output") if prompted(args["template"]) else ("output",), skipped)
        used = set(columns)
    elif (talks := talks_in(table)) and "instruction" not in args:
        turns = [_conversation(f"{where}, row {row + 1}", talks, talk, answered) for row, talk in table[talks].items()]
        if any("weight" in turn for talk in turns for turn in talk):
            say_once(f"{where}: the 'weight' of a turn is not read: the last turn is what is learned")
        if earlier:
            turns = [talk if talk[0]["role"] == "system" else [*more, *talk] for more, talk in zip(earlier, turns)]
        frame = pd.DataFrame({"messages": pd.Series(turns, index=table.index, dtype=object)})
        full = frame["messages"].map(lambda messages: bool(messages[-1]["content"].strip())).astype(bool)
        count_skipped(skipped, "empty last answer", int((~full).sum()))
        frame = frame[full]
        used = {talks}
    else:
        chosen = {role: _role(where, table, args, role) for role in SYNONYMS if answered or role != "output"}
        distinct(chosen)
        texts = {role: "" if name is None else as_texts(where, name, table[name]) for role, name in chosen.items()}
        frame = pd.DataFrame({**texts, "output": texts.get("output", "x")}, index=table.index)
        if earlier is not None:
            frame["before"] = pd.Series(earlier, index=table.index, dtype=object)
        frame = drop_empty(frame, ("instruction", "output"), skipped)
        used = set(chosen.values())
    if whole and not len(frame):
        raise UserError(f"{where}: every row has an empty instruction or answer")
    category = args.get("category")
    if category:
        require_columns(where, table, [category])
        frame["category"] = table[category].reindex(frame.index)
        used.add(category)
    frame = _with_fields(frame, table, {*used, *ROLES})
    return frame, [c for c in frame if c not in ROLES], skipped


def _role(where: str | Path, table: pd.DataFrame, args: Mapping[str, Any], role: str) -> str | None:
    """The column of a role of ``SYNONYMS``; None for an input that is not there."""
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


def talks_in(there: Iterable[Any]) -> str:
    """The column of conversations among those that are ``there``; empty if there is none."""
    return next((name for name in ("messages", "conversations") if name in set(there)), "")


def _earlier(where: str | Path, table: pd.DataFrame) -> list[list[dict[str, str]]] | None:
    """The turns before those of each row, as LLaMA-Factory's data have them: a text for the system, and ``history``,
    pairs of a question and its answer. None if the table has no such columns.
    """
    there = [name for name in ("system", "system_prompt", "history", "tools") if name in table]
    unread: dict[str, None] = {}
    earlier = []
    for row in table[there].to_dict("records") if there else ():
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
    return earlier if there else None


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


def text_columns(args: Mapping[str, Any], there: Iterable[Any]) -> dict[str, Any]:
    """The columns of labelled text: those in ``data.args``, and of those that are ``there`` a ``text_pair``."""
    pair = args.get("text_pair") or ("text_pair" if "text_pair" in set(there) else None)
    return {"text": args.get("text", "text"), "text_pair": pair, "label": args.get("label", "label")}


def flags_of(args: Mapping[str, Any], kind: str) -> list[str]:
    """The columns of 0 and 1 that ``label`` of ``data.args`` lists, of sets of classes; none if it is one column.

    Raises:
        UserError: the data are not sets of classes.
    """
    flags = args["label"] if isinstance(args.get("label"), list) else []
    if flags and kind != MULTI_LABEL:
        raise UserError(
            f"data.args: label = {flags}: several columns are sets of classes; set model.task MultiLabelClassification"
        )
    return flags


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


def distinct(columns: Mapping[str, str | None]) -> None:
    """Refuse one column under two names of ``data.args``, such as ``text`` and ``label``."""
    names: dict[str, str] = {}
    for role, column in columns.items():
        if column is not None and names.setdefault(column, role) != role:
            raise UserError(
                f"data.args: {names[column]} and {role} are the same column {column!r}; name a column for each"
            )


def require_columns(where: str | Path, table: pd.DataFrame, columns: list[str]) -> None:
    for column in columns:
        if column not in table:
            present = [str(name) for name in table]
            raise UserError(f"{where}: no column {column!r}{nearest(column, present)}; there are: {', '.join(present)}")


def several_classes(labels: pd.Series, where: str) -> None:
    if labels.nunique() < 2:
        raise UserError(f"{where}: all {len(labels)} rows have one class; a classifier needs at least two")


def fingerprint(raw: RawData) -> str:
    digest = hashlib.sha256(json.dumps([raw.task, raw.label_names]).encode())
    for part in (raw.train, raw.validation, raw.test):
        if part is None:
            digest.update(b"none")
            continue
        for column in part:
            digest.update(json.dumps([str(column), part[column].tolist()], default=str).encode())
    if raw.images is not None:
        digest.update(f"images {raw.images.shape}".encode() + raw.images.tobytes())
    return digest.hexdigest()
