"""Partition training rows among clients. Every row goes to exactly one client, and every client gets a row.

A partitioner is a function ``(rows, num_clients, rng, **args) -> index array of each client``, as a list or as one
``Ragged``. Its keyword arguments are the keys of ``data.splitter_args``, checked by their annotations (see
``settings.key``).
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from fs_lowrank.data.files import natural, require_columns
from fs_lowrank.data.ragged import Ragged
from fs_lowrank.errors import UserError, nearest, say_once
from fs_lowrank.settings import Origin, check_keys, keys_of

#: values of ``data.splitter`` with which the data name the client of a row; the other values simulate clients
BY_SITE = ("field", "file", "meta")
DRAWS = 50  # from the Dirichlet distribution, before rows are moved to reach min_size

_MIXTURE_SEED = "seed of the clients' mixtures, for the same mixtures with another split; None: the run's"
_FIELD = "column that says whose a row is; None: the only column, or `category`"
_SIZE_ALPHA = "concentration of the sizes of clients that share a value; None: equal sizes"
# ``help`` is what the reference of keys says.
Alpha = Annotated[float, {"above": 0.0, "help": "concentration of the Dirichlet distribution; small is skewed"}]
MinSize = Annotated[int, {"min": 1, "help": "rows that a client has at least"}]
Column = Annotated[
    str | None, {"words": "the name of a column", "help": "column that takes the place of the class; None: the class"}
]


@dataclass
class Rows:
    """The input of a partitioner: number of rows, their classes, and other columns by name, each ``(size,)``."""

    size: int
    labels: np.ndarray | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Partition:
    """The rows of each client: ``indices[c]`` are the sorted int64 rows of client ``c``.

    ``labels`` and ``label_names`` are the classes of all rows. ``files`` are the clients' files, where each has
    one.
    """

    indices: Ragged
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    labels: np.ndarray | None = field(default=None, repr=False, compare=False)
    label_names: list[str] | None = field(default=None, repr=False, compare=False)
    files: list[str] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.indices)

    def sizes(self) -> np.ndarray:
        """Number of rows of each client, int64 ``(clients,)``."""
        return self.indices.lengths

    def classes(self) -> list[str] | None:
        """The names of the classes; their numbers, if they have no names; None without classes."""
        if self.labels is None:
            return None
        return self.label_names or [str(value) for value in range(int(self.labels.max(initial=-1)) + 1)]


def class_counts(labels: np.ndarray, names: Sequence[str]) -> dict[str, int]:
    """How many of ``labels`` are each class, by its name."""
    counts = np.bincount(labels, minlength=len(names))
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def client_record(index: int, size: int, labels: np.ndarray | None, names: Sequence[str] | None) -> dict[str, Any]:
    """One client: ``client`` (from 1), ``size`` and, for classes, ``labels`` (counts by name).

    Args:
        labels: the classes of its rows; None: there are none. names: of the classes.
    """
    record: dict[str, Any] = {"client": index + 1, "size": size}
    if labels is not None and names is not None:
        record["labels"] = class_counts(labels, names)
    return record


Partitioner = Callable[..., "Ragged | Sequence[np.ndarray]"]
PARTITIONERS: dict[str, Partitioner] = {}


def register_partitioner(*names: str) -> Callable[[Partitioner], Partitioner]:
    """Register a function under ``names`` as values of ``data.splitter``."""

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
    """Partition ``rows`` among ``num_clients`` with partitioner ``name``; ``rng`` determines the result.

    Args:
        args: the mapping of ``data.splitter_args``. origin: its origin, for messages.

    Raises:
        UserError: unknown name or argument, no client, more clients than rows, or a value out of range.
    """
    origin = origin or Origin()
    if name not in PARTITIONERS:
        hint = f"{nearest(name, PARTITIONERS)}; there are: {', '.join(sorted(PARTITIONERS))}"
        origin.fail("data.splitter", f"= {name!r}: there is no such splitter{hint}")
    function = PARTITIONERS[name]
    args = check_keys(args or {}, keys_of(function, 3), origin, "data.splitter_args.0")
    floor = args.get("min_size") or 1
    if floor * num_clients > rows.size:
        raise UserError(
            f"{num_clients} clients cannot share {rows.size} training rows: every client needs at least {floor}; "
            "lower federate.client_num (or min_size), or use more data"
        )
    parts = Ragged.of(function(rows, int(num_clients), rng, **args))
    everything = parts.values
    # A partitioner may be a third party's, and no metric would show a lost or repeated row.
    if len(parts) != num_clients or not np.array_equal(np.sort(everything), np.arange(rows.size)):
        raise RuntimeError(f"splitter {name!r} did not give every row to exactly one of {num_clients} clients")
    files = _files(rows) if function is by_file else None
    return Partition(_by_client(everything, parts.owners(), num_clients), name, args, rows.labels, files=files)


def _by_client(rows: np.ndarray, owners: np.ndarray, num_clients: int) -> Ragged:
    """The rows of each client in order; ``rows`` are all numbers from 0, in any order, and ``owners`` their clients."""
    row_owners = np.empty(len(rows), np.int64)
    row_owners[rows] = owners
    return Ragged.by_owner(row_owners, num_clients)


def matching_shares(parts: Partition, train: Rows, held_out: Rows, rng: np.random.Generator) -> Ragged:
    """Partition held-out rows among the clients of ``parts``, distributed as their training rows.

    The rows of each class go to the clients in proportion to their training rows of that class, by largest remainder.
    If the training rows were partitioned by a column that the held-out rows also have, its values replace the classes;
    without classes, rows go by size. Every row goes to one client; a small client may get none.

    Args:
        train: the rows partitioned by ``parts``. held_out: the held-out rows.
    Returns:
        for each client the sorted int64 rows of ``held_out``.
    """
    train_classes, held_out_classes = _matching_classes(parts, train, held_out)
    row_owners = np.empty(train.size, np.int64)
    row_owners[parts.indices.values] = parts.indices.owners()
    kinds, inverse = np.unique(train_classes, return_inverse=True)
    by_class = dict(zip(kinds.tolist(), Ragged.by_owner(inverse, len(kinds))))
    owners = np.empty(held_out.size, np.int64)
    for kind in np.unique(held_out_classes).tolist():
        members = rng.permutation(np.flatnonzero(held_out_classes == kind))
        # A class that is not in the training rows is divided by the size of the clients.
        counts = np.bincount(row_owners[by_class[kind]], minlength=len(parts)) if kind in by_class else parts.sizes()
        # Ties are broken at random; otherwise the first clients would win them for every class.
        sizes = apportion(counts / counts.sum() * len(members), len(members), rng.permutation(len(parts)))
        owners[members] = np.repeat(np.arange(len(parts)), sizes)
    return Ragged.by_owner(owners, len(parts))


def apportion(quota: np.ndarray, total: int, order: np.ndarray | None = None) -> np.ndarray:
    """Round ``quota`` to whole numbers with sum ``total`` by largest remainder, of equal ones by ``order``."""
    sizes = np.floor(quota + 1e-9).astype(np.int64)
    order = np.arange(len(quota)) if order is None else order
    sizes[order[np.argsort((sizes - quota)[order], kind="stable")][: total - sizes.sum()]] += 1
    return sizes


def _matching_classes(parts: Partition, train: Rows, held_out: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The classes, or the values of the column, by which ``matching_shares`` divides."""
    function = PARTITIONERS.get(parts.name)
    field = "file" if function is by_file else parts.args.get("field")
    parameters = inspect.signature(function).parameters if function else ()
    if field is None and "field" in parameters and (function is by_field or train.labels is None):
        field = next(iter(train.fields)) if len(train.fields) == 1 else "category"
    if field is not None and field in train.fields and field in held_out.fields:
        train_values, held_out_values = (np.array([str(v) for v in rows.fields[field]]) for rows in (train, held_out))
        return train_values, held_out_values
    if train.labels is not None and held_out.labels is not None:
        return np.asarray(train.labels), np.asarray(held_out.labels)
    return np.zeros(train.size, np.int64), np.zeros(held_out.size, np.int64)


