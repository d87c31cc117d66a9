"""Trackers are told what the records have, and a tracker that fails ends no run."""

import json
import socket
import threading
from importlib.metadata import version
from pathlib import Path

import pytest
from accelerate import tracking

import fs_lowrank
from fs_lowrank import UserError
from fs_lowrank.callbacks import trackers
from fs_lowrank.callbacks.trackers import numbers, trackers_of
from fs_lowrank.settings.sections import TRACKERS

FEW = {"federate.total_round_num": 3, "eval.freq": 2, "lowrank.pictures": False}


@pytest.fixture
def config(few):
    return few("run")


def read(folder):
    """Every curve that TensorBoard shows of a folder: name -> [(step, value)]."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.more
def test_tensorboard_shows_what_the_records_have_also_after_an_interruption(config):
    pytest.importorskip("tensorboard")
    config = config.replace({"lowrank.trackers": ["tensorboard"]})
    before = set(threading.enumerate())
    fs_lowrank.run(config, on_round=lambda record: record["round"] == 2, progress=False)
    fs_lowrank.run(config, resume=True, progress=False)
    folder = config.outdir
    records = [json.loads(line) for line in open(f"{folder}/rounds.jsonl", encoding="utf-8")]
    curves = read(f"{folder}/tensorboard")
    wanted: dict[str, list] = {}
    for record in records:
        for name, value in numbers(record).items():
            wanted.setdefault(name, []).append((record["round"], pytest.approx(value, rel=1e-6)))
    assert {"loss", "metrics/test/acc", "uplink_bytes", "seconds/training", "adapter_norm/lora_A"} <= wanted.keys()
    assert len(wanted["loss"]) == 3 and len(wanted["metrics/test/acc"]) == 2
    assert {name: curve for name, curve in curves.items() if name in wanted} == wanted
    assert curves.keys() == wanted.keys()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), "it ends with the run"


def test_numbers_of_a_record():
    lists = {"selected": [1, 2], "failed": [{"client": 2}], "skipped": "why"}
    seconds = {"client_seconds": {"1": {"training": 2.0, "reused": False}}}
    record = {"round": 4, "loss": 0.5, **lists, **seconds, "metrics": {"val": {"acc": 0.25, "clients": {"std": 0.1}}}}
    assert numbers(record) == {"loss": 0.5, "metrics/val/acc": 0.25}


@pytest.mark.more
def test_a_tracker_that_fails_ends_no_run(config, caplog):
    pytest.importorskip("tensorboard")
    plain = fs_lowrank.run(config.replace(outdir=f"{config.outdir}_plain"), progress=False)
    folder = Path(config.outdir)
    folder.mkdir()
    (folder / "tensorboard").write_text("a file where the tracker wants a folder")
    ended = fs_lowrank.run(config.replace({"lowrank.trackers": ["tensorboard"]}), progress=False)
    assert [r["loss"] for r in ended.history] == [r["loss"] for r in plain.history]
    assert "lowrank.trackers: tensorboard gets no further numbers: " in caplog.text


@pytest.mark.more
def test_a_tracker_whose_server_never_answers_ends_no_run(config, caplog, monkeypatch):
    """Its class is one of accelerate's, with a connection to a socket that accepts and says nothing."""
    monkeypatch.setattr(trackers, "LIMIT", 1.0)
    threads = []

    class Remote(tracking.TensorBoardTracker):
        def log(self, values, step=None, **_):
            threads.append(threading.get_ident())
            if step == 2:
                with socket.create_connection(silent.getsockname()) as peer:
                    peer.recv(1)

    caplog.set_level("INFO", "fs_lowrank")
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Remote)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = fs_lowrank.run(config.replace({"lowrank.trackers": ["tensorboard"]}), progress=False)
    assert len(ended.history) == 3 and len(threads) == 2 and len({*threads, threading.get_ident()}) == 2
    assert "tensorboard gets no further numbers: no answer for 1 s" in caplog.text


@pytest.mark.more
def test_a_tracker_that_is_not_installed_or_unknown_is_refused(config):
    with pytest.raises(UserError, match="lowrank.trackers: aim is not installed; install it with: pip install aim"):
        fs_lowrank.run(config.replace({"lowrank.trackers": ["aim"]}), progress=False)
    with pytest.raises(UserError, match="lowrank.trackers.*tensorbord.*tensorboard"):
        config.replace({"lowrank.trackers": ["tensorbord"]})
    with pytest.raises(UserError, match="wandb is not installed"):
        fs_lowrank.run(config.replace({"wandb.use": True}), progress=False)


@pytest.mark.more
def test_names_are_those_of_accelerate(config, monkeypatch):
    known = tracking.LOGGER_TYPE_TO_CLASS
    assert known.keys() <= set(TRACKERS), "an older accelerate knows fewer"
    if version("accelerate") == "1.15.0":
        assert known.keys() == set(TRACKERS)
    assert trackers_of(config) == []
    both = config.replace({"wandb.use": True, "lowrank.trackers": ["mlflow", "wandb"]})
    assert trackers_of(both) == ["mlflow", "wandb"]
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {k: v for k, v in known.items() if k != "mlflow"})
    with pytest.raises(UserError, match="accelerate that is installed does not know mlflow.*-U accelerate"):
        fs_lowrank.run(config.replace({"lowrank.trackers": ["mlflow"]}), progress=False)
