"""``fs-lowrank examples``: the configurations, a notebook and a program that ship with the package."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from ..errors import UserError, hint, nearest
from ..jobs import tables
from ..jobs.files import read_json, write_bytes
from ..jobs.shell import console, say

SUFFIXES = (".yaml", ".ipynb", ".py")


def folder() -> Path:
    """The folder of the examples: in the installed package, or at the root of a clone."""
    return Path(import_module("fs_lowrank.examples").__path__[0])


def add(commands) -> None:
    parser = commands.add_parser(
        "examples", help="list the configurations, the notebook and the program that ship, or copy some of them"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the examples to copy; without a name, list all")
    parser.add_argument("--to", default=".", metavar="FOLDER", type=Path, help="where to copy them (default: here)")
    tables.option(parser)
    parser.set_defaults(do=_examples)


def _examples(args: argparse.Namespace) -> None:
    available = {path.stem: path for path in sorted(folder().iterdir()) if path.suffix in SUFFIXES}
    if not args.names:
        lines = [(name, _first_line(path).lstrip('#" ').strip()) for name, path in available.items()]
        tables.show(console, [("example", "what"), *lines], args.table)
        say(f"copy one with: {hint('examples', next(iter(available)))}")
        return
    tables.only_of_a_list(args)
    chosen = []
    for name in args.names:
        stem = Path(name).stem if Path(name).suffix in SUFFIXES else Path(name).name
        if stem not in available:
            raise UserError(f"no example {name!r}{nearest(name, available)}; there are: {', '.join(available)}")
        path = available[stem]
        copy = args.to / path.name
        if copy.exists():
            raise UserError(f"{copy} exists; remove it, or choose another folder with --to")
        chosen.append((path, copy))
    for path, copy in chosen:
        write_bytes(copy, path.read_bytes())
        say(str(copy))


def _first_line(path: Path) -> str:
    """The description of an example: the first line of the file, or of the first cell."""
    text = read_json(path)["cells"][0]["source"] if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    return "".join(text).splitlines()[0]
