"""Blocks of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def heading(content: str, level: int) -> str:
    return f"{'#' * level} {content}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the header."""
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    head, *rest = (f"| {' | '.join(row)} |" for row in escaped)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *rest])


def image(title: str, path: str | Path) -> str:
    return f"![{title}]({path})"


def value_of(value: Any) -> str:
    """A setting as text: a number as short as it goes."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def range_of(values: Sequence) -> str:
    """Ascending numbers as text, by the first and the last."""
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
