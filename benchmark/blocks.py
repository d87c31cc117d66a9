"""The blocks that a report is made of; two templates write them as Markdown and as one HTML page."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .conditions import FAILS, HOLDS, UNTESTED

_CLASSES = {HOLDS: "holds", FAILS: "fails", UNTESTED: "untested"}
_COLOURS_OF_A_FIGURE = 96


@dataclass(frozen=True)
class Heading:
    """``level`` 1 is the title of the report; a claim's heading has its ``verdict``."""

    text: str
    level: int
    verdict: str = ""


@dataclass(frozen=True)
class PlainTable:
    """The first row is the header. ``claims``: a row for each claim, with its verdict in the column ``verdict``."""

    rows: Sequence[Sequence[str]]
    claims: bool = False


@dataclass(frozen=True)
class Image:
    title: str
    path: str


@dataclass(frozen=True)
class Findings:
    """What was found of a claim in an experiment, ``said`` of its runs, and by condition: a text and its verdict."""

    experiment: str
    verdict: str
    said: str
    conditions: Sequence[tuple[str, str]]


#: a text is a paragraph or a list of Markdown
Block = str | Heading | PlainTable | Image | Findings


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown."""
    text: str = _templates().get_template("report.md").render(blocks=blocks)
    return text


def page(blocks: Sequence[Block], root: Path | None = None) -> str:
    """The blocks as one HTML page with a list of contents, that needs no other file.

    Claims are links to the figures behind them, verdicts are coloured, tables can be sorted.

    Args:
        root: the folder that the images' paths start in; images that are there become part of the page.
    """
    from fs_lowrank.draw.page import document

    title, *rest = blocks
    assert isinstance(title, Heading) and title.level == 1
    keys, seen, here = [], Counter[str](), "report"
    for block in rest:
        if isinstance(block, Heading):
            here = re.sub(r"[^\w]+", "-", f"{block.text} {block.verdict}".casefold()).strip("-")
            seen[here] += 1
            here += f"-{seen[here]}" * (seen[here] > 1)
        keys.append(here)
    made = _templates().get_template("report.html").module
    shown = {"blocks": list(zip(rest, keys)), "embedded": lambda path: _embedded(root, path)}
    return document(title.text, body=str(made.body(**shown)), nav=str(made.nav(shown["blocks"])))


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, select_autoescape
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    reader = MarkdownIt("commonmark", {"html": False})
    made = Environment(
        loader=PackageLoader(__package__),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "kind": lambda block: type(block).__name__,
        "text": lambda text: Markup(reader.render(text)),
        "inline": lambda text: Markup(reader.renderInline(str(text))),
        "cell": lambda text: str(text).replace("|", "\\|"),
        "stem": lambda path: Path(path).stem,
        # one of several experiments that differ is open
        "colour": lambda verdict: _CLASSES.get(verdict.partition(", not tested in")[0], "open"),
    }
    return made


def _embedded(root: Path | None, path: str) -> str:
    """A picture as an address that holds it, with as many colours as a plot needs; its path if it is not there."""
    from PIL import Image as Pictures

    if root is None or not (root / path).is_file():
        return path
    content = io.BytesIO()
    with Pictures.open(root / path) as image:
        image.convert("RGB").quantize(_COLOURS_OF_A_FIGURE).save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def value_of(value: Any) -> str:
    """A setting as text: a number as short as it goes."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def range_of(values: Sequence) -> str:
    """Ascending numbers as text, by the first and the last."""
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
