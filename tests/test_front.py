"""The README: the demo's figures in it, its size."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
front = runpy.run_path(str(ROOT / "docs" / "pictures" / "demo.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figures_of_the_demo_are_the_committed_ones():
    methods = json.loads((ROOT / "results" / "demo" / "comparison.json").read_text())
    rounds = json.loads((ROOT / front["ROUNDS"]).read_text())
    rows = dict(re.findall(r"^│ (\w+) +│ (0\.\d{3}) │", README, re.M))
    assert list(rows) == list(methods) == list(rounds)
    for name, result in methods.items():
        accuracy = result["final"]["test_acc"]
        assert rows[name] == f"{accuracy:.3f}" and rounds[name][-1][1] == accuracy


def test_texts_of_the_pictures_have_the_ink_of_their_page():
    for name, (ink, _) in front["_LOOKS"].items():
        assert f"text{{fill: {ink}}}" in (ROOT / front["PICTURES"] / f"demo-{name}.svg").read_text()


def test_a_visitor_reads_it_in_a_minute():
    assert len(README.encode()) <= 9000
    assert all(
        len(line) <= 80 for block in re.findall(r"```\w*\n(.*?)```", README, re.S) for line in block.splitlines()
    )
