"""Tables as lines of cells: on the screen, where every command shows its tables by this, and as CSV and LaTeX files."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from .escaped import printable
from .files import write_text

#: cells are plain text, or text with a style; the first line is the header; an empty line is a rule on the screen only
Lines = Sequence[Sequence[str | Text]]

_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"±": r"$\pm$", "≠": r"$\ne$", "–": "--", "\n": " "},
    }
)


def option(command: argparse.ArgumentParser, when: str = "") -> None:
    """Give a command the option ``--table FILE``, for ``show``; ``when`` it has a table begins the help."""
    about = f"{when}also write the table: FILE.csv and FILE.tex"
    command.add_argument("--table", metavar="FILE", type=_path, help=about)


def only_of_a_list(args: argparse.Namespace) -> None:
    """Refuse ``--table`` where a command prints a table only without NAMES.

    Raises:
        UserError: it is given.
    """
    if args.table:
        raise UserError(f"--table {args.table}: there is a table only without a name; leave one of them out")


def _path(text: str) -> Path:
    if Path(text).suffix.lower() not in (".csv", ".tex"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file that ends with .csv or .tex; both are written")
    return Path(text).with_suffix(".csv")


def show(console: Console, lines: Lines, file: Path | None = None, *, right: Collection[str] = ()) -> None:
    """Print a table, and write it to ``file``, if one is given, as ``write_tables`` does.

    Args:
        right: the columns that stand at the right, by name.
    """
    table = rich_table(lines)
    for column in table.columns:
        column.overflow = "fold"
        column.justify = "right" if str(column.header) in right else "left"
    console.print(table)
    if file:
        write_tables(lines, file)


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
