"""``federate.process_num`` on the embedded engine: the result of one process, also if processes die or hang."""

import json
import os
import re
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
from fs_lowrank.engines import workers
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.errors import say_once
from fs_lowrank.jobs.nursery import AVAILABLE
from fs_lowrank.methods import get_method_class, requirements

METHODS = [m for m in fs_lowrank.list_methods() if "SequenceClassification" in requirements(m).tasks]
#: run by ``make test``; ``make test-slow`` runs the others, which start many processes
QUICK = ("fedloru",)


@pytest.fixture
def few(settings, tmp_path, no_curves):
    """``few(name, keys)``: four clients, two rounds of two steps, under an outdir of their own."""

    def make(name, keys=None, of=None):
        base = {"federate.client_num": 4, "federate.total_round_num": 2, "train.local_update_steps": 2}
        return fs_lowrank.load_config(of or settings, {**base, "outdir": str(tmp_path / name), **(keys or {})})

    return make


@pytest.mark.more
def test_states_of_frozen_layers_in_files(few, tmp_path):
    keys = {"train.cache_frozen_dir": str(tmp_path / "states")}
    one, two = (fs_lowrank.run(few(f"{n} processes", {**keys, "federate.process_num": n})) for n in (1, 2))
    assert one.final == two.final and not any(r["failed"] for r in two.history)


def same(a, b):
    """Tensors, metrics, losses and bytes equal to the bit."""
    for (name, x), (_, y) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(x, y), name
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


