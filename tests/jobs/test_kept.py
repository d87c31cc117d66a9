"""What a process keeps of what it has loaded: copies that share memory, and runs that are those of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import fs_lowrank
from fs_lowrank import data
from fs_lowrank.jobs.kept import Keep, keeping, kept
from fs_lowrank.models import build
from fs_lowrank.rounds.site import Site

LARGE = 1 << 18


def value(key, made, size=LARGE):
    """A value with a tensor, a view of it, an array and a text; ``made`` notes that it was made."""
    made.append(key)
    tensor = torch.arange(size, dtype=torch.float32)
    return {"tensor": tensor, "view": tensor[3:9], "array": np.arange(size), "small": np.arange(3), "text": key}


def test_a_value_is_made_once_and_every_copy_is_its_own():
    made = []
    with keeping() as keep:
        one, two = (kept("a", lambda: {"n": 1}, lambda: value("a", made)) for _ in range(2))
        kept("a", lambda: {"n": 2}, lambda: value("b", made))
        with keeping() as inner:
            assert inner is keep
        assert made == ["a", "b"]
    assert not keep.files and one["text"] == "a"
    assert one["tensor"][3:9].data_ptr() == one["view"].data_ptr()
    one["tensor"][3], one["array"][:] = -1, 0
    assert one["view"][0] == -1 and two["tensor"][3] == 3 and two["array"][5] == 5
    assert kept("a", lambda: pytest.fail("nothing is kept"), lambda: "anew") == "anew"


def test_addresses_keep_their_remainder():
    """Products may round otherwise where a matrix begins elsewhere in a line of the cache."""
    odd = torch.frombuffer(bytearray(4 * LARGE + 24), dtype=torch.uint8)[24:].view(torch.float32)
    storages = [odd.clone().untyped_storage(), odd.untyped_storage()]
    with keeping():
        copy = kept("a", dict, lambda: [odd, torch.empty(7).set_(storages[0])])
    assert copy[0].data_ptr() % 64 == odd.data_ptr() % 64


def test_what_cannot_be_kept_is_made_each_time():
    made = []
    with keeping(Keep(limit=5 * LARGE)):
        for _ in range(2):
            assert callable(kept("a", dict, lambda: made.append("a") or (lambda: 0)))
            kept("large", dict, lambda: value("large", made))
            assert kept("unknown", lambda: None, lambda: made.append("unknown")) is None
    assert made == ["a", "large", "unknown"] * 2


def test_the_least_recently_used_gives_way():
    made = []
    with keeping(Keep(limit=30 * LARGE)) as keep:  # room for two
        for name in ("a", "b", "a", "c", "a", "b"):
            kept("a", lambda name=name: {"n": name}, lambda name=name: value(name, made))
        assert len(keep.files) == 2
    keep.close()
    assert made == ["a", "b", "c", "b"]
    assert not [fd for fd in os.listdir("/proc/self/fd") if "fs_lowrank" in _target(fd)]


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_another_process_maps_what_this_one_keeps():
    code = (
        "import json, sys; from fs_lowrank.jobs.kept import Keep, keeping, kept\n"
        "with keeping(Keep(limit=0, given=json.loads(sys.argv[1]))):\n"
        "    print(int(kept('a', dict, lambda: {'tensor': None})['tensor'].sum()))"
    )
    import json

    with keeping() as keep:
        kept("a", dict, lambda: value("a", []))
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(keep.places)], capture_output=True, text=True, timeout=120
        )
    assert done.stdout.split() == [str(int(torch.arange(LARGE, dtype=torch.float32).sum()))], done.stderr
    given = Keep(limit=0, given=keep.places)  # dropped meanwhile
    assert given.value(next(iter(keep.places), '["a", {}]'), lambda: "anew") == "anew"


@pytest.fixture
def loaded(monkeypatch):
    """How often a model was loaded and data were tokenized."""
    counts = {"model": 0, "data": 0}

    def counting(what, function):
        def counted(*given):
            counts[what] += 1
            return function(*given)

        return counted

    monkeypatch.setattr(build, "_built", counting("model", build._built))
    monkeypatch.setattr(data, "_built", counting("data", data._built))
    return counts


def files(folder):
    """The bytes of all files of a run but those that have times in them."""
    found = {p.relative_to(folder): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {
        name: p.read_bytes()
        for name, p in found.items()
        if p.name
        not in (
            "rounds.jsonl",
            "config.yaml",
            "summary.json",
            "summary.csv",
            "summary.tex",
            "README.md",
            ".lock",
            "meta.json",
        )
    }


@pytest.mark.parametrize("kind", ["settings", "causal_settings", "vision_settings"])
def test_runs_in_one_process_are_those_of_fresh_ones(kind, request, tmp_path, loaded, no_curves):
    keys = {"federate.total_round_num": 2, "federate.client_num": 3, "federate.method": "fedavg"}
    if kind == "settings":
        keys |= {"federate.method": "fedloru", "lowrank.tau": 1}  # merges into the base

    def run(name, **more):
        config = fs_lowrank.load_config(request.getfixturevalue(kind), {**keys, "outdir": str(tmp_path / name), **more})
        return fs_lowrank.run(config)

    alone = run("alone")
    loaded.update(model=0, data=0)
    with keeping():
        run("other", **{"train.optimizer.lr": 0.3})
        run("seed", seed=7)
        torch.rand(3), np.random.rand(3)
        after = run("after")
        # Once for each seed; images are not tokenized.
        assert loaded == {"model": 2, "data": 3 if kind == "vision_settings" else 2}
    for (name, x), (_, y) in zip(alone.model.named_parameters(), after.model.named_parameters(), strict=True):
        assert torch.equal(x, y), name
    for a, b in zip(alone.history, after.history, strict=True):
        assert all(a[k] == b[k] for k in a if "seconds" not in k)
    assert files(alone.outdir) == files(after.outdir)
    assert alone.facts == after.facts


def test_a_changed_file_is_noticed(settings, tmp_path, loaded, reviews_csv):
    rows = tmp_path / "rows.csv"
    rows.write_bytes(reviews_csv.read_bytes())
    settings["data"]["type"] = str(rows)
    config = fs_lowrank.load_config(settings)
    with keeping():
        first = Site(config).data.fingerprint
        rows.write_text(rows.read_text().rsplit("\n", 2)[0] + "\n")
        assert Site(config).data.fingerprint != first
        assert loaded == {"model": 1, "data": 2}
        place = build.locate(build.model_name(config.model.type))
        os.utime(f"{place}/config.json")
        Site(config)
        assert loaded == {"model": 2, "data": 2}
