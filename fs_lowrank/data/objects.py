"""Data that a program holds as objects, written as arrow files, from which every process of a run reads them.

An object is a ``datasets.Dataset``, a pandas ``DataFrame``, or a PyTorch dataset with a length whose items are mappings
of columns, or tuples ``(text, label)`` or ``(text, text_pair, label)``. Data are one object, which is divided among the
clients; a list of objects, one for each client; or a ``DatasetDict`` or mapping with ``train`` (one object, or such a
list) and perhaps ``validation`` and ``test``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fs_lowrank.data.stored import CHUNK, class_names
from fs_lowrank.errors import UserError, users_own

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_SPLITS = ("train", "validation", "test")
_EXPECTED = "a datasets.Dataset, a DataFrame or a torch Dataset with a length"
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
        named = ", ".join(map(repr, splits)) or "none"
        raise UserError(f"data = a mapping with {named}: expected train, and perhaps validation and test")
    about: dict[str, Any] = {"clients": 0}
    digest = hashlib.sha256()
    for split, held in splits.items():
        parts = {f"{split}.arrow": (f"data[{split!r}]" if len(splits) > 1 else "data", held)}
        about[split] = f"{split}.arrow"
        if isinstance(held, (list, tuple)):
            if split != "train" or not held:
                raise UserError(
                    f"data[{split!r}] = a list of {len(held)}: only train is a list, with one for each client"
                )
            about |= {"train": "client_*.arrow", "clients": len(held)}
            width = len(str(len(held)))
            parts = {f"client_{i:0{width}}.arrow": (f"data[{i - 1}]", own) for i, own in enumerate(held, start=1)}
        for name, (where, own) in parts.items():
            digest.update(json.dumps([name, _write(own, folder / name, where)]).encode())
    return {**about, "digest": digest.hexdigest()}


def as_table(held: Any, where: str = "data") -> pd.DataFrame:
    """The rows of one object as a table of Python's own values, as a run reads them.

    A missing value is None, and a class of a ``ClassLabel`` its name.

    Raises:
        UserError: as for ``store``.
    """
    dataset = _dataset(held, where)
    rows = [row for part in _chunks(dataset, where) for row in part.to_pylist()]
    table = pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=object) for name in dataset.features})
    for name, feature in dataset.features.items():
        if names := dict(enumerate(class_names(feature) or ())):
            table[name] = [
                [names.get(v, v) for v in value] if isinstance(value, list) else names.get(value, value)
                for value in table[name]
            ]
    return table


def _write(held: Any, path: Path, where: str) -> str:
    """Write one object; the SHA-256 of its rows."""
    import pyarrow as pa

    dataset = _dataset(held, where)
    schema = dataset.features.arrow_schema  # with the names of classes
    digest = hashlib.sha256(json.dumps(schema.names).encode())
    with pa.ipc.new_stream(str(path), schema) as writer:
        for table in _chunks(dataset, where):
            digest.update(json.dumps([table[name].to_pylist() for name in schema.names], default=str).encode())
            writer.write_table(table)
    return digest.hexdigest()


def _chunks(dataset: datasets.Dataset, where: str) -> Iterator[pa.Table]:
    """The rows as arrow tables."""
    import pyarrow as pa

    arrow, schema = dataset.with_format("arrow"), dataset.features.arrow_schema
    for start in range(0, len(dataset), CHUNK):
        with users_own(f"{where}, from item {start}: the data set"):
            rows = arrow[start : start + CHUNK]
        with users_own(f"{where}: making arrow data of it"):
            part = pa.Table.from_batches(rows.to_batches()).cast(schema)
        yield part


def _dataset(held: Any, where: str) -> datasets.Dataset:
    """An object of any kind as a data set of ``datasets``, with at least one row."""
    import datasets
    import pyarrow as pa
    import torch

    if isinstance(held, datasets.Dataset):
        dataset = held
    elif isinstance(held, pd.DataFrame):
        plain = held.set_axis([str(name) for name in held], axis=1)
        if len(twice := plain.columns[plain.columns.duplicated()]):
            raise UserError(f"{where}: it has the column {twice[0]!r} twice; give each column a name of its own")
        plain = plain.astype(dict.fromkeys(plain.select_dtypes("category"), object))
        with users_own(f"{where}: making arrow data of it"):
            whole = pa.Table.from_pandas(plain, preserve_index=False).replace_schema_metadata(None)
            dataset = datasets.Dataset(whole)
    elif isinstance(held, (datasets.IterableDataset, torch.utils.data.IterableDataset)):
        raise UserError(
            f"{where}: {type(held).__name__} has no length, and clients draw from all of their rows; {_EXPECTED}"
        )
    elif isinstance(held, torch.utils.data.Dataset) and hasattr(held, "__len__"):
        with users_own(f"{where}: the data set"):
            count = len(held)
        parts: list[pa.Table] = []
        for start in range(0, count, CHUNK):
            rows = [_row(held, i, where) for i in range(start, min(start + CHUNK, count))]
            names = parts[0].column_names if parts else list(rows[0])
            for i, row in enumerate(rows, start):
                if row.keys() != set(names):
                    raise UserError(
                        f"{where}, item {i}: it has the columns {', '.join(sorted(row))}, and the first item has "
                        f"{', '.join(sorted(names))}; give every item the same, with None where there is nothing"
                    )
            with users_own(f"{where}: making arrow data of it"):
                parts.append(pa.Table.from_pylist(rows, parts[0].schema if parts else None))
        dataset = datasets.Dataset(pa.concat_tables(parts)) if parts else datasets.Dataset.from_dict({})
    else:
        hint = ""
        if isinstance(held, Mapping) or where.startswith("data["):
            hint = "; rows go into datasets.Dataset.from_list, or a DataFrame"
        raise UserError(f"{where} = {type(held).__name__}: expected {_EXPECTED}{hint}")
    if not len(dataset):
        raise UserError(f"{where}: it has no rows")
    return dataset


def _row(items: Any, i: int, data: str) -> dict[str, Any]:
    """An item of a torch dataset as a row."""
    where = f"{data}, item {i}"
    with users_own(f"{where}: the data set"):
        item = items[i]
    if isinstance(item, (tuple, list)) and len(item) in _TUPLES:
        item = dict(zip(_TUPLES[len(item)], item))
    if not isinstance(item, Mapping):
        raise UserError(
            f"{where} = {type(item).__name__}: expected a mapping of columns, (text, label) or (text, text_pair, label)"
        )
    row = {str(name): value.tolist() if hasattr(value, "tolist") else value for name, value in item.items()}
    for name, value in row.items():
        if not isinstance(value, (str, int, float, bool, list, dict, type(None))):
            kind = type(value).__name__
            raise UserError(f"{where}: column {name!r} is of the class {kind}; expected text, numbers or lists of them")
    return row
