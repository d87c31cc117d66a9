"""The user's own files: tables, arrow data on disk (``stored``), and several of them by a pattern."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank.data import stored
from fs_lowrank.data.files import SUFFIXES as TABLES
from fs_lowrank.data.files import natural, read_table
from fs_lowrank.data.stored import is_saved, is_stored, read_stored
from fs_lowrank.data.tables import (
    CAUSAL_LM,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    RawData,
    conversation_column,
    count_skipped,
    instructions,
    labelled,
)
from fs_lowrank.data.template import is_custom
from fs_lowrank.errors import UserError
from fs_lowrank.jobs.files import file_digest
from fs_lowrank.settings.metrics import LANGUAGE

SUFFIXES = (*TABLES, *stored.SUFFIXES)
# Arguments of tokenization, for all data sets.
COMMON_ARGS = ("max_len",)
LANGUAGE_ARGS = (*COMMON_ARGS, "template", "loss_on")
OWN_ARGS = (*COMMON_ARGS, "text", "text_pair", "label", "quoting", "test", "validation")
OWN_LANGUAGE_ARGS = (*LANGUAGE_ARGS, "instruction", "input", "output", "category", "quoting", "test", "validation")
#: model.task -> the kind of labels other than classes
LABELS = {"SequenceRegression": REGRESSION, "MultiLabelClassification": MULTI_LABEL}
HELD_OUT = ("validation", "test")
_PATTERN = re.compile(r"[*?\[]")


def under(root: Path, name: str) -> Path:
    """The path ``name`` below ``root`` or, if it or ``root`` does not exist, below the working folder."""
    path = Path(name).expanduser()
    below = path if path.is_absolute() else root / path
    if below.exists() or _matching(below):
        return below
    return path if path.exists() or _matching(path) or not root.is_dir() else below


def is_files(path: Path) -> bool:
    """Whether ``read_user_files`` reads ``path``: a file by its suffix, a folder of ``save_to_disk``, or a pattern."""
    return path.name.lower().endswith(SUFFIXES) or is_saved(path) or bool(_matching(path)) or _is_pattern(path)


def _is_pattern(path: Path) -> bool:
    return bool(_PATTERN.search(str(path))) and not path.exists()


def _matching(path: Path) -> list[Path]:
    """The files and folders of ``save_to_disk`` that a pattern matches, in the order of their names and numbers."""
    if not _is_pattern(path):
        return []
    paths = [Path(name) for name in glob.glob(str(path), recursive=True)]
    readable = (p for p in paths if is_saved(p) or p.is_file() and p.name.lower().endswith(SUFFIXES))
    return sorted(readable, key=lambda path: natural(str(path)))


def _files(path: Path) -> list[Path]:
    """The file ``path``, or all files that it matches.

    Raises:
        UserError: no file matches.
    """
    if not _is_pattern(path):
        return [path]
    if not (paths := _matching(path)):
        raise UserError(f"no file matches {path} and ends with {', '.join(SUFFIXES)}")
    return paths


def roles(path: Path, args: Mapping[str, Any]) -> dict[str, Path]:
    """The user's files by role: ``path`` for training, and the files named in ``data.args``."""
    folder = Path(_PATTERN.split(str(path))[0]).parent if _is_pattern(path) else path.parent
    held_out = {role: str(args[role]) for role in HELD_OUT if args.get(role)}
    return {"train": path, **{role: under(folder, name) for role, name in held_out.items()}}