@register_partitioner("iid")
def iid(rows: Rows, num_clients: int, rng: np.random.Generator) -> Ragged:
    """Random rows; the sizes of clients differ by at most one."""
    return Ragged(rng.permutation(rows.size), _even(rows.size, num_clients))


@register_partitioner("lda", "dirichlet")
def lda(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    alpha: Alpha = 0.5,
    min_size: MinSize = 1,
    field: Column = None,
) -> Ragged:
    """Divide each class by proportions drawn from Dirichlet(alpha) (Yurochkin et al., 2019); small alpha is skewed.

    ``field`` is a column to use instead of the class; without classes the default is ``category``. Every client gets at
    least ``min_size`` rows: the draw is repeated, and finally rows are moved from the largest clients.
    """
    groups = _groups(rows, field)
    best_size, best = -1, Ragged.of([])
    for _ in range(DRAWS):
        shuffled, sizes = _deal(groups, (_dirichlet(rng, alpha, num_clients) for _ in groups), rng)
        if (size := sizes.sum(0).min()) > best_size:
            best_size, best = size, _dealt(shuffled, sizes)
        if best_size >= min_size:
            return best
    return _lift(best, min_size, rng)


@register_partitioner("mixture")
def mixture(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    alpha: Alpha = 0.5,
    min_size: MinSize = 1,
    field: Column = None,
    mixture_seed: Annotated[int | None, {"min": 0, "max": 2**32 - 1, "help": _MIXTURE_SEED}] = None,
) -> Ragged:
    """Draw the class mixture of each client from Dirichlet(alpha) (Hsu et al., 2019).

    ``mixture_seed`` is a separate seed of the mixtures, for numpy's ``RandomState``: runs with several seeds differ
    in the rows of the clients but not in their mixtures. The code of Jhunjhunwala et al. (2024) uses 3. ``field`` is as
    for ``lda``; a client with fewer than ``min_size`` rows gets rows from the largest clients.
    """
    groups = _groups(rows, field)
    draw = rng if mixture_seed is None else np.random.RandomState(mixture_seed)
    mixtures = np.empty((num_clients, len(groups)))
    for mixture in mixtures:
        mixture[:] = _dirichlet(draw, alpha, len(groups))
    # A class whose proportion is zero in every mixture (in float precision) is divided equally.
    shares = (
        column / column.sum() if column.sum() > 0 else np.full(num_clients, 1 / num_clients) for column in mixtures.T
    )
    return _lift(_dealt(*_deal(groups, shares, rng)), min_size, rng)