@pytest.mark.more
def test_a_process_that_is_killed(few, monkeypatch):
    """In every round one process is killed while its client trains; another process trains the client again."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 2}
    whole = fs_lowrank.run(few("whole", keys))
    engine = LocalEngine(few("killed", {**keys, "federate.process_num": 2}))
    killed = []

    def send(self, item, send=workers.Worker.send):
        send(self, item)
        facts = item.facts
        if facts.get("kind") == "train" and facts["round"] not in killed:
            killed.append(facts["round"])
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.Worker, "send", send)
    same(whole, engine.run())
    assert killed == [1, 2]


@pytest.mark.slow
def test_the_update_of_a_client_that_kills_two_processes_is_left_out(few, monkeypatch):
    engine = LocalEngine(few("killed", {"federate.process_num": 2}))

    def send(self, item, send=workers.Worker.send):
        send(self, item)
        if item.facts.get("kind") == "train" and item.facts["clients"] == [3]:
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.Worker, "send", send)
    result = engine.run()
    for record in result.history:
        assert record["clients"] == [1, 2, 4]
        (failure,) = record["failed"]
        assert (
            failure["client"] == 3
            and "two processes ended while they did it, the last one: signal 9" in failure["reason"]
        )


@pytest.mark.slow
def test_a_process_that_does_not_answer(few, monkeypatch, caplog):
    keys = {"federate.method": "fedlora", "lowrank.timeout": 60}
    whole = fs_lowrank.run(few("whole", keys))
    engine = LocalEngine(few("stopped", {**keys, "federate.process_num": 2}))
    stopped = []

    def send(self, item, send=workers.Worker.send):
        if item.facts.get("kind") == "train" and not stopped:
            stopped.append(self)
            os.kill(self.process.pid, signal.SIGSTOP)
            self.timeout = 2.0
        send(self, item)

    monkeypatch.setattr(workers.Worker, "send", send)
    same(whole, engine.run())
    assert stopped[0].process.returncode == -signal.SIGKILL
    assert "no sign of life within lowrank.timeout, 2 s" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("others", ["live", "die"])
def test_a_process_that_cannot_be_replaced(few, monkeypatch, caplog, others):
    """The process of a client dies, and so does every further one while it loads: the other process does all work."""
    keys = {"federate.method": "fedlora"}
    engine, killed, start = LocalEngine(few("killed", {**keys, "federate.process_num": 2})), [], workers.Worker.__init__

    def send(self, item, send=workers.Worker.send):
        send(self, item)
        if item.facts.get("kind") == "train" and not (killed and others == "live"):
            killed.append(self.rank)
            os.kill(self.process.pid, signal.SIGKILL)

    def further(self, *given):
        start(self, *given)
        os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.Worker, "send", send)
    monkeypatch.setattr(workers.Worker, "__init__", further)
    if others == "live":
        same(fs_lowrank.run(few("whole", keys)), engine.run())
        assert "cannot be replaced (process 1 of federate.process_num could not start" in caplog.text
        assert "the run goes on with fewer: 1" in caplog.text
    else:
        with pytest.raises(fs_lowrank.RunFailed, match="no other could take its place .* and none is left"):
            engine.run()


@pytest.mark.more
@pytest.mark.parametrize("deaths", [1, 3], ids=["it is replaced", "so do those in its place"])
def test_a_process_that_dies_while_it_loads(few, monkeypatch, caplog, deaths):
    """Once when it has loaded and is brought to where the run stands; then as soon as it has begun to load."""
    keys = {"federate.method": "fedlora"}
    engine, killed, start = LocalEngine(few("killed", {**keys, "federate.process_num": 2})), [], workers.Worker.__init__

    def goes(process):
        return process.rank == 0 and len(killed) < deaths

    def kill(process):
        killed.append(process.process.pid)
        os.kill(process.process.pid, signal.SIGKILL)

    def send(self, item, send=workers.Worker.send):
        now = item.facts.get("kind") == "stand" and goes(self)
        if now:
            os.kill(self.process.pid, signal.SIGSTOP)  # it must not answer
        send(self, item)
        if now:
            kill(self)

    def further(self, *given):
        start(self, *given)
        if goes(self):
            kill(self)

    monkeypatch.setattr(workers.Worker, "send", send)
    monkeypatch.setattr(workers.Worker, "__init__", further)
    same(fs_lowrank.run(few("whole", keys)), engine.run())
    assert len(killed) == deaths
    assert "process 1 ended while it loaded (signal 9); another takes its place" in caplog.text
    assert ("the run goes on with fewer: 1" in caplog.text) == (deaths == 3)


@pytest.mark.more
def test_processes_that_all_die_while_they_load_end_the_run(few, monkeypatch):
    start, started = workers.Worker.__init__, []

    def killed(self, *given):
        start(self, *given)
        started.append(self)
        os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.Worker, "__init__", killed)
    engine = LocalEngine(few("killed", {"federate.process_num": 2}))
    last = r"process 2 ended while it loaded .*, no other could take its place \(process 2 .*, and none is left"
    with pytest.raises(fs_lowrank.RunFailed, match=last):
        engine.run()
    assert len(started) == 6, "two tries for each of the two"
    assert all(process.process.poll() is not None for process in started)


@pytest.mark.more
def test_the_runs_process_evaluates_what_two_others_die_of(few, monkeypatch, caplog):
    """A part of the test set, and a client's test data; the figures are those of one process, here and in the next
    round."""
    say_once.cache_clear()
    keys = {"federate.method": "pfedloru", "lowrank.tau": 1, "eval.client_scores": True, "eval.metrics": ["acc", "f1"]}
    whole = fs_lowrank.run(few("whole", keys))
    engine, killed = LocalEngine(few("killed", {**keys, "federate.process_num": 2})), []

    def send(self, item, send=workers.Worker.send):
        send(self, item)
        facts = item.facts
        if facts.get("kind") == "score" and (facts.get("clients") == [3] or facts.get("part") == 1):
            what = facts.get("split", "client 3")
            if what in ("test", "client 3") and killed.count(what) < 2:
                killed.append(what)
                os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.Worker, "send", send)
    same(whole, engine.run())
    assert sorted(killed) == ["client 3", "client 3", "test", "test"]
    said = [r.getMessage() for r in caplog.records if "the run's own process evaluates" in r.getMessage()]
    assert len(said) == 1, "once, not for each"


@pytest.mark.more
def test_what_a_replacement_reports_is_not_asked_for_again(few, monkeypatch, caplog):
    """The data are gone when it loads: the others, which have them, go on."""
    keys = {"federate.method": "fedlora"}
    whole = fs_lowrank.run(few("whole", keys))
    engine, killed, started = LocalEngine(few("killed", {**keys, "federate.process_num": 2})), [], []

    def send(self, item, send=workers.Worker.send):
        if "config" in item.facts:
            started.append(self.rank)
            item.facts["config"]["data"] |= {"type": "gone.csv@file"}
        send(self, item)
        if item.facts.get("kind") == "train" and not killed:
            killed.append(self.rank)
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.Worker, "send", send)
    same(whole, engine.run())
    assert started == killed, "one other was started"
    assert re.search(r"process \d cannot be replaced \(.*gone\.csv.*\); the run goes on with fewer: 1", caplog.text)


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
        engine.keeper.start(False)
        assert json.loads((engine.keeper.outdir / "environment.json").read_text())["threads"] == 1
    finally:
        engine.transport.end()
        engine.keeper.release()
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
        LocalEngine(config).run()


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
        assert len(children) == (3 if AVAILABLE else 2), "with the process that they are forked from"
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
    assert workers.processes_of(few("a", {"federate.process_num": "auto"})) == min(torch.get_num_threads(), 4)
    assert workers.processes_of(few("b", {"federate.process_num": 64})) == 4, "at most one for each client of a round"
    monkeypatch.setenv(workers.INSIDE, "1")
    assert workers.processes_of(few("c", {"federate.process_num": "auto"})) == 1
    assert workers.processes_of(few("d", {"federate.process_num": 2})) == 2
    with pytest.raises(fs_lowrank.UserError, match="process_num.*-1.*a whole number or auto"):
        few("e", {"federate.process_num": -1})


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_processes_evaluate_the_same_batches_as_one_process(few, parts):
    engine = LocalEngine(few("parts"))
    test = engine.site.held_out()["test"]
    size = 5
    from fs_lowrank.training.evaluate import batch_scores

    whole = batch_scores(engine.model, test, size)
    pieces = [workers.part_of(test, part, parts, size) for part in range(parts)]
    assert sum(map(len, pieces)) == len(test)
    assert [s for piece in pieces if len(piece) for s in batch_scores(engine.model, piece, size)] == whole
