"""Checks of values against the type, bounds and choices of their key, for all that a user configures."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from ..errors import UserError, nearest, say_once
from .origin import Origin, show
from .tree import plain


def key(default: Any, **meta: Any) -> Any:
    """A key of a section.

    Meta: ``min``, ``above``, ``max``, ``below`` are bounds of a number or of each item of a list (``above`` and
    ``below`` are exclusive); ``choices``; ``items``, the choices for each item of a list; ``fold``, ignore upper and
    lower case; ``also``, other spellings; ``filled``, a list or mapping must not be empty; ``once``, a list must not
    have an item twice; ``dropped``, items of a list that are left out, and why; ``words``, a description of the
    expected value, if the type is not enough; ``result=False``, the key does not affect the result; ``later``, the
    default of a key added after a release: the former behaviour, which is left out of fingerprints; ``open``,
    unknown keys are accepted.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=meta)
    return field(default=default, metadata=meta)


def check_value(name: str, value: Any, key: Key, origin: Origin) -> Any:
    """``value``, converted to the type of the key and checked against its bounds and choices."""
    raw, meta = value, key.meta

    def wrong(hint: str = "") -> NoReturn:
        origin.wrong(name, raw, expected(key) + hint)

    for spelling, canonical in meta.get("also", {}).items():
        folded = value.lower() if meta.get("fold") and isinstance(value, str) else value
        if type(folded) is type(spelling) and folded == spelling:
            value = canonical
    try:
        value = _coerce(plain(value), key.hint)
    except _Mismatch:
        listed = isinstance(raw, str) and "a list" in _type_in_words(key.hint) and re.fullmatch(r"\((.*)\)", raw, re.S)
        wrong(f"; write [{listed[1]}]" if listed else "")
    for item, reason in meta.get("dropped", {}).items():
        if item in value:
            value = [entry for entry in value if entry != item]
            say_once(f"{name}: {item} has no effect: {reason}")
    if meta.get("filled") and not value:
        wrong(" that is not empty")
    if meta.get("fold"):
        value = {choice.lower(): choice for choice in meta["choices"]}.get(value.lower(), value)
    items, choices = value if isinstance(value, (list, tuple)) else [value], meta.get("choices") or meta.get("items")
    for i, item in enumerate(items):
        if choices and item is not None and item not in choices:
            wrong(nearest(item, choices))
        if meta.get("once") and item in items[:i]:
            origin.fail(name, f"has {show(item)} twice; name it once")
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        if is_number and not all(holds(item, meta[bound]) for bound, holds, _ in _BOUNDS if bound in meta):
            wrong()
    return value


@dataclass(frozen=True)
class Key:
    """The description of a key: its type, the metadata given to ``key``, whether it is required, or its default."""

    hint: Any
    meta: Mapping[str, Any] = field(default_factory=dict)
    required: bool = False
    default: Any = None


@cache
def keys_of(definition: type | Callable[..., Any], skip: int = 0) -> dict[str, Key]:
    """The fields of a dataclass, or the arguments of a function after the first ``skip``, as keys.

    A function gives by ``Annotated[float, {"above": 0.0}]`` the metadata that a dataclass gives by ``key``. An argument
    without a type accepts any value.
    """
    if dataclasses.is_dataclass(definition):
        fields, missing, hints = dataclasses.fields(definition), dataclasses.MISSING, typing.get_type_hints(definition)
        defaults = {f.name: f.default if f.default_factory is missing else f.default_factory() for f in fields}
        return {
            f.name: Key(hints[f.name], f.metadata, (val := defaults[f.name]) is missing, val) for f in fields if f.init
        }
    hints = typing.get_type_hints(definition, include_extras=True)
    keys = {}
    for name, parameter in list(inspect.signature(definition).parameters.items())[skip:]:
        hint, *noted = (
            typing.get_args(hints[name]) if hasattr(hints.get(name), "__metadata__") else [hints.get(name, Any)]
        )
        default = parameter.default
        keys[name] = Key(hint, noted[0] if noted else {}, default is parameter.empty, default)
    return keys