@register_partitioner("shards")
def shards(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    shards_per_client: Annotated[int, {"min": 1, "help": "shards that a client is given"}] = 2,
    field: Column = None,
) -> Ragged:
    """Sort rows by class, cut them into equal shards, and give each client some shards (McMahan et al., 2017)."""
    count = num_clients * shards_per_client
    if count > rows.size:
        raise UserError(
            f"{num_clients} clients with {shards_per_client} shards each need {count} rows; there are {rows.size}"
        )
    ordered = np.concatenate([rng.permutation(group) for group in _groups(rows, field).values()])
    dealt = Ragged(ordered, _even(rows.size, count)).select(rng.permutation(count))
    return Ragged(dealt.values, dealt.lengths.reshape(num_clients, shards_per_client).sum(1))


@register_partitioner("field", "meta")
def by_field(
    rows: Rows,
    num_clients: int,
    rng: np.random.Generator,
    field: Annotated[str | None, {"words": "the name of a column", "help": _FIELD}] = None,
    size_alpha: Annotated[float | None, {"above": 0.0, "help": _SIZE_ALPHA}] = None,
    min_size: MinSize = 1,
) -> Ragged:
    """Each client holds rows of one value of column ``field``; a value gets clients in proportion to its rows.

    With fewer clients than values, the values are dealt out to the clients in turn, as FederatedScope does.
    Clients are numbered by value, in sorted order. With ``size_alpha``, the proportions of the clients of one value are
    drawn from Dirichlet(size_alpha); without it they are equal. The default of ``field`` is the only column, or else
    ``category``.
    """
    if field is None:
        names = list(rows.fields)
        field = names[0] if len(names) == 1 else "category"
    groups = _groups(rows, field)
    if len(groups) > num_clients:
        say_once(
            f"data.splitter = field: column {field!r} has {len(groups)} values, so some of {num_clients} clients hold "
            f"the rows of several; federate.client_num = {len(groups)} gives each value a client"
        )
        lists = list(groups.values())
        shared = Ragged.of(rng.permutation(np.concatenate(lists[client::num_clients])) for client in range(num_clients))
        return _lift(shared, min_size, rng)
    counts = np.array(list(map(len, groups.values())))
    room, allotted = counts // min_size, np.ones(len(counts), np.int64)
    for value, count in zip(groups, counts):
        if count < min_size:
            raise UserError(f"column {field!r}: value {value!r} has {count} rows, fewer than min_size {min_size}")
    # The Sainte-Laguë method of apportionment: the next client goes to the first value with the largest quotient.
    for _ in range(num_clients - len(groups)):
        quotients = np.where(allotted < room, counts / (2 * allotted + 1), 0.0)
        if not quotients.any():
            raise UserError(
                f"column {field!r}: no more than {room.sum()} clients of one value and at least {min_size} rows "
                f"are possible, {num_clients} are asked for"
            )
        allotted[quotients.argmax()] += 1
    parts = []
    for group, clients in zip(groups.values(), allotted.tolist()):
        sizes = _sizes(len(group), clients, size_alpha, min_size, rng)
        parts.append(Ragged(rng.permutation(group), sizes))
    return Ragged.join(parts)


