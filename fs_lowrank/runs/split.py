"""The rows of each client: ``data.json``, and ``rows.npz`` with numbers for every row and every client.

``rows.npz`` has whole numbers in NumPy's format, without pickle: ``clients``, the rows of all clients one after the
other; ``sizes``, how many of them each client has; ``labels``, their classes, if there are any; ``validation`` and
``test``, the rows that are held out; ``keys``, hashes of the training rows (``data.duplicates``). Rows are numbered
from 0 in the source that they are from, without its header and empty lines.

Up to schema 1 there was no such file, and ``data.json`` listed the rows of each client.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..data import FederatedData
from ..data.partition import client_record
from ..data.ragged import Lazy, Ragged
from ..errors import UserError
from ..jobs.files import read_json, replaced, to_json, write_text
from ..versions import SCHEMA

ABOUT, ROWS = "data.json", "rows.npz"
_REMEDY = "restore the file, or resume the run, which writes it again"


def write_split(folder: Path, data: FederatedData) -> dict[str, Any]:
    """Write both files into ``folder``; returns the same as ``read_split``.

    Raises:
        RunFailed: a file cannot be written.
    """
    facts, arrays = {"schema": SCHEMA, **data.record()}, data.arrays()
    with replaced(folder / ROWS) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **{name: _compact(array) for name, array in arrays.items()})  # type: ignore[arg-type]
    write_text(folder / ABOUT, to_json(facts, indent=1))
    return _joined(facts, arrays)


def _compact(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 in as few bytes as the largest needs."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def read_data_json(folder: Path) -> dict[str, Any]:
    """The content of ``data.json`` of the run in ``folder``, of any schema; empty if the run has not written it.

    Raises:
        DamagedFile: it cannot be read. NewerSchema: a newer version wrote it.
    """
    facts: dict[str, Any] = read_json(folder / ABOUT, missing={}, remedy=_REMEDY)
    return facts


def read_split(folder: str | Path) -> dict[str, Any]:
    """The split of the run in ``folder``, of any schema; empty if the run has not written it.

    Returns:
        The content of ``data.json``; of each client, under ``clients``, a record with ``client`` (its number),
        ``size``, ``labels`` (counts by class, if there are classes) and ``rows``, which is made when it is asked for;
        ``sizes``, those of all clients; the ``keys`` of the training rows; and the ``rows`` of ``validation`` and
        ``test``, where they are there.

    Raises:
        UserError: a file is missing or damaged, or of a newer version.
    """
    folder = Path(folder)
    facts = read_data_json(folder)
    if not facts:
        return {}
    path = folder / ROWS
    try:
        if isinstance(facts["clients"], list):  # schema 1
            return {**facts, "sizes": np.array([client["size"] for client in facts["clients"]])}
        with np.load(path, allow_pickle=False) as file:
            return _joined(facts, {name: file[name].astype(np.int64) for name in file.files})
    except (OSError, EOFError, ValueError, LookupError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}; it belongs to {ABOUT} beside it") from error


def _joined(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    rows, labels = (Ragged(arrays[name], arrays["sizes"]) if name in arrays else None for name in ("clients", "labels"))
    if rows is None or len(rows) != facts["clients"] or rows.lengths.sum() != len(rows.values):
        raise ValueError(f"it does not have the rows of {facts['clients']} clients")

    def client(i: int) -> dict[str, Any]:
        record = client_record(i, len(rows[i]), None if labels is None else labels[i], facts["classes"])
        return {**record, "rows": rows[i].tolist()}

    held_out = {
        split: {**facts[split], "rows": arrays[split].tolist()} for split in ("validation", "test") if split in facts
    }
    keys = arrays.get("keys", np.empty(0, np.int64))
    return {**facts, "clients": Lazy(len(rows), client), "sizes": rows.lengths, "keys": keys, **held_out}
