"""Commands that packages add through the entry-point group ``fs_lowrank.commands``, such as ``hpo`` and ``benchmark``.

An entry point names a function ``main(argv)`` that returns an exit code: ``hpo = fs_lowrank.hpo.cli:main`` becomes
``fs-lowrank hpo``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from ..jobs import shell

ENTRY_POINTS = "fs_lowrank.commands"


@cache
def extensions() -> Mapping[str, EntryPoint]:
    """The added commands: name → entry point; looked for once, since that takes time."""
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)}


def run_extension(point: EntryPoint, argv: Sequence[str]) -> int:
    """Run an added command with the arguments after its name; returns the exit code."""
    return point.load()(list(argv)) or shell.OK
