"""The commands of ``fs-lowrank`` that have a file of their own, and the commands that packages add.

A command's file has ``add(commands)``, which gives it a parser, and imports what it needs only when it runs.
``extensions`` finds the commands of packages through the entry-point group ``fs_lowrank.commands``.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..jobs.shell import Parser

    Commands = argparse._SubParsersAction[Parser]


def add_commands(commands: Commands) -> None:
    """Give every command of this package a parser below ``commands``."""
    from . import check, examples, finished, flower, init, keys, report

    for module in (init, examples, keys, finished, report, check, flower):
        module.add(commands)
