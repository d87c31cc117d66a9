"""Nested plain data with dotted keys: flatten, look up, assign, merge."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UserError
from .origin import NOWHERE, Origin, show


def flatten(tree: Mapping[str, Any], prefix: str = "", origin: Origin = NOWHERE) -> dict[str, Any]:
    """Values by dotted key. Sections are flattened at all levels; lists are values.

    Raises:
        UserError: a key that is not text, a table or an array.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str):
            expected = "text (YAML reads a bare on, off, yes, no as a truth value and digits as a number)"
            raise UserError(f"{origin.where(f'{prefix}{key}')}unknown key {prefix}{key!r}: expected {expected}")
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}.", origin))
        else:
            flat[prefix + key] = plain(value, prefix + key)
    return flat


def merge(tree: dict[str, Any], changes: Mapping[str, Any], origin: Origin = NOWHERE) -> None:
    """Merge ``changes``, which come from ``origin``, into ``tree``: sections are merged, all other values replaced."""
    for key, value in flatten(changes, origin=origin).items():
        if value == {} and isinstance(value, dict):
            if lookup(tree, key) is None:
                assign(tree, key, {}, origin)
        else:
            assign(tree, key, value, origin)


def assign(tree: Any, key: str, value: Any, origin: Origin = NOWHERE) -> None:
    """Set a dotted key. A number is an index into a list; the index after the last item appends.

    Raises:
        UserError: an index beyond the list, or a value where a section is expected.
    """
    parts = key.split(".")
    node = tree
    for depth, part in enumerate(parts):
        index: Any = _index(part) if isinstance(node, list) else part
        if isinstance(node, list) and (index is None or index > len(node)):
            listed = f"{'.'.join(parts[:depth])} is a list of {len(node)}; expected an index up to {len(node)}"
            raise UserError(f"{origin.where(key)}{key}: {listed}, not {show(part)}")
        if isinstance(node, list) and index == len(node):
            node.append(None)
        if depth == len(parts) - 1:
            node[index] = value
            return
        if (node[index] if isinstance(node, list) else node.get(index)) is None:
            node[index] = {} if _index(parts[depth + 1]) is None else []
        if not isinstance(child := node[index], (dict, list)):
            problem = f"{'.'.join(parts[: depth + 1])} is a value ({show(child)})"
            raise UserError(f"{origin.where(key)}unknown key {key!r}: {problem}, not a section")
        node = child


def sections(names: Iterable[str]) -> set[str]:
    """The sections of dotted keys, at all levels."""
    return {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}


def _index(part: str) -> int | None:
    """``part`` of a key as an index into a list; None if it is a name."""
    return int(part) if part.isdecimal() else None


def lookup(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key, in which a number is an index into a list; ``default`` if there is none."""
    node: Any = tree
    for part in key.split("."):
        try:
            node = node[_index(part) if isinstance(node, list) else part]
        except (KeyError, IndexError, TypeError):
            return default
    return node


def plain(value: Any, name: str = "") -> Any:
    """``value`` in types that YAML can write: lists for tuples, Python numbers for NumPy's, text for paths.

    Raises:
        UserError: a table or an array.
    """
    if isinstance(value, Mapping):
        return {key: plain(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, name) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "dtype") and hasattr(value, "item") and math.prod(value.shape) == 1:
        return value.item()
    if hasattr(value, "shape"):
        subject = f"{name or 'a value'} is a {type(value).__name__}"
        raise UserError(f"{subject}: expected text, a number or a list; data go to run(data=…)")
    return value
