"""The engine of ``docs/guides/own_engine.md``, which starts a command for each order, as the page has it."""

import importlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import fs_lowrank
from fs_lowrank.config import check_engine
from fs_lowrank.methods import get_method_class
from fs_lowrank.runs.folder import remove_run
from tests.cases import FURTHER, VARIANTS, engine_cases, same_model, same_run

pytestmark = pytest.mark.more
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own_engine.md"
TEXT = [(m, {}) for m, keys in engine_cases() if not keys]
CASES = [(m, keys, "settings") for m, keys in (*TEXT, *VARIANTS[1:], *FURTHER)]
CASES += [(m, {}, "causal_settings") for m, keys in engine_cases("causal") if not keys]
CASES += [(m, {}, "vision_settings") for m in fs_lowrank.list_methods() if (m, {}) not in TEXT]
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


def test_what_the_engine_refuses_beside_is_named_with_the_other_keys():
    (call,) = re.findall(r"`(check_engine\(config, .*\))`", PAGE.read_text(encoding="utf-8"))
    names, keys = {"check_engine": check_engine}, {"federate.client_num": 2, "federate.method": "fedlora"}
    eval(call, {**names, "config": fs_lowrank.load_config(keys)})
    with pytest.raises(fs_lowrank.UserError, match="does not honour; remove:\n  federate.process_num: a command is"):
        eval(call, {**names, "config": fs_lowrank.load_config(keys, {"federate.process_num": 2})})


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


@pytest.fixture
def at_once(engine, monkeypatch):
    """Each command runs in this process, whose imports are done, and has nothing but its input and its disk."""

    def run(command, input, **options):
        output = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[2:])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
            patch.setattr(sys, "stdout", io.TextIOWrapper(output))
            runpy.run_path(engine.__file__, run_name="__main__")
            return SimpleNamespace(stdout=output.getvalue())

    monkeypatch.setattr(engine, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(engine, "ThreadPoolExecutor", lambda threads: nullcontext(SimpleNamespace(map=map)))


def test_clients_that_lost_their_disks_end_as_on_the_embedded_engine(engine, at_once, few):
    """Client 1 loses it while the run is stopped, client 2 while it runs; either is sent everything, which counts."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 3}
    local, config = fs_lowrank.run(few("local", keys)), few("commands", keys)
    engine.run(config, on_round=lambda record: True)
    there = Path(config.outdir) / "clients"
    assert sorted(place.name for place in there.iterdir()) == ["1", "2"]
    shutil.rmtree(there / "1")
    resumed = engine.run(config, resume=True, on_round=lambda r: r["round"] == 2 and shutil.rmtree(there / "2"))
    assert not any(record["failed"] for record in resumed.history)
    sent, least = (result.history[2]["client_downlink_bytes"] for result in (resumed, local))
    assert sent["1"] == least["1"] == least["2"] < sent["2"]
    same_model(local, resumed)


def test_a_run_that_is_begun_anew_starts_without_what_stayed_with_the_clients(engine, at_once, few):
    keys = {"federate.method": "fedlora", "lowrank.personal": ["head"], "eval.freq": 0}
    config = few("commands", keys)
    first = engine.run(config)
    remove_run(Path(config.outdir))
    again = engine.run(config)
    assert [r["loss"] for r in again.history] == [r["loss"] for r in first.history]


def test_an_answer_that_comes_twice_takes_no_other_clients_place(engine, at_once, few, monkeypatch):
    exchange = engine.Commands.exchange
    monkeypatch.setattr(engine.Commands, "exchange", lambda *args: (r for r in exchange(*args) for _ in range(2)))
    history = engine.run(few("commands", {"federate.method": "fedlora", "eval.freq": 0})).history
    assert [(record["clients"], record["failed"]) for record in history] == [([1, 2], [])] * len(history)


@pytest.mark.slow
@pytest.mark.parametrize("method, keys, kind", CASES)
def test_the_result_is_that_of_the_embedded_engine(engine, at_once, few, keys_of, request, method, keys, kind):
    of = request.getfixturevalue(kind)
    one_shot = ".one_shot." in get_method_class(method).__module__
    own = {"federate.client_num": 3, "federate.sample_client_num": 3 if keys else 2, **keys_of(method), **keys}
    own |= {"federate.method": method} | ({"federate.total_round_num": 1} if one_shot else {})
    same_run(fs_lowrank.run(few("local", own, of)), engine.run(few("commands", own, of)), shares_model=False)
