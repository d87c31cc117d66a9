"""A run of a few out of very many clients: nothing is done or kept for each client that does not take part."""

import cProfile
import json
import pstats
import tracemalloc

import numpy as np
import pandas as pd
import pytest

import fs_lowrank
from fs_lowrank import load_config
from fs_lowrank.data import RawData
from fs_lowrank.data.partition import PARTITIONERS, Rows, matching_shares, partition
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.rounds import workspace
from fs_lowrank.runs.split import read_split
from fs_lowrank.testing.bench import without_seconds

pytestmark = pytest.mark.more

FEW, MANY, ROWS = 1_000, 100_000, 220_000


@pytest.fixture(scope="module")
def pixels():
    """Images of 8 × 8 in two classes, and 60 test images."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (ROWS + 60, 1, 8, 8), dtype=np.uint8)
    frame = pd.DataFrame({"image": np.arange(ROWS + 60), "label": draw.integers(0, 2, ROWS + 60)})
    frames = {"train": frame[:ROWS], "test": frame[ROWS:].reset_index(drop=True)}
    return RawData.of(
        "image_classification", frames, ["dark", "bright"], [], "pixels", images=images, mean=(0.5,), std=(1,)
    )


@pytest.fixture
def config(vision_settings, pixels, monkeypatch):
    """``config(clients, keys)``: two rounds of three clients, without pictures."""
    monkeypatch.setattr(workspace, "load_raw", lambda *args, **keys: pixels)
    plain = {**vision_settings, "data": {"type": vision_settings["data"]["type"], "splits": [1.0, 0.0, 0.0]}}

    def made(clients, keys=None):
        few = {"federate.client_num": clients, "federate.sample_client_num": 3, "federate.total_round_num": 2}
        few |= {"train.local_update_steps": 1, "eval.split": ["test"], "eval.freq": 2, "dataloader.batch_size": 2}
        few |= {"lowrank.pictures": False, "data.splitter": "iid", "outdir": f"{plain['outdir']}-{clients}"}
        return load_config(plain, {**few, **(keys or {})})

    return made


def calls(function):
    """The number of Python's function calls, those of builtins included."""
    profiler = cProfile.Profile()
    profiler.enable()
    function()
    profiler.disable()
    return pstats.Stats(profiler).total_calls


@pytest.mark.slow
def test_a_run_does_as_much_with_few_clients_as_with_many(config):
    LocalEngine(config(FEW, {"outdir": config(FEW).outdir + "-warm"})).run()
    few, many = (calls(LocalEngine(config(clients)).run) for clients in (FEW, MANY))
    setup = [calls(lambda clients=clients: LocalEngine(config(clients))) for clients in (FEW, MANY)]
    assert abs(many - few) < 1000 and abs(setup[1] - setup[0]) < 1000, "less than a hundredth of a call a client"


@pytest.mark.slow
def test_a_client_costs_no_more_than_its_row_indices(config):
    peaks = []
    for clients in (FEW, MANY):
        tracemalloc.start()
        engine = LocalEngine(config(clients))
        peaks.append(tracemalloc.get_traced_memory())
        tracemalloc.stop()
        assert len(engine.workspace.clients) == len(engine.workspace.data.clients) == clients
    (few, highest_few), (many, highest_many) = peaks
    assert many - few < 50 * (MANY - FEW), "bytes that stay: where its rows begin and how many they are, twice"
    assert highest_many - highest_few < 150 * (MANY - FEW)


def test_the_files_of_a_run_have_nothing_of_clients_that_take_no_part(config):
    sizes = {}
    for clients in (FEW, MANY):
        folder = fs_lowrank.run(config(clients)).outdir
        sizes[clients] = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    few, many = sizes[FEW], sizes[MANY]
    assert few.keys() == many.keys()
    grown = {name: many[name] - few[name] for name in few if name != "rows.npz"}
    assert max(grown.values()) < 1000, "client numbers have more digits"
    assert many["rows.npz"] < (4 + 8) * ROWS + 2 * MANY, "8 bytes are the hash of a row"


@pytest.mark.slow
def test_a_run_of_many_clients_is_resumed_and_read(config):
    whole = fs_lowrank.run(config(MANY))
    keys = {"outdir": config(MANY).outdir + "-again"}
    fs_lowrank.run(config(MANY, keys), on_round=lambda record: True)
    again = fs_lowrank.run(config(MANY, keys), resume=True)
    assert without_seconds(again.history) == without_seconds(whole.history)
    frame = again.clients_frame()
    assert len(frame) == MANY and frame["rounds"].sum() == 6 and frame["samples"].sum() == ROWS
    assert len(again.unseen) == MANY - (frame["rounds"] > 0).sum()
    split = read_split(again.outdir)
    assert json.loads((again.outdir / "data.json").read_text())["clients"] == len(split["clients"]) == MANY
    last = split["clients"][-1]
    assert last["client"] == MANY and last["size"] == len(last["rows"]) == sum(last["labels"].values()) == 2
    summary = json.loads((again.outdir / "summary.json").read_text())
    assert summary["clients"] == {"number": MANY, "least": 2, "most": 3}


@pytest.mark.parametrize("name", sorted(PARTITIONERS.keys() - {"file"}))  # which makes a client of each file
def test_partitioners_divide_many_rows_among_many_clients(name):
    args = {"shards": {"shards_per_client": 1}, "field": {"field": "side"}, "meta": {"field": "side"}}.get(name, {})
    draw = np.random.default_rng(0)
    sides = np.array(["left", "right"])[draw.integers(0, 2, 20_000)]
    rows = Rows(20_000, draw.integers(0, 3, 20_000), {"side": sides})
    held = Rows(500, draw.integers(0, 3, 500), {"side": sides[:500]})

    def divide(clients):
        parts = partition(name, rows, clients, np.random.default_rng(1), args)
        assert parts.sizes().min() >= 1
        assert sum(map(len, matching_shares(parts, rows, held, np.random.default_rng(2)))) == 500

    few, many = calls(lambda: divide(100)), calls(lambda: divide(10_000))
    assert many - few < 60 * 10_000, "no client is compared with all others"
