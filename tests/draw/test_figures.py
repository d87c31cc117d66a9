"""Panels as matplotlib draws them: names, fonts, legends, and pictures for pages."""

import logging
import re

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from fs_lowrank.draw import figures
from fs_lowrank.draw.panels import Bars, Line, Matrix, Panel

NAMES = ["under $10_$20", "_a", r"\$x_$", "50 %"]


def shown(texts):
    """The texts as matplotlib writes them; none may be a formula."""
    read = [text._preprocess_math(text.get_text()) for text in texts]
    assert not any(formula for _, formula in read)
    return [text for text, _ in read]


@pytest.mark.more
@pytest.mark.filterwarnings("error")
def test_names_are_shown_as_they_are_written(tmp_path):
    ticks = dict(enumerate(NAMES))
    lines = [Line(name, [0, 1, 2, 3], [1, 2, 3, 4], colour=i) for i, name in enumerate(NAMES)]
    panels = [
        Panel("a", "$title_$", "$x_$", "$y_$", lines, ticks=ticks),
        Panel("b", "", "x", "y", [Bars({name: [1.0, 2.0] for name in NAMES})], ticks=ticks),
        Panel("c", "", "x", "y", [Matrix([[1, 0]] * 2, "share", texts=[["1", "0"]] * 2)], ticks=ticks, rows=ticks),
    ]
    made = figures.figure(panels, "my_$data_$ · model")
    figures.save(made, tmp_path / "names.png")
    first, *_ = made.axes
    assert shown(made.legends[0].get_texts()) == shown(first.get_xticklabels()) == NAMES
    assert shown([first.title, first._left_title, first.xaxis.label, first.yaxis.label]) == [
        "",
        "$title_$",
        "$x_$",
        "$y_$",
    ]
    assert shown([made._suptitle]) == ["my_$data_$\u00a0· model"]


def test_the_legend_is_below_and_says_what_colours_styles_and_hollow_points_mean():
    lines = [Line("a", [1, 2], [1, 2]), Line("a", [1, 2], [1, 2], style="--", means="dashed"), Line("", [1], [2])]
    (legend,) = figures.figure([Panel("k", "", "x", "y", lines)] * 2).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "dashed"]
    one = [Line("a", [1, 2], [1, 2])]
    assert not figures.figure([Panel("k", "", "x", "y", one)]).legends, "only one thing is drawn"


def test_main_panels_are_larger_and_others_in_rows_of_equal_length():
    panels = [Panel(str(i), str(i), "x", "y", [Line("a", [1], [1])], main=i < 2) for i in range(8)]
    made = figures.figure(panels)
    made.draw_without_rendering()
    boxes = [axes.get_position() for axes in made.axes]
    assert min(box.width for box in boxes[:2]) > 1.3 * max(box.width for box in boxes[2:])
    assert min(box.height for box in boxes[:2]) > 1.2 * max(box.height for box in boxes[2:])
    assert len({round(box.y0, 2) for box in boxes[2:]}) == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lines", [1, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_a_low_panel_has_room_below_a_title_of_several_lines(lines, count):
    mark = Line("met", [0], [0.1], [0.0], [0.2], style="", marker="o", band=False)
    panel = Panel("a", "", "", "by how much it is met", [mark], ticks={0: "a condition"}, sideways=True, tall=4)
    made = figures.figure([panel] * count, "\n".join(["a title"] * lines), size=(9.5, 0.26), in_a_row=1)
    figures.drawn(made, "png")
    assert all(axes.get_position().height * made.get_figheight() > 0.2 for axes in made.axes)


def test_panels_with_the_same_axis_show_all_of_each():
    panels = [
        Panel(name, "", "round", "accuracy", [Line("a", [1, 2], y)]) for name, y in (("b", [5, 9]), ("c", [2, 3]))
    ]
    first, second = figures.figure(panels, same=True).axes
    low, high = first.get_ylim()
    assert low < 2 and high > 9 and second.get_ylim() == (low, high)


def test_sideways_intervals_are_inside_the_axis():
    lines = [Line("far", [0], [0.1], [-40.0], [50.0], style="", band=False), Line("near", [1], [0.2], style="")]
    (axes,) = figures.figure([Panel("k", "", "", "points", lines, sideways=True, ticks={0: "a", 1: "b"})]).axes
    low, high = axes.get_xlim()
    assert low <= -40 and high >= 50 and axes.get_xlabel() == "points" and axes.get_ylim()[0] > axes.get_ylim()[1]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]


def test_a_picture_in_a_page_has_texts_and_the_inks_of_the_page():
    panel = Panel("k", "title", "Länge <b>", "y", [Line("a", [1, 2], [1, 2], hollow=True), Line("b", [1], [1])])
    text = figures.svg(panel)
    assert text == figures.svg(panel) and text.startswith("<svg") and len(text) < 20_000
    assert "Länge &lt;b&gt;" in text and "currentColor" in text and "var(--paper)" in text and "title" not in text
    assert not re.search(r"#000000|#ffffff|<image|http(?!://www.w3.org)", text)


def test_a_panel_in_words():
    line, flat = Line("a", [1, 2], [0.5, 0.75], means="dashed"), Line("", [*range(20)], [1.0] * 20)
    panel = Panel("k", "the title", "round", "accuracy", [line, flat, Bars({"n": [1, 2]}), Matrix([[1, 2]], "s")])
    said = "the title: accuracy against round. a dashed: 0.5 at 1, 0.75 at 2. 1 at 0 to 1 at 19. n: 1, 2. "
    assert str(panel) == said + "1 rows and 2 columns, s"


@pytest.fixture
def font(tmp_path):
    """A font that has one character, which no other has: one for private use."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0)), pen.lineTo((0, 500)), pen.lineTo((500, 500)), pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "own"])
    builder.setupCharacterMap({0x10FFFD: "own"})
    builder.setupGlyf({".notdef": pen.glyph(), "own": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (600, 0), "own": (600, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Own font", "styleName": "Regular"})
    builder.setupOS2(), builder.setupPost()
    builder.save(tmp_path / "own.ttf")
    before = [*font_manager.fontManager.ttflist]
    font_manager.fontManager.addfont(tmp_path / "own.ttf")
    figures._fonts_with.cache_clear()
    yield "Own font"
    font_manager.fontManager.ttflist = before
    figures._fonts_with.cache_clear()


@pytest.mark.filterwarnings("error")
def test_characters_that_the_usual_font_lacks_are_in_another(font, tmp_path, caplog):
    figures._fonts_with.cache_clear()
    panel = Panel("k", "own \U0010fffd", "x", "y", [Line("a", [1, 2], [1, 2]), Line("\U0010fffe", [1], [1])])
    monkey = "\U0010fffd"
    assert figures._fonts_with(monkey) == [font] and not caplog.records
    with caplog.at_level(logging.WARNING, logger="fs_lowrank"):
        assert figures._fonts_with(monkey + "\U0010fffb") == [font]
        assert "no installed font has \U0010fffb" in caplog.text
        figures.save(figures.figure([panel]), tmp_path / "own.png")
