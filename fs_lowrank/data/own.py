"""The user's own files: tables, arrow data on disk (``stored``), and several of them by a pattern."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data import stored
from fs_lowrank.data.files import SUFFIXES as TABLES
from fs_lowrank.data.files import as_texts, file_digest, natural, read_table
from fs_lowrank.data.labels import from_flags, label_text
from fs_lowrank.data.stored import Stored, StoredFrame, class_names, is_saved, is_stored, open_stored
from fs_lowrank.data.tables import (
    CAUSAL_LM,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    ROLES,
    RawData,
    classified,
    count_skipped,
    flags_of,
    instructions,
    require_columns,
    talks_in,
    text_columns,
)
from fs_lowrank.data.template import is_own
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.settings.metrics import LANGUAGE

SUFFIXES = (*TABLES, *stored.SUFFIXES)
# Arguments of tokenization, for all data sets.
COMMON_ARGS = ("max_len",)
LANGUAGE_ARGS = (*COMMON_ARGS, "template", "loss_on")
OWN_ARGS = (*COMMON_ARGS, "text", "text_pair", "label", "quoting", "test", "validation")
OWN_LANGUAGE_ARGS = (*LANGUAGE_ARGS, "instruction", "input", "output", "category", "quoting", "test", "validation")
#: model.task -> what labels are, where they are not classes
LABELS = {"SequenceRegression": REGRESSION, "MultiLabelClassification": MULTI_LABEL}
_PATTERN = re.compile(r"[*?\[]")


def under(root: Path, name: str) -> Path:
    """The path called ``name``, below ``root`` or, if it or ``root`` is not there, below the working folder."""
    path = Path(name).expanduser()
    below = path if path.is_absolute() else root / path
    if below.exists() or _matching(below):
        return below
    return path if path.exists() or _matching(path) or not root.is_dir() else below


def is_files(path: Path) -> bool:
    """Whether ``path`` is what ``read_own`` reads: a file by its suffix, a folder of ``save_to_disk``, or a pattern."""
    return path.name.lower().endswith(SUFFIXES) or is_saved(path) or bool(_matching(path)) or _is_pattern(path)


def _is_pattern(path: Path) -> bool:
    return bool(_PATTERN.search(str(path))) and not path.exists()


def _matching(path: Path) -> list[Path]:
    """The files and folders of ``save_to_disk`` that a pattern matches, in the order of their names and numbers."""
    if not _is_pattern(path):
        return []
    found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    there = (p for p in found if is_saved(p) or p.is_file() and p.name.lower().endswith(SUFFIXES))
    return sorted(there, key=lambda path: natural(str(path)))


def refuse_tables(folder: Path, name: str) -> None:
    """Raise ``UserError`` if ``folder``, which ``data.type`` calls ``name``, has files of tables and no folders."""
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    tables = sorted((p.name for p in there if p.name.lower().endswith(SUFFIXES)), key=natural)
    if tables and not any(path.is_dir() for path in there):
        raise UserError(
            f"data.type = {name!r}: a folder of {len(tables)} files such as {tables[0]}; name the file, or several by "
            f"a pattern: {name.rstrip('/')}/*{Path(tables[0]).suffix}"
        )


def _files(path: Path, named_by: str) -> list[Path]:
    """The file ``path``, or all files that it matches.

    Raises:
        UserError: no file matches.
    """
    if not _is_pattern(path):
        return [path]
    if not (found := _matching(path)):
        raise UserError(f"no file matches {path}, of those that end with {', '.join(SUFFIXES)}; check {named_by}")
    return found


def roles(path: Path, args: Mapping[str, Any]) -> dict[str, Path]:
    """The user's files by role: ``path`` for training, and those named in ``data.args``."""
    folder = Path(_PATTERN.split(str(path))[0]).parent if _is_pattern(path) else path.parent
    held_out = {role: str(args[role]) for role in ("validation", "test") if args.get(role)}
    return {"train": path, **{role: under(folder, name) for role, name in held_out.items()}}


