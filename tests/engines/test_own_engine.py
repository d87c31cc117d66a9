"""The engine of ``docs/guides/own_engine.md``, which starts a command for each order, as the page has it.

``make flower`` compares every method on clients that keep nothing but their disks between two messages.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fs_lowrank
from tests.cases import same_model

pytestmark = pytest.mark.more
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own_engine.md"
FEW = {"federate.client_num": 2, "train.cache_frozen": "off"}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(code.splitlines()) <= 60
    (tmp_path / "commands_engine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield importlib.import_module("commands_engine")
    del sys.modules["commands_engine"]


def test_a_stopped_run_whose_client_lost_its_disk_ends_as_on_the_embedded_engine(engine, few):
    keys = {"federate.method": "fedloru", "lowrank.tau": 1}
    config = few("commands", keys)
    engine.run(config, on_round=lambda record: True)
    there = Path(config.outdir) / "clients"
    assert sorted(place.name for place in there.iterdir()) == ["1", "2"]
    shutil.rmtree(there / "1")
    resumed = engine.run(config, resume=True)
    assert not any(record["failed"] for record in resumed.history)
    same_model(fs_lowrank.run(few("local", keys)), resumed)


def test_a_client_whose_process_fails_is_left_out_of_its_round(engine, few, monkeypatch):
    run, orders = subprocess.run, []

    def failing(command, **options):
        orders.append(command[-1])
        return run(["false"] if command[-1] == "2" and orders.count("2") == 1 else command, **options)

    monkeypatch.setattr(engine.subprocess, "run", failing)
    first, second = engine.run(few("commands", {"federate.method": "fedlora", "eval.freq": 0})).history
    assert first["failed"] == [{"client": 2, "kind": "failed", "reason": "exit code 1: "}]
    assert first["clients"] == [1] and second["clients"] == [1, 2]
    # What it was sent in round 1 is not on its disk, so it is sent again.
    assert second["client_downlink_bytes"]["2"] >= second["client_downlink_bytes"]["1"]
