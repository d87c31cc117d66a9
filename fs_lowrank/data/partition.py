"""Divides training rows among clients. Every row goes to exactly one client, and no client is left empty.

A partitioner is a function ``(rows, num_clients, rng, **args) -> list of index arrays``; its keyword arguments are
what ``data.splitter_args`` may set, checked by their annotations (``settings.key`` has what may be noted).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from fs_lowrank.errors import UserError, nearest
from fs_lowrank.settings import Origin, check_keys, keys_of

__all__ = ["PARTITIONERS", "Partition", "Rows", "matching_shares", "partition", "register_partitioner"]

DRAWS = 50  # of the Dirichlet distribution, before samples are moved to reach the floor

Positive = Annotated[float, {"above": 0.0}]
Count = Annotated[int, {"min": 1}]
Column = Annotated[str | None, {"words": "the name of a column"}]


@dataclass
class Rows:
    """What a partitioner may look at: how many rows, their classes, and other columns by name, each ``(size,)``."""

    size: int
    labels: np.ndarray | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Partition:
    """Who holds which row: ``indices[c]`` are the sorted int64 rows of client ``c``.

    ``labels`` and ``label_names`` are carried along so that ``summary`` can count classes.
    """

    indices: list[np.ndarray]
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    labels: np.ndarray | None = field(default=None, repr=False, compare=False)
    label_names: list[str] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.indices)

    def sizes(self) -> np.ndarray:
        """Rows of each client, int64 ``(clients,)``."""
        return np.array([len(rows) for rows in self.indices], dtype=np.int64)

    def summary(self) -> list[dict[str, Any]]:
        """One record a client: ``client`` (from 1), ``size`` and, where rows have classes, ``labels``, by name."""
        records: list[dict[str, Any]] = []
        for client, rows in enumerate(self.indices, start=1):
            record: dict[str, Any] = {"client": client, "size": len(rows)}
            if self.labels is not None:
                names = self.label_names or [str(value) for value in range(int(self.labels.max(initial=-1)) + 1)]
                counts = np.bincount(self.labels[rows], minlength=len(names))
                record["labels"] = {name: int(count) for name, count in zip(names, counts, strict=True)}
            records.append(record)
        return records

    def to_json(self) -> str:
        """Name, arguments and indices as a JSON string; ``from_json`` reads it back."""
        indices = [rows.tolist() for rows in self.indices]
        return json.dumps({"name": self.name, "args": self.args, "indices": indices}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """The partition that ``to_json`` wrote, without its labels."""
        data = json.loads(text)
        return cls([np.asarray(rows, dtype=np.int64) for rows in data["indices"]], data["name"], data["args"])


Partitioner = Callable[..., list[np.ndarray]]
PARTITIONERS: dict[str, Partitioner] = {}


def register_partitioner(*names: str) -> Callable[[Partitioner], Partitioner]:
    """Makes a function known under ``names`` as a value of ``data.splitter``."""

    def register(function: Partitioner) -> Partitioner:
        for name in names:
            PARTITIONERS[name] = function
        return function

    return register


def partition(
    name: str,
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    args: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
) -> Partition:
    """Divide ``rows`` among ``num_clients`` by partitioner ``name``; ``rng`` alone decides the outcome.

    Args:
        args: as ``data.splitter_args`` has them. origin: where they came from, for messages.

    Raises:
        UserError: unknown name or argument, no client, more clients than rows, or a value out of its range.
    """
    origin = origin or Origin()
    if name not in PARTITIONERS:
        there = f"{nearest(name, PARTITIONERS)}; there are: {', '.join(sorted(PARTITIONERS))}"
        origin.fail("data.splitter", f"= {name!r}: there is no such splitter{there}")
    function = PARTITIONERS[name]
    args = check_keys(args or {}, keys_of(function, 3), origin, "data.splitter_args.0")
    if num_clients < 1:
        raise UserError(f"the number of clients (federate.client_num) must be a positive integer, got {num_clients!r}")
    if num_clients > rows.size:
        raise UserError(
            f"{num_clients} clients cannot share {rows.size} training rows: every client needs at least one; "
            "lower federate.client_num or use more data"
        )
    parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in function(rows, int(num_clients), rng, **args)]
    everything = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)
    # Partitioners may come from elsewhere; a lost or doubled row would go unnoticed in any metric.
    if len(parts) != num_clients or not np.array_equal(everything, np.arange(rows.size)):
        raise RuntimeError(f"splitter {name!r} did not give every row to exactly one of {num_clients} clients")
    return Partition(parts, name, args, rows.labels)


def matching_shares(parts: Partition, train: Rows, held: Rows, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide held-out rows among the clients of ``parts`` so that each gets them distributed as its training rows.

    Each class's rows go to the clients in proportion to their training rows of that class, by largest remainder. Where
    the training rows were divided by a column, its values take the classes' place, if the held-out rows have it;
    without classes only the sizes count. Every row goes to one client; a small client may get none.

    Args:
        train: the rows that ``parts`` divides. held: those to divide.
    Returns:
        for each client sorted int64 rows of ``held``.
    """
    kinds_of, held_of = _kinds_of(parts, train, held)
    counts: dict[Any, np.ndarray] = {}
    for client, rows in enumerate(parts.indices):
        kinds, found = np.unique(kinds_of[rows], return_counts=True)
        for kind, count in zip(kinds.tolist(), found, strict=True):
            counts.setdefault(kind, np.zeros(len(parts)))[client] = count
    shares: list[list[np.ndarray]] = [[] for _ in parts.indices]
    for kind in np.unique(held_of).tolist():
        members = rng.permutation(np.flatnonzero(held_of == kind))
        # A kind that nobody trains on goes by size.
        weights = counts.get(kind, parts.sizes().astype(float))
        quota = weights / weights.sum() * len(members)
        sizes = np.floor(quota + 1e-9).astype(np.int64)
        # Among equal remainders chance decides, or the first clients would have them of every kind.
        order = rng.permutation(len(quota))
        sizes[order[np.argsort((sizes - quota)[order], kind="stable")][: len(members) - sizes.sum()]] += 1
        for share, piece in zip(shares, np.split(members, np.cumsum(sizes)[:-1]), strict=True):
            share.append(piece)
    return [np.sort(np.concatenate(share)) if share else np.empty(0, np.int64) for share in shares]


