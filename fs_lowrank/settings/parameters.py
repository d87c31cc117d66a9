"""The hyperparameters of a method (its dataclass ``Params``) as keys of the section ``lowrank``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UserError, nearest
from .check import check_value, keys_of
from .origin import Origin
from .sections import Lowrank


def params_fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    params = getattr(cls, "Params", None)
    return {f.name: f for f in dataclasses.fields(params) if f.init} if params is not None else {}


def params_defaults(cls: Any) -> dict[str, Any]:
    defaults = {}
    for name, f in params_fields(cls).items():
        if f.default_factory is not dataclasses.MISSING:
            defaults[name] = f.default_factory()
        elif f.default is not dataclasses.MISSING:
            defaults[name] = f.default
    return defaults


def general_keys() -> list[str]:
    """The keys of ``lowrank`` that are not hyperparameters of a method."""
    return [f.name for f in dataclasses.fields(Lowrank) if not f.metadata.get("open")]


def taken_keys(cls: Any, keys: Iterable[str]) -> list[str]:
    """The subset of ``keys``, such as ``lowrank.ranks``, that are hyperparameters of the method."""
    fields = params_fields(cls)
    return [key for key in keys if key.split(".")[1] in fields]


def unknown_parameter(key: str, classes: Sequence[Any], origin: Origin) -> NoReturn:
    name, fields = f"lowrank.{key}", list(dict.fromkeys(field for cls in classes for field in params_fields(cls)))
    has = (
        f"the method {classes[0].name} has"
        if len(classes) == 1
        else f"the methods {', '.join(cls.name for cls in classes)} have"
    )
    raise UserError(
        f"{origin.where(name)}unknown key {name!r}{nearest(key, [*general_keys(), *fields])}; {has} "
        + (f"the keys {', '.join(fields)}" if fields else f"no keys of {'its' if len(classes) == 1 else 'their'} own")
    )


def check_method_params(cls: Any, given: Mapping[str, Any], origin: Origin | None = None) -> dict[str, Any]:
    """All hyperparameters of the method: the given values, checked, and defaults for the others."""
    fields, origin = params_fields(cls), origin or Origin()
    keys = keys_of(cls.Params) if fields else {}
    values = {}
    for name, value in given.items():
        if name not in keys:
            unknown_parameter(name, [cls], origin)
        values[name] = check_value(f"lowrank.{name}", value, keys[name].hint, keys[name].meta, origin)
    missing = [key for key in fields if key not in values and key not in params_defaults(cls)]
    if missing:
        origin.fail(f"lowrank.{missing[0]}", f"is missing: federate.method = {cls.name} needs it")
    if not fields:
        return {}
    try:
        params = cls.Params(**values)
    except ValueError as error:
        raise UserError(f"{origin.where('lowrank')}lowrank ({cls.name}): {error}") from None
    return {key: getattr(params, key) for key in fields}