@register_partitioner("file")
def by_file(rows: Rows, num_clients: int, rng: np.random.Generator) -> Ragged:
    """Each client holds the rows of one file; the files match a pattern in ``data.type``, and stay in order.

    ``data.json`` of a run lists the files of the clients.
    """
    if "file" not in rows.fields:
        raise UserError("data.splitter = file: the data are one file; name several by a pattern, such as clients/*.csv")
    files = {name: number for number, name in enumerate(_files(rows))}
    if len(files) != num_clients:
        raise UserError(
            f"data.splitter = file: {len(files)} files have training rows, and there are {num_clients} clients; each "
            f"client has one file, so set federate.client_num to {len(files)}"
        )
    return Ragged.by_owner(np.array([files[str(name)] for name in rows.fields["file"]]), num_clients)


def _files(rows: Rows) -> list[str]:
    """The names of the files in the column ``file``, in order."""
    return sorted({str(name) for name in rows.fields["file"]}, key=natural)


@register_partitioner("quantity")
def quantity(
    rows: Rows, num_clients: int, rng: np.random.Generator, alpha: Alpha = 0.5, min_size: MinSize = 1
) -> Ragged:
    """Random rows; sizes are drawn from Dirichlet(alpha), at least ``min_size``."""
    sizes = _sizes(rows.size, num_clients, alpha, min_size, rng)
    return Ragged(rng.permutation(rows.size), sizes)


