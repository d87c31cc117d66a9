"""States of frozen layers that are cached on disk for other runs do not change the results."""

import multiprocessing
import os
import resource
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.models.shortcuts.frozen import FrozenPrefix
from fs_lowrank.models.shortcuts.states import SharedStates, shared_folder
from fs_lowrank.rounds.workspace import Workspace
from tests.cases import same_model


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FS_LOWRANK_FROZEN", str(tmp_path / "frozen"))
    return tmp_path / "frozen"


#: with an adapter on the last layer only, two layers are frozen; every client goes through its data at least once, so
#: that their states are kept with and without other runs
FEW = {"llm.adapter.args.0.layers": [2], "train.batch_or_epoch": "epoch", "train.local_update_steps": 1}


@pytest.fixture
def last_layer(few):
    """``last_layer(name, keys)`` runs with an adapter on the last layer only."""
    return lambda name, keys=None: fs_lowrank.run(few(name, keys))


@pytest.fixture
def computed(monkeypatch):
    """Collects the owners whose states are computed."""
    owners, fill = [], FrozenPrefix._filled
    monkeypatch.setattr(
        FrozenPrefix, "_filled", lambda self, owner, *args: owners.append(owner) or fill(self, owner, *args)
    )
    return owners


def same(a, b):
    same_model(a, b)
    assert a.final == b.final and [r["loss"] for r in a.history] == [r["loss"] for r in b.history]


@pytest.mark.more
def test_a_second_run_computes_nothing_again(last_layer, computed, folder):
    without = last_layer("without", {"train.cache_frozen_shared": 0})
    assert computed and not folder.exists()
    computed.clear()
    first = last_layer("first")
    assert computed and len(SharedStates(folder, 1).entries()) == len(computed)
    computed.clear()
    same(without, first)
    same(without, last_layer("second"))
    other = last_layer("another method", {"federate.method": "ffa_lora"})
    assert not computed and other.final != first.final


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
@pytest.mark.more
def test_a_damaged_entry_is_computed_again(last_layer, computed, folder, caplog, damage):
    first = last_layer("first")
    entries = SharedStates(folder, 1).entries()
    data = bytearray(entries[0].read_bytes())
    data[-3] ^= 1
    entries[0].write_bytes({"cut": data[:-7], "flip": data, "empty": b"", "text": b"{}" * 40}[damage])
    computed.clear()
    same(first, last_layer("second"))
    assert len(computed) == 1 and "is damaged" in caplog.text
    computed.clear()
    same(first, last_layer("third"))
    assert not computed


def test_an_entry_under_another_s_name_is_computed_again(folder, caplog):
    states = SharedStates(folder, limit=1e9)
    for name, value in (("a", 1.0), ("b", 2.0)):
        states.get(name, lambda value=value: torch.full((10, 80), value))
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    assert torch.equal(states.get("b", lambda: torch.full((10, 80), 2.0)), torch.full((10, 80), 2.0))
    assert "b.safetensors is damaged (its checksum does not match)" in caplog.text


def test_the_least_recently_used_entries_are_removed(folder):
    states = SharedStates(folder, limit=10_000)
    tensors = {name: torch.full((10, 80), float(i)) for i, name in enumerate("abc")}  # 3,200 bytes per entry
    for i, (name, tensor) in enumerate(tensors.items()):
        states.get(name, lambda tensor=tensor: tensor)
        os.utime(folder / f"{name}.safetensors", (i, i))
    assert torch.equal(states.get("a", lambda: pytest.fail("a is there")), tensors["a"])  # used again
    states.get("d", lambda: torch.zeros(10, 80))
    assert {p.stem for p in states.entries()} == {"c", "a", "d"}
    assert states.size() <= 10_000 + 3 * 200  # with the headers of the files
    states.get("large", lambda: torch.zeros(100, 80))
    assert not (folder / "large.safetensors").exists(), "an entry above the limit is not kept"


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(folder, caplog):
    folder.write_text("this is a file")
    states = SharedStates(folder, limit=1e9)
    assert states.get("a", lambda: torch.ones(2, 3)).sum() == 6
    assert states.get("b", lambda: torch.ones(2, 3)).sum() == 6
    assert caplog.text.count("cannot be used") == 1


def _get(folder, start, computed):
    def compute():
        computed.put(os.getpid())
        return torch.ones(1000, 64)

    start.wait()
    SharedStates(folder, 1e9).get("one", compute)


@pytest.mark.slow
def test_processes_that_need_the_same_entry_compute_it_once(folder):
    context = multiprocessing.get_context("spawn")
    start, computed = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_get, args=(folder, start, computed)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    computed.get(timeout=5)
    assert computed.empty()


