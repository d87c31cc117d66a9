"""Panels drawn by matplotlib: as a figure, as PNG and PDF files, and as SVG in a page.

They are drawn on matplotlib's ``Figure`` objects, so nothing global is changed: no backend, no parameters.
"""

from __future__ import annotations

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..jobs.files import write_bytes
from .panels import Bars, Line, Matrix, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger("fs_lowrank")

COLOURS = "#1f77b4 #d62728 #2ca02c #9467bd #ff7f0e #17becf #8c564b #e377c2 #bcbd22 #000080".split()
MARKERS = "osD^vP*X<>"
GREY = "#808080"
#: of texts and axes, and of hollow points; a page, light or dark, has its own instead
INK, PAPER = "#000000", "#ffffff"
#: lines with more points have no markers
_MOST_MARKED = 50


def figure(
    panels: Sequence[Panel],
    title: str = "",
    *,
    size: tuple[float, float] = (3.8, 3.0),
    same: bool = False,
    in_a_row: int = 5,
) -> Figure:
    """A figure of panels with one legend below them; ``main`` panels are larger, in the first row.

    Args:
        title: above the panels; its lines are broken to the width of the figure.
        size: width and height in inches of a panel that is not ``main``. same: all have the same axis of y.
        in_a_row: the most panels in a row, without the ``main`` ones.
    """
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            """The picture for a notebook, whatever its backend is."""
            return drawn(self, "png")

    main, others = ([panel for panel in panels if panel.main == large] for large in (True, False))
    columns = -(-len(others) // max(-(-len(others) // in_a_row), 1))  # rows of as many panels each
    rows = [main] * bool(main) + [others[i : i + columns] for i in range(0, len(others), max(columns, 1))]
    heights = [max(panel.tall for panel in row) * (1.35 if row is main and others else 1.0) for row in rows] or [1.0]
    width = size[0] * max(columns, len(main) * (1 + bool(others)))
    # A blank that does not break keeps the dot at the end of a line.
    wrapped = (textwrap.wrap(line.replace(" · ", "\u00a0· "), int(12 * width)) for line in title.splitlines())
    lines = [part for line in wrapped for part in line]
    # In inches: the title; the legend and the margins take the rest.
    chart = Shown(figsize=(width, size[1] * sum(heights) + 0.17 * len(lines) + 0.43), layout="constrained")
    slots: Any = chart.add_gridspec(len(heights), 1, height_ratios=heights)
    for slot, row in zip(slots, rows):
        for panel, part in zip(row, slot.subgridspec(1, len(main) if row is main else columns)):
            axes = chart.add_subplot(part, sharey=chart.axes[0] if same and chart.axes else None)
            axes.set_autoscaley_on(True)  # the panel before has set the limits of all to its own
            _draw(axes, panel)
            if same:
                axes.label_outer()
    _add_legend(chart, [mark for panel in panels for mark in panel.marks])
    chart.suptitle("\n".join(lines), fontsize=10)
    texts = chart.findobj(Text)
    fallbacks = _fonts_with(frozenset(c for t in texts for c in t.get_text() if c.isprintable() and not c.isascii()))
    for text in texts:
        text.set_parse_math(False)  # a text with two "$" is shown as it is
        text.set_fontfamily([*text.get_fontfamily(), *fallbacks])
    return chart


def _draw(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for mark in panel.marks:
        if isinstance(mark, Line):
            _draw_line(axes, mark, panel.sideways)
        elif isinstance(mark, Bars):
            _draw_bars(axes, mark)
        else:
            _draw_matrix(axes, mark)
    along, across = (axes.yaxis, axes.xaxis) if panel.sideways else (axes.xaxis, axes.yaxis)
    if panel.log:
        axes.set_xscale("log")
        axes.minorticks_off()
    elif panel.whole:
        along.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axis, name, ticks in ((along, panel.x, panel.ticks), (across, panel.y, panel.rows)):
        axis.set_label_text(textwrap.fill(name, 44))
        if ticks:
            slanted = axis is axes.xaxis and sum(map(len, ticks.values())) > 50
            look: dict[str, Any] = {"rotation": 30, "ha": "right"} if slanted else {}
            axis.set_ticks([*ticks], [*ticks.values()], **look)
    axes.set_title(textwrap.fill(panel.title, 52), fontsize=10, loc="left")
    if not isinstance(panel.marks[0], Matrix):
        axes.grid(alpha=0.15, color=INK)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = across.get_view_interval()
        margin = max(panel.least - (high - low), 0) / 2
        ends = [max(low - margin, 0), min(high + margin, 1)] if panel.share else [low - margin, high + margin]
        (axes.set_xlim if panel.sideways else axes.set_ylim)(*ends)
    if panel.sideways:
        axes.invert_yaxis()


def _look(line: Line) -> dict[str, Any]:
    colour, marker = line.colour, line.marker
    if isinstance(colour, int):
        marker = MARKERS[colour % len(MARKERS)] if marker is None else marker
        colour = COLOURS[colour % len(COLOURS)]
    marker = "" if marker is None or line.style and len(line.x) > _MOST_MARKED else marker
    size = {"markersize": 4 if line.style else 6, "markerfacecolor": PAPER if line.hollow else colour}
    return {"color": colour, "linestyle": line.style, "linewidth": 1.4, "marker": marker, **size}


def _draw_line(axes: Axes, line: Line, sideways: bool) -> None:
    look = _look(line)
    x, y, error = (line.y, line.x, "xerr") if sideways else (line.x, line.y, "yerr")
    axes.plot(x, y, **look, clip_on=False, zorder=3)
    if line.band and len(line.low) > 1:
        axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.13, linewidth=0)
    elif line.low:
        ends = [[v - low for v, low in zip(line.y, line.low)], [high - v for v, high in zip(line.y, line.high)]]
        spread: dict[str, Any] = {error: ends}
        axes.errorbar(x, y, **spread, fmt="none", ecolor=look["color"], alpha=0.7, capsize=3)


def _draw_bars(axes: Axes, bars: Bars) -> None:
    below = [0.0] * max(map(len, bars.parts.values()))
    for colour, sizes in zip(COLOURS, bars.parts.values()):
        axes.bar(range(len(sizes)), sizes, bottom=below, color=colour)
        below = [end + size for end, size in zip(below, sizes)]


def _draw_matrix(axes: Axes, matrix: Matrix) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", ["#e3eef8", "#1b5a8c"])
    look: dict[str, Any] = {"vmin": 0, "vmax": matrix.largest, "aspect": "auto", "interpolation": "none"}
    image: Any = axes.imshow(matrix.values, cmap=shades, **look)
    axes.figure.colorbar(image, ax=axes, label=matrix.scale)
    for i, row in enumerate(matrix.texts):
        for j, text in enumerate(row):
            dark = image.norm(matrix.values[i][j]) > 0.5
            axes.text(j, i, text, ha="center", va="center", color="#fefefe" if dark else "#111111")


def _add_legend(chart: Figure, marks: Iterable[Line | Bars | Matrix]) -> None:
    """A legend of colours, styles and hollow points below the panels; nothing where there is one entry."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names: dict[str, Any] = {}
    meanings: dict[str, Any] = {}
    for mark in marks:
        if isinstance(mark, Bars):
            names |= {name: Patch(color=colour) for colour, name in zip(COLOURS, mark.parts)}
        elif isinstance(mark, Line):
            names.setdefault(mark.name, Line2D([], [], **_look(mark)))
            sample = replace(mark, colour=GREY, marker="o" if mark.hollow else "")
            meanings.setdefault(mark.means, Line2D([], [], **_look(sample)))
    handles = {name: handle for name, handle in (names | meanings).items() if name}
    if len(names) > 1 or len(meanings) > 1:
        columns = max(1, int(11 * chart.get_figwidth() / (max(map(len, handles)) + 7)))
        layout: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        chart.legend([*handles.values()], [*handles], **layout, fontsize=9, frameon=False)


@cache
def _fonts_with(characters: Iterable[str]) -> list[str]:
    """Installed fonts that together have the characters that the usual font lacks; a warning names any others."""
    from matplotlib import font_manager

    usual = font_manager.get_font(font_manager.findfont(font_manager.FontProperties())).get_charmap()
    missing, fonts = {*map(ord, characters)} - usual.keys(), []
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        covered = missing & font_manager.get_font(font.fname).get_charmap().keys()
        if covered and not font.name.startswith("Last Resort"):  # of matplotlib: a box for every character
            fonts.append(font.name)
            missing -= covered
    if missing:
        lacking = "".join(map(chr, sorted(missing)))
        logger.warning("no installed font has %s, so PNG and PDF pictures show boxes; install such a font", lacking)
    return fonts


def save(chart: Figure, path: Path) -> Path:
    """Write a figure as PNG, and as PDF beside it; returns ``path``.

    Raises:
        RunFailed: it cannot be written.
    """
    # The PNG last, so that where it is, the PDF is, too.
    for target in (path.with_suffix(".pdf"), path):
        content = drawn(chart, target.suffix[1:])  # on a full disk matplotlib would raise other errors than the disk's
        write_bytes(target, content, durable=False)
    return path


def drawn(chart: Figure, kind: str, comment: str = "") -> bytes:
    """A figure as the content of a file, which is the same for the same figure.

    Args:
        kind: ``png``, ``pdf`` or ``svg``; in the last, texts are texts, and there is no background.
        comment: of a PNG, that a picture does not show.
    """
    import matplotlib

    options: dict[str, Any] = {
        "png": {"dpi": 110, "metadata": {"Comment": comment} if comment else {}},
        "pdf": {"metadata": {"CreationDate": None}},
        "svg": {"metadata": dict.fromkeys(("Date", "Creator", "Format", "Type")), "transparent": True},
    }
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fs-lowrank"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # _fonts_with has said it in other words
        chart.savefig(content, format=kind, **options[kind])
    return content.getvalue()


def svg(panel: Panel) -> str:
    """A panel without its title as an element of a page, as wide as its place, in the page's ink and paper."""
    text = drawn(figure([replace(panel, title="")], size=(5.2, 3.0)), "svg").decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    text = re.sub(r' (?:width|height)="[\d.]+pt"| id="[\w.]+_\d+"', "", text)
    return re.sub(r"(font: [\d.]+px) [^;\"]+", r"\1 sans-serif", text)