def _groups(rows: Rows, field: str | None) -> dict[Any, np.ndarray]:
    """Row indices by class, or by value of column ``field``, sorted by value."""
    if field is None and rows.labels is not None:
        values = np.asarray(rows.labels)
    else:
        field = field or "category"
        require_columns("data.splitter: the data to divide", rows.fields, [field])
        # As text, since a column may have mixed types that cannot be sorted.
        values = np.array([str(value) for value in rows.fields[field]])
    kinds, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(inverse, minlength=len(kinds)))[:-1])
    return {kind.item(): piece for kind, piece in zip(kinds, pieces, strict=True)}


def _dirichlet(rng: np.random.Generator | np.random.RandomState, alpha: float, count: int) -> np.ndarray:
    shares = rng.dirichlet(np.full(count, alpha))
    if not abs(shares.sum() - 1) < 1e-6:  # alpha too large or too small for a float: use the limit
        shares = np.full(count, 1.0 / count) if alpha > 1 else (np.arange(count) == rng.choice(count)).astype(float)
    return shares


def _sizes(total: int, count: int, alpha: float | None, floor: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` sizes of at least ``floor`` whose sum is ``total``."""
    shares = np.full(count, 1.0 / count) if alpha is None else _dirichlet(rng, alpha, count)
    sizes = apportion(shares * total, total)
    for giver, receiver in _moves(sizes, floor):
        sizes[giver] -= 1
        sizes[receiver] += 1
    return sizes


def _even(total: int, count: int) -> np.ndarray:
    """``count`` sizes with sum ``total`` that differ by at most one, the larger ones first."""
    return total // count + (np.arange(count) < total % count)


def _deal(
    groups: Mapping[Any, np.ndarray], shares: Iterable[np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the shuffled rows of every group by its ``shares``, ``(num_clients,)`` with sum 1.

    Returns:
        The rows, group after group, and their numbers by group and client, ``(groups, num_clients)``.
    """
    rows, sizes = [], []
    for group, share in zip(groups.values(), shares, strict=True):
        cuts = np.minimum((np.cumsum(share) * len(group)).astype(np.int64)[:-1], len(group))
        rows.append(rng.permutation(group))
        sizes.append(np.diff(cuts, prepend=0, append=len(group)))
    return np.concatenate(rows), np.stack(sizes)


def _dealt(rows: np.ndarray, sizes: np.ndarray) -> Ragged:
    """The rows of each client, in the order of the groups; from the result of ``_deal``."""
    groups, clients = sizes.shape
    owners = np.repeat(np.tile(np.arange(clients), groups), sizes.reshape(-1))
    return Ragged(rows[np.argsort(owners, kind="stable")], sizes.sum(0))


def _lift(parts: Ragged, floor: int, rng: np.random.Generator) -> Ragged:
    """Move random rows from the largest clients until each client has at least ``floor`` rows."""
    rows = parts.values.copy()
    for part in Ragged(rows, parts.lengths):
        part[:] = rng.permutation(part)
    owners, sizes, starts = parts.owners(), parts.lengths.copy(), np.cumsum(parts.lengths) - parts.lengths
    for giver, receiver in _moves(sizes, floor):
        sizes[giver] -= 1
        owners[starts[giver] + sizes[giver]] = receiver
    return _by_client(rows, owners, len(parts))


def _moves(sizes: np.ndarray, floor: int) -> Iterator[tuple[int, int]]:
    """Pairs ``(giver, receiver)`` of clients that move one row each, until every client has ``floor`` rows.

    The giver is always the largest client, of equal ones the first. There must be enough rows.
    """
    givers = [(-size, client) for client, size in enumerate(sizes.tolist()) if size > floor]
    heapq.heapify(givers)
    poor = np.flatnonzero(sizes < floor)
    for receiver, missing in zip(poor.tolist(), (floor - sizes[poor]).tolist()):
        for _ in range(missing):
            size, giver = givers[0]
            if -size - 1 > floor:
                heapq.heapreplace(givers, (size + 1, giver))
            else:
                heapq.heappop(givers)
            yield giver, receiver
