"""``fs-lowrank keys``: the reference of configuration keys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from ..jobs import tables
from ..jobs.files import to_json
from ..jobs.shell import console, say


def add(commands) -> None:
    parser = commands.add_parser(
        "keys", help="all configuration keys: type, default, engines, meaning; or the keys of one section or name"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a key, a section, a splitter, a method")
    schema = "print a JSON schema of configuration files, by which editors complete and check a YAML"
    parser.add_argument("--schema", action="store_true", help=schema)
    tables.option(parser)
    parser.set_defaults(do=_keys)


def _keys(args: argparse.Namespace) -> None:
    from ..keys import find, json_schema, reference

    if args.schema:
        print(to_json(json_schema(), indent=1, ensure_ascii=False))
        return
    entries = find(args.name) if args.name else reference()
    if len(entries) == 1:
        tables.only_of_a_list(args)
        (entry,) = entries
        say(Text.assemble((entry.name, "bold"), f" ({entry.group})"))
        default = entry.default or "none, it must be given"
        lines = [entry.meaning, f"  expected: {entry.type}", f"  default: {default}", f"  engines: {entry.engines}"]
        say("\n".join(lines))
        return
    rows: list[Sequence[str | Text]] = [("key", "default", "meaning")]
    for group, members in groupby(entries, lambda entry: entry.group):
        rows += [(), (Text(group, "bold"), "", ""), *((entry.name, entry.default, entry.meaning) for entry in members)]
    tables.show(console, rows, args.table, leaves=("default",))
    if not args.name:
        further = "one key in full: fs-lowrank keys NAME; FederatedScope's other keys: fs-lowrank keys FederatedScope"
        say(further)
