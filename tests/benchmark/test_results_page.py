"""The page of the results has a section for each claim, with the verdict of the report, one figure and the command."""

import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from benchmark import suite as suites
from benchmark.suite import shipped

load_suite = cache(suites.load_suite)
RESULTS = Path(__file__).parents[2] / "results"
PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")
CLAIMS = pd.read_csv(RESULTS / "claims.csv", keep_default_na=False).to_dict("records")
SECTIONS = {
    heading: text
    for heading, text in re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
}


def claims():
    return [(name, str(claim["says"])) for name in shipped() for claim in load_suite(name, "small").claims.values()]


def test_every_claim_has_a_section_and_no_other_has():
    assert sorted(heading.rpartition(" — ")[0] for heading in SECTIONS) == sorted(says for _, says in claims())


@pytest.mark.parametrize("suite, says", claims(), ids=[f"{name}-{i}" for i, (name, _) in enumerate(claims())])
def test_a_claim_has_the_verdict_of_the_report_one_figure_and_the_command(suite, says):
    ((heading, text),) = [(h, t) for h, t in SECTIONS.items() if h.rpartition(" — ")[0] == says]
    rows = [c for c in CLAIMS if (c["claim"], c["suite"]) == (says, suite) and c["size"] in ("small", "")]
    assert [c["verdict"] for c in rows] == [heading.rpartition(" — ")[2]], "make report, or the page is older"
    figures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    untested = heading.endswith("not tested at this size")
    assert len(figures) == 1 or untested and not figures
    assert all((RESULTS / figure).is_file() for figure in figures)
    command = re.findall(r"^`((?:fs-lowrank benchmark run|python -m studies\.).*)`$", text, flags=re.MULTILINE)
    assert len(command) == 1 and "| --- |" not in text
    if command[0].startswith("fs-lowrank") and "--only" in command[0]:
        known = {e for size in ("small", "paper") for e in load_suite(suite, size).experiments}
        assert set(command[0].split("--only ")[1].split()[0].split(",")) <= known


def test_every_claim_that_does_not_hold_names_a_cause_that_was_tested():
    refuted = {c["claim"]: c["tested cause"] for c in CLAIMS if "does not hold" in c["verdict"]}
    assert len(refuted) >= 5
    for says, cause in refuted.items():
        assert re.search(r"\(.*\)$", cause), f"{says}: {cause}"
