"""The files of ``federate.save_to`` and ``federate.restore_from``: written whole, and checked when they are read."""

from __future__ import annotations

import pickle
from collections import OrderedDict
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


@pytest.fixture
def saved():
    from fs_lowrank.engines.federatedscope import saved

    return saved


def restore(saved, path):
    """``load_state`` of a run of rolora, up to where it would need a model."""
    saved.load_state(str(path), SimpleNamespace(device="cpu", method=SimpleNamespace(name="rolora")), None)


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("whose", ["server", "client"])
def test_a_run_that_cannot_save_says_so_in_one_line(quick, tmp_path, whose):
    path = tmp_path / "model.ckpt"
    keys = {"federate.method": "rolora", "federate.total_round_num": 1, "federate.save_to": str(path)}
    if whose == "client":
        keys |= {"federate.make_global_eval": False, "federate.save_client_model": True}
    full = path.with_name("client_1_model.ckpt") if whose == "client" else path
    full.symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=f"{full} cannot be written: No space left on device") as error:
        fs_lowrank.run(quick("run", keys), "federatedscope")
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
        except Exception:
            refused += 1
            with pytest.raises(UserError, match="cannot restore .*x.ckpt") as error:
                restore(saved, path)
            assert one_line(error)
        else:
            assert back["cur_round"] == 2 and all(torch.equal(back["model"][n], t) for n, t in CONTENT["model"].items())
            assert torch.equal(back["state"]["a"], CONTENT["state"]["a"]) and back["base"]["w"].eq(1).all()
    assert refused > 50, refused
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="cannot restore .*x.ckpt") as error:
            restore(saved, path)
        assert one_line(error)


def test_files_of_before_stay_readable(saved, tmp_path):
    """Those of the framework, and of versions with an entry of ours that nothing reads any more."""
    path = tmp_path / "x.ckpt"
    for content in ({**CONTENT, "digest": "a" * 64}, {"cur_round": -1, "model": OrderedDict(CONTENT["model"])}):
        torch.save(content, path)
        assert saved.read(str(path), "cpu")["cur_round"] == max(content["cur_round"], 0)


@pytest.mark.parametrize(
    "content, said",
    [
        ([1], "TypeError"),
        ({}, "KeyError: 'cur_round'"),
        ({"cur_round": "two", "model": {}}, "'two'"),
    ],
)
def test_another_content_is_one_line(saved, tmp_path, content, said):
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(
        UserError, match="expected what federate.save_to writes, a dict of cur_round and model"
    ) as error:
        restore(saved, tmp_path / "x.ckpt")
    assert said in str(error.value) and "x.ckpt" in str(error.value) and one_line(error)


def test_pickled_objects_are_not_loaded(saved, tmp_path):
    path = tmp_path / "x.ckpt"
    for write, said in ((pickle.dump, "BadZipFile"), (torch.save, "it holds other things than tensors")):
        with path.open("wb") as file:
            write({"cur_round": 1, "model": SimpleNamespace()}, file)
        with pytest.raises(UserError, match=said) as error:
            restore(saved, path)
        assert one_line(error)


def test_what_does_not_fit_the_run_is_one_line(quick, tmp_path):
    path, method = tmp_path / "model.ckpt", "rolora"
    fs_lowrank.run(
        quick("a", {"federate.method": method, "federate.total_round_num": 1, "federate.save_to": str(path)}),
        "federatedscope",
    )
    content = torch.load(path, weights_only=True)
    name = next(iter(content["model"]))
    restored = {"federate.restore_from": str(path)}
    cases = [
        ({"state": {n: v for n, v in content["state"].items() if n != name}}, name),
        ({"base": {"no.such.weight": torch.ones(1)}}, "no.such.weight"),
        ({"state": {**content["state"], name: torch.ones(1)}}, f"{name} differs"),
        ({"method": "fedlora"}, "is of method 'fedlora', this run's is 'rolora'"),
    ]
    for changed, said in cases:
        torch.save({**content, **changed}, path)
        with pytest.raises(UserError) as error:
            fs_lowrank.run(quick("b", {"federate.method": method, **restored}), "federatedscope")
        assert said in str(error.value) and one_line(error)
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        fs_lowrank.run(quick("b", {"federate.method": method, **restored}), "federatedscope")
