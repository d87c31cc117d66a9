"""``federate.process_num`` on the embedded engine: the result of one process, also if a process dies."""

import json
import os
import shutil
import signal

import pytest
import torch
from transformers import AutoConfig, AutoModel

import fs_lowrank
from fs_lowrank.engines import pool
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.jobs.pool import Pool
from fs_lowrank.methods import get_method_class, requirements
from tests.cases import same_run

METHODS = [m for m in fs_lowrank.list_methods() if "SequenceClassification" in requirements(m).tasks]
#: run by ``make test``; ``make test-slow`` runs the others, which start many processes
QUICK = ("fedloru",)


FEW = {"federate.client_num": 4}


@pytest.mark.more
def test_states_of_frozen_layers_in_files(few, tmp_path):
    keys = {"train.cache_frozen_dir": str(tmp_path / "states")}
    one, two = (fs_lowrank.run(few(f"{n} processes", {**keys, "federate.process_num": n})) for n in (1, 2))
    assert one.final == two.final and not any(r["failed"] for r in two.history)


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in METHODS])
def test_the_result_is_that_of_one_process(few, method):
    one_shot = ".one_shot." in get_method_class(method).__module__
    keys = {"federate.method": method, "federate.total_round_num": 1 if one_shot else 2}
    keys |= {} if one_shot else {"federate.sample_client_num": 3, "eval.client_scores": True, "eval.before": True}
    same_run(fs_lowrank.run(few("one", keys)), fs_lowrank.run(few("two", {**keys, "federate.process_num": 2})))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys, kind",
    [
        ({"federate.method": "pfedlora", "federate.make_global_eval": False}, "settings"),
        ({"federate.sample_client_num": 3, "lowrank.drift": "scaffold", "train.optimizer.type": "SGD"}, "settings"),
        ({"federate.method": "fedloru", "lowrank.tau": 1}, "causal_settings"),
    ],
    ids=["own models", "what clients keep beside the model", "a language model"],
)
def test_three_processes(few, request, keys, kind):
    keys, of = {"federate.total_round_num": 3, **keys}, request.getfixturevalue(kind)
    same_run(fs_lowrank.run(few("one", keys, of)), fs_lowrank.run(few("two", {**keys, "federate.process_num": 3}, of)))


@pytest.mark.slow
def test_resumed_with_another_number_of_processes(few):
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 3}
    whole = fs_lowrank.run(few("whole", keys))
    config = few("parts", {**keys, "federate.process_num": 2})
    fs_lowrank.run(config, on_round=lambda record: record["round"] == 1)
    same_run(whole, fs_lowrank.run(config.replace({"federate.process_num": 3}), resume=True))


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
    same_run(whole, fs_lowrank.run(few("killed", {**keys, "federate.process_num": 2})))
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
    same_run(whole, fs_lowrank.run(config, resume=True))


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


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
    assert json.loads((both.outdir / "environment.json").read_text())["threads"] == 1
    assert torch.get_num_threads() == 2, "as before the run"
    torch.set_num_threads(1)
    same_run(fs_lowrank.run(few("one", keys)), both)


@pytest.mark.more
def test_wrong_use_in_a_process_is_one_error(few, monkeypatch):
    """A file that a process can no longer load is an error for the user, without a traceback."""
    config = few("gone", {"federate.process_num": 2})
    monkeypatch.setattr(config.__class__, "to_dict", lambda self: {**to_dict(self), "device": "nowhere"})
    with pytest.raises(fs_lowrank.UserError, match="device"):
        fs_lowrank.run(config)


to_dict = fs_lowrank.config.Config.to_dict


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
