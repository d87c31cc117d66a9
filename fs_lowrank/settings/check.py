"""Checking one value against its key: type, bounds, choices. Everything that a user configures is checked here."""

from __future__ import annotations

import copy
import difflib
import math
import operator
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any

from ..errors import nearest
from .origin import Origin
from .tree import plain


def key(default: Any, **meta: Any) -> Any:
    """A key of a section.

    Meta: ``min``, ``above``, ``max``, ``below`` bound a number or each in a list (``above`` and ``below``
    exclude); ``choices``; ``items``, the choices for each item of a list; ``fold``, case does not matter;
    ``also``, other spellings; ``result=False``, does not decide the result; ``local``, the only value that the
    local engine honours; ``idle``, why the local engine has no use for it; ``open``, takes unknown keys.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=meta)
    return field(default=default, metadata=meta)


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The annotations of a class, evaluated: which takes longer than all checks by them."""
    return typing.get_type_hints(cls)


def check_value(name: str, value: Any, hint: Any, meta: Mapping[str, Any], origin: Origin) -> Any:
    """``value`` checked against the key's type and bounds."""
    given = value
    for spelling, meant in meta.get("also", {}).items():
        if type(value) is type(spelling) and value == spelling:
            value = meant
    try:
        value = _coerce(plain(value), hint)
    except _Mismatch:
        expected, choices = _expected(hint), meta.get("choices")
        origin.wrong(name, given, f"one of {', '.join(map(str, choices))}" if choices else expected)
    if meta.get("fold"):
        value = {choice.lower(): choice for choice in meta["choices"]}.get(value.lower(), value)
    items = value if isinstance(value, (list, tuple)) else [value]
    for choices, shape, chosen in (
        (meta.get("choices"), "one of", [value]),
        (meta.get("items"), "a list of any of", items),
    ):
        for item in chosen:
            if choices and item is not None and item not in choices:
                listed = ", ".join(str(choice) or "''" for choice in choices)
                origin.wrong(name, given, f"{shape} {listed}{nearest(item, choices)}")
    bounds = [(meta[bound], holds, words) for bound, holds, words in _BOUNDS if meta.get(bound) is not None]
    for item in items:
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        if is_number and not all(holds(item, limit) for limit, holds, _ in bounds):
            wanted = " and ".join(f"{words} {limit:g}" for limit, _, words in bounds)
            origin.wrong(name, given, f"{_expected(hint)}, {wanted}")
    return value


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


def _expected(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (list, tuple) and args:
        return {
            int: "a list of whole numbers",
            float: "a list of numbers",
            str: "a list of texts",
            dict: "a list of mappings",
        }.get(args[0], "a list")
    return _EXPECTED.get(origin or hint, getattr(hint, "__name__", str(hint)))


class _Mismatch(Exception):
    pass


def _coerce(value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` has it, if that takes no guess: an int for a float, a number written as text."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        exact = [arg for arg in args if type(value) is (typing.get_origin(arg) or arg)]
        for arg in (*exact, *args):
            try:
                return _coerce(value, arg)
            except _Mismatch:
                continue
        raise _Mismatch
    if origin is typing.Literal:
        if value in args:
            return value
    elif hint is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise _Mismatch from None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint in (bool, str, type(None)):
        if isinstance(value, hint):
            return value
    elif (origin or hint) in (list, tuple, Sequence):
        if isinstance(value, (list, tuple)):
            kind = tuple if (origin or hint) is tuple else list
            fixed = origin is tuple and args and args[-1] is not ...
            if fixed and len(args) != len(value):
                raise _Mismatch
            hints = args if fixed else [args[0] if args else Any] * len(value)
            return kind(_coerce(item, arg) for item, arg in zip(value, hints))
    elif (origin or hint) in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    else:
        return value
    raise _Mismatch


def misspelt(key: str, known: Any, cutoff: float = 0.8) -> str | None:
    """The known name that ``key`` was surely meant to be, or None."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(key.lower(), list(lower), n=1, cutoff=cutoff)
    return lower[close[0]] if close else None
