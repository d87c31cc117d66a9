"""Markdown as one HTML page, and values as text."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .conditions import FAILS, HOLDS, INCONCLUSIVE, UNTESTED

if TYPE_CHECKING:
    from markdown_it.token import Token

_CLASSES = {HOLDS: "holds", FAILS: "fails", UNTESTED: "untested"}
_COLOURS_OF_A_FIGURE = 96
#: bytes of a page without its frame
_LARGEST = 980_000


def html(text: str, root: Path | None = None) -> str:
    """Markdown as one HTML page of at most 1 MB with a list of contents.

    Its pictures are part of it, and it needs no other file, as far as they fit; the last ones are then files beside it.
    Claims in the table of all claims are links to the figures behind them, verdicts are coloured, tables can be sorted.

    Args:
        text: begins with a heading, which is the title.
        root: the folder of the page, in which the images' paths start.
    """
    from markdown_it import MarkdownIt
    from markdown_it.common.utils import escapeHtml
    from markupsafe import Markup

    from fs_lowrank.draw.page import document

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    title, *tokens = (token for token in reader.parse(text) if token.level or token.tag != "h1")
    seen, claims, anchor = Counter[str](), dict[str, list[str]](), "report"
    nav = Markup()
    for number, (token, content) in enumerate(zip(tokens, tokens[1:])):
        if token.type == "heading_open":
            anchor = re.sub(r"[^\w]+", "-", content.content.casefold()).strip("-")
            seen[anchor] += 1
            anchor += f"-{seen[anchor]}" * (seen[anchor] > 1)
            token.attrSet("id", anchor)
            claim = content.content.partition("Claim: ")[2].rpartition(" — ")[0]
            if claim:
                claims.setdefault(claim, []).append(anchor)
            else:
                nav += Markup('<a class="{}" href="#{}">{}</a>\n').format(token.tag, anchor, content.content)
        elif token.type == "table_open":
            token.attrSet("data-name", f"{anchor[:60]}-{number}")
    for token in tokens:
        if token.content in claims and claims[token.content]:
            token.children = _linked(token, claims[token.content].pop(0))
        for child, content in zip(token.children or (), (token.children or ())[1:]):
            if child.type == "strong_open" and content.content.startswith((HOLDS, FAILS, INCONCLUSIVE, UNTESTED)):
                child.attrSet("class", _CLASSES.get(content.content.partition(", not tested in")[0], "open"))
    body = reader.renderer.render(tokens, reader.options, {})
    for path in [str(c.attrs["src"]) for t in tokens for c in t.children or () if c.type == "image"]:
        if root is None or not (root / path).is_file():
            continue
        picture = _embedded(root / path)
        if len(body) + len(picture) > _LARGEST:
            break
        body = body.replace(f'src="{escapeHtml(path)}"', f'src="{picture}"', 1)
    return document(title.content, body=body, nav=f'<nav class="contents">{nav}</nav>')


def _linked(token: Token, key: str) -> list[Token]:
    """The content of ``token`` as a link to the heading ``key``."""
    from markdown_it.token import Token

    inner = token.children or []
    return [Token("link_open", "a", 1, attrs={"href": f"#{key}"}), *inner, Token("link_close", "a", -1)]


def _embedded(file: Path) -> str:
    """A picture as an address that holds it, a PNG with as many colours as a plot needs."""
    from PIL import Image as Pictures

    if file.suffix == ".svg":
        return f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}"
    content = io.BytesIO()
    with Pictures.open(file) as image:
        image.convert("RGB").quantize(_COLOURS_OF_A_FIGURE).save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


# -- values ----------------------------------------------------------------------------------------------


def value_of(value: Any) -> str:
    """A setting as text: a number as short as it goes."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> str:
    """A value of a suite as text."""
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value_of(value)


def range_of(values: Sequence) -> str:
    """Ascending numbers as text, by the first and the last."""
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
