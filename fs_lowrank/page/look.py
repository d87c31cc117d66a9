"""What an HTML page of ours looks like: one file that needs no other, for wide and narrow screens, light and dark.

Tables are sorted by a click (or Enter) on a header, and saved as CSV or LaTeX by the buttons below them.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ..versions import __version__


def document(title: str, body: str, *, nav: str = "", plots: bool = False, renew: float = 0.0) -> str:
    """A whole page.

    Args:
        title: plain text. body, nav: HTML.
        plots: embed Plotly, for what ``plot`` makes.
        renew: seconds after which a browser loads the page again; 0: never.
    Raises:
        ImportError: ``plots``, and plotly is not installed.
    """
    library = ""
    if plots:
        from plotly.offline import get_plotlyjs

        library = f"<script>{get_plotlyjs()}</script>"
    refresh = f'<meta http-equiv="refresh" content="{math.ceil(renew)}">' if renew else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_file('look.css')}</style>{library}</head>"
        f"<body><header><h1>{html.escape(title)}</h1>{nav}</header><main>{body}</main>"
        f"<footer>fs-lowrank {__version__}</footer><script>{_file('look.js')}</script></body></html>\n"
    )


def contents(entries: Iterable[tuple[str, str]]) -> str:
    """A list of links; entries are an id of the page and plain text."""
    return "<nav>" + "".join(f'<a href="#{key}">{html.escape(text)}</a>' for key, text in entries) + "</nav>"


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that can be sorted and saved.

    Args:
        name: of the file that it is saved as. head: plain text.
        rows: of text, numbers, or pairs of a text and the number to sort by.
    """

    def cell(value: Any) -> str:
        text, by = value if isinstance(value, tuple) else (value, value)
        if not isinstance(by, (int, float)) or isinstance(by, bool):
            return f"<td>{html.escape(str(text))}</td>"
        text = f"{text:.4g}" if isinstance(text, float) else str(text)
        return f'<td class=number data-value="{by!r}">{html.escape(text)}</td>'

    top = "".join(f"<th>{html.escape(word)}</th>" for word in head)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f'<table data-name="{html.escape(name)}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def plot(name: str, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]) -> str:
    """A plot by Plotly, named ``plot-NAME``."""
    # "<" would end the script where a name holds "</script>".
    content = json.dumps({"data": traces, "layout": layout}).replace("<", "\\u003c")
    place = f'<div class=plot id="plot-{name}"></div>'
    return f'<div>{place}<script type="application/json" data-plot="plot-{name}">{content}</script></div>'


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
