"""The report is Markdown by a template, and an HTML page of it."""

from html.parser import HTMLParser

import PIL.Image
import pytest

from benchmark.conditions import HOLDS, INCONCLUSIVE, UNTESTED, Condition
from benchmark.figures import along_axis, claim_panels, draw_claim, learning_curves
from benchmark.intervals import Estimate, Figure
from benchmark.metrics import title_of
from benchmark.page import html
from benchmark.results import ExperimentResults
from benchmark.suite import load_suite
from benchmark.template import markdown
from fs_lowrank.draw.figures import figure


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
    text = f"# R\n\n## T & <T>\n\n{markdown('table', rows)}\n![Curves, 2 clients](report/x.png)\n\n"
    read = Text()
    read.feed(html(text + "**Failed:**\n- a: 1 < 2\n\n- one: **holds**\n  - because 3 > 2: holds\n"))
    tags = [tag for tag, _ in read.tags]
    assert tags.count("th") == 2 and tags.count("td") == 4 and tags.count("script") == 1
    assert {"h2", "strong", "code", "ul"} <= set(tags) and tags.count("li") == 3
    assert dict(read.tags)["img"] == {"src": "report/x.png", "alt": "Curves, 2 clients"}
    for words in ("T & <T>", "a | b", "<script>", "x_y_z", "a: 1 < 2", "because 3 > 2: holds"):
        assert words in read.words, words


def test_a_page_has_no_more_pictures_than_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmark.page._LARGEST", 1200)
    for name in "ab":
        PIL.Image.effect_noise((16, 16), 64).save(tmp_path / f"{name}.png")
    read = Text()
    read.feed(html("# R\n\n![One](a.png)\n\n![Two](b.png)\n", tmp_path))
    first, second = (attrs["src"] for tag, attrs in read.tags if tag == "img")
    assert first.startswith("data:image/png;base64,") and second == "b.png"


