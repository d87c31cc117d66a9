"""The hyperparameters of a method (its dataclass ``Params``) as keys of the section ``lowrank``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UserError, nearest
from .check import check_keys, keys_of
from .origin import Origin
from .sections import Lowrank


def params_defaults(cls: Any) -> dict[str, Any]:
    return {name: key.default for name, key in keys_of(cls.Params).items() if not key.required}


def with_params(cls: Any, params: Mapping[str, Any]) -> str:
    """The method's name, with its hyperparameters that are not at their default: ``flora with lowrank.merge = False``.

    Args:
        params: all hyperparameters.
    """
    defaults = params_defaults(cls)
    pairs = [(name, value) for name, value in params.items() if name not in defaults or value != defaults[name]]
    changed = [f"lowrank.{name} = {str(value):.80}" for name, value in pairs]
    return f"{cls.name} with {', '.join(changed)}" if changed else str(cls.name)


def general_keys() -> list[str]:
    """The keys of ``lowrank`` that are not hyperparameters of a method."""
    return [name for name, key in keys_of(Lowrank).items() if not key.meta.get("open")]


def taken_keys(cls: Any, keys: Iterable[str]) -> list[str]:
    """The subset of ``keys``, such as ``lowrank.ranks``, that are hyperparameters of the method."""
    return [key for key in keys if key.split(".")[1] in keys_of(cls.Params)]


def unknown_parameter(key: str, classes: Sequence[Any], origin: Origin, others: Iterable[Any] = ()) -> NoReturn:
    """Refuse a key of ``lowrank`` that none of the methods ``classes`` has; ``others`` are methods that may have it."""
    name, fields = f"lowrank.{key}", list(dict.fromkeys(field for cls in classes for field in keys_of(cls.Params)))
    having = [cls.name for cls in others if key in keys_of(cls.Params)]
    hint = f", which is of {', '.join(having)}" if having else nearest(key, [*general_keys(), *fields])
    valid = f"keys of {', '.join(cls.name for cls in classes)}: {', '.join(fields) or 'none'}"
    raise UserError(f"{origin.where(name)}unknown key {name!r}{hint}; {valid}")


def check_method_params(
    cls: Any, arguments: Mapping[str, Any], origin: Origin | None = None, others: Iterable[Any] = ()
) -> dict[str, Any]:
    """All hyperparameters of the method: the given values, checked, and defaults for the others.

    Args:
        others: methods that may have a key that this one has not.
    """
    keys, origin = keys_of(cls.Params), origin or Origin()
    for name in arguments:
        if name not in keys:
            unknown_parameter(name, [cls], origin, others)
    values = check_keys(arguments, keys, origin, "lowrank")
    try:
        params = cls.Params(**values)
    except ValueError as error:
        raise UserError(f"{origin.where('lowrank')}lowrank ({cls.name}): {error}") from None
    return {name: getattr(params, name) for name in keys}
