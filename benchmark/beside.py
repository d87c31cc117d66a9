"""The package ``hpo``, and this package's own name: top-level ones in a clone, inside ``fs_lowrank`` in a wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__ == "benchmark":
    import hpo as hpo
else:
    from .. import hpo as hpo


def module_of(script: str) -> str:
    """The module that a suite names ``benchmark.…``, or any other, by the name that it has here."""
    return f"{__package__}.{script.removeprefix('benchmark.')}" if script.startswith("benchmark.") else script
