"""The report as one HTML page that needs no other file, made from the Markdown."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from fs_lowrank.draw.page import document

from .decide import FAILS, HOLDS, INCONCLUSIVE, UNTESTED

_CLASSES = {HOLDS: "holds", FAILS: "fails", INCONCLUSIVE: "open", UNTESTED: "untested"}
_DECIDED = f"(?:{HOLDS}|{FAILS})"
_SEVERAL = rf"{_DECIDED} in \d+ of \d+ experiments(?:, (?:{FAILS}|{INCONCLUSIVE}) in \d+)+"
_VERDICT = rf"(?:{'|'.join(sorted(_CLASSES, reverse=True))}|{_SEVERAL})(?:, not tested in \d+)?"
#: where a verdict stands: bold, or at the end of a heading or of a condition
_PLACES = re.compile(rf"(<strong>|— |: )({_VERDICT})(</strong>|</h3>|</a>|\n?</li>|\n<ul>)")
_COLOURS_OF_A_FIGURE = 96


def page(markdown: str, root: Path | None = None) -> str:
    """Render Markdown as a page with a list of contents.

    Headings and figures have ids, claims are links to the figures behind them, verdicts are coloured, tables can be
    sorted. An image is a paragraph of its own, with its title as caption.

    Args:
        root: the folder that the images' paths start in; images that are there become part of the page.
    """
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(markdown)
    title = "Benchmark report"
    if tokens and tokens[0].tag == "h1":
        title, tokens = tokens[1].content, tokens[3:]
    headings = list(_named(tokens))
    _link_claims(tokens, [key for _, key, text in headings if text.startswith("Claim: ")])
    for opening, inline, closing in zip(tokens, tokens[1:], tokens[2:]):
        if inline.children and [child.type for child in inline.children] == ["image"]:
            _figure(opening, inline, closing, root)
    body = reader.renderer.render(tokens, reader.options, {})
    return document(title, body=_PLACES.sub(_coloured, body), nav=_contents(headings))


def _named(tokens: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Give headings their ids and tables their names; yields tag, id and text of each heading."""
    seen: dict[str, int] = {}
    here, tables = "report", 0
    for opening, inline in zip(tokens, tokens[1:]):
        if opening.type == "heading_open":
            here = re.sub(r"[^\w]+", "-", inline.content.casefold()).strip("-")
            seen[here] = seen.get(here, 0) + 1
            here, tables = f"{here}-{seen[here]}" if seen[here] > 1 else here, 0
            opening.attrSet("id", here)
            yield opening.tag, here, inline.content
        elif opening.type == "table_open":
            tables += 1
            opening.attrSet("data-name", f"{here[:60]}-{tables}")


def _link_claims(tokens: Sequence[Token], claims: Sequence[str]) -> None:
    """Make each claim of the first table, which has them in the order of the page, a link to its heading."""
    ends = [i for i, token in enumerate(tokens) if token.type == "table_close"]
    rows = [i for i, token in enumerate(tokens[: ends[0]]) if token.type == "tr_open"][1:] if ends else []
    if not claims or len(rows) != len(claims):
        return
    for row, key in zip(rows, claims):
        cell = tokens[row + 2]
        link = Token("link_open", "a", 1, attrs={"href": f"#{key}"})
        cell.children = [link, *(cell.children or []), Token("link_close", "a", -1)]


def _figure(opening: Token, inline: Token, closing: Token, root: Path | None) -> None:
    opening.tag = closing.tag = "figure"
    image = (inline.children or [])[0]
    source = str(image.attrGet("src"))
    opening.attrSet("id", Path(source).stem)
    caption = Token("caption", "figcaption", 1), *(image.children or []), Token("caption", "figcaption", -1)
    inline.children = [image, *caption]
    if root and (root / source).is_file():
        image.attrSet("src", _embedded(root / source))


def _embedded(path: Path) -> str:
    """A picture as an address that holds it, with as many colours as a plot needs."""
    from PIL import Image

    content = io.BytesIO()
    with Image.open(path) as image:
        image.convert("RGB").quantize(_COLOURS_OF_A_FIGURE).save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _coloured(found: re.Match[str]) -> str:
    before, verdict, after = found.groups()
    name = _CLASSES.get(verdict.partition(", not tested")[0], "open")
    if before == "<strong>":
        return f'<strong class="{name}">{verdict}{after}'
    return f'{before}<span class="{name}">{verdict}</span>{after}'


def _contents(headings: Sequence[tuple[str, str, str]]) -> str:
    """A list of the suites, and below each of its experiments."""
    items: list[str] = []
    for tag, key, text in headings:
        link = f'<a href="#{key}">{html.escape(text)}</a>'
        if tag == "h2":
            items.append(f"<b>{link}</b>")
        elif not text.startswith("Claim: "):
            items.append(link)
    return f'<nav class="contents">{"".join(items)}</nav>'
