"""The engines by name: built-in ones and those of other packages. No other module imports an engine by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import cast

from ..errors import UserError, nearest
from .process_settings import preserving_settings

ENTRY_POINTS = "fs_lowrank.engines"
_BUILT_IN = {
    "local": "fs_lowrank.engines.local",
    "federatedscope": "fs_lowrank.engines.federatedscope.run",
    "flower": "fs_lowrank.engines.flower.run",
}


@cache
def _added(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """The engines of other packages; searched once for each ``sys.path``, as that takes time."""
    added: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        registered = _BUILT_IN.get(point.name) or (point.name in added and added[point.name].value)
        if registered and registered != point.value:
            raise UserError(
                f"a package adds an engine {point.name!r} ({point.value}), but there is one of this name already "
                f"({registered}); uninstall one of the two packages, or give its engine another name"
            )
        added[point.name] = point
    return added


def added_engines() -> Mapping[str, str]:
    """The engines of other packages: name → module."""
    return {name: point.value for name, point in sorted(_added(tuple(sys.path)).items())}


def list_engines() -> list[str]:
    """Names of all engines: the built-in ones, then those that other packages add, sorted."""
    return [*_BUILT_IN, *added_engines()]


def get_engine(name: str) -> ModuleType:
    """The engine's module, whose ``run(config, resume, on_round, on_client, callbacks)`` is called.

    Raises:
        UserError: there is no such engine (the message names the nearest), it cannot be imported, or it has no ``run``.
    """
    module = _BUILT_IN.get(name) or added_engines().get(name)
    if module is None:
        raise UserError(f"no engine {name!r}{nearest(name, list_engines())}; there are: {', '.join(list_engines())}")
    label = f"engine {name!r} ({module})"
    try:
        with preserving_settings():
            engine = import_module(module) if name in _BUILT_IN else _added(tuple(sys.path))[name].load()
    except UserError as error:  # it says what it needs
        if name in _BUILT_IN:
            raise
        raise UserError(f"{label}: {error}") from error
    except Exception as error:
        raise UserError(f"{label} failed to import: {type(error).__name__}: {error}") from error
    if not callable(getattr(engine, "run", None)):
        raise UserError(f"{label}: it has no run(config, resume, on_round, on_client, callbacks)")
    return cast(ModuleType, engine)
