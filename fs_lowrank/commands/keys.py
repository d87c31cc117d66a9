"""``fs-lowrank keys``: the reference of configuration keys."""

from __future__ import annotations

import argparse
import sys

from rich.markup import escape
from rich.table import Table

from ..jobs import shell

console = shell.make_console(140)


def add(commands) -> None:
    parser = commands.add_parser(
        "keys", help="all configuration keys: type, default, engines, meaning; or those of one section or name"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a key, a section, a splitter, a method")
    parser.add_argument("--markdown", action="store_true", help="print the page of the documentation")
    parser.set_defaults(do=_keys)


def _keys(args: argparse.Namespace) -> None:
    from ..errors import UserError
    from ..keys import find, markdown, reference

    if args.markdown:
        if args.name:
            raise UserError(f"--markdown prints all keys; leave out {args.name!r}")
        sys.stdout.write(markdown())
        return
    entries = find(args.name) if args.name else reference()
    if len(entries) == 1:
        (entry,) = entries
        console.print(f"[bold]{escape(entry.name)}[/] ({escape(entry.group)})", soft_wrap=True)
        console.print(escape(entry.meaning), soft_wrap=True)
        console.print(f"  expected: {escape(entry.type)}", soft_wrap=True)
        console.print(f"  default: {escape(entry.default) or 'none, it must be given'}", soft_wrap=True)
        console.print(f"  engines: {escape(entry.engines)}", soft_wrap=True)
        return
    table = Table()
    for column in ("key", "default", "meaning"):
        table.add_column(column, overflow="fold")
    group = ""
    for entry in entries:
        if entry.group != group:
            table.add_section()
            group = entry.group
            table.add_row(f"[bold]{escape(group)}[/]", "", "")
        table.add_row(*map(escape, (entry.name, entry.default, entry.meaning)))
    console.print(table)
    if not args.name:
        console.print(
            "one key in full: fs-lowrank keys NAME; FederatedScope's other keys: docs/keys.md", soft_wrap=True
        )
