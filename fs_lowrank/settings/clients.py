"""Settings that some clients have for themselves: ``lowrank.clients``.

They come from a list in the configuration, from a table (``.csv``, ``.tsv``) with a column ``client`` and a row for
each client, or from a file of FederatedScope's ``--client_cfg`` (``.yaml``: ``client_3: {train: {…}}``). A loaded
configuration has them as a list in one form, whatever they came from.
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
class OfClient:
    """What a client may have for itself; None: as all clients."""

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


#: the key of a configuration -> what it is called here
SPELLED = {
    "dataloader.batch_size": "batch_size",
    "train.local_update_steps": "local_update_steps",
    "train.batch_or_epoch": "batch_or_epoch",
    "train.optimizer.lr": "lr",
    "llm.tok_len": "tok_len",
    "llm.adapter.args.0.r": "rank",
}
#: the other way round, of the keys that are replaced for a client: what it is called here -> the key
CALLED = {name: key for key, name in SPELLED.items() if name != "rank"}
_KEY = "lowrank.clients"
_NUMBERS = "a client's number, a span such as '3-10', or a list of them"
#: which clients, their settings, the dotted key that names the clients, and where it is from
Entry = tuple[Any, dict[str, Any], str, Origin]


def read_clients(value: Any, clients: int, origin: Origin) -> list[dict[str, Any]]:
    """The settings of clients in one form: a mapping for each group of clients that have the same.

    Args:
        value: of ``lowrank.clients``: a list of mappings, or the name of a file; or the content of one of
            FederatedScope's. clients: how many there are.
        origin: of ``value``.
    Raises:
        UserError: a file that cannot be read, a client that does not exist, a key that clients do not have or that is
            given twice, or a value that is wrong; the message names file and line.
    """
    of: dict[int, dict[str, Any]] = {}
    for who, settings, at, where in _entries(value, origin):
        named = _named(settings, at.removesuffix(".clients"), where)
        for number in _numbers(who, clients, at, where):
            own = of.setdefault(number, {})
            for name, (given, place) in named.items():
                if name in own:
                    where.fail(place, f"is given twice for client {number}")
                own[name] = given
                if {"lr", "lr_factor"} <= own.keys():
                    where.fail(place, f"is one of lr and lr_factor, and both are given for client {number}")
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number in sorted(of):
        groups.setdefault(tuple(sorted(of[number].items())), []).append(number)
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
        at = f"{_KEY}.{i}"
        if not isinstance(entry, Mapping) or "clients" not in entry:
            origin.wrong(at, entry, "a mapping with the key clients, such as {clients: [5, 9], batch_size: 4}")
        settings = flatten({name: item for name, item in entry.items() if name != "clients"})
        if not settings:
            origin.wrong(at, entry, f"settings beside clients: {', '.join(keys_of(OfClient))}")
        yield entry["clients"], settings, f"{at}.clients", origin


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
            wrong = f"a cell is not a value, or the header has other columns: {show(row)}: {error}"
            raise UserError(f"{name}, line {reader.line_num}: {wrong}") from None
        who = cells.pop("client", None)
        yield who, cells, f"client_{who}", Origin(name, {f"client_{who}": reader.line_num})


def _numbers(who: Any, clients: int, at: str, origin: Origin) -> list[int]:
    """The numbers of clients in ``who``, of 1 to ``clients``."""
    found: list[int] = []
    for item in who if isinstance(who, (list, tuple)) else [who]:
        span = re.fullmatch(r"\s*([0-9]{1,9})\s*-\s*([0-9]{1,9})\s*", item) if isinstance(item, str) else None
        if span is not None and int(span[1]) <= int(span[2]):
            first, last = int(span[1]), int(span[2])
        elif isinstance(item, int) and not isinstance(item, bool):
            first = last = item
        else:
            origin.wrong(at, who, _NUMBERS)
        for number in (first, last):
            if not 1 <= number <= clients:
                origin.fail(at, f"= {show(who)}: there is no client {number}; federate.client_num is {clients}")
        found += range(first, last + 1)
    if not found:
        origin.wrong(at, who, _NUMBERS)
    return found


def _spans(numbers: list[int]) -> Any:
    """Numbers in order as ``read_clients`` takes them: one number, or a list of numbers and spans."""
    listed: list[Any] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        of = [number for _, number in run]
        listed += [f"{of[0]}-{of[-1]}"] if len(of) > 2 else of
    return listed[0] if len(listed) == 1 else listed


def _named(settings: Mapping[str, Any], at: str, origin: Origin) -> dict[str, tuple[Any, str]]:
    """The settings by their names here, each checked, with the dotted key that it was given as."""
    keys, settings = keys_of(OfClient), dict(settings)
    named: dict[str, tuple[Any, str]] = {}
    match args := settings.pop("llm.adapter.args", None):
        case None:
            pass
        case [{"r": rank, **rest}] if not rest:
            settings["llm.adapter.args.0.r"] = rank
        case _:
            origin.fail(f"{at}.llm.adapter.args", f"= {show(args)}: of the adapter, a client may have its own rank: r")
    for given, value in settings.items():
        name, place = SPELLED.get(given, given), f"{at}.{given}"
        if name not in keys:
            origin.fail(place, f"cannot be set by client{nearest(given, keys)}; a client may have: {', '.join(keys)}")
        if name in named:
            origin.fail(place, f"and {named[name][1]} are two spellings of one key; keep one")
        named[name] = check_value(place, value, keys[name], origin), place
    return {name: given for name, given in named.items() if given[0] is not None}
