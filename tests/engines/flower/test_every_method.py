"""Every method on Flower has the global tensors of the embedded engine, where clients keep nothing but their disks
between messages and the server ends after the first round.

``make flower-all`` writes the table of ``results/flower.md``; ``test_simulation.py`` has three methods on Ray.
"""

import json
import os
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import fs_lowrank
from fs_lowrank.jobs.files import to_json, write_text
from fs_lowrank.models.names import all_tensors
from fs_lowrank.runs.environment import versions
from tests.cases import engine_cases

pytestmark = [pytest.mark.flower, pytest.mark.slow]

CASES = [(method, keys, "encoder") for method, keys in engine_cases()]
CASES += [(m, {}, "vision") for m in fs_lowrank.list_methods() if m not in {method for method, _, _ in CASES}]
IDS = [m + "".join(f"-{name.split('.')[1]}" for name in keys) for m, keys, _ in CASES]
#: keys of the table's rows, and how they are shown
COLUMNS = {
    "method": "method",
    "difference": "largest difference of a global tensor",
    "uplink": "bytes sent up",
    "downlink": "bytes sent down",
    "rounds": "rounds",
    "embedded_seconds": "seconds, embedded",
    "seconds": "seconds, Flower",
}
ABOUT = """# Every method on Flower

`make flower-all` wrote this page and `flower.json`: {versions}.

Three clients, two of them in each round, three rounds of two steps, on the small models of the tests, in float32 and
with the same seed: the embedded engine, and this package's server and clients on Flower's grid and SuperLink state in
one process. Between two messages a client has nothing but the files on its disk, and the server is stopped after
the first round and resumed. Clients make data and model anew for each message and other work ran beside it, so the
seconds say only how long this took.

Bytes are compared by client and by round. Those sent down differ where clients have models of their own: to evaluate
these, clients that did not train are sent what they lack.

"""


@pytest.fixture(scope="module")
def table():
    """Rows that the tests add; written where ``FLOWER_TABLE`` says, without ending, in Markdown and JSON."""
    rows = []
    yield rows
    if place := os.environ.get("FLOWER_TABLE"):
        place, found = Path(place), {**versions(), "flwr": version("flwr")}
        result = {"command": "make flower-all", "versions": found, "rows": rows}
        write_text(place.with_suffix(".json"), to_json(result, indent=1) + "\n")
        lines = [[f"{v:g}" if isinstance(v := row[name], float) else str(v) for name in COLUMNS] for row in rows]
        lines = [list(COLUMNS.values()), ["---", *["---:"] * (len(COLUMNS) - 1)], *lines]
        used = ", ".join(" ".join(pair) for pair in found.items())
        text = ABOUT.format(versions=used) + "".join(f"| {' | '.join(line)} |\n" for line in lines)
        write_text(place.with_suffix(".md"), text)


@pytest.mark.parametrize("method, keys, task", CASES, ids=IDS)
def test_every_method(quick, federation, vision_settings, keys_of, table, method, keys, task):
    from fs_lowrank.engines.flower.client import _node
    from tests.engines.flower.test_server import serve

    def anew(number, message, answer):
        _node.cache_clear()
        return answer()

    few = {"federate.method": method, "federate.sample_client_num": 2, "federate.total_round_num": 3}
    few |= {"lowrank.checkpoint_freq": 1, **keys_of(method), **keys}
    of = vision_settings if task == "vision" else None
    began = time.perf_counter()
    local = fs_lowrank.run(quick("local", few, of))
    middle, config = time.perf_counter(), quick("flower", few, of)
    grid = federation(behave=anew).grid
    serve(config, grid, on_round=lambda record: record["round"] == 1)
    other = serve(config, grid, resume=True)
    ended = time.perf_counter()

    ours, theirs = all_tensors(local.model), all_tensors(other.model)
    assert ours.keys() == theirs.keys()
    apart = [theirs[name].double() - tensor.double() for name, tensor in ours.items() if tensor.numel()]
    difference = max(tensor.abs().max().item() for tensor in apart)
    sent = {
        way: [r[f"client_{way}_bytes"] for r in other.history] == [r[f"client_{way}_bytes"] for r in local.history]
        for way in ("uplink", "downlink")
    }
    row = {"method": " ".join([method, *(f"{name.split('.')[1]} {json.dumps(v)}" for name, v in keys.items())])}
    row |= {"difference": difference} | {way: "equal" if same else "differ" for way, same in sent.items()}
    row |= {"rounds": len(other.history), "embedded_seconds": round(middle - began, 1)}
    table.append(row | {"seconds": round(ended - middle, 1)})
    assert difference <= 1e-5
    assert [r["clients"] for r in other.history] == [r["clients"] for r in local.history]
    assert not any(r["failed"] for r in other.history)
    assert sent["uplink"]