def test_the_folder_of_the_entries(monkeypatch, tmp_path, folder):
    assert shared_folder() == folder
    monkeypatch.delenv("FS_LOWRANK_FROZEN")
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tmp_path))
    assert shared_folder() == tmp_path / "frozen"


@pytest.mark.slow
def test_other_states_have_other_entries(last_layer, computed, monkeypatch):
    """Of another depth, precision or sample; of another kind of attention, precision of products, processor, number of
    threads.
    """
    from transformers import PreTrainedConfig

    last_layer("first")
    for keys in ({"llm.adapter.args.0.layers": [1]}, {"lowrank.dtype": "bfloat16"}, {"llm.tok_len": 6}):
        computed.clear()
        last_layer(str(keys), keys)
        assert computed, keys
    for place, name, value in (
        (PreTrainedConfig, "_attn_implementation", property(lambda self: "eager", lambda self, value: None)),
        (torch, "get_float32_matmul_precision", lambda: "medium"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
        (torch, "get_num_threads", lambda: 3),
    ):
        computed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            last_layer(name)
        assert computed, name


def test_entries_that_are_removed_or_replaced_while_they_are_mapped(folder, caplog):
    store = SharedStates(folder, 1e6)
    values = torch.arange(4000.0).reshape(100, 40)
    store.get("a", lambda: values)
    mapped = store.get("a", lambda: pytest.fail("it is there"))
    SharedStates(folder, 1e6)._write("a", values + 1)  # another process has made it again
    assert torch.equal(mapped, values)
    assert store.make_room(0) == 1 and torch.equal(mapped, values)
    (folder / ".b.safetensors.1.writing").write_bytes(b"of a process that was killed")
    (folder / ".c.safetensors.2.writing").write_bytes(b"of one that writes now")
    os.utime(folder / ".b.safetensors.1.writing", (0, 0))
    store.make_room(1e6)
    assert [p.name for p in folder.glob(".*.writing")] == [".c.safetensors.2.writing"]
    assert not caplog.records


def test_an_entry_that_is_removed_between_two_looks_is_made_again_without_a_word(folder, monkeypatch, caplog):
    store = SharedStates(folder, 1e6)
    monkeypatch.setattr("fs_lowrank.models.shortcuts.states.Path.exists", lambda self: True)
    assert store.get("a", lambda: torch.ones(2, 3)).sum() == 6 and not caplog.records


def mapped_from(tensor):
    """The file in whose mapping the values of ``tensor`` are; empty for the process's own memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, file = (line.split(maxsplit=5) + [""])[:6]
        start, end = (int(at, 16) for at in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return file
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_who_computes_an_entry_and_who_finds_it_have_the_same_memory(folder):
    values = torch.arange(40_000.0).reshape(1000, 40)
    assert mapped_from(values) != str(folder / "a.safetensors")
    store = SharedStates(folder, 1e6)
    computed = store.get("a", lambda: values)
    found = SharedStates(folder, 1e6).get("a", lambda: pytest.fail("it is there"))
    for mapped in (computed, found):
        assert torch.equal(mapped, values) and mapped_from(mapped) == str(folder / "a.safetensors")


def test_an_error_of_what_computes_is_no_error_of_the_disk(folder):
    store = SharedStates(folder, 1e6)

    def fail():
        raise OSError("the data cannot be read")

    with pytest.raises(OSError, match="the data cannot be read"):
        store.get("a", fail)
    assert store.get("a", lambda: torch.ones(2, 3)).sum() == 6, "its lock is free again"


def test_a_full_disk_leaves_what_was_computed(folder, caplog):
    """A limit on the size of files imitates a full disk: the system refuses the same call."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store, values = SharedStates(folder, 1e6), torch.ones(1000, 40)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        for name in "ab":
            assert store.get(name, lambda: values) is values
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be used") == 1 and not list(folder.glob("*.safetensors"))
    assert not list(folder.glob(".*.writing")), "nothing is left of it"


@pytest.mark.more
def test_whose_states_are_kept_follows_from_the_configuration(settings, folder):
    keys = {"federate.client_num": 4, "train.local_update_steps": 1, "data.splitter": "iid", "data.splitter_args": []}

    def kept(more):
        budget = Workspace(fs_lowrank.load_config(settings, {**keys, **more})).prefix.budget
        return [budget.get(f"client {i}", False) for i in range(1, 5)]

    # 32 samples are drawn in a run, of 52 or 53
    own = {"train.cache_frozen_dir": str(folder / "own")}
    for keys_of_the_cache in ({}, {"train.cache_frozen_shared": 1e9}, {"train.cache_frozen_shared": 0}, own):
        assert kept(keys_of_the_cache) == [True] * 4, "results do not depend on them"
    assert kept({"federate.total_round_num": 3}) == [False] * 4