def digests(path: Path, args: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the user's files by role; for several files and for folders, over the names and digests of all.

    Missing files are left out here; reading them raises the error.
    """
    hashes = {}
    for role, source in roles(path, args).items():
        files = [
            file for item in _matching(source) or [source] for file in ([item] if item.is_file() else item.rglob("*"))
        ]
        sums = {str(f): file_digest(f) for f in sorted(files) if f.is_file()}
        if sums:
            joint = hashlib.sha256("".join(f"{Path(name).name} {value}\n" for name, value in sums.items()).encode())
            hashes[role] = sums[str(source)] if str(source) in sums else joint.hexdigest()
    return hashes


def read_file(path: Path, quoting: bool | None = None) -> dict[str, Any]:
    """The tables in a file, or a folder of ``save_to_disk``, by split; without splits all rows are ``train``."""
    return read_stored(path) if is_stored(path) else {"train": read_table(path, quoting)}


def read_user_files(
    path: Path,
    args: Mapping[str, Any],
    check: Callable[..., dict[str, Any]],
    language: bool | None,
    task: str = "",
    read: Callable[..., dict[str, pd.DataFrame]] = read_file,
) -> RawData:
    """The user's data at ``path``.

    Args:
        args: of ``data.args``. check: checks them; called with the names that the data support.
        language: whether the rows are instructions with answers; None: the columns decide. task: ``model.task``.
        read: reads the training file.
    """
    tables = _tables(path, args, read)
    if language is None:
        present = set(tables["train"][1])
        labelled_args = {"text", "label"} & set(args)
        language = not labelled_args and (
            task in LANGUAGE
            or is_custom(args.get("template", "auto"))
            or bool({"instruction", "input", "output"} & set(args))
            or bool(conversation_column(present))
            or {"instruction"} < present
            and not {"text", "label"} <= present
        )
    source = f"the user's {'data' if _is_pattern(path) or is_stored(path) else 'file'} {path.name}"
    if not language:
        check(*OWN_ARGS)
        return labelled(tables, args, source, LABELS.get(task, CLASSIFICATION))
    check(*OWN_LANGUAGE_ARGS)
    frames: dict[str, pd.DataFrame] = {}
    fields: list[str] = []
    skipped: dict[str, int] = {}
    for role, (where, table) in tables.items():
        frames[role], column_names, left_out = instructions(table, where, args)
        fields = column_names if role == "train" else fields
        for reason, count in left_out.items():
            count_skipped(skipped, reason, count)
    return RawData.of(CAUSAL_LM, frames, [], fields, source, skipped)


def _tables(
    path: Path, args: Mapping[str, Any], read: Callable[..., dict[str, pd.DataFrame]] = read_file
) -> dict[str, tuple[str, pd.DataFrame]]:
    """Role → name for messages, and table."""
    tables: dict[str, tuple[str, pd.DataFrame]] = {}
    trained = set[Path]()
    for role, source in roles(path, args).items():
        files = _files(source)
        trained = trained or {file.resolve() for file in files}  # training is the first
        if role != "train" and (shared := next((file for file in files if file.resolve() in trained), None)):
            raise UserError(f"data.args: {role}: {shared} is a file of the training rows; name one with other rows")
        parts = [(read if role == "train" else read_file)(file, args.get("quoting")) for file in files]
        if len(files) > 1:
            folder = os.path.commonpath([file.parent for file in files])
            for part, name in zip(parts, (os.path.relpath(file, folder) for file in files)):
                part.update({split: f.assign(file=name) for split, f in part.items() if "file" not in f})
        for split in ("train", *HELD_OUT) if role == "train" else ("train",):
            if frames := [part[split] for part in parts if split in part]:
                table = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
                # A file without names of classes has to have classes of the others.
                names = {k: v for frame in reversed(frames) for k, v in frame.attrs.get("classes", {}).items()}
                table.attrs = {"classes": names}
                where = str(source) if split == "train" else f"{source}, split {split}"
                tables[role if split == "train" else split] = where, table
    return tables


def train_table(path: Path) -> pd.DataFrame:
    """The training table at ``path``.

    Raises:
        UserError: it cannot be read, or ``read_user_files`` does not read it.
    """
    if not is_files(path):
        raise UserError(
            f"{path}: expected a file that ends with {', '.join(SUFFIXES)}, a folder of save_to_disk, or a pattern"
            + "; there is nothing of this name" * (not path.exists())
        )
    return _tables(path, {})["train"][1]


def stem_of(path: Path) -> str:
    """A name for a configuration of ``path``: the last part of the path that is no pattern."""
    return next((Path(part).stem for part in reversed(path.parts) if not _PATTERN.search(part)), "") or "data"
