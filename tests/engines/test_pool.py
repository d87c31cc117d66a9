"""``federate.process_num`` on the embedded engine: the result of one process, also if a process dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModel

import fs_lowrank
from fs_lowrank.engines import pool
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.jobs.pool import Pool
from fs_lowrank.methods import get_method_class, requirements
from tests.cases import same_model

METHODS = [m for m in fs_lowrank.list_methods() if "SequenceClassification" in requirements(m).tasks]
#: run by ``make test``; ``make test-slow`` runs the others, which start many processes
QUICK = ("fedloru",)


FEW = {"federate.client_num": 4}


@pytest.mark.more
def test_states_of_frozen_layers_in_files(few, tmp_path):
    keys = {"train.cache_frozen_dir": str(tmp_path / "states")}
    one, two = (fs_lowrank.run(few(f"{n} processes", {**keys, "federate.process_num": n})) for n in (1, 2))
    assert one.final == two.final and not any(r["failed"] for r in two.history)


def same(a, b):
    """Tensors, metrics, losses and bytes equal to the bit."""
    same_model(a, b)
    for first, second in zip(a.history, b.history, strict=True):
        for key in first.keys() - {"seconds", "client_seconds"}:
            assert first[key] == second[key], key
    assert a.final == b.final and a.best == b.best and a.before == b.before
    for file in a.outdir.glob("*_best/*.safetensors"):
        assert file.read_bytes() == (b.outdir / file.relative_to(a.outdir)).read_bytes()


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in METHODS])
def test_the_result_is_that_of_one_process(few, method):
    one_shot = ".one_shot." in get_method_class(method).__module__
    keys = {"federate.method": method, "federate.total_round_num": 1 if one_shot else 2}
    keys |= {} if one_shot else {"federate.sample_client_num": 3, "eval.client_scores": True, "eval.before": True}
    same(fs_lowrank.run(few("one", keys)), fs_lowrank.run(few("two", {**keys, "federate.process_num": 2})))


@pytest.mark.slow
def test_the_clients_own_models_are_evaluated(few):
    keys = {"federate.method": "pfedlora", "federate.make_global_eval": False}
    same(fs_lowrank.run(few("one", keys)), fs_lowrank.run(few("two", {**keys, "federate.process_num": 3})))


@pytest.mark.slow
def test_what_clients_keep_beside_the_model(few):
    keys = {"lowrank.drift": "scaffold", "train.optimizer": {"type": "SGD", "lr": 0.1}}
    keys |= {"federate.total_round_num": 3, "federate.sample_client_num": 3}
    same(fs_lowrank.run(few("one", keys)), fs_lowrank.run(few("two", {**keys, "federate.process_num": 2})))


@pytest.mark.slow
def test_a_language_model(few, causal_settings):
    keys = {"federate.method": "fedloru", "lowrank.tau": 1}
    one = fs_lowrank.run(few("one", keys, causal_settings))
    same(one, fs_lowrank.run(few("two", {**keys, "federate.process_num": 2}, causal_settings)))


@pytest.mark.slow
def test_resumed_with_another_number_of_processes(few):
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 3}
    whole = fs_lowrank.run(few("whole", keys))
    config = few("parts", {**keys, "federate.process_num": 2})
    fs_lowrank.run(config, on_round=lambda record: record["round"] == 1)
    same(whole, fs_lowrank.run(config.replace({"federate.process_num": 3}), resume=True))


def killing(monkeypatch, when):
    """The process that is given work for which ``when(kind, facts, killed)`` is true is killed; the list of these."""
    killed, submit = [], Pool.submit

    def submitted(self, rank, function, *given):
        work = submit(self, rank, function, *given)
        kind = given[0].partition("_")[0] if function is pool._dispatch else ""
        if kind and when(kind, {} if kind == "score" else {"round": given[1]}, killed):
            killed.append(kind)
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        return work

    monkeypatch.setattr(Pool, "submit", submitted)
    return killed


@pytest.mark.more
@pytest.mark.parametrize("at", ["train", "follow", "score"])
def test_a_process_that_is_killed(few, monkeypatch, caplog, at):
    """Another takes its place, and does its work again; what brings it to the end of a round counts once."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 3, "eval.client_scores": True}
    whole = fs_lowrank.run(few("whole", keys))
    killed = killing(monkeypatch, lambda kind, facts, killed: kind == at and facts.get("round", 2) == 2 and not killed)
    same(whole, fs_lowrank.run(few("killed", {**keys, "federate.process_num": 2})))
    assert killed == [at] and "ended (signal 9: out of memory, perhaps); another takes its place" in caplog.text


