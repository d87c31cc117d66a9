"""Tables as lines of cells, for all commands: on the screen, as JSON, CSV and LaTeX."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..errors import UserError
from .escaped import printable
from .files import to_json, write_text

#: cells are plain text, or text with a style; the first line is the header; an empty line is a rule on the screen only
Lines = Sequence[Sequence[str | Text]]

#: in place of a file: the value of ``option`` for ``--json``
JSON = Path("json")
#: the stream of the JSON; None: the standard output
_output: TextIO | None = None


class _ScoresOrTable(argparse.Action):
    """``--json FILE`` is the file of the scores; ``--json`` alone is that of a table, ``JSON``."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        setattr(namespace, "table" if value is JSON else self.dest, value)


def option(command: argparse.ArgumentParser, when: str = "", scores: bool = False) -> None:
    """Give a command the options ``--table FILE`` and ``--json``, for ``show``.

    Args:
        when: the beginning of the help. scores: ``--json FILE`` names a file for more than the table, ``args.json``.
    """
    text = f"{when}also write the table, as CSV and LaTeX; FILE ends with .csv or .tex"
    group = command.add_mutually_exclusive_group()
    group.add_argument("--table", metavar="FILE", type=_path, help=text)
    as_json = f"{when}print the table as JSON instead, one object a row"
    as_json += "; with FILE: write the scores to it, too" * scores
    alone: dict[str, Any] = {"dest": "table", "action": "store_const"}
    named = {"metavar": "FILE", "nargs": "?", "type": Path, "action": _ScoresOrTable}
    (command if scores else group).add_argument("--json", const=JSON, help=as_json, **(named if scores else alone))


def only_of_a_list(args: argparse.Namespace) -> None:
    """Refuse ``--table`` where a command prints a table only without NAMES.

    Raises:
        UserError: it is given.
    """
    if args.table:
        option_text = "--json" if args.table is JSON else f"--table {args.table}"
        raise UserError(f"{option_text}: there is a table only without a name; leave one of them out")


def _path(text: str) -> Path:
    if Path(text).suffix.lower() not in (".csv", ".tex"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file that ends with .csv or .tex; both are written")
    return Path(text).with_suffix(".csv")


@contextlib.contextmanager
def output_of(file: Path | None) -> Iterator[None]:
    """Within the block, with ``JSON``, messages go to standard error, and the table alone to the output."""
    global _output
    if file is not JSON or sys.stdout is sys.stderr:  # the command that called this one has done so
        yield
        return
    _output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield


def show(
    console: Console, lines: Lines, file: Path | None = None, *, right: Collection[str] = (), leaves: Sequence[str] = ()
) -> None:
    """Print a table, and write it to ``file``, if one is given, as ``write_tables`` does; ``JSON``: print that instead.

    On the screen no word is broken. Without room for the longest word of each column, columns are hidden.

    Args:
        right: the names of right-aligned columns.
        leaves: the names of columns that may be hidden, the first one first.
    """
    if file is JSON:
        print(as_json(lines), file=_output)
        return
    hidden: list[str] = []
    while _too_wide(table := rich_table(_without(lines, hidden), right), console.width) and len(hidden) < len(leaves):
        hidden.append(leaves[len(hidden)])
    console.print(table)
    if hidden:
        console.print(f"a wider terminal, and --json, also show: {', '.join(hidden)}")
    if file:
        write_tables(lines, file)


def _without(lines: Lines, names: Collection[str]) -> Lines:
    return [[cell for name, cell in zip(lines[0], line) if name not in names] for line in lines]


def _too_wide(table: Table, room: int) -> bool:
    """Set the widths of the columns. The widest shrinks first, to its longest word; True if that is not enough."""
    texts = [[str(text) for text in (column.header, *column.cells)] for column in table.columns]
    minimum = [max(cell_len(word) for text in cells for word in ["", *text.split()]) for cells in texts]
    widths = [max(cell_len(line) for text in cells for line in ["", *text.splitlines()]) for cells in texts]
    room -= 3 * len(widths) + 1
    while sum(widths) > room and widths != minimum:
        spare = [width if width > lowest else 0 for width, lowest in zip(widths, minimum)]
        widths[spare.index(max(spare))] -= 1
    for column, width in zip(table.columns, widths):
        column.width = width
    return sum(widths) > room


def as_json(lines: Lines) -> str:
    """The rows as JSON objects by the names of the columns; cells that are plain numbers as numbers.

    A hash, which may look like a large number or one with an exponent, stays a text.
    """

    def cell(value: str | Text) -> str | float:
        text = str(value)
        number = re.fullmatch(r"-?(0|[1-9]\d{0,8})(\.\d{1,17}(e[+-]\d\d)?)?", text)
        return text if not number else float(text) if number[2] else int(text)

    head, *rows = ([" ".join(str(part).split()) for part in line] for line in lines if line)
    records = [{name: cell(value) for name, value in zip(head, row)} for row in rows]
    return to_json(records, indent=1, ensure_ascii=False)


def rich_table(lines: Lines, right: Collection[str] = ()) -> Table:
    """A table for the screen, with the columns ``right`` right-aligned; brackets in plain text are no markup."""
    header, *rows = lines
    table = Table(*(Column(_text(n), justify="right" if str(n) in right else "left", overflow="fold") for n in header))
    for row in rows:
        if row:
            table.add_row(*map(_text, row))
        else:
            table.add_section()
    return table


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(printable(cell))  # before the width of a column is decided


def write_tables(lines: Lines, path: Path) -> Path:
    """Write ``path`` (``.csv``) and, beside it, the LaTeX table (``.tex``, package booktabs).

    Raises:
        RunFailed: a file cannot be written.
    """
    import pandas as pd

    head, *rows = [[str(cell).replace("\n", " ") for cell in line] for line in lines if line]
    table, look = pd.DataFrame(rows, columns=head), "l" + "r" * (len(head) - 1)
    tex = table.to_latex(index=False, escape=True, column_format=look).replace("±", r"$\pm$")
    write_text(path, table.to_csv(index=False, lineterminator="\n"), durable=False)
    write_text(path.with_suffix(".tex"), tex, durable=False)
    return path
