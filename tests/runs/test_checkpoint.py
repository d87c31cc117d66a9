"""Checkpoints are complete or absent, and damage is recognised."""

import json
import logging
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from fs_lowrank.callbacks import best
from fs_lowrank.errors import UserError
from fs_lowrank.runs import checksums
from fs_lowrank.runs.checkpoint import load_checkpoint, save_checkpoint, saved_rounds

META = {"numbers": {"t": 3, "x": 0.1}, "synced": {1: 2, 10: 0}, "outbox": {"a": (1, [2, 3], "float32")}, "config": {}}


def parts(round):
    generator = torch.Generator().manual_seed(round)
    flat = torch.randn(20, generator=generator)
    return {
        "state": {"a": flat[:6].view(2, 3), "b": flat[6:], "half": torch.ones(3, dtype=torch.bfloat16)},
        "personal": {"1/x": torch.randn(4, 5, generator=generator).T},
    }


def save(folder, *rounds, **options):
    for round in rounds:
        save_checkpoint(folder, round, parts(round), {**META, "round of": round}, **options)


def check(checkpoint, round):
    assert checkpoint.round == round and checkpoint.meta["round of"] == round
    for part, tensors in parts(round).items():
        assert checkpoint.parts[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = checkpoint.parts[part][name]
            assert torch.equal(found, tensor) and found.dtype == tensor.dtype


def test_a_checkpoint_is_restored_as_it_was_saved(tmp_path):
    assert load_checkpoint(tmp_path / "checkpoint") is None
    save(tmp_path / "checkpoint", 1)
    found = load_checkpoint(tmp_path / "checkpoint")
    check(found, 1)
    assert found.meta["numbers"] == META["numbers"] and found.meta["synced"] == {"1": 2, "10": 0}
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["round_000001"]


def test_the_newest_checkpoints_are_kept(tmp_path):
    save(tmp_path, 9, 10, 11)
    check(load_checkpoint(tmp_path), 11)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round_000010", "round_000011"]
    save(tmp_path, 12, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["round_000012"]
    save(tmp_path, 12)  # a repeated round replaces its checkpoint
    check(load_checkpoint(tmp_path), 12)


@pytest.mark.parametrize("name", ["round_000009.bak", "round_000003_old", "round_9", "round_x"])
def test_a_copy_beside_the_checkpoints_is_neither_read_nor_counted_nor_removed(tmp_path, name):
    folder = tmp_path / "checkpoint"
    save(folder, 2, 3)
    shutil.copytree(folder / "round_000003", folder / name)
    shutil.copytree(folder, tmp_path / "best")
    save(folder, 4)
    assert sorted(p.name for p in folder.iterdir()) == sorted(["round_000003", "round_000004", name])
    assert saved_rounds(folder) == [3, 4] and saved_rounds(tmp_path / "best") == [2, 3]
    check(load_checkpoint(folder), 4)
    best.keep_only(tmp_path, [4])
    best.go_back(tmp_path, 2)
    assert [p.name for p in (tmp_path / "best").iterdir()] == [name]


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x04
    path.write_bytes(content)


DAMAGES = {
    "middle of a tensor file": lambda p: flip(p / "state.safetensors", -30),
    "last byte of a tensor file": lambda p: flip(p / "personal.safetensors", -1),
    "tensor file cut short": lambda p: os.truncate(p / "state.safetensors", 40),
    "tensor file gone": lambda p: (p / "personal.safetensors").unlink(),
    "meta gone": lambda p: (p / "meta.json").unlink(),
    "meta cut short": lambda p: os.truncate(p / "meta.json", 60),
    "meta nested deep": lambda p: (p / "meta.json").write_text("[" * 100_000),
    "meta of another kind": lambda p: (p / "meta.json").write_text("{}"),
    "folder empty": lambda p: (shutil.rmtree(p), p.mkdir()),
    "a file in place of the folder": lambda p: (shutil.rmtree(p), p.write_text("")),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog, how):
    save(tmp_path, 1, 2)
    DAMAGES[how](tmp_path / "round_000002")
    with caplog.at_level(logging.WARNING, "fs_lowrank"):
        check(load_checkpoint(tmp_path), 1)
    assert "round_000002" in caplog.text and "the one before" in caplog.text
    DAMAGES[how](tmp_path / "round_000001")
    with pytest.raises(UserError, match="every checkpoint in .* is damaged"):
        load_checkpoint(tmp_path)


def test_every_flipped_byte_of_the_metadata_is_noticed(tmp_path):
    # Most of the bytes are digits and letters, so a flip often gives valid JSON with another content.
    save(tmp_path, 1, 2)
    path = tmp_path / "round_000002" / "meta.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        flip(path, at)
        check(load_checkpoint(tmp_path), 1)
        path.write_bytes(whole)
    check(load_checkpoint(tmp_path), 2)


def test_metadata_is_readable_by_people(tmp_path):
    save(tmp_path, 1)
    meta = json.loads((tmp_path / "round_000001" / "meta.json").read_text())
    assert meta["round"] == 1 and set(meta["files"]) == {"state.safetensors", "personal.safetensors"}


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "adapter/tokenizer.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["flip", "delete", "loop"])
def test_what_is_kept_of_the_best_round_is_checked_before_a_run_goes_on(tmp_path, name, damage):
    def make():
        folder = tmp_path / best.place_of(2) / "adapter"
        shutil.rmtree(tmp_path / "best", ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({"a": torch.ones(3, 2)}, folder / "adapter_model.safetensors")
        (folder / "tokenizer.json").write_text("{}")
        checksums.seal(folder.parent)
        return tmp_path / best.place_of(2)

    folder = make()
    best.go_back(tmp_path, 3)
    assert saved_rounds(tmp_path / "best") == [2]
    file = folder / name
    if damage == "flip":
        flip(file, -1)
    else:
        file.unlink()
    if damage == "loop":
        file.symlink_to(file.name)
    if (name, damage) == ("checksums.json", "delete"):
        best.go_back(tmp_path, 3)  # an earlier version wrote none
    else:
        with pytest.raises(UserError, match=f"{re.escape(str(file))} is damaged .*; restore it, or remove {folder} to"):
            best.go_back(tmp_path, 3)
    best.go_back(tmp_path, 1)
    assert saved_rounds(tmp_path / "best") == [], "it is not needed where the run goes on before it"
    shutil.rmtree(tmp_path / "best")
    best.go_back(tmp_path, 3)  # what the message advises
    make()
    best.publish(tmp_path, 2, move=False)
    assert {p.name for p in (tmp_path / "adapter_best").iterdir()} == {"adapter_model.safetensors", "tokenizer.json"}
