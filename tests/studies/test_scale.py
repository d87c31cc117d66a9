"""The benchmarks of many clients and of one server run at a small size; the guide says what the registry says."""

import json
import re
from pathlib import Path

import pytest
import torch

from fs_lowrank.methods import Update, create_method, get_method_class, list_methods, requirements
from fs_lowrank.settings import AdapterSpec
from studies.speed import capacity, scale
from studies.speed.server_step import Layers

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
GUIDE, RESULTS = ROOT / "docs" / "guides" / "scale.md", ROOT / "results" / "speed"


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


@pytest.mark.parametrize("name", capacity.methods())
def test_servers_that_share_the_layers_compute_what_one_does(name):
    """To the bit, as the guide says of shards: two servers with some of the matrices each, over two rounds."""
    settings = {"adapter": AdapterSpec(r=2, lora_alpha=4, target_modules=("q", "v")), "rounds": 9, "seed": 0}
    whole, *shards = (create_method(name, **settings) for _ in range(3))
    model = whole.adapt(Layers(6, 7, 5))
    state = whole.initial_state(model)
    states = [_of(state, own) for own in _SHARDS]
    draw = torch.Generator().manual_seed(0)
    for round in (1, 2):
        wanted = [whole.expected(state, round, client) for client in (1, 2, 3)]
        drawn = [{n: torch.randn(t.shape, generator=draw) for n, t in own.items()} for own in wanted]
        updates = [Update(i, 10 * i, tensors) for i, tensors in enumerate(drawn, 1)]
        state, message = whole.aggregate(updates, state, round)
        for i, (server, own) in enumerate(zip(shards, _SHARDS)):
            given = [Update(u.client, u.num_samples, _of(u.tensors, own)) for u in updates]
            states[i], part = server.aggregate(given, states[i], round)
            expected = _of(message, own)
            assert part.keys() == expected.keys() and part
            assert all(torch.equal(part[n], expected[n]) for n in part)


#: the matrices of each server
_SHARDS = (("layers.0.", "layers.1.q"), ("layers.1.v", "layers.2."))


def _of(tensors, own):
    return {n: t for n, t in tensors.items() if any(module in n for module in own)}


def test_the_guide_has_the_figures_that_were_measured():
    lines, measured = GUIDE.read_text(encoding="utf-8").splitlines(), {}
    for part in ("capacity", "scale"):
        measured[part] = json.loads((RESULTS / f"{part}.json").read_text(encoding="utf-8"))["results"]
    table = [line for line in lines if line.count("|") == 9]
    assert len(table) > 10 and set(table) <= set(capacity.lines(measured["capacity"]))
    for number, (run,) in measured["scale"].items():
        above = (run["peak_bytes"] - run["base_bytes"]) / 1e6
        figures = (f"{run['setup']['processor']:.1f}", f"{above:.0f}", f"{scale.round_seconds(run):.2f}")
        rest = (f"{scale.own_share(run):.0%}".replace("%", " %"), f"{run['file_bytes'] / 1e6:.1f}")
        assert f"| {int(number):,} | " + " | ".join((*figures, *rest)) + " |" in lines


def test_the_guide_says_of_every_method_whether_sums_are_enough():
    said = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE))
    assert said == {
        name: "yes" if requirements(name).sums else "no"
        for name in list_methods()
        if get_method_class(name).__module__.startswith("fs_lowrank.")
    }
