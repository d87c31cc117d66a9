"""The files of ``federate.save_to`` and ``federate.restore_from``: written whole, and checked when they are read."""

from __future__ import annotations

import pickle
import resource
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import fs_lowrank
from fs_lowrank import UserError
from fs_lowrank.errors import RunFailed

pytestmark = pytest.mark.federatedscope

CONTENT = {
    "cur_round": 2,
    "method": "rolora",
    "model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5, dtype=torch.bfloat16)},
    "state": {"a": torch.arange(6.0).reshape(2, 3), "rounds": 2, "norm": 0.5, "none": None},
    "base": {"w": torch.ones(40)},
}


@contextmanager
def no_room(size=4096):
    """Files can have ``size`` bytes, as if the disk were full beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def saved():
    from fs_lowrank.engines.federatedscope import saved

    return saved


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_is_written_is_read(saved, tmp_path):
    path = tmp_path / "new" / "x.ckpt"
    saved.write(str(path), CONTENT)
    assert [p.name for p in path.parent.iterdir()] == ["x.ckpt"]
    back = saved.read(str(path), "cpu")
    assert back.keys() == CONTENT.keys() and back["cur_round"] == 2
    for part in ("model", "base"):
        for name, tensor in CONTENT[part].items():
            assert back[part][name].dtype == tensor.dtype and torch.equal(back[part][name], tensor)
    assert torch.load(path, weights_only=True)["model"].keys() == {"a", "b"}, "the framework reads it too"


def test_a_link_stays_a_link(saved, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for _ in range(2):
        saved.write(str(tmp_path / "link"), CONTENT)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").is_file()


def test_a_full_disk_leaves_the_file_of_before(saved, tmp_path):
    path = tmp_path / "x.ckpt"
    saved.write(str(path), CONTENT)
    before = path.read_bytes()
    with no_room(), pytest.raises(RunFailed, match=r"x.ckpt cannot be written: File too large; make room") as error:
        saved.write(str(path), {**CONTENT, "base": {"w": torch.zeros(100_000)}})
    assert one_line(error) and path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_folder_or_a_device_is_not_replaced(saved, tmp_path):
    for place in (tmp_path, "/dev/full"):
        with pytest.raises(RunFailed, match="cannot be written: it is there already and is not a file"):
            saved.write(str(place), CONTENT)


@pytest.mark.parametrize("whose", ["server", "client"])
def test_a_run_that_cannot_save_says_so_in_one_line(quick, tmp_path, monkeypatch, whose):
    """``torch.save`` reports a full disk as an error about positions in a stream."""
    path, real = tmp_path / "model.ckpt", torch.save
    path.write_bytes(b"of before")

    def full(content, file, **kwargs):
        if whose == "server" or "method" not in content:
            with no_room():
                real(content, file, **kwargs)
        return real(content, file, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    keys = {"federate.method": "rolora", "federate.total_round_num": 1, "federate.save_to": str(path)}
    if whose == "client":
        keys |= {"federate.make_global_eval": False, "federate.save_client_model": True}
    config = quick("run", keys)
    name = "client_1_model.ckpt" if whose == "client" else "model.ckpt"
    with pytest.raises(RunFailed, match=f"{tmp_path}/{name} cannot be written: File too large") as error:
        fs_lowrank.run(config, "federatedscope")
    assert one_line(error) and path.read_bytes() == b"of before"


def test_every_flipped_bit_of_a_tensor_is_noticed(saved, tmp_path):
    path = tmp_path / "x.ckpt"
    saved.write(str(path), CONTENT)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        stored = [archive.read(name) for name in names]
    assert len(names) == 4
    for data in stored:
        at = whole.index(data)
        for bit in (0, 8 * len(data) - 1):
            bytes_ = bytearray(whole)
            bytes_[at + bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes_)
            with pytest.raises(UserError, match=r"x.ckpt: it is damaged: its digest does not match; restore") as error:
                saved.read(str(path), "cpu")
            assert one_line(error)


def test_bytes_that_came_to_harm_are_one_line_or_change_nothing(saved, tmp_path):
    path = tmp_path / "x.ckpt"
    saved.write(str(path), CONTENT)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            back = saved.read(str(path), "cpu")
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and str(path) in str(error)
        else:
            assert back["cur_round"] == 2 and torch.equal(back["model"]["a"], CONTENT["model"]["a"])
    assert refused > 50
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="cannot read .*x.ckpt: .*; restore the file") as error:
            saved.read(str(path), "cpu")
        assert one_line(error)


def test_files_without_a_digest_stay_readable(saved, tmp_path):
    """Those of the framework, and of versions before."""
    path = tmp_path / "x.ckpt"
    for content in (CONTENT, {"cur_round": -1, "model": OrderedDict(CONTENT["model"])}):
        torch.save(content, path)
        assert saved.read(str(path), "cpu")["cur_round"] == max(content["cur_round"], 0)


@pytest.mark.parametrize(
    "content, said",
    [
        ([1], "it holds a value of type list, expected what federate.save_to writes: a dict with cur_round and model"),
        ({}, "it has no cur_round (it has nothing), expected what"),
        ({"cur_round": 1, "weights": {}}, "it has no model (it has cur_round, weights), expected what"),
        ({"model": {}}, "it has no cur_round (it has model), expected what"),
        ({"cur_round": "two", "model": {}}, "cur_round is str 'two', expected the number of completed rounds"),
        ({"cur_round": 1.5, "model": {}}, "cur_round is float 1.5, expected the number of"),
        ({"cur_round": True, "model": {}}, "cur_round is bool True, expected the number of"),
        ({"cur_round": -2, "model": {}}, "cur_round is int -2, expected the number of"),
        ({"cur_round": 1, "model": [torch.ones(2)]}, "model is a value of type list, expected a dict of tensors"),
        ({"cur_round": 1, "model": torch.ones(2)}, "model is a tensor of shape (2,), expected a dict of tensors"),
        ({"cur_round": 1, "model": {"a": 1}}, "model has int 1 for str 'a', expected tensors by name"),
        ({"cur_round": 1, "model": {3: torch.ones(1)}}, "model has a tensor of shape (1,) for int 3, expected"),
        ({"cur_round": 1, "model": {}, "state": 3}, "state is int 3, expected a dict of tensors"),
        ({"cur_round": 1, "model": {}, "base": {"a": None}}, "base has NoneType None for str 'a', expected tensors"),
        ({"cur_round": 1, "model": {}, "digest": 7}, "it is damaged: its digest does not match"),
    ],
)
def test_another_content_is_one_line(saved, tmp_path, content, said):
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(UserError) as error:
        saved.read(str(tmp_path / "x.ckpt"), "cpu")
    assert said in str(error.value) and "x.ckpt" in str(error.value) and one_line(error)


def test_pickled_objects_are_not_loaded(saved, tmp_path):
    path = tmp_path / "x.ckpt"
    for write in (pickle.dump, torch.save):
        with path.open("wb") as file:
            write({"cur_round": 1, "model": SimpleNamespace()}, file)
        with pytest.raises(UserError, match="it holds other things than tensors and plain values") as error:
            saved.read(str(path), "cpu")
        assert one_line(error)


def test_what_does_not_fit_the_run_is_one_line(quick, tmp_path):
    path, method = tmp_path / "model.ckpt", "rolora"
    fs_lowrank.run(
        quick("a", {"federate.method": method, "federate.total_round_num": 1, "federate.save_to": str(path)}),
        "federatedscope",
    )
    content = torch.load(path, weights_only=True)
    del content["digest"]
    name = next(iter(content["model"]))
    restored = {"federate.restore_from": str(path)}
    cases = [
        ({"state": {n: v for n, v in content["state"].items() if n != name}}, f"{name!r} differs"),
        ({"base": {"no.such.weight": torch.ones(1)}}, "has changed weights of another base: no.such.weight; use"),
        ({"method": "fedlora"}, "is of method 'fedlora', this run's is 'rolora'"),
        ({"model": [1]}, "model is a value of type list, expected a dict of tensors by name"),
    ]
    for changed, said in cases:
        torch.save({**content, **changed}, path)
        with pytest.raises(UserError) as error:
            fs_lowrank.run(quick("b", {"federate.method": method, **restored}), "federatedscope")
        assert said in str(error.value) and one_line(error)
