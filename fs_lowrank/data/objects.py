"""Data objects of a program, written as arrow files, from which every process of a run reads them.

An object is a ``datasets.Dataset``, a pandas ``DataFrame``, or a PyTorch dataset with a length whose items are mappings
of columns, or tuples ``(text, label)`` or ``(text, text_pair, label)``. Data are one object, which is divided among the
clients; a list of objects, one for each client; or a ``DatasetDict`` or mapping with ``train`` (one object, or such a
list) and perhaps ``validation`` and ``test``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fs_lowrank.data.stored import frame_of
from fs_lowrank.errors import UserError, user_errors

if TYPE_CHECKING:
    import datasets

#: rows that are written at a time
CHUNK = 1 << 10
_SPLITS = ("train", "validation", "test")
_EXPECTED = "a datasets.Dataset, a DataFrame or a torch Dataset with a length; rows go into Dataset.from_list"
#: columns of tuples, by their length
_TUPLES = {2: ("text", "label"), 3: ("text", "text_pair", "label")}


def store(data: Any, folder: Path) -> dict[str, Any]:
    """Write ``data`` into ``folder``, split by split and client by client.

    Returns:
        ``train``: the name of the file, or a pattern of several; perhaps ``validation`` and ``test``; ``clients``: the
        number of data sets of a list, else 0; ``digest``: SHA-256 over names and rows.
    Raises:
        UserError: an object of another kind, without rows, or with values that arrow cannot hold; one that raises an
            error, which the message names. OSError: a file cannot be written.
    """
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in splits or splits.keys() - set(_SPLITS):
        names = ", ".join(map(repr, splits)) or "none"
        raise UserError(f"data = a mapping with {names}: expected train, and perhaps validation and test")
    record: dict[str, Any] = {"clients": 0}
    digest = hashlib.sha256()
    for split, content in splits.items():
        parts = {f"{split}.arrow": (f"data[{split!r}]" if len(splits) > 1 else "data", content)}
        record[split] = f"{split}.arrow"
        if isinstance(content, (list, tuple)):
            if split != "train" or not content:
                raise UserError(f"data[{split!r}]: only train is a list, with one object for each client")
            record |= {"train": "client_*.arrow", "clients": len(content)}
            width = len(str(len(content)))
            parts = {f"client_{i:0{width}}.arrow": (f"data[{i - 1}]", part) for i, part in enumerate(content, start=1)}
        for name, (where, part) in parts.items():
            digest.update(json.dumps([name, _write(part, folder / name, where)]).encode())
    return {**record, "digest": digest.hexdigest()}


def as_table(data: Any, where: str = "data") -> pd.DataFrame:
    """The rows of one object as a table, as a run reads them.

    Raises:
        UserError: as for ``store``.
    """
    dataset = _dataset(data, where)
    with user_errors(f"{where}: making a table of it"):
        return frame_of(dataset)


def _write(data: Any, path: Path, where: str) -> str:
    """Write one object; returns the SHA-256 of its rows."""
    import pyarrow as pa

    dataset = _dataset(data, where)
    schema = dataset.features.arrow_schema  # with the names of classes
    digest = hashlib.sha256(json.dumps(schema.names).encode())
    with pa.ipc.new_stream(str(path), schema) as writer, user_errors(f"{where}: making arrow data of it"):
        for start in range(0, len(dataset), CHUNK):
            table = pa.Table.from_batches(dataset.with_format("arrow")[start : start + CHUNK].to_batches()).cast(schema)
            digest.update(json.dumps([table[name].to_pylist() for name in schema.names], default=str).encode())
            writer.write_table(table)
    return digest.hexdigest()


def _dataset(data: Any, where: str) -> datasets.Dataset:
    """An object of any kind as a data set of ``datasets``, with at least one row."""
    import datasets
    import pyarrow as pa
    import torch

    if isinstance(data, datasets.Dataset):
        dataset = data
    elif isinstance(data, pd.DataFrame):
        with user_errors(f"{where}: making arrow data of it"):
            frame = data.astype(dict.fromkeys(data.select_dtypes("category"), object)).rename(columns=str)
            dataset = datasets.Dataset(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None))
    elif isinstance(data, torch.utils.data.Dataset) and hasattr(data, "__len__"):
        rows = [_row(data, i, where) for i in range(len(data))]
        for i, row in enumerate(rows):  # from_list would drop columns that the first item lacks
            if row.keys() != rows[0].keys():
                raise UserError(
                    f"{where}, item {i}: it has the columns {', '.join(sorted(row))}, and the first item has "
                    f"{', '.join(sorted(rows[0]))}; give every item the same, with None for a missing value"
                )
        with user_errors(f"{where}: making arrow data of it"):
            dataset = datasets.Dataset.from_list(rows)
    else:
        raise UserError(f"{where} = {type(data).__name__}: expected {_EXPECTED}")
    if not len(dataset):
        raise UserError(f"{where}: it has no rows")
    return dataset


def _row(items: Any, i: int, data: str) -> dict[str, Any]:
    """An item of a torch dataset as a row."""
    with user_errors(f"{data}, item {i}: the data set"):
        item = items[i]
    if isinstance(item, (tuple, list)) and len(item) in _TUPLES:
        item = dict(zip(_TUPLES[len(item)], item))
    if not isinstance(item, Mapping):
        raise UserError(
            f"{data}, item {i} = {type(item).__name__}: expected a mapping of columns, (text, label) or (text, "
            "text_pair, label)"
        )
    return {str(name): value.tolist() if hasattr(value, "tolist") else value for name, value in item.items()}
