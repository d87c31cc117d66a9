"""Copies of this package's modules to look up the parameters of methods and data sets without importing torch.

A reference shows docstrings, classes and signatures of a module; only the computations need tensors. A copy has all of
these; names imported from other packages are absent in it.
"""

from __future__ import annotations

import builtins
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

#: rooms whose modules import nothing slow, so that a copy uses them unchanged
_QUICK = ("fs_lowrank.errors", "fs_lowrank.seeds", "fs_lowrank.settings", "fs_lowrank.versions")
_QUICK_PACKAGES = {*sys.stdlib_module_names, "yaml"}


class _Absent:
    """In place of a name of another package: a base of nothing, a decorator without effect, a part of a type."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    def __getitem__(self, item: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__


def declared(name: str) -> Any:
    """The module ``name`` of this package if it is imported already; else a copy that imports no other package.

    A copy imports other modules of its own room as copies, and the rooms below ``algebra`` unchanged.
    """
    return sys.modules.get(name) or _copy(name)


@cache
def _copy(name: str) -> ModuleType:
    file = Path(__file__).parent.joinpath(*name.split(".")[1:])
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    module = ModuleType(f"{name} (declared)")
    sys.modules[module.__name__] = module  # where dataclasses and inspect look for it
    room, package = name.split(".")[:2], name if file.name == "__init__.py" else name.rpartition(".")[0]

    def import_(target: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0) -> Any:
        target = resolve_name("." * level + target, package)
        if target.split(".")[0] in _QUICK_PACKAGES or target.startswith(_QUICK):
            return builtins.__import__(target, globals, locals, names)
        return declared(target) if target.split(".")[:2] == room else _Absent()

    scope = {"__file__": str(file), "__package__": package, "__builtins__": {**vars(builtins), "__import__": import_}}
    vars(module).update(scope)
    code: Any = SourceFileLoader(name, str(file)).get_code(name)
    exec(code, vars(module))
    return module


def methods() -> Any:
    """``fs_lowrank.methods`` or its copy; never the copy if packages add methods, since these import the room."""
    if not _methods_added(tuple(sys.path)):
        return declared("fs_lowrank.methods")
    from . import methods as room

    return room


@cache
def _methods_added(path: tuple[str, ...]) -> bool:
    """Whether packages add methods; looked for once for each ``sys.path``, since that takes time."""
    return bool(entry_points(group=declared("fs_lowrank.methods.catalogue").ENTRY_POINTS))
