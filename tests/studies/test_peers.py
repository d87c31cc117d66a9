"""The comparison with other systems: the job that all are given, our side of it, and what is said of a missing peer.

The peers themselves are not run: each needs an environment of hundreds of megabytes.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from fs_lowrank import load_config
from fs_lowrank.engines.local import LocalEngine
from studies.speed.peers import case, environment
from studies.speed.peers.fedjob import Job, load, trained
from studies.speed.peers.job import BATCH, STEPS, make_job

pytestmark = pytest.mark.more


@pytest.fixture(scope="module", params=["encoder", "llama"])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers") / "job"
    make_job(request.param, folder, clients=3, rounds=2, tiny=True)
    return folder


def test_peers_are_given_the_batches_that_we_train(job):
    read = Job.read(job)
    engine = LocalEngine(load_config(json.loads((job / "ours.json").read_text()), outdir=str(job / "again")))
    for own, examples in zip(read.samples(), engine.workspace.data.clients, strict=True):
        assert len(own) == len(examples) == STEPS * BATCH
        theirs, ours = read.collate(own[:BATCH]), examples.batch(np.arange(BATCH))
        assert torch.equal(theirs["input_ids"], ours["input_ids"])
        assert torch.equal(theirs["attention_mask"].long(), ours["attention_mask"])
        assert torch.equal(theirs["labels"].view_as(ours["labels"]), ours["labels"])


def test_peers_can_train_on_what_they_are_given(job):
    read = Job.read(job)
    batch = read.collate(read.samples()[0][:BATCH])
    assert {name: tensor.dtype for name, tensor in batch.items() if name != "attention_mask"} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
    }
    loss = read.peft_model()(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_peers_start_from_our_tensors(job):
    read = Job.read(job)
    engine = LocalEngine(load_config(json.loads((job / "ours.json").read_text()), outdir=str(job / "again")))
    theirs = trained(read.peft_model())
    assert theirs.keys() == engine.ledger.state.keys()
    assert all(torch.equal(tensor, engine.ledger.state[name]) for name, tensor in theirs.items())


def test_a_model_that_trains_other_tensors_is_refused(job):
    model = Job.read(job).peft_model()
    with pytest.raises(SystemExit, match="trains other tensors than the job"):
        load(model, {"strange": torch.zeros(1)})


def test_scripts_of_peers_import_nothing_of_ours():
    folder = Path(case.__file__).parent
    for name in ("fedjob.py", *(peer.script for peer in environment.PEERS)):
        assert "fs_lowrank" not in (folder / name).read_text() and "from ." not in (folder / name).read_text()


def test_a_peer_that_cannot_be_had_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tmp_path))
    by_name = {peer.name: peer for peer in environment.PEERS}
    monkeypatch.delenv("FEDERATEDSCOPE_ROOT", raising=False)
    with pytest.raises(environment.Missing, match="in no package index; set FEDERATEDSCOPE_ROOT to a checkout, with"):
        environment.prepared(by_name["federatedscope"])


def test_what_the_installer_refuses_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tmp_path))
    monkeypatch.setattr(environment.venv, "create", lambda folder, **options: None)

    def run(command, **options):
        said = "WARNING: slow\nERROR: Could not find a version\nERROR: No matching distribution found for flwr\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(environment.subprocess, "run", run)
    peer = next(peer for peer in environment.PEERS if peer.name == "flower")
    with pytest.raises(environment.Missing) as caught:
        environment.prepared(peer)
    assert str(caught.value) == "Flower's simulation: cannot be installed: No matching distribution found for flwr"


def run_of(speed, loss=0.5, samples=96, **more):
    facts = {"rounds_per_second": speed, "processor_seconds_a_round": 2 / speed, "peak_bytes": 10**9, "seconds": 9.0}
    rest = {"processor_seconds": 8.0, "memory": "PSS", "apart": 1e-7, "status": "ok"}
    return {**facts, **rest, "loss": loss, "samples": samples, **more}


def found_of(*systems, clients=50):
    cell = {"model": "llama", "clients": clients}
    cell["systems"] = [{"system": s, "variant": v, "runs": [r], **case._medians([r])} for s, v, r in systems]
    settings = {"rounds": 4, "repeat": 1, "tiny": False, "cpus": 2}
    return {"settings": settings, "cells": [cell], "versions": {"flower": {"flwr": "1.42"}}, "missing": {}}


def test_the_faster_setting_of_a_peer_counts_and_a_missed_goal_is_bold():
    found = found_of(
        ("ours", "one process", run_of(4.0)),
        ("flower", "1 CPU a client", run_of(2.5)),
        ("flower", "2 CPUs a client", run_of(1.0)),
        ("federatedscope", "2 threads", run_of(1.0)),
    )
    text = case.table(found)
    assert "2 CPUs a client" not in text
    assert "| 2.5 (**1.60×**) | 0.8 (1.60×) | 1.00 GB (1.00×) |" in text  # Flower: twice as fast is the goal
    assert "| FederatedScope, branch llm | 2 threads | 1 (4.00×) |" in text
    assert "- Flower's simulation: flwr 1.42." in text


def test_all_settings_of_a_peer_run_once_and_the_faster_one_again():
    ours, peer = environment.OURS, environment.PEERS[1]
    runs = {(peer.name, v.name): [{"rounds_per_second": speed}] for v, speed in zip(peer.variants, (0.2, 0.5))}
    assert case._variants(peer, {}) == peer.variants and case._variants(ours, runs) == ours.variants
    assert case._variants(peer, runs) == [peer.variants[1]]
    runs[peer.name, peer.variants[1].name] = [{"status": "exit code 1: no memory"}]
    assert case._variants(peer, runs) == [peer.variants[0]]
    del runs[peer.name, peer.variants[0].name]
    assert case._variants(peer, runs) == [peer.variants[1]]


def test_other_work_has_no_ratio_and_a_failed_run_says_why():
    ours = ("ours", "one process", run_of(4.0))
    for other in (run_of(1.0, samples=95), run_of(1.0, loss=0.6)):
        text = case.table(found_of(ours, ("flower", "one process", other)))
        assert "(other work)" in text and "×)" not in text
    failed = {"status": "exit code 1: KeyError: 'weight'"}
    assert "| exit code 1: KeyError: 'weight' | |" in case.table(found_of(ours, ("flower", "one process", failed)))


@pytest.mark.parametrize(
    "given, said",
    [
        (["--models", "lama"], "--models lama: unknown; did you mean 'llama'?"),
        (["--peers", "flow"], "--peers flow: unknown"),
        (["--rounds", "1"], "--rounds 1: expected at least 2 rounds"),
    ],
)
def test_wrong_use_is_one_line(given, said, tmp_path, capsys):
    assert case.main([*given, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[2], 'pid').write_text(str(child.pid))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(case, "LIMIT", 6.0)
    variant = environment.Variant("endless", {"threads": 1})
    peer = environment.Peer("endless", "Endless", str(script), (variant,))
    run = case._run_once(peer, variant, tmp_path, tmp_path / "out", sys.executable, "")
    assert run == {"status": "not done after 6 s"}
    child = int((tmp_path / "out" / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):  # it is no child of this process
        psutil.Process(child).wait(20)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_our_side_runs_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(case, "MANY", 3)  # from which on there is one run of two rounds, whatever is asked
    given = ["--peers", "none", "--models", "encoder", "--clients", "3", "--rounds", "5", "--repeat", "4"]
    assert case.main([*given, "--tiny", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "case.json").read_text())
    assert (found["cells"][0]["rounds"], found["cells"][0]["repeat"]) == (2, 1)
    one, several = found["cells"][0]["systems"]
    assert one["status"] == several["status"] == "ok"
    assert one["samples"] == several["samples"] == 3 * 2 * STEPS * BATCH
    assert one["apart"] == 0 and several["apart"] < 1e-4
    assert found["versions"]["ours"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "| encoder | 3 | fs-lowrank | one process |" in case.table(found)
