"""Settings that some clients have for themselves: ``lowrank.clients``.

They come from a list in the configuration, from a table (``.csv``, ``.tsv``) with a column ``client`` and a row for
each client, or from a file of FederatedScope's ``--client_cfg`` (``.yaml``: ``client_3: {train: {…}}``). A loaded
configuration has them as a list in one form.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..errors import UserError, nearest
from .check import check_value, key, keys_of
from .origin import Origin, show
from .reading import read_text, read_value, read_yaml
from .tree import flatten


@dataclass(frozen=True)
class ClientKeys:
    """The settings that a client may have for itself; None: as for all clients."""

    #: ``dataloader.batch_size`` of these clients
    batch_size: int | None = key(None, min=1)
    #: ``train.local_update_steps`` of these clients
    local_update_steps: int | None = key(None, min=1)
    #: ``train.batch_or_epoch`` of these clients
    batch_or_epoch: str | None = key(None, choices=("batch", "epoch"))
    #: ``train.optimizer.lr`` of these clients
    lr: float | None = key(None, above=0.0)
    #: the same, as a factor of ``train.optimizer.lr``
    lr_factor: float | None = key(None, above=0.0)
    #: ``llm.tok_len`` of these clients' training texts; rows that ``llm.tok_len`` leaves out stay left out
    tok_len: int | None = key(None, min=1)
    #: rank of these clients' adapters, for methods with ``lowrank.ranks``, in place of that list
    rank: int | None = key(None, min=1)


#: key of a configuration -> its name here
SHORT_NAMES = {
    "dataloader.batch_size": "batch_size",
    "train.local_update_steps": "local_update_steps",
    "train.batch_or_epoch": "batch_or_epoch",
    "train.optimizer.lr": "lr",
    "llm.tok_len": "tok_len",
    "llm.adapter.args.0.r": "rank",
}
#: name here -> key of a configuration, for the keys that are replaced for a client
FULL_KEYS = {name: key for key, name in SHORT_NAMES.items() if name != "rank"}
_KEY = "lowrank.clients"
_NUMBERS = "a client's number, a span such as '3-10', or a list of them"
#: the clients as given, their settings, the dotted key of the clients, and its origin
Entry = tuple[Any, dict[str, Any], str, Origin]


def read_clients(value: Any, clients: int, origin: Origin) -> list[dict[str, Any]]:
    """The settings of clients in one form: a mapping for each group of clients with equal settings.

    Args:
        value: of ``lowrank.clients``: a list of mappings, or the name of a file; or the content of one of
            FederatedScope's. clients: how many there are.
        origin: of ``value``.
    Raises:
        UserError: a file that cannot be read, a client that does not exist, a key that clients do not have or that is
            given twice, or a value that is wrong; the message names file and line.
    """
    by_client: dict[int, dict[str, Any]] = {}
    for spec, settings, dotted, source in _entries(value, origin):
        values = _checked(settings, dotted.removesuffix(".clients"), source)
        for number in _numbers(spec, clients, dotted, source):
            overrides = by_client.setdefault(number, {})
            for name, (item, path) in values.items():
                if name in overrides:
                    source.fail(path, f"is given twice for client {number}")
                overrides[name] = item
                if {"lr", "lr_factor"} <= overrides.keys():
                    source.fail(path, f"is one of lr and lr_factor, and both are given for client {number}")
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number in sorted(by_client):
        groups.setdefault(tuple(sorted(by_client[number].items())), []).append(number)
    return [{"clients": _spans(numbers), **dict(settings)} for settings, numbers in groups.items() if settings]


def by_group(entries: Any) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """The clients and the settings of each entry of the list that ``read_clients`` gives."""
    for entry in entries:
        settings = {name: value for name, value in entry.items() if name != "clients"}
        yield _numbers(entry["clients"], 10**9, _KEY, Origin()), settings


def _entries(value: Any, origin: Origin) -> Iterator[Entry]:
    if isinstance(value, Mapping):
        return _frameworks(value, origin)
    if isinstance(value, str):
        kind = os.path.splitext(value)[1].lower()
        if kind in (".csv", ".tsv"):
            return _table(value, "," if kind == ".csv" else "\t")
        if kind in (".yaml", ".yml"):
            file, content = read_yaml(value)
            return _frameworks(content, file)
        origin.wrong(_KEY, value, "a list of mappings, a table (.csv, .tsv), or FederatedScope's file (.yaml)")
    return _listed(value, origin)


def _listed(value: Sequence[Any], origin: Origin) -> Iterator[Entry]:
    for i, entry in enumerate(value):
        dotted = f"{_KEY}.{i}"
        if not isinstance(entry, Mapping) or "clients" not in entry:
            origin.wrong(dotted, entry, "a mapping with the key clients, such as {clients: [5, 9], batch_size: 4}")
        settings = flatten({name: item for name, item in entry.items() if name != "clients"})
        if not settings:
            origin.wrong(dotted, entry, f"settings beside clients: {', '.join(keys_of(ClientKeys))}")
        yield entry["clients"], settings, f"{dotted}.clients", origin


def _frameworks(content: Mapping[str, Any], origin: Origin) -> Iterator[Entry]:
    """The entries of a file of FederatedScope's ``--client_cfg``."""
    for name, settings in content.items():
        number = re.fullmatch(r"client_([0-9]{1,9})", str(name))
        if number is None or not isinstance(settings, Mapping):
            origin.wrong(str(name), settings, "client_N with a section of keys, N from 1")
        yield int(number[1]), flatten(settings), name, origin


