"""The benchmarks of many clients and of one server run at a small size; the guide says what the registry says."""

import json
import re
from pathlib import Path

import pytest

from benchmark.speed import capacity, scale
from fs_lowrank.methods import get_method_class, list_methods, requirements

ROOT = Path(__file__).parents[2]
GUIDE, RESULTS = ROOT / "docs" / "scale.md", ROOT / "results" / "speed"


def test_a_run_of_a_few_of_many_clients_is_measured(monkeypatch, no_curves):
    monkeypatch.setattr(scale, "in_fresh_process", scale.measure)
    found = scale.run(clients=(6, 40), sampled=3, rows=300, rounds=2, turns=1)
    assert [line["holds"] for line in found["rows"][:2]] == [True, True] and len(found["rows"]) == 5
    for number, (run,) in found["results"].items():
        assert run["clients"] == int(number) and len(run["rounds"]) == 2 and run["file_bytes"] < 1e6
        assert run["reading"]["clock"] > 0 and run["setup"]["clock"] > 0
        for of_round in run["rounds"]:
            assert 0 < of_round["training"]["clock"] < of_round["whole"]["clock"]
    assert "set-up beyond it" in scale.described(run)


@pytest.mark.parametrize("name", capacity.methods())
def test_what_a_server_does_for_a_client_is_measured(name):
    some, found = (capacity.measure(name, 24, modules, 2, 4, measured=3, repeats=1) for modules in (3, 6))
    assert all(value > 0 for value in found.values())
    assert [found[key] for key in ("up_bytes", "down_bytes")] == [2 * some[key] for key in ("up_bytes", "down_bytes")]
    *_, line = capacity.lines([{"method": name, "model": "m", "rank": 2, "clients": 4, **found}])
    assert line.startswith(f"| `{name}` | m, 2 | 4 | {found['up_bytes'] / 1e6:.3g} |")


def test_the_guide_has_the_figures_that_were_measured():
    lines, measured = GUIDE.read_text(encoding="utf-8").splitlines(), {}
    for part in ("capacity", "scale"):
        measured[part] = json.loads((RESULTS / f"{part}.json").read_text(encoding="utf-8"))["results"]
    table = [line for line in lines if line.count("|") == 9]
    assert len(table) > 10 and set(table) <= set(capacity.lines(measured["capacity"]))
    for number, runs in measured["scale"].items():
        files = max(run["file_bytes"] for run in runs) / 1e6
        assert any(line.startswith(f"| {int(number):,} |") and line.endswith(f"| {files:.1f} |") for line in lines)


def test_the_guide_says_of_every_method_whether_sums_are_enough():
    said = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE))
    assert said == {
        name: "yes" if requirements(name).sums else "no"
        for name in list_methods()
        if get_method_class(name).__module__.startswith("fs_lowrank.")
    }