VERDICTS = {
    "holds": "holds",
    "does not hold": "fails",
    "inconclusive": "open",
    "not tested at this size": "untested",
    "holds in 1 of 3 experiments, inconclusive in 2": "open",
    "does not hold in 1 of 3 experiments, inconclusive in 2": "open",
    "holds in 1 of 3 experiments, does not hold in 1, inconclusive in 1": "open",
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdicts_are_coloured_and_claims_are_links(verdict):
    claims = markdown(
        "table", [("claim", "verdict"), ("A holds", verdict), ("A holds", verdict), ("B", verdict)], "verdict"
    )
    assert f"| A holds | **{verdict}** |" in claims
    claim = f"### Claim: A holds — {verdict}\n\n- one: **{verdict}**\n  - so: holds\n\n"
    text = html(f"# Benchmark report\n\n## Claims\n\n{claims}\n## Suite\n\n{claim}{claim}### An experiment\n")
    assert text.count(f'<strong class="{VERDICTS[verdict]}">{verdict}</strong>') == 5
    read = Text()
    read.feed(text)
    ids = [a["id"] for _, a in read.tags if "id" in a]
    links = [a["href"].removeprefix("#") for tag, a in read.tags if tag == "a"]
    assert len(set(ids)) == len(ids) and set(links) <= set(ids)
    assert links[:3] == ["claims", "suite", "an-experiment"] and len(set(links[3:])) == 2
    assert text.count("<h1>") == 1


def test_accuracy_is_that_of_the_next_token_for_a_language_model():
    assert title_of("val_acc") == "validation accuracy, %"
    assert title_of("val_acc", True) == "validation next-token accuracy, %"
    assert title_of("rounds_to:val_acc:0.5", True) == "rounds, until val_token_acc is 0.5"
    assert title_of("test_loss", True) == title_of("test_loss")


def condition(what, estimate, unit="test_acc", **more):
    found = Condition(
        what, "", "", {"a": Figure({0: 0.4, 1: 0.5, 2: 0.6})}, estimate, 0.0, float("inf"), unit=unit, **more
    )
    assert found.verdict in (HOLDS, INCONCLUSIVE)
    return found


def test_a_claim_has_a_figure_of_its_conditions(tmp_path):
    """Without the one that only asks whether anything was learned."""
    absent = Condition("c above d", "", "", {"c": None}, None, 0.0, float("inf"))
    assert absent.verdict == UNTESTED
    conditions = [condition("a above b", Estimate(0.02, 0.002, 5)), condition("a / b", Estimate(0.1, None), "quotient")]
    learns = condition("a learns", Estimate(0.3, 0.001, 5), premise=True)
    accuracy, quotient = claim_panels({"main": [learns, *conditions, absent]})
    (_, point), (_, hollow) = accuracy.marks, quotient.marks
    low, high = (100 * end for end in conditions[0].estimate.ends)
    assert (point.name, point.y, point.hollow) == (HOLDS, [2.0], False)
    assert (*point.low, *point.high) == pytest.approx((low, high))
    assert (hollow.name, hollow.y, hollow.low, hollow.hollow) == (INCONCLUSIVE, [0.1], (), True)
    assert accuracy.ticks == {0: "main: a above b"} and "points of accuracy" in accuracy.y
    path = tmp_path / "report" / "claim.png"
    assert draw_claim("A claim", {"main": conditions}, path) == path and PIL.Image.open(path).width > 500
    drawn = path.stat().st_mtime_ns
    draw_claim("A claim", {"main": conditions}, path)
    assert path.stat().st_mtime_ns == drawn  # of the same data
    path.write_bytes(path.read_bytes()[:-400])
    draw_claim("A claim", {"main": conditions}, path)
    PIL.Image.open(path).load()  # a torn file is drawn again
    drawn = path.stat().st_mtime_ns
    draw_claim("A claim", {"main": conditions[:1]}, path)
    assert path.stat().st_mtime_ns > drawn
    assert draw_claim("A claim", {"main": [absent]}, tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()


def test_the_figure_along_an_axis_has_a_panel_for_each_setting_of_the_others(tmp_path):
    (tmp_path / "axes.yaml").write_text(
        """
        config: {model: {type: lenet}, data: {type: mnist}, federate: {client_num: 2}}
        methods: [fedavg, fedlora]
        grid:
          split: {IID: {data.splitter: iid}, Dir: {data.splitter: dirichlet}}
          steps:
            {4: {train.local_update_steps: 4}, 20: {train.local_update_steps: 20}, 80: {train.local_update_steps: 80}}
        """
    )
    suite = load_suite(str(tmp_path / "axes.yaml"), "small")
    results = ExperimentResults(suite, suite.experiments["main"])
    there = [("IID", 4), ("IID", 20), ("IID", 80), ("Dir", 4), ("Dir", 80)]
    for method, more in (("fedavg", 0.0), ("fedlora", 0.2)):
        for split, steps in there:
            results.records[method, f"{split} / {steps}"] = [
                {"seed": s, "metrics": {"test_acc": steps / 100 + more / 2 + s / 50}} for s in (0, 1)
            ]
    panels = along_axis(results)
    assert [panel.title for panel in panels] == ["split IID", "split Dir"]
    assert [[*panel.ticks.values()] for panel in panels] == [["4", "20", "80"], ["4", "80"]]
    line = panels[1].marks[1]
    assert (line.name, line.x, line.y) == ("fedlora", [4, 80], pytest.approx([15, 91]))
    assert line.high == pytest.approx([y + 2**0.5 for y in line.y])
    assert {panel.x for panel in panels} == {"steps"}
    assert not [mark for panel in panels for mark in panel.marks if mark.hollow]
    for records in results.records.values():
        records[0]["majority"] = 0.05  # of which a seed at 4 steps is below
    said = [text.get_text() for text in figure(along_axis(results)).legends[0].get_texts()]
    assert said.count("a seed collapsed or failed") == said.count("majority class") == 1


@pytest.mark.more
def test_a_learning_curve_ends_hollow_where_a_seed_collapsed_or_failed():
    suite = load_suite("glue", "small")
    column = next(iter(suite.experiments["sst2"].axes["clients"]))

    def run(seed: int, test: float) -> dict:
        history = {"evaluated": [{"round": n, "val_acc": 0.5 + n * test / 10} for n in (1, 2, 3)]}
        return {"seed": seed, "metrics": {"test_acc": test}, "majority": 0.51, "history": history}

    records = {(m, column): [run(0, 0.8), run(1, 0.8)] for m in ("fedlora", "ffa_lora", "rolora")}
    records["ffa_lora", column][1] = run(1, 0.5)
    results = ExperimentResults(suite, suite.experiments["sst2"], records, lost={("rolora", column): {2}})
    (panel,) = learning_curves(results)
    colours = {line.name: line.colour for line in panel.marks if line.name}
    ends = [(line.colour, line.x, line.y, line.means) for line in panel.marks if line.hollow]
    means = "a seed collapsed or failed"
    assert ends == [
        (colours["ffa_lora"], (3,), (pytest.approx(69.5),), means),
        (colours["rolora"], (3,), (pytest.approx(74),), means),
    ]
    assert panel.x == "round"
    del records["ffa_lora", column][0]["history"]["evaluated"][-1]  # as a run that stopped early
    (panel,) = learning_curves(results)
    assert panel.x == "round; ffa_lora to the end of its shortest run"
    (line,) = [line for line in panel.marks if line.name == "ffa_lora"]
    assert line.x == [1, 2] and line.low == pytest.approx([55, 60]) and line.high == pytest.approx([58, 66])


def test_two_metrics_of_one_task_are_two_columns():
    suite = load_suite("humaneval", "small")
    scores = {"pass@1": 0.1, "pass@1_stderr": 0.1, "sampled_pass@1": 0.2, "sampled_pass@10": 0.5}
    found = {"seed": 0, "hash": "a", "metrics": {"val_loss": 1.5}, "scores": {"humaneval": {"humaneval": scores}}}
    records = {("rolora", ""): [found], ("fedlora", ""): [{**found, "hash": "b"}]}
    text = markdown("tables", ExperimentResults(suite, suite.experiments["main"], records))
    names = " | ".join(f"humaneval:{name}" for name in ("pass@1", "sampled_pass@1", "sampled_pass@10"))
    assert f"| method | {names} | paper: humaneval |" in text
    assert "| rolora | 10.00 (s.e. 10.00) | 20.00 | 50.00 | 13.45 ± 0.28 |" in text
