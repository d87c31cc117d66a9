"""The HTML page of runs: complete in one file, and names from the user are not read as markup."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from fs_lowrank import UserError, cli
from fs_lowrank.page import read_runs, write_page


class Page(HTMLParser):
    """Texts, and addresses that a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.ids, self.texts = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        if tag in ("script", "img", "link", "iframe") and attributes.get("href") != "data:,":
            self.loads += [attributes[k] for k in ("src", "href") if k in attributes]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def page(runs, tmp_path):
    out = write_page(read_runs([runs["classes"].outdir, runs["instructions"].outdir]), tmp_path / "report.html")
    return out.read_text(encoding="utf-8")


def test_the_page_is_one_file_and_has_every_part(page, runs):
    read = Page(page)
    assert not read.loads
    assert {"summary", "curves", "data", "clients", "settings"} <= read.ids and "failures" not in read.ids
    shown = " ".join(read.texts)
    for result in runs.values():
        assert f"{result.final['test_loss']:.4g}" in shown
    plots = re.findall(r'data-plot="plot-([\w-]+)"', page)
    assert {"test-acc-bytes", "test-token-acc-bytes", "test-perplexity-round"} <= set(plots), "of a language model"
    best = runs["classes"].best
    assert "best round" in read.texts and f"{best['test_loss']:.4g}" in read.texts and "best test acc" not in read.texts
    assert any("5 clients, 5 a round" in text for text in read.texts), "the setting"
    counts = runs["classes"].facts["rows"]
    assert f" {counts['read']} " in shown
    loss = runs["instructions"].final["test_loss"]
    assert "test token acc" in shown and f"{math.exp(loss):.4g}" in shown and "test perplexity" in shown
    assert {"plot-test-token-acc-round", "plot-test-token-acc-bytes", "plot-test-perplexity-round"} <= read.ids
    assert "test_perplexity" in runs["instructions"]._repr_html_()
    assert "≠ data.type" in shown and "<meta http-equiv" not in page


def test_the_curves_are_the_records(page, runs):
    plots = {m[1]: json.loads(m[2]) for m in re.finditer(r'data-plot="plot-([\w-]+)">(.*?)</script>', page)}
    (first, *_) = plots["test-acc-round"]["data"]
    history = runs["classes"].history
    assert first["y"] == [r["metrics"]["test"]["acc"] for r in history] and first["x"] == [1, 2, 3]
    sent = plots["test-acc-bytes"]["data"][0]["x"]
    assert sent[-1] == sum(runs["classes"].bytes[k] for k in ("uplink_bytes", "downlink_bytes"))
    bars = plots["clients-1"]["data"]
    assert sum(map(sum, (t["y"] for t in bars))) == sum(runs["classes"].facts["clients"])
    (heat,) = plots["confusion-1"]["data"]
    right = sum(heat["text"][i][i] for i in range(2)) / sum(map(sum, heat["text"]))
    assert right == pytest.approx(runs["classes"].final["test_acc"])
    assert len(plots["client-scores"]["data"][0]["y"]) == len(runs["classes"].facts["clients"])
    assert {t["name"] for t in plots["drift"]["data"]} >= {"rolora, A", "rolora, B"} or len(plots["drift"]["data"]) > 2


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
        (["report", "{run}", "--live", "--every", "0"], "argument --every: '0': expected a number above 0"),
        (["report", "{run}", "--out", "{empty}/none/x.html"], "there is no folder"),
    ],
)
def test_wrong_use_is_one_line(runs, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    assert cli.main([a.format(run=runs["classes"].outdir, empty=tmp_path / "empty") for a in arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 1, told


@pytest.mark.more
def test_damaged_files_are_named(runs, tmp_path):
    for name in ("config.yaml", "data.json", "rows.npz", "rounds.jsonl"):
        (tmp_path / name).write_bytes((runs["classes"].outdir / name).read_bytes())
    whole = json.loads((runs["classes"].outdir / "summary.json").read_text())
    wrong = ["{", "[]", "[" * 100_000, *(json.dumps({**whole, key: 5}) for key in ("labels", "best", "on_test"))]
    for content in wrong:
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(UserError, match="summary.json cannot be read"):
            read_runs([tmp_path])
    (tmp_path / "summary.json").write_text(json.dumps(whole))
    first, *_ = (runs["classes"].outdir / "rounds.jsonl").read_text().splitlines()
    lacking = json.dumps({key: value for key, value in json.loads(first).items() if key != "client_uplink_bytes"})
    for content, said in (
        (f"{lacking}\n", "line 1: expected the record of a round"),
        ("", "cannot be read: it has no round"),
    ):
        (tmp_path / "rounds.jsonl").write_text(content)
        with pytest.raises(UserError, match=f"rounds.jsonl.*{said}"):
            read_runs([tmp_path])
    (tmp_path / "rounds.jsonl").write_bytes((runs["classes"].outdir / "rounds.jsonl").read_bytes())
    for content in ("null", "[" * 100_000, json.dumps(whole)):  # a summary has the sizes of clients, and no split
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(UserError, match="data.json cannot be read: .*; restore the file, or resume the run"):
            read_runs([tmp_path])


def test_the_scores_of_clients_own_models(runs, tmp_path):
    (shown,) = read_runs([runs["classes"].outdir])
    shown.history[-1]["client_scores"] = {"1": {"acc": 0.125, "loss": 1.0, "samples": 8}}
    text = write_page([shown], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "test acc of own models" in text and ">0.125<" in text
