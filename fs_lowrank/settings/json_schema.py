"""A value's JSON schema (draft 2020-12), from the type, bounds and choices by which ``check_value`` checks it."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from .check import Key

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object"}
_BOUNDS = {"min": "minimum", "above": "exclusiveMinimum", "max": "maximum", "below": "exclusiveMaximum"}


def value_schema(key: Key) -> dict[str, Any]:
    """The schema of a key's values."""
    meta, schema = key.meta, _schema(key.hint, key.meta)
    spellings = list(meta.get("also", {}))
    if meta.get("fold"):  # in upper or lower case; the choices are for editors, which complete them
        letters = ("".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in w) for w in meta["choices"])
        return {"anyOf": [schema, {"type": "string", "pattern": f"^({'|'.join(letters)})$"}]}
    return {"anyOf": [schema, {"enum": spellings}]} if spellings else schema


def _schema(hint: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(arg, meta) for arg in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (list, tuple):
        return {"type": "array", **_items(origin, args, meta)}
    if origin not in _TYPES:
        return {}
    schema: dict[str, Any] = {"type": _TYPES[origin]}
    if origin in (int, float):
        schema |= {keyword: meta[bound] for bound, keyword in _BOUNDS.items() if meta.get(bound) is not None}
    if origin in (int, float, str) and meta.get("choices"):
        schema["enum"] = [choice for choice in meta["choices"] if choice is not None]
    return schema


def _items(origin: type, args: tuple[Any, ...], meta: Mapping[str, Any]) -> dict[str, Any]:
    bounds = {bound: meta[bound] for bound in _BOUNDS if bound in meta}
    schema: dict[str, Any] = {}
    if origin is tuple and args and args[-1] is not ...:
        schema |= {"prefixItems": [_schema(arg, bounds) for arg in args], "minItems": len(args), "maxItems": len(args)}
    elif args:
        schema["items"] = _schema(args[0], bounds)
    if "items" in meta:
        schema["items"] = {"enum": [*meta["items"], *meta.get("dropped", ())]}
    return schema


def section() -> dict[str, Any]:
    """The schema of a section without keys yet; an empty one is None in YAML. Dotted names are not checked."""
    dotted: dict[str, Any] = {r"\.": {}}
    return {"type": ["object", "null"], "properties": {}, "patternProperties": dotted, "additionalProperties": False}


def within(node: dict[str, Any], name: str) -> dict[str, Any]:
    """The subsection ``name`` of a section, or the items of a list (name ``0`` or ``N``); made if missing."""
    if name not in ("0", "N"):
        child: dict[str, Any] = node["properties"].setdefault(name, section())
        return child
    array: dict[str, Any] = next(option for option in (node, *node.get("anyOf", ())) if option.get("type") == "array")
    if "properties" not in array.get("items", {}):
        array["items"] = section()
    items: dict[str, Any] = array["items"]
    return items
