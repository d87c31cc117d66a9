"""Numbers at dotted paths in the JSON files that a script wrote.

A path is ``file.key.0.key``; ``*`` takes all of a list or mapping, ``-10:`` the last ten entries, and
``LIST?key=value&key=value`` the entries of a list with these values. Two paths are a quotient: ``A / B``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fs_lowrank import UserError


def quotient(documents: Mapping, path: str) -> float:
    """The mean of the numbers at a path, or the quotient of two.

    Raises:
        UserError: the path does not exist, or its value is not a number.
    """
    first, _, second = path.partition(" / ")
    return _mean(_numbers(documents, first)) / (_mean(_numbers(documents, second)) if second else 1)


def quotients(documents: Mapping, path: str) -> dict[int, float]:
    """The numbers by seed at a path, or the quotients of two paths, each the mean of those of a seed.

    A seed that only one of them has, or where ``B`` is 0, has no number (NaN), as one that has failed. Entries that
    ``?`` chooses have their own ``seed``; without them, the first ``*`` runs over the seeds. A path that has neither is
    a constant.

    Raises:
        UserError: the path does not exist, or has no seeds.
    """
    first, _, second = path.partition(" / ")
    values, divisors = _by_seed(documents, first), _by_seed(documents, second) if second else {None: 1.0}
    if None in values:
        raise UserError(f"by_seed: {path}: expected entries with a seed, or a * that runs over the seeds")
    constant = divisors.pop(None, None)
    return {
        seed: values[seed] / divisor if seed in values and (divisor := divisors.get(seed, constant)) else math.nan
        for seed in sorted(values.keys() | divisors.keys(), key=int)
    }


def _by_seed(documents: Mapping, path: str) -> dict[Any, float]:
    numbers = _numbers(documents, path)
    return {seed: _mean([number for number in numbers if number[0] == seed]) for seed in dict(numbers)}


def _mean(numbers: list[tuple[int | None, float]]) -> float:
    return float(sum(value for _, value in numbers) / len(numbers))


def _numbers(documents: Mapping, path: str) -> list[tuple[int | None, float]]:
    """The numbers at a path, each with its seed if it has one."""
    nodes: list[tuple[int | None, Any]] = [(None, documents)]
    for part in path.split("."):
        name, chooses, wanted = part.partition("?")
        step = []
        for seed, node in nodes:
            items = node if isinstance(node, dict) else dict(enumerate(node)) if isinstance(node, list) else {}
            by_name = {str(key): value for key, value in items.items()}
            if re.fullmatch(r"-\d+:", name):
                step += [(seed, value) for value in list(items.values())[int(name[:-1]) :]]
            elif name == "*":
                step += [(at if seed is None else seed, value) for at, value in enumerate(items.values())]
            elif name not in by_name:
                available = ", ".join(list(by_name)[:12]) or "a value"
                raise UserError(f"values: {path}: there is no {name!r}, only {available}")
            else:
                step += _chosen(by_name[name], part, wanted) if chooses else [(seed, by_name[name])]
        nodes = step
    if not nodes or not all(isinstance(value, (int, float)) for _, value in nodes):
        raise UserError(f"values: {path}: expected a number there")
    return nodes


def _chosen(entries: list[dict], part: str, wanted: str) -> list[tuple[int | None, Any]]:
    """The entries that have ``wanted``, each with its seed, or a single one without."""
    keys = dict(pair.split("=", 1) for pair in wanted.split("&"))
    chosen = [(e.get("seed"), e) for e in entries if all(str(e.get(key)) == value for key, value in keys.items())]
    if not chosen or len(dict(chosen)) < len(chosen):
        raise UserError(f"by_seed: {part}: {len(chosen)} entries have that, and not each has a seed of its own")
    return chosen
