"""HTML pages of ours: one file that needs no other, for wide and narrow screens, light and dark.

Sections, tables and paragraphs that are empty are left out.

Tables are sorted by a click (or Enter) on a header, and saved as CSV or LaTeX by the buttons below them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..versions import __version__
from .figures import svg
from .panels import Panel, digits


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        name: of the file that it is saved as. head: the names of the columns.
        rows: of cells: a text, a number, or a pair of a text and the number to sort by.
    """

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Note:
    """A paragraph; ``look`` is a class of ``look.css``: ``note``, ``answer`` or ``fails``."""

    text: str
    look: str = "note"

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading, or in another section a fold that a click on its ``name`` opens."""

    key: str
    name: str
    items: Sequence[PageTable | Note | Panel | Section]

    def __bool__(self) -> bool:
        return any(self.items)


Item = PageTable | Note | Panel | Section


def document(
    title: str,
    sections: Sequence[Section] = (),
    *,
    lead: Sequence[str] = (),
    body: str = "",
    nav: str = "",
    renew: float = 0.0,
) -> str:
    """A whole page.

    Args:
        lead: lines below the title. body, nav: HTML before the sections, and in place of the list of them.
        renew: seconds after which a browser loads the page again; 0: never.
    """
    context = {"title": title, "lead": lead, "body": body, "nav": nav, "renew": math.ceil(renew)}
    text: str = _template().render(sections=[*filter(None, sections)], version=__version__, **context)
    return text


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"svg": svg, "cell": _cell, "kind": lambda item: type(item).__name__}
    return pages.get_template("page.html")


def _cell(value: Any) -> tuple[str, str]:
    """The text of a cell, and the number that it is sorted by, or nothing."""
    text, key = value if isinstance(value, tuple) else (value, value)
    if not isinstance(key, (int, float)) or isinstance(key, bool):
        return str(text), ""
    return text if isinstance(text, str) else digits(text), repr(key)
