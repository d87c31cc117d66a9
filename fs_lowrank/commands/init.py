"""``fs-lowrank init FILE``: a complete, commented configuration from a file; ``run --data FILE`` writes and runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UserError, hint
from ..jobs import shell
from ..jobs.files import write_text
from ..jobs.shell import say

_COLUMNS = {
    "text": "column of the text",
    "text_pair": "column of a second sentence",
    "label": "column of the class",
    "instruction": "column of the instruction",
    "input": "column of the instruction's input",
    "output": "column of the answer",
}


def add(commands) -> None:
    parser = commands.add_parser("init", help="write a complete, commented configuration for data of your own")
    parser.add_argument(
        "data",
        nargs="?",
        metavar="FILE",
        type=Path,
        help="labelled texts or instructions: CSV, TSV, JSON, JSON Lines, Parquet or Arrow, a folder of save_to_disk, "
        "or a pattern for several in quotes, such as 'clients/*.csv'; or a folder with a folder of pictures a class; "
        "by default the only one here",
    )
    options(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="the configuration (default: FILE's name, .yaml)")
    parser.set_defaults(do=_init)


def options(parser: argparse.ArgumentParser) -> None:
    """The options from which ``init`` and ``run`` make a configuration."""
    group = parser.add_argument_group("a file of your own (options that you leave out are guessed)")
    for name, help_text in _COLUMNS.items():
        group.add_argument(f"--{name.replace('_', '-')}", default="", metavar="COLUMN", help=help_text)
    group.add_argument(
        "--model", default="", metavar="MODEL", help="folder or name (default: minilm, smollm2 or resnet10)"
    )
    count, clients = shell.at_least(1), "number of clients (default: by the rows)"
    group.add_argument("--clients", type=count, default=0, metavar="N", help=clients)
    group.add_argument("--method", default="", metavar="NAME", help="default: rolora; for pictures fedlora")


def _only_one() -> Path:
    """The only file of texts, or folder of pictures, in the working directory.

    Raises:
        UserError: there is none, or there are several.
    """
    from ..data.image_files import SUFFIXES as PICTURES
    from ..data.user_data import SUFFIXES

    paths = []
    for path in sorted(Path().iterdir()):
        kinds = {file.suffix.lower() for file in path.glob("*/*")}
        if path.suffix.lower() in SUFFIXES or kinds and kinds <= {*PICTURES}:
            paths.append(path)
    if len(paths) == 1:
        return paths[0]
    raise UserError(f"init needs a FILE: {', '.join(map(str, paths)) or 'no texts or pictures are in this folder'}")


def used_options(args: argparse.Namespace) -> list[str]:
    """The names of the ``options`` that the command line has."""
    names = [*_COLUMNS, "model", "clients", "method"]
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]


def write(args: argparse.Namespace, out: Path | None) -> Path:
    """Write the configuration for ``args.data``.

    Raises:
        UserError: see ``start.draft``; the file exists with another content. RunFailed: it cannot be written.
    """
    from ..data.user_data import stem_of
    from ..declared import methods
    from ..start import Setup, draft

    columns = {name: getattr(args, name) for name in _COLUMNS}
    method = methods().get_method_class(args.method).name if args.method else ""
    text = draft(Setup(args.data, columns, model=args.model, method=method, clients=args.clients))
    out = out or Path(stem_of(args.data) + ".yaml")
    if out.exists() and out.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(
            f"{out} exists and differs; remove it, name another file with --out, or run it: {hint('run', '--cfg', out)}"
        )
    write_text(out, text)
    return out


def _init(args: argparse.Namespace) -> None:
    args.data = args.data or _only_one()
    out = write(args, args.out)
    say(out.read_text(encoding="utf-8"), end="")
    say(f"\nwritten to {out}; run it with: {hint('run', '--cfg', out)}")
