"""Commands that packages add through the entry-point group ``fs_lowrank.commands``, such as ``hpo`` and ``benchmark``.

An entry point names a function ``main(argv)`` that returns an exit code: ``hpo = fs_lowrank.hpo.cli:main`` becomes
``fs-lowrank hpo``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

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
        main = point.load()
    except Exception as error:
        why = f"failed to import: {type(error).__name__}: {error}"
        return shell.explain(UserError(f"the command {point.name!r} ({point.value}) {why}"))
    return main(list(argv)) or shell.OK