def check_keys(
    mapping: Any, keys: Mapping[str, Key], origin: Origin, section: str = "", only: Iterable[str] | None = None
) -> dict[str, Any]:
    """The values of ``mapping``, each checked against its key.

    Args:
        section: the dotted name of ``mapping``, for messages.
        only: the subset of ``keys`` that is allowed here; None: all.
    Raises:
        UserError: not a mapping; an unknown key (the message suggests the nearest); a missing key; a value of the
            wrong type or out of range. The message names file, line, dotted key, value, and the expected values.
    """
    if not isinstance(mapping, Mapping):
        origin.wrong(section or "the whole", mapping, "a mapping")
    allowed = list(keys if only is None else only)
    prefix = f"{section}." if section else ""
    checked = {}
    for name, value in mapping.items():
        if name not in allowed:
            hint = f"there are: {', '.join(allowed)}" if allowed else "it takes none"
            raise UserError(
                f"{origin.where(f'{prefix}{name}')}unknown key {prefix + str(name)!r}{nearest(name, allowed)}; {hint}"
            )
        checked[name] = check_value(prefix + name, value, keys[name], origin)
    for name in allowed:
        if keys[name].required and name not in mapping:
            origin.fail(prefix + name, "is missing")
    return checked


def one_mapping(name: str, value: Any, origin: Origin) -> dict[str, Any]:
    """The mapping in a list of at most one mapping, FederatedScope's form of arguments; ``{}`` for an empty list."""
    entries = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(entries, (list, tuple)) or len(entries) > 1 or not all(isinstance(e, Mapping) for e in entries):
        origin.wrong(name, value, "a list of one mapping")
    return dict(entries[0]) if entries else {}


_BOUNDS = (
    ("min", operator.ge, "at least"),
    ("above", operator.gt, "above"),
    ("max", operator.le, "at most"),
    ("below", operator.lt, "below"),
)


_EXPECTED = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "nothing",
}


def expected(key: Key) -> str:
    """The type, the choices and the bounds in words."""
    meta = key.meta
    limits = [(words, meta[bound]) for bound, _, words in _BOUNDS if bound in meta]
    bounds = " and ".join(f"{words} {limit if isinstance(limit, int) else f'{limit:g}'}" for words, limit in limits)
    choices = meta.get("choices") or meta.get("items")
    listed = ", ".join(str(choice) or "''" for choice in choices or ())
    kind = f"{'a list of any' if 'items' in meta else 'one'} of {listed}" if choices else _type_in_words(key.hint)
    return ", ".join(filter(None, [meta.get("words", kind), bounds]))


def _type_in_words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_in_words, args))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (list, tuple) and args:
        fixed = origin is tuple and args[-1] is not ...
        length = f"a list of {len(args)}" if fixed else "a list of"
        plural = {int: " whole numbers", float: " numbers", str: " texts", dict: " mappings"}.get(args[0])
        return f"{length}{plural}" if plural else length if fixed else "a list"
    return _EXPECTED.get(origin or hint, getattr(hint, "__name__", str(hint)))


class _Mismatch(Exception):
    pass


def _coerce(value: Any, hint: Any) -> Any:
    """``value`` converted to ``hint`` if that is unambiguous: an int to a float, text to a number."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # which neither files nor tensors hold
        raise _Mismatch
    if origin in (typing.Union, types.UnionType):
        for arg in sorted(args, key=lambda arg: type(value) not in (arg, typing.get_origin(arg))):  # its own type first
            with contextlib.suppress(_Mismatch):
                return _coerce(value, arg)
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin is float:
        with contextlib.suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif origin in (list, tuple, Sequence):
        if isinstance(value, (list, tuple)):
            fixed = origin is tuple and args and args[-1] is not ...
            hints = args if fixed else [args[0] if args else Any] * len(value)
            if len(hints) == len(value):
                return (tuple if origin is tuple else list)(map(_coerce, value, hints))
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is Any or not isinstance(origin, type):
        return value
    elif isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    raise _Mismatch


def rounds_of(share: float, rounds: int) -> int:
    """``share`` of ``rounds``, rounded up as in decimals: 0.55 · 100 is above 55 in floating point."""
    return math.ceil(share * rounds - 1e-9)
