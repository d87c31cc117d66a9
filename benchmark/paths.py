"""Numbers at dotted paths in the JSON files that a script wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fs_lowrank import UserError


def quotient(found: Mapping, path: str) -> float:
    """The number at a path, or the quotient of two: ``A / B``."""
    first, _, second = path.partition(" / ")
    return dig(found, first) / dig(found, second) if second else dig(found, first)


def dig(found: Mapping, path: str) -> float:
    """The number at ``file.key.0.key``; ``*`` means over a list or mapping, ``-10:`` over the last ten entries.

    Raises:
        UserError: the path does not exist, or its value is not a number.
    """
    nodes: list[Any] = [found]
    for part in path.split("."):
        step = []
        for node in nodes:
            items = node if isinstance(node, dict) else dict(enumerate(node)) if isinstance(node, list) else {}
            by_name = {str(k): v for k, v in items.items()}
            if re.fullmatch(r"-\d+:", part):
                step += list(items.values())[int(part[:-1]) :]
                continue
            if part != "*" and part not in by_name:
                raise UserError(
                    f"values: {path}: there is no {part!r}, only {', '.join(list(by_name)[:12]) or 'a value'}"
                )
            step += list(by_name.values()) if part == "*" else [by_name[part]]
        nodes = step
    if not nodes or not all(isinstance(n, (int, float)) for n in nodes):
        raise UserError(f"values: {path}: expected a number there")
    return float(sum(nodes) / len(nodes))


def quotients(found: Mapping, path: str) -> dict[int, float]:
    """The numbers by seed at a path, or the quotients of two paths, ``A / B``.

    A seed that only one of them has, or where ``B`` is 0, has no number (NaN), as one that has failed.

    In a path, ``LIST?key=value&key=value`` chooses entries of a list, each with its ``seed``. In a single entry without
    a seed, and in a path without a choice, the first ``*`` runs over the seeds. Any other path is a constant.

    Raises:
        UserError: the path does not exist, or has no seeds.
    """
    first, _, second = path.partition(" / ")
    values, below = _by_seed(found, first), _by_seed(found, second) if second else 1.0
    if not isinstance(values, dict):
        raise UserError(f"by_seed: {path}: expected entries with a seed, or a * that runs over the seeds")
    if not isinstance(below, dict):
        return {seed: value / below for seed, value in values.items()}
    return {
        seed: values[seed] / below[seed] if seed in values and below.get(seed) else math.nan
        for seed in sorted(values.keys() | below.keys())
    }


def _by_seed(found: Mapping, path: str) -> dict[int, float] | float:
    above, mark, rest = path.partition("?")
    if mark:
        chosen, _, path = rest.partition(".")
        wanted = dict(part.split("=", 1) for part in chosen.split("&"))
        entries = [e for e in _at(found, above) if all(str(e.get(key)) == value for key, value in wanted.items())]
        if entries and all("seed" in entry for entry in entries):
            seeds = [int(entry["seed"]) for entry in entries]
            if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
                raise UserError(f"by_seed: {above}: {seeds.count(twice[0])} entries with seed {twice[0]} have {chosen}")
            return {seed: dig(entry, path) for seed, entry in zip(seeds, entries)}
        if len(entries) != 1:
            raise UserError(f"by_seed: {above}: {len(entries)} entries have {chosen}, and not each has a seed")
        found = entries[0]
    above, mark, path = path.partition(".*.")
    if not mark:
        return dig(found, above)
    return {seed: dig({"entry": entry}, f"entry.{path}") for seed, entry in enumerate(_at(found, above))}


def _at(found: Any, path: str) -> list:
    """The list at a path without ``*``."""
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, list):
        raise UserError(f"by_seed: {path}: expected a list there")
    return found
