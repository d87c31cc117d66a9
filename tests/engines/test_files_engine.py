"""An engine of another package, whose processes end after every message, gives what the embedded engine gives."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.methods import get_method_class

ENGINE = Path(__file__).with_name("files_engine.py")
METHODS = [m for m in fs_lowrank.list_methods() if "SequenceClassification" in get_method_class(m).tasks]
FOR_IMAGES = [m for m in fs_lowrank.list_methods() if m not in METHODS]
#: where a hyperparameter changes what travels, or what a copy must remember
VARIANTS = [
    ("fedlora", {"lowrank.ranks": [1, 3, 2]}),
    ("flexlora", {"lowrank.ranks": [1, 3, 2]}),
    ("fedloru", {"lowrank.tau": 2, "lowrank.init": "momentum", "federate.total_round_num": 3}),
    ("pfedloru", {"lowrank.tau": 2, "federate.total_round_num": 3}),
    ("fedloru", {"fedopt.use": True, "fedopt.optimizer.type": "Adam", "fedopt.optimizer.lr": 0.01}),
    ("pfedlora", {"lowrank.drop_rate": 0.4, "seed": 5, "federate.total_round_num": 3}),
    ("rolora", {"federate.make_global_eval": False}),
]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The engine as a package that is installed would have it."""
    info = tmp_path / "site" / "files_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: files-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fs_lowrank.engines]\nfiles = files_engine\n")
    shutil.copy(ENGINE, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    sys.modules.pop("files_engine", None)


@pytest.fixture
def quick(installed, settings, tmp_path, no_curves):
    """``quick(name, keys)``: a configuration under an outdir of its own: three clients, two rounds of two steps."""

    def make(name, keys=None, of=None):
        few = {"federate.client_num": 3, "federate.total_round_num": 2, "train.local_update_steps": 2}
        few |= {"train.cache_frozen": "off", "outdir": str(tmp_path / name)}
        return fs_lowrank.load_config(of or settings, {**few, **(keys or {})})

    return make


def same(local, other, late=False):
    """The global tensors to the bit, and all of the records but the seconds.

    Where clients have models of their own, they follow to the end of the run to evaluate them, which counts: those
    bytes are in the last record of the one engine, and in neither of the other, whose clients share its model.
    """
    for (name, a), (other_name, b) in zip(local.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert name == other_name and torch.equal(a, b), name
    assert len(local.history) == len(other.history)
    for a, b in zip(local.history, other.history):
        down = {key for key in a if "downlink" in key} if "client_test" in a["metrics"] else set()
        for key in a.keys() - {"seconds", "client_seconds"} - down:
            assert a[key] == b[key], key
        assert not down or (a["downlink_bytes"] < b["downlink_bytes"])
        assert a["client_seconds"].keys() == b["client_seconds"].keys()
    assert local.final == other.final


@pytest.mark.parametrize("method, keys", [*((m, {}) for m in METHODS), *VARIANTS])
def test_the_same_as_the_embedded_engine(quick, method, keys):
    keys = {"federate.method": method, "federate.sample_client_num": 3 if keys else 2, **keys}
    same(fs_lowrank.run(quick("local", keys)), fs_lowrank.run(quick("files", keys), "files"))


@pytest.mark.parametrize("method", FOR_IMAGES)
def test_methods_for_images_alone(quick, vision_settings, method):
    keys = {"federate.method": method, "model.type": "lenet", "model.use_bias": False, "lowrank.width": 0.5}
    if "generator_steps" in get_method_class(method).Params.__dataclass_fields__:
        keys |= {"lowrank.epochs": 2, "lowrank.generator_steps": 2, "lowrank.images": 8, "lowrank.channels": 4}
    keys |= {"federate.total_round_num": 1}
    same(
        fs_lowrank.run(quick("local", keys, vision_settings)),
        fs_lowrank.run(quick("files", keys, vision_settings), "files"),
    )


def test_clients_that_come_late(quick):
    keys = {"federate.method": "fedloru", "lowrank.tau": 2, "federate.sample_client_num": 1, "seed": 5}
    keys |= {"federate.total_round_num": 5, "eval.freq": 0, "lowrank.checkpoint_freq": 0}
    local = fs_lowrank.run(quick("local", keys))
    assert len({c for r in local.history for c in r["selected"]}) > 1, "the seed must let clients come late"
    same(local, fs_lowrank.run(quick("files", keys), "files"))


class Killed(Exception):
    """What stands for the end of the whole machine."""


@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_server_that_is_killed_between_messages(quick, monkeypatch, at):
    """The ``at``-th process of the server does not come to be, nor anything after it; then the run is resumed."""
    import files_engine

    keys = {"federate.method": "pfedloru", "lowrank.tau": 1, "federate.client_num": 2}
    local, config = fs_lowrank.run(quick("local", keys)), quick("files", keys)
    started, process = [], files_engine.process

    def until(target, *args):
        started.append(target)
        if started.count(files_engine.server_process) > at:
            raise Killed
        return process(target, *args)

    monkeypatch.setattr(files_engine, "process", until)
    seen = []
    with pytest.raises(Killed):
        fs_lowrank.run(config, "files", on_round=lambda record: seen.append(record["round"]) and None)
    monkeypatch.undo()
    sys.path.insert(0, str(Path(files_engine.__file__).parent))
    try:
        again = fs_lowrank.run(
            config, "files", resume=True, on_round=lambda record: seen.append(record["round"]) and None
        )
    finally:
        sys.path.pop(0)
    same(local, again)
    assert seen == [1, 2]


def test_a_server_s_process_that_is_killed(quick, monkeypatch):
    """In the middle of its work: what it had not written yet is done again."""
    import files_engine

    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.client_num": 2}
    local, config = fs_lowrank.run(quick("local", keys)), quick("files", keys)
    monkeypatch.setattr(files_engine, "server_process", killed_server)
    with pytest.raises(fs_lowrank.RunFailed, match="server's process ended with exit code -9; run again with --resume"):
        fs_lowrank.run(config, "files")
    monkeypatch.undo()


def test_a_client_that_lost_its_disk(quick):
    """It says that it stands at the start, gets everything, and the record has the bytes."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.client_num": 2, "federate.total_round_num": 3}
    whole, config = fs_lowrank.run(quick("whole", keys), "files"), quick("lost", keys)

    def lose(record):
        if record["round"] == 2:
            shutil.rmtree(Path(config.outdir) / "mail" / "clients" / "1")

    lost = fs_lowrank.run(config, "files", on_round=lose)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), lost.model.parameters(), strict=True))
    assert not any(r["failed"] for r in lost.history)
    down = [r["client_downlink_bytes"] for r in lost.history]
    assert down[:2] == [r["client_downlink_bytes"] for r in whole.history][:2]
    assert down[2]["2"] == whole.history[2]["client_downlink_bytes"]["2"] < down[2]["1"]
