"""Tables as lines of cells: on the screen, where every command shows its tables by this, as JSON, CSV and LaTeX."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from .escaped import printable
from .files import to_json, write_text

#: cells are plain text, or text with a style; the first line is the header; an empty line is a rule on the screen only
Lines = Sequence[Sequence[str | Text]]

#: in place of a file: what ``option`` gives for ``--json``
JSON = Path("json")
#: where it goes; None: the standard output
_output: TextIO | None = None

_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"±": r"$\pm$", "≠": r"$\ne$", "–": "--", "\n": " "},
    }
)


def option(command: argparse.ArgumentParser, when: str = "") -> None:
    """Give a command the option ``--table FILE``, for ``show``; ``when`` it has a table begins the help."""
    about = f"{when}also write the table, as CSV and LaTeX; FILE ends with .csv or .tex"
    given = command.add_mutually_exclusive_group()
    given.add_argument("--table", metavar="FILE", type=_path, help=about)
    as_json = f"{when}print the table as JSON instead, one object a row"
    if "--json" not in command._option_string_actions:  # of some commands it names a file
        given.add_argument("--json", dest="table", action="store_const", const=JSON, help=as_json)


def only_of_a_list(args: argparse.Namespace) -> None:
    """Refuse ``--table`` where a command prints a table only without NAMES.

    Raises:
        UserError: it is given.
    """
    if args.table:
        raise UserError(f"{as_given(args.table)}: there is a table only without a name; leave one of them out")


def _path(text: str) -> Path:
    if Path(text).suffix.lower() not in (".csv", ".tex"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file that ends with .csv or .tex; both are written")
    return Path(text).with_suffix(".csv")


def as_given(file: Path) -> str:
    """What the command line has that gives ``file``."""
    return "--json" if file is JSON else f"--table {file}"


@contextlib.contextmanager
def output_of(file: Path | None) -> Iterator[None]:
    """Within the block, with ``JSON``, all that is said goes to standard error, and the table alone to the output."""
    global _output
    if file is not JSON:
        yield
        return
    _output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield


def show(console: Console, lines: Lines, file: Path | None = None, *, right: Collection[str] = ()) -> None:
    """Print a table, and write it to ``file``, if one is given, as ``write_tables`` does; ``JSON``: print that instead.

    Args:
        right: the columns that stand at the right, by name.
    """
    if file is JSON:
        print(as_json(lines), file=_output)
        return
    table = rich_table(lines)
    for column in table.columns:
        column.overflow = "fold"
        column.justify = "right" if str(column.header) in right else "left"
    console.print(table)
    if file:
        write_tables(lines, file)


def as_json(lines: Lines) -> str:
    """The rows as JSON objects by the names of the columns; cells that are plain numbers as numbers.

    A hash, which may look like a large number or one with an exponent, stays a text.
    """

    def cell(value: str | Text) -> str | float:
        text = str(value)
        number = re.fullmatch(r"-?(0|[1-9]\d{0,8})(\.\d{1,17}(e[+-]\d\d)?)?", text)
        return text if not number else float(text) if number[2] else int(text)

    head, *rows = ([" ".join(str(part).split()) for part in line] for line in lines if line)
    return to_json(
        [{name: cell(value) for name, value in zip(head, row)} for row in rows], indent=1, ensure_ascii=False
    )


def rich_table(lines: Lines) -> Table:
    """A table for the screen; brackets in plain text are no markup."""
    header, *rows = lines
    table = Table()
    for name in header:
        table.add_column(_text(name))
    for row in rows:
        if row:
            table.add_row(*map(_text, row))
        else:
            table.add_section()
    return table


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(printable(cell))  # before the width of a column is decided


def write_tables(lines: Lines, path: Path) -> Path:
    """Write ``path`` (``.csv``) and, beside it, the same as a LaTeX table (``.tex``, package booktabs).

    Raises:
        RunFailed: a file cannot be written.
    """
    text, cells = io.StringIO(), [[str(cell) for cell in line] for line in lines if line]
    csv.writer(text, lineterminator="\n").writerows([[cell.replace("\n", " ") for cell in line] for line in cells])
    write_text(path, text.getvalue(), durable=False)
    write_text(path.with_suffix(".tex"), latex(cells), durable=False)
    return path


def latex(lines: Iterable[Sequence[str]]) -> str:
    """A ``tabular`` with the rules of booktabs."""
    cells = [[cell.translate(_LATEX) for cell in line] for line in lines]
    head, *rows = [" & ".join(line) + r" \\" for line in cells]
    columns = "l" + "r" * (len(cells[0]) - 1)
    body = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(body) + "\n"
