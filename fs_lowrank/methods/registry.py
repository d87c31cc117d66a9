"""The registered methods. ``catalogue`` imports the modules that register them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping

from ..errors import UserError
from ..settings import Lowrank
from .base import Averaging, Gathering, Method

_METHODS: dict[str, type[Method]] = {}
#: attributes that version 0.1.0 read, which would be ignored without a word, and what replaces them
_FORMER = {
    "averages": "derive from Averaging for True, from Gathering for False",
    "additive": "return replace(super().requires(params), sums=…) from requires",
    "needs_only_sums": "return replace(super().requires(params), sums=…) from requires",
    "selects": "return replace(super().requires(params), validation=…) from requires",
    "plans_ahead": "return replace(super().requires(params), rounds=…) from requires",
    "tasks": "return replace(super().requires(params), tasks=…) from requires",
    "lora_only": 'return replace(super().requires(params), adapter="lora") from requires',
    "either": 'return replace(super().requires(params), adapter="optional") from requires',
    "chains_only": "call models.chain.chain in adapt(model), which refuses other networks",
    "averages_head": "name in averaged the tags whose mean a Gathering method takes",
    "average": "override mean(updates, state) of Averaging, or call mean_of(updates, tags)",
    "combine": "derive from Averaging, whose aggregate calls its wrappers",
}


def register_method(name: str) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: register the method as ``name`` (lower case).

    Raises:
        UserError: the name belongs to another class; a hyperparameter has the name of a key that ``lowrank`` has for
            every method; the class derives from neither ``Averaging`` nor ``Gathering``, or lacks an abstract method;
            it has ``exchanges`` and no ``tell``, or an attribute of the former contract, which nothing would read.
    """

    def register(cls: type[Method]) -> type[Method]:
        general = {f.name for f in dataclasses.fields(Lowrank)}
        clash = sorted(general & {f.name for f in dataclasses.fields(cls.Params)})
        if clash:
            raise UserError(
                f"method {name!r}: hyperparameter {clash[0]!r} is a key of the section lowrank already, "
                f"for every method; choose another name (taken: {', '.join(sorted(general))})"
            )
        existing = _METHODS.get(name)
        if existing is not None and (existing.__module__, existing.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"method {name!r} is registered already, by {existing.__module__}.{existing.__qualname__}")
        refuse_former(name, dir(cls))
        if not issubclass(cls, (Averaging, Gathering)) or inspect.isabstract(cls):
            raise UserError(
                f"method {name!r}: {cls.__qualname__} does not define its server step; derive it from Averaging (a "
                "weighted mean, to which server optimizers apply), or from Gathering and define aggregate"
            )
        if cls.exchanges is not Method.exchanges and cls.tell is Method.tell:
            raise UserError(f"method {name!r}: {cls.__qualname__} has rounds of several exchanges; define tell, too")
        cls.name = name
        _METHODS[name] = cls
        return cls

    return register


def refuse_former(name: str, attributes: Iterable[str]) -> None:
    """Raise a ``UserError`` if one of the ``attributes`` of the method ``name`` belongs to the former contract."""
    for former in sorted(_FORMER.keys() & set(attributes)):
        raise UserError(f"method {name!r}: the attribute {former} is no longer read; instead, {_FORMER[former]}")


def registered() -> Mapping[str, type[Method]]:
    """The classes by name, from the modules imported so far."""
    return _METHODS