@pytest.mark.more
def test_a_second_death_ends_the_run_which_can_be_resumed(few, monkeypatch):
    keys = {"federate.method": "pfedloru", "lowrank.tau": 1, "federate.total_round_num": 3}
    whole = fs_lowrank.run(few("whole", keys))
    config = few("killed", {**keys, "federate.process_num": 2})
    with monkeypatch.context() as patch:
        killing(patch, lambda kind, facts, killed: kind == "train" and facts["round"] == 2 and len(killed) < 2)
        with pytest.raises(fs_lowrank.RunFailed, match="of federate.process_num ended .*; run again with resume=True"):
            fs_lowrank.run(config)
    same(whole, fs_lowrank.run(config, resume=True))


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.more
def test_the_engines_process_has_as_many_threads_as_the_others(few, two_threads):
    engine = LocalEngine(few("run", {"federate.process_num": 2}))
    try:
        assert torch.get_num_threads() == 1
        engine.recorder.start(False)
        assert json.loads((engine.recorder.outdir / "environment.json").read_text())["threads"] == 1
    finally:
        engine.transport.end()
        engine.recorder.release()
    assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_two_processes_of_one_thread_are_one_process_of_one_thread(few, tiny_encoder, tmp_path, two_threads):
    """The server step, too, whose products differ between one and two threads on layers as wide as these."""
    wide = tmp_path / "wide"
    shutil.copytree(tiny_encoder, wide)
    sizes = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 384}
    config = AutoConfig.from_pretrained(tiny_encoder, **sizes)
    AutoModel.from_config(config).save_pretrained(wide)
    keys = {"federate.method": "flexlora", "model.type": f"{wide}@transformers", "federate.total_round_num": 1}
    keys["llm.adapter.args"] = [{"r": 8, "alpha": 16, "modules": ["query", "value"]}]
    both = fs_lowrank.run(few("two", {**keys, "federate.process_num": 2}))
    torch.set_num_threads(1)
    same(fs_lowrank.run(few("one", keys)), both)


@pytest.mark.more
def test_wrong_use_in_a_process_is_one_error(few, monkeypatch):
    """A file that a process can no longer load is an error for the user, without a traceback."""
    config = few("gone", {"federate.process_num": 2})
    monkeypatch.setattr(config.__class__, "to_dict", lambda self: {**to_dict(self), "device": "nowhere"})
    with pytest.raises(fs_lowrank.UserError, match="device"):
        fs_lowrank.run(config)


to_dict = fs_lowrank.config.Config.to_dict


@pytest.mark.slow
def test_no_process_outlives_its_engine_and_the_run_is_resumed(few, tmp_path):
    """The run's own process is killed; the result is that of a run that was not."""
    rounds = 30
    keys = {"federate.method": "fedloru", "lowrank.tau": 3, "federate.total_round_num": rounds}
    keys["federate.process_num"] = 2
    config = few("orphans", keys)
    config.dump(tmp_path / "run.yaml")
    command = [sys.executable, "-m", "fs_lowrank.cli", "run", "--cfg", str(tmp_path / "run.yaml")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    parent = subprocess.Popen(command, **quiet)
    records = Path(config.outdir) / "rounds.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (records.exists() and len(records.read_text().splitlines()) > 1):
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 4, "with the process that they are forked from, and multiprocessing's tracker"
    finally:
        parent.kill()
        parent.wait(60)
    deadline = time.monotonic() + 60
    while any(map(_lives, children)):
        assert time.monotonic() < deadline, "a process has outlived its engine"
        time.sleep(0.1)
    assert 1 <= len([json.loads(line) for line in records.read_text().splitlines()]) < rounds
    assert subprocess.run([*command, "--resume"], **quiet, timeout=300).returncode == 0
    same(fs_lowrank.run(few("whole", keys)), fs_lowrank.run(config, resume=True))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_number_of_processes(few, monkeypatch):
    assert pool.processes_of(few("a", {"federate.process_num": "auto"})) == min(torch.get_num_threads(), 4)
    assert pool.processes_of(few("b", {"federate.process_num": 64})) == 4, "at most one for each client of a round"
    monkeypatch.setenv(pool.INSIDE, "1")
    assert pool.processes_of(few("c", {"federate.process_num": "auto"})) == 1
    assert pool.processes_of(few("d", {"federate.process_num": 2})) == 2
    with pytest.raises(fs_lowrank.UserError, match="process_num.*-1.*a whole number or auto"):
        few("e", {"federate.process_num": -1})


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_processes_evaluate_the_same_batches_as_one_process(few, parts):
    engine = LocalEngine(few("parts"))
    test = engine.workspace.held_out()["test"]
    size = 5
    from fs_lowrank.training.evaluate import batch_scores

    whole = batch_scores(engine.model, test, size)
    pieces = [pool.part_of(test, part, parts, size) for part in range(parts)]
    assert sum(map(len, pieces)) == len(test)
    assert [s for piece in pieces if len(piece) for s in batch_scores(engine.model, piece, size)] == whole


def test_work_goes_to_the_process_of_its_home_in_even_shares():
    assert pool.spread([0, 1, 2, 3], 2) == [0, 1, 0, 1]
    assert pool.spread([0, 2, 4, 1], 2) == [0, 0, 1, 1]
    assert pool.spread([0, 0, 0], 3) == [0, 1, 2]
    assert pool.spread([], 2) == []
