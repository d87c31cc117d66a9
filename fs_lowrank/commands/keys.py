"""``fs-lowrank keys``: the reference of configuration keys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.text import Text

from ..jobs import shell, tables

console = shell.make_console(140)


def add(commands) -> None:
    parser = commands.add_parser(
        "keys", help="all configuration keys: type, default, engines, meaning; or those of one section or name"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a key, a section, a splitter, a method")
    tables.option(parser)
    parser.set_defaults(do=_keys)


def _keys(args: argparse.Namespace) -> None:
    from ..keys import find, reference

    entries = find(args.name) if args.name else reference()
    if len(entries) == 1:
        tables.only_of_a_list(args)
        (entry,) = entries
        console.print(Text.assemble((entry.name, "bold"), f" ({entry.group})"), soft_wrap=True)
        console.print(entry.meaning, soft_wrap=True)
        console.print(f"  expected: {entry.type}", soft_wrap=True)
        console.print(f"  default: {entry.default or 'none, it must be given'}", soft_wrap=True)
        console.print(f"  engines: {entry.engines}", soft_wrap=True)
        return
    lines: list[Sequence[str | Text]] = [("key", "default", "meaning")]
    group = ""
    for entry in entries:
        if entry.group != group:
            group = entry.group
            lines += [(), (Text(group, "bold"), "", "")]
        lines.append((entry.name, entry.default, entry.meaning))
    tables.show(console, lines, args.table)
    if not args.name:
        console.print(
            "one key in full: fs-lowrank keys NAME; FederatedScope's other keys: fs-lowrank keys FederatedScope",
            soft_wrap=True,
        )