def _table(file: str, delimiter: str) -> Iterator[Entry]:
    """The rows of a table, whose cells are read as YAML; an empty cell is not given."""
    name, text = read_text(file, lambda path: os.listdir(os.path.dirname(path) or "."))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header = [column.strip() for column in next(reader, [])]
    if "client" not in header or len(set(header)) < len(header):
        raise UserError(f"{name}, line 1: columns {', '.join(header) or 'none'}: expected client, and each column once")
    for row in filter(None, reader):
        try:
            cells = {column: read_value(cell) for column, cell in zip(header, row, strict=True) if cell.strip()}
        except ValueError as error:
            problem = f"a cell is not a value, or the header has other columns: {show(row)}: {error}"
            raise UserError(f"{name}, line {reader.line_num}: {problem}") from None
        spec = cells.pop("client", None)
        yield spec, cells, f"client_{spec}", Origin(name, {f"client_{spec}": reader.line_num})


def _numbers(spec: Any, clients: int, dotted: str, origin: Origin) -> list[int]:
    """The numbers of clients in ``spec``, from 1 to ``clients``."""
    numbers: list[int] = []
    for item in spec if isinstance(spec, (list, tuple)) else [spec]:
        span = re.fullmatch(r"\s*([0-9]{1,9})\s*-\s*([0-9]{1,9})\s*", item) if isinstance(item, str) else None
        if span is not None and int(span[1]) <= int(span[2]):
            first, last = int(span[1]), int(span[2])
        elif isinstance(item, int) and not isinstance(item, bool):
            first = last = item
        else:
            origin.wrong(dotted, spec, _NUMBERS)
        for number in (first, last):
            if not 1 <= number <= clients:
                origin.fail(dotted, f"= {show(spec)}: there is no client {number}; federate.client_num is {clients}")
        numbers += range(first, last + 1)
    if not numbers:
        origin.wrong(dotted, spec, _NUMBERS)
    return numbers


def _spans(numbers: list[int]) -> Any:
    """Numbers in order as ``read_clients`` takes them: one number, or a list of numbers and spans."""
    listed: list[Any] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        listed += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else members
    return listed[0] if len(listed) == 1 else listed


def _checked(settings: Mapping[str, Any], key: str, origin: Origin) -> dict[str, tuple[Any, str]]:
    """Name here → checked value, and the dotted key as given."""
    keys, settings = keys_of(ClientKeys), dict(settings)
    values: dict[str, tuple[Any, str]] = {}
    match args := settings.pop("llm.adapter.args", None):
        case None:
            pass
        case [{"r": rank, **rest}] if not rest:
            settings["llm.adapter.args.0.r"] = rank
        case _:
            origin.fail(f"{key}.llm.adapter.args", f"= {show(args)}: of the adapter, a client may have its own rank: r")
    for spelling, value in settings.items():
        name, path = SHORT_NAMES.get(spelling, spelling), f"{key}.{spelling}"
        if name not in keys:
            origin.fail(path, f"cannot be set by client{nearest(spelling, keys)}; a client may have: {', '.join(keys)}")
        if name in values:
            origin.fail(path, f"and {values[name][1]} are two spellings of one key; keep one")
        values[name] = check_value(path, value, keys[name], origin), path
    return {name: entry for name, entry in values.items() if entry[0] is not None}
