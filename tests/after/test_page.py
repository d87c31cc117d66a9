"""The HTML page of runs: complete in one file, and names from the user are not read as markup."""

import json
import math
from html.parser import HTMLParser

import pytest

from fs_lowrank import UserError, cli
from fs_lowrank.draw.panels import digits
from fs_lowrank.draw.report import write_page
from fs_lowrank.runs.shown import read_runs
from fs_lowrank.settings.metrics import standard_error

pytestmark = pytest.mark.more  # the page of the shared runs takes seconds to draw


class Page(HTMLParser):
    """Texts, and addresses that a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.ids, self.texts, self.pictures = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.pictures += [attributes["aria-label"]] if attributes.get("role") == "img" else []
        if tag in ("script", "img", "link", "iframe") and attributes.get("href") != "data:,":
            self.loads += [attributes[k] for k in ("src", "href") if k in attributes]

    def handle_data(self, data):
        self.texts += [data] if data.strip() else []


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    out = write_page(read_runs([runs["classes"].outdir, runs["instructions"].outdir]), folder / "report.html")
    return out.read_text(encoding="utf-8")


def test_the_page_is_one_file_and_has_every_part(page, runs):
    read = Page(page)
    assert not read.loads and len(page) < 1_000_000
    parts = ["result", "curves", "clients", "data", "settings"]
    assert [key for key in read.ids if key in (*parts, "failures")] == parts, "the same order everywhere"
    shown = " ".join(read.texts)
    for result in runs.values():
        assert digits(result.final["test_loss"]) in shown
    assert {"test-loss-round", "test-next-token-accuracy-round", "test-perplexity-round"} <= set(read.ids)
    best = runs["classes"].best
    assert "best round" in read.texts and digits(best["test_loss"]) in read.texts
    assert any("5 clients, 5 a round" in text for text in read.texts), "the setting"
    assert f"{runs['classes'].facts['rows']['read']}" in read.texts
    assert digits(math.exp(runs["instructions"].final["test_loss"])) in shown and "test perplexity" in shown
    assert "test_perplexity" in runs["instructions"]._repr_html_()
    assert "differences" in page and "<meta http-equiv" not in page


def test_every_picture_has_a_text_alternative(page):
    read = Page(page)
    assert len(read.pictures) == page.count("<svg") >= 10 and all(len(text) > 30 for text in read.pictures)


def test_the_result_of_one_run_is_said_first(runs, tmp_path):
    (shown,) = read_runs([runs["classes"].outdir])
    read = Page(write_page([shown], tmp_path / "report.html").read_text(encoding="utf-8"))
    final, size = runs["classes"].final["test_acc"], runs["classes"].facts["held_out"]["test"]
    assert read.texts[0].strip() == "rolora on reviews.csv, 5 clients"
    said = next(text for text in read.texts if text.startswith("rolora has a"))
    assert f"rolora has a test accuracy of {final:.3f} ± {standard_error(final, size):.3f}" in said
    assert f"{shown.majority:.3f}" in said and f"{digits(shown.megabytes)} MB in all" in said
    assert shown.megabytes == sum(runs["classes"].bytes[f"{way}link_bytes"] for way in ("up", "down")) / 1e6


def test_names_are_not_read_as_markup(runs, tmp_path):
    shown = read_runs([runs["classes"].outdir])
    shown[0].name = "</script><b>bold"
    text = write_page(shown, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>bold" not in text and "&lt;b&gt;bold" in text


def test_a_run_that_has_not_ended(runs, tmp_path, capsys):
    folder, going = runs["classes"].outdir, tmp_path / "going"
    going.mkdir()
    for name in ("config.yaml", "data.json", "rows.npz"):
        (going / name).write_bytes((folder / name).read_bytes())
    text = write_page(read_runs([going]), tmp_path / "a.html", renew=5).read_text(encoding="utf-8")
    assert 'http-equiv="refresh" content="5"' in text and "still running" in text and "No round has ended yet" in text
    (going / "rounds.jsonl").write_text((folder / "rounds.jsonl").read_text().splitlines()[0] + '\n{"round": 2, "sel')
    assert len(read_runs([going])[0].history) == 1
    assert cli.main(["report", str(folder), "--live", "--out", str(tmp_path / "b.html")]) == 0  # it has ended
    assert str(tmp_path / "b.html") in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["report", "{empty}"], "holds no run"),
        (["report", "{run}", "{run}"], "the same run is named twice"),
        (["report", "{run}", "--out", "{empty}"], "expected a file that ends with .html"),
        (["report", "{run}", "--live", "--every", "0"], "argument --every: '0': expected a number, 0.1 or more"),
    ],
)
def test_wrong_use_is_one_line(runs, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    assert cli.main([a.format(run=runs["classes"].outdir, empty=tmp_path / "empty") for a in arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 1, told


def test_damaged_files_are_named(runs, tmp_path):
    for name in ("config.yaml", "data.json", "rows.npz", "rounds.jsonl"):
        (tmp_path / name).write_bytes((runs["classes"].outdir / name).read_bytes())
    whole = json.loads((runs["classes"].outdir / "summary.json").read_text())
    for content in ("{", "[]", "[" * 100_000):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(UserError, match="summary.json cannot be read"):
            read_runs([tmp_path])
    (tmp_path / "summary.json").write_text(json.dumps(whole))
    (tmp_path / "rounds.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="rounds.jsonl, line 1: expected the record of a round"):
        read_runs([tmp_path])
    (tmp_path / "rounds.jsonl").write_bytes((runs["classes"].outdir / "rounds.jsonl").read_bytes())
    for content in ("null", "[" * 100_000):
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(UserError, match="data.json cannot be read: .*; restore the file, or resume the run"):
            read_runs([tmp_path])
    (tmp_path / "data.json").write_text(json.dumps(whole))  # a summary has the sizes of clients, and no split
    with pytest.raises(UserError, match="rows.npz cannot be read: .*; it belongs to data.json beside it"):
        read_runs([tmp_path])


def test_the_scores_of_clients_own_models(runs, tmp_path):
    (shown,) = read_runs([runs["classes"].outdir])
    shown.history[-1]["client_scores"] = {"1": {"acc": 0.125, "loss": 1.0, "samples": 8}}
    text = write_page([shown], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "test acc of own models" in text and ">0.125<" in text


def test_what_one_sees_first(runs, tmp_path):
    """The sentence, then the curve by bytes; all figures, other curves and each client after a click."""
    (shown,) = read_runs([runs["classes"].outdir])
    text = write_page([shown], tmp_path / "report.html").read_text(encoding="utf-8")
    order = ["a test accuracy of", "<details", 'data-name="figures"', "</details>", 'id="test-accuracy-round"']
    order += ['id="test-accuracy-bytes"', 'id="other-curves"', 'id="clients-1"', 'data-name="data"']
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    clients = text[text.index('data-name="clients"') :]
    assert clients.index("<th>client</th>") < clients.index("</thead>") and "<th>run</th>" not in text
