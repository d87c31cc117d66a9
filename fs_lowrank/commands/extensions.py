"""Commands that packages add through the entry-point group ``fs_lowrank.commands``, such as ``hpo`` and ``benchmark``.

An entry point names a function ``main(argv)`` that returns an exit code: ``hpo = hpo.cli:main`` becomes
``fs-lowrank hpo``. Its module is taken from where its package is installed, so that a file ``hpo.py`` or a folder
``benchmark`` of the user's, which Python would import instead, is never run in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec
from pathlib import Path

from ..errors import UserError
from ..jobs import shell

ENTRY_POINTS = "fs_lowrank.commands"


@cache
def _found(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """The entry points by name; looked for once for each ``sys.path``, since that takes time."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UserError(
                f"two packages add a command {point.name!r} ({other.value}, {point.value}); uninstall one of them"
            )
    return dict(sorted(found.items()))


def extensions(built_in: Collection[str] = ()) -> Mapping[str, EntryPoint]:
    """The added commands: name → entry point.

    Raises:
        UserError: two packages add the same name, or one adds a name that is ``built_in``.
    """
    found = _found(tuple(sys.path))
    for name in sorted(found.keys() & set(built_in)):
        raise UserError(
            f"a package adds a command {name!r} ({found[name].value}), but fs-lowrank has one of this name; "
            "uninstall the package"
        )
    return found


def run_extension(point: EntryPoint, argv: Sequence[str]) -> int:
    """Run an added command with the arguments after its name; returns the exit code."""
    try:
        main = _load(point)
    except UserError as error:
        return shell.explain(error)
    code = main(list(argv))
    return shell.OK if code is None else int(code)


def _load(point: EntryPoint):
    """The function that the entry point names, from its own package.

    Raises:
        UserError: the package cannot be imported, or another module of its name was imported before.
    """
    package = point.module.partition(".")[0]
    own = _own_spec(point, package)
    try:
        if own is not None:
            _import(package, own)
        main = point.load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the command {point.name!r} ({point.value}) failed to import: {type(error).__name__}: {error}"
        ) from error
    if not callable(main):
        raise UserError(f"the command {point.name!r}: {point.value} is no function main(argv)")
    return main


def _own_spec(point: EntryPoint, package: str) -> ModuleSpec | None:
    """Where the package's files are; None if that is known to its own importer alone (some editable installs)."""
    homes = []
    if point.dist is not None:
        homes.append(Path(str(point.dist.locate_file(""))))
        if point.dist.name.replace("_", "-") == "fs-lowrank":  # an editable install: the files are beside this package
            homes.append(Path(__file__).parents[2])
    for home in homes:
        spec = PathFinder.find_spec(package, [str(home.resolve())])
        if spec is not None and spec.loader is not None:
            return spec
    return None


def _import(package: str, own: ModuleSpec) -> None:
    """Import ``package`` from ``own`` even where a module of the same name stands before it on ``sys.path``."""
    known = sys.modules.get(package)
    if known is not None:
        where = getattr(known, "__file__", None)
        if where is None or own.origin is None or not Path(where).samefile(own.origin):
            raise UserError(f"{package} was imported from {where or 'elsewhere'}, it is needed from {own.origin}")
        return
    usual = PathFinder.find_spec(package)
    if usual is not None and usual.origin != own.origin and own.origin is not None:
        # Processes that are started find modules along the same path, so that the own one must come first there too.
        sys.path.insert(0, str(Path(own.origin).parents[1 if own.submodule_search_locations else 0]))
    module = module_from_spec(own)
    sys.modules[package] = module
    try:
        assert own.loader is not None
        own.loader.exec_module(module)
    except BaseException:
        del sys.modules[package]
        raise