def digests(path: Path, args: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the user's files by role; of several files, and of folders, over the names and digests of all.

    Missing files are left out here; reading them raises the error.
    """
    found = {}
    for role, place in roles(path, args).items():
        files = [
            file for each in _matching(place) or [place] for file in ([each] if each.is_file() else each.rglob("*"))
        ]
        own = {str(f): file_digest(f) for f in sorted(files) if f.is_file()}
        if own:
            whole = hashlib.sha256("".join(f"{Path(name).name} {of}\n" for name, of in own.items()).encode())
            found[role] = own[str(place)] if str(place) in own else whole.hexdigest()
    return found


def read_own(
    path: Path,
    args: Mapping[str, Any],
    takes: Callable[..., dict[str, Any]],
    language: bool | None,
    task: str = "",
    read: Callable[..., pd.DataFrame] = read_table,
) -> RawData:
    """The user's data at ``path``.

    Args:
        args: of ``data.args``. takes: checks them, called with those that the data take.
        language: whether it is instructions with answers; None: as its columns say. task: ``model.task``.
        read: reads the training file, if that is a table.
    """
    tables = _tables(path, args, read)
    if language is None:
        present = set(tables["train"][1])
        asked = {"text", "label"} & set(args)
        language = not asked and (
            task in LANGUAGE
            or is_own(args.get("template", "auto"))
            or bool({"instruction", "input", "output"} & set(args))
            or bool(talks_in(present))
            or {"instruction"} < present
            and not {"text", "label"} <= present
        )
    source = f"the user's {'data' if _is_pattern(path) or is_stored(path) else 'file'} {path.name}"
    if not language:
        takes(*OWN_ARGS)
        return labelled(tables, args, source, LABELS.get(task, CLASSIFICATION))
    takes(*OWN_LANGUAGE_ARGS)
    frames: dict[str, Any] = {}
    fields: list[str] = []
    skipped: dict[str, int] = {}
    for role, (where, table) in tables.items():
        reads = _stored_instructions if isinstance(table, Stored) else instructions
        frames[role], column_names, left_out = reads(table, where, args)
        fields = column_names if role == "train" else fields
        for reason, count in left_out.items():
            count_skipped(skipped, reason, count)
    return RawData.of(CAUSAL_LM, frames, [], fields, source, skipped, fingerprint=_state(tables))


def _tables(path: Path, args: Mapping[str, Any], read: Callable[..., pd.DataFrame]) -> dict[str, tuple[str, Any]]:
    """By role, what it is called and the table, a DataFrame or ``Stored``."""
    tables: dict[str, tuple[str, Any]] = {}
    quoting, quoted, trained = args.get("quoting"), False, set[Path]()
    for role, place in roles(path, args).items():
        named_by = "data.root and data.type" if role == "train" else f"data.args: {role}"
        files = _files(place, named_by)
        trained = trained or {file.resolve() for file in files}  # training is the first
        if role != "train" and (same := next((file for file in files if file.resolve() in trained), None)):
            raise UserError(f"data.args: {role}: {same} is a file of the training rows; name one with other rows")
        if len(stored_ones := [file for file in files if is_stored(file)]) not in (0, len(files)):
            other = next(file for file in files if file not in stored_ones)
            raise UserError(f"{place}: matches {other.name} and {stored_ones[0].name}; expected files of one kind")
        names = [os.path.relpath(file, os.path.commonpath([f.parent for f in files])) for file in files]
        if stored_ones:
            for split, table in open_stored(files, names).items():
                if role == "train" and split in ("train", "validation", "test"):
                    tables[split] = f"{place}, split {split}" if split != "train" else str(place), table
                elif split == "train":
                    tables[role] = str(place), table
            continue
        quoted = quoted or any({".csv", ".tsv"} & {s.lower() for s in file.suffixes[-2:]} for file in files)
        frames = [read(f, quoting) if role == "train" else read_table(f, quoting, named_by) for f in files]
        if len(files) > 1:
            frames = [f if "file" in f else f.assign(file=name) for f, name in zip(frames, names)]
        tables[role] = str(place), pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    if quoting is not None and not quoted:
        say_once(f"data.args.0.quoting = {quoting} has no effect: it is for files that end with .csv or .tsv")
    return tables


def look_at(path: Path, rows: int) -> pd.DataFrame:
    """The table at ``path``; of data that stay on disk, so many of its rows, evenly spaced.

    Raises:
        UserError: it cannot be read, or is not what ``read_own`` reads.
    """
    if not is_files(path):
        raise UserError(
            f"{path}: expected a file that ends with {', '.join(SUFFIXES)}, a folder of save_to_disk, or a pattern"
            + "; there is nothing of this name" * (not path.exists())
        )
    _, table = _tables(path, {}, partial(read_table, named_by="the name of the file"))["train"]
    if not isinstance(table, Stored):
        return table
    return table.rows(np.unique(np.linspace(0, len(table) - 1, min(rows, len(table))).astype(int)))


def stem_of(path: Path) -> str:
    """What a configuration for ``path`` may be called: the last name in it that is no pattern."""
    return next((Path(part).stem for part in reversed(path.parts) if not _PATTERN.search(part)), "") or "data"


def _state(tables: Mapping[str, tuple[str, Any]]) -> str:
    """What stands for the content of tables that are stored; empty if none is."""
    states = [table.state() for _, table in tables.values() if isinstance(table, Stored)]
    return hashlib.sha256(repr(states).encode()).hexdigest() if states else ""


def labelled(tables: Mapping[str, tuple[str, Any]], args: Mapping[str, Any], source: str, kind: str) -> RawData:
    """Labelled text.

    Args:
        tables: by role, what it is called and the table, a DataFrame or ``Stored``.
        args: of ``data.args``, with the columns. kind: of labels: ``CLASSIFICATION``, ``REGRESSION``, ``MULTI_LABEL``.
    """
    train = tables["train"][1]
    columns = text_columns(args, train)
    flags = flags_of(args, kind)
    labels, texts = flags or [str(columns["label"])], [str(columns[c]) for c in ("text", "text_pair") if columns[c]]
    columns = {**columns, "label": "label"} if flags else columns
    outlines = {}
    for role, (where, table) in tables.items():
        require_columns(where, table, [*texts, *labels])
        frame = table.outline(texts, labels) if isinstance(table, Stored) else table
        # The hub's test splits carry -1 for every label.
        if role == "train" or not (isinstance(table, Stored) and (frame[labels[0]].map(label_text) == "-1").all()):
            outlines[role] = where, from_flags(where, frame, flags) if flags else frame
    names = class_names(train.dataset.features[labels[0]]) if isinstance(train, Stored) and not flags else None
    raw = classified(outlines, columns, source, flags or names, kind, fingerprint=_state(tables))
    for role in outlines:
        if isinstance(table := tables[role][1], Stored):
            kept = getattr(raw, role).drop(columns=["text", "text_pair"], errors="ignore")
            roles_of = {column: role for role, column in columns.items() if column and role != "label"}
            convert = partial(_texts, tables[role][0], roles_of)
            setattr(raw, role, StoredFrame(kept, table, list(roles_of.values()), convert))
    return raw


def _texts(where: str, roles_of: Mapping[str, str], rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({role: as_texts(where, column, rows[column]) for column, role in roles_of.items()})


def _stored_instructions(
    table: Stored, where: str, args: Mapping[str, Any]
) -> tuple[StoredFrame, list[str], dict[str, int]]:
    """What ``instructions`` gives, of a table whose texts stay on disk."""
    skipped: dict[str, int] = {}
    kept: list[pd.DataFrame] = []
    texts: list[str] = []
    small = pd.DataFrame(table.fields([]), index=range(len(table)))
    for rows in table.chunks():
        frame, fields, left_out = instructions(rows, where, args, whole=False)
        texts = [name for name in frame if name in ROLES]
        own = [name for name in fields if name in small]
        category = {"category": frame["category"]} if args.get("category") else {}
        kept.append(pd.DataFrame({**category, **{n: small[n].loc[frame.index] for n in own}}, index=frame.index))
        for reason, count in left_out.items():
            count_skipped(skipped, reason, count)
    whole = pd.concat(kept)
    for name in table.more:
        whole[name] = small[name].loc[whole.index]
    if not len(whole):
        raise UserError(f"{where}: every row has an empty instruction or answer")

    def convert(rows: pd.DataFrame) -> pd.DataFrame:
        return instructions(rows, where, args, whole=False)[0][texts]

    return StoredFrame(whole, table, texts, convert), list(whole), skipped
