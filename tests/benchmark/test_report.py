"""The report is written as Markdown, and the HTML page is rendered from it."""

from html.parser import HTMLParser

from benchmark.report import heading, image, page, table


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.words = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_has_all_that_the_markdown_has():
    rows = [("method", "a | b"), ("**rolora**", "0.5 ± 0.1"), ("<script>", "`x_y_z`")]
    blocks = [heading("T & <T>", 2), table(rows), image("Curves, 2 clients", "report/x.png"), "**Failed:**\n- a: 1 < 2"]
    blocks.append("- one: **holds**\n  - because: 3 > 2")
    read = Text()
    read.feed(page("\n\n".join(blocks) + "\n"))
    tags = [tag for tag, _ in read.tags]
    assert tags.count("th") == 2 and tags.count("td") == 4 and "script" not in tags
    assert {"h2", "strong", "code", "ul", "figure", "figcaption"} <= set(tags) and tags.count("li") == 3
    assert dict(read.tags)["img"] == {"src": "report/x.png", "alt": "Curves, 2 clients"}
    for words in ("T & <T>", "a | b", "<script>", "x_y_z", "a: 1 < 2", "because: 3 > 2"):
        assert words in read.words, words
    assert read.words.count("Curves, 2 clients") == 1


def test_a_vertical_bar_in_a_cell_does_not_end_the_cell():
    assert table([("a|b", 1)]) == "| a\\|b | 1 |\n| --- | --- |"
