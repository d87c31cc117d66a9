"""The methods that have registered. What imports the built-in ones is ``catalogue``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from ..errors import UserError
from ..settings import Lowrank
from .base import Method

_METHODS: dict[str, type[Method]] = {}


def register_method(name: str) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: make the method known as ``name`` (lower case).

    Raises:
        UserError: the name is taken by another class, or a hyperparameter has the name of a key that ``lowrank``
            has for every method: one value in a config would mean both.
    """

    def register(cls: type[Method]) -> type[Method]:
        general = {f.name for f in dataclasses.fields(Lowrank)}
        clash = sorted(general & {f.name for f in dataclasses.fields(cls.Params)})
        if clash:
            raise UserError(
                f"method {name!r}: hyperparameter {clash[0]!r} is a key of the section lowrank already, "
                f"for every method; choose another name (taken: {', '.join(sorted(general))})"
            )
        taken = _METHODS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"method {name!r} is registered already, by {taken.__module__}.{taken.__qualname__}")
        cls.name = name
        _METHODS[name] = cls
        return cls

    return register


def registered() -> Mapping[str, type[Method]]:
    """The classes by name, of the modules that have been imported so far."""
    return _METHODS