def _kinds_of(parts: Partition, train: Rows, held: Rows) -> tuple[np.ndarray, np.ndarray]:
    """What rows are alike by, for training and held-out rows."""
    field = parts.args.get("field")
    function = PARTITIONERS.get(parts.name)
    takes = inspect.signature(function).parameters if function else ()
    if field is None and "field" in takes and (function is by_field or train.labels is None):
        field = next(iter(train.fields)) if len(train.fields) == 1 else "category"
    if field is not None and field in train.fields and field in held.fields:
        of_train, of_held = (np.array([str(v) for v in rows.fields[field]]) for rows in (train, held))
        return of_train, of_held
    if train.labels is not None and held.labels is not None:
        return np.asarray(train.labels), np.asarray(held.labels)
    return np.zeros(train.size, np.int64), np.zeros(held.size, np.int64)


@register_partitioner("iid")
def iid(rows: Rows, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows at random, sizes equal to within one."""
    return np.array_split(rng.permutation(rows.size), num_clients)


@register_partitioner("lda", "dirichlet")
def lda(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    alpha: Positive = 0.5,
    min_size: Count = 1,
    field: Column = None,
) -> list[np.ndarray]:
    """Each class is divided by shares drawn from Dirichlet(alpha) (Yurochkin et al., 2019); smaller is more skewed.

    ``field`` names the column to use in place of the class; without classes the default is ``category``. No client
    gets fewer than ``min_size`` rows: the draw is repeated, and if that does not help, rows move from the largest.
    """
    floor = _floor(min_size, num_clients, rows.size)
    groups = _groups(rows, field)
    best: list[np.ndarray] = []
    for _ in range(DRAWS):
        drawn = _deal(groups, (_dirichlet(rng, alpha, num_clients) for _ in groups), num_clients, rng)
        if not best or min(map(len, drawn)) > min(map(len, best)):
            best = drawn
        if min(map(len, best)) >= floor:
            return best
    return _lift(best, floor, rng)


@register_partitioner("mixture")
def mixture(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    alpha: Positive = 0.5,
    min_size: Count = 1,
    field: Column = None,
    mixture_seed: Annotated[int | None, {"min": 0, "max": 2**32 - 1}] = None,
) -> list[np.ndarray]:
    """Each client draws its mixture of classes from Dirichlet(alpha) (Hsu et al., 2019), and takes its part of each.

    ``mixture_seed`` draws the mixtures alone, and as numpy's ``RandomState`` does, so that runs of several seeds differ
    in who holds which row but not in how skewed the clients are; the code of Jhunjhunwala et al. (2024) has 3.
    ``field`` is as for ``lda``; where a client has fewer than ``min_size`` rows, some move from the largest.
    """
    floor = _floor(min_size, num_clients, rows.size)
    groups = _groups(rows, field)
    draw = rng if mixture_seed is None else np.random.RandomState(mixture_seed)
    mixtures = np.stack([_dirichlet(draw, alpha, len(groups)) for _ in range(num_clients)])
    # A class that no client's mixture has, to the precision of a float, is everyone's.
    shares = (
        column / column.sum() if column.sum() > 0 else np.full(num_clients, 1 / num_clients) for column in mixtures.T
    )
    return _lift(_deal(groups, shares, num_clients, rng), floor, rng)


@register_partitioner("shards")
def shards(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    shards_per_client: Count = 2,
    field: Column = None,
) -> list[np.ndarray]:
    """Rows sorted by class are cut into equal shards, and each client gets some of them (McMahan et al., 2017)."""
    count = num_clients * shards_per_client
    if count > rows.size:
        raise UserError(
            f"{num_clients} clients with {shards_per_client} shards each need {count} rows; there are {rows.size}"
        )
    ordered = np.concatenate([rng.permutation(group) for group in _groups(rows, field).values()])
    pieces = np.array_split(ordered, count)
    dealt = rng.permutation(count).reshape(num_clients, shards_per_client)
    return [np.concatenate([pieces[i] for i in hand]) for hand in dealt]


@register_partitioner("field", "meta")
def by_field(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    field: Column = None,
    size_alpha: Annotated[float | None, {"above": 0.0}] = None,
    min_size: Count = 1,
) -> list[np.ndarray]:
    """Each client holds one value of column ``field``; values get clients in proportion to their rows.

    Clients are numbered value by value, in sorted order. ``size_alpha`` makes the clients of one value unequal: their
    shares are drawn from Dirichlet(size_alpha); without it they are equal. ``field`` may be left out where there is
    only one column to choose, or one named ``category``.
    """
    floor = _floor(min_size, num_clients, rows.size)
    if field is None:
        names = list(rows.fields)
        field = names[0] if len(names) == 1 else "category"
    groups = _groups(rows, field)
    if len(groups) > num_clients:
        raise UserError(
            f"column {field!r} has {len(groups)} values, more than the {num_clients} clients, and a client holds "
            "only one; raise federate.client_num"
        )
    room = {value: len(group) // floor for value, group in groups.items()}
    small = [value for value, places in room.items() if places < 1]
    if small:
        raise UserError(
            f"column {field!r}: value {small[0]!r} has {len(groups[small[0]])} rows, fewer than min_size {floor}"
        )
    given = dict.fromkeys(groups, 1)
    for _ in range(num_clients - len(groups)):
        open_to = [value for value in groups if given[value] < room[value]]
        if not open_to:
            raise UserError(
                f"column {field!r}: no more than {sum(room.values())} clients of one value and at least {floor} rows "
                f"are possible, {num_clients} are asked for"
            )
        # Sainte-Lague: the next client goes where one client stands for the most rows.
        value = max(open_to, key=lambda v: len(groups[v]) / (2 * given[v] + 1))
        given[value] += 1
    parts: list[np.ndarray] = []
    for value, group in groups.items():
        sizes = _sizes(len(group), given[value], size_alpha, floor, rng)
        parts += np.split(rng.permutation(group), np.cumsum(sizes)[:-1])
    return parts


@register_partitioner("quantity")
def quantity(
    rows: Rows, num_clients: int, rng: np.random.Generator, alpha: Positive = 0.5, min_size: Count = 1
) -> list[np.ndarray]:
    """Clients of unequal size, shares drawn from Dirichlet(alpha), floor ``min_size``; which rows is left to chance."""
    sizes = _sizes(rows.size, num_clients, alpha, _floor(min_size, num_clients, rows.size), rng)
    return np.split(rng.permutation(rows.size), np.cumsum(sizes)[:-1])


def _floor(min_size: int, num_clients: int, size: int) -> int:
    if min_size * num_clients > size:
        raise UserError(
            f"min_size {min_size} for each of {num_clients} clients needs {min_size * num_clients} rows; "
            f"there are {size}"
        )
    return min_size


def _groups(rows: Rows, field: str | None) -> dict[Any, np.ndarray]:
    """Row indices by class, or by the value of column ``field``, in sorted order of the values."""
    if field is None and rows.labels is not None:
        values = np.asarray(rows.labels)
    else:
        field = field or "category"
        if field not in rows.fields:
            raise UserError(
                f"the data have no column {field!r} to divide by{nearest(field, rows.fields)}; "
                f"there are: {', '.join(map(str, rows.fields)) or 'none'}"
            )
        # As text, since a column of a user's file may mix types that cannot be sorted.
        values = np.array([str(value) for value in rows.fields[field]])
    kinds, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(inverse, minlength=len(kinds)))[:-1])
    return {kind.item(): piece for kind, piece in zip(kinds, pieces, strict=True)}


def _dirichlet(rng: np.random.Generator | np.random.RandomState, alpha: float, count: int) -> np.ndarray:
    shares = rng.dirichlet(np.full(count, alpha))
    if not abs(shares.sum() - 1) < 1e-6:  # alpha beyond what a float can hold: take the limit
        shares = np.full(count, 1.0 / count) if alpha > 1 else np.eye(count)[rng.choice(count)]
    return shares


def _sizes(total: int, count: int, alpha: float | None, floor: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` sizes of at least ``floor`` that add up to ``total``."""
    shares = np.full(count, 1.0 / count) if alpha is None else _dirichlet(rng, alpha, count)
    sizes = np.floor(shares * total).astype(np.int64)
    rest = np.argsort(sizes - shares * total, kind="stable")[: total - sizes.sum()]
    sizes[rest] += 1
    for client in range(count):
        while sizes[client] < floor:
            sizes[np.argmax(sizes)] -= 1
            sizes[client] += 1
    return sizes


def _deal(
    groups: Mapping[Any, np.ndarray], shares: Iterable[np.ndarray], num_clients: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Every group's rows in random order, cut by its ``shares``, ``(num_clients,)`` and of sum 1."""
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for group, share in zip(groups.values(), shares, strict=True):
        cuts = (np.cumsum(share) * len(group)).astype(np.int64)[:-1]
        for part, piece in zip(parts, np.split(rng.permutation(group), cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _lift(parts: list[np.ndarray], floor: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Move random rows of the largest clients until each has ``floor``; ends because there are enough rows for all."""
    held = [rng.permutation(part).tolist() for part in parts]
    sizes = np.array([len(rows) for rows in held])
    for client, rows in enumerate(held):
        while len(rows) < floor:
            giver = int(np.argmax(sizes))
            rows.append(held[giver].pop())
            sizes[giver] -= 1
            sizes[client] += 1
    return [np.asarray(rows, dtype=np.int64) for rows in held]
