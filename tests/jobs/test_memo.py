"""What a process keeps of what it has loaded; runs that use it are those of a fresh process."""

from __future__ import annotations

import copy
import gc
import os
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import fs_lowrank
from fs_lowrank import data
from fs_lowrank.jobs import memo
from fs_lowrank.jobs.memo import memoized, memoizing
from fs_lowrank.models import build
from fs_lowrank.rounds.workspace import Workspace
from tests.cases import same_model
from tests.torture.child import difference


def value(key, made):
    made.append(key)
    return {"tensor": torch.arange(100.0), "text": key}


def keep_one(key, made, size=400):
    return memoized("a", lambda: {"n": key}, lambda: value(key, made), copy=copy.deepcopy, size=lambda of: size)


@pytest.mark.more
def test_a_value_is_made_once_and_every_copy_is_its_own():
    made = []
    with memoizing() as keep:
        one, two = keep_one("a", made), keep_one("a", made)
        keep_one("b", made)
        with memoizing() as inner:
            assert inner is keep
        assert made == ["a", "b"]
    one["tensor"][3] = -1
    assert one["text"] == "a" and two["tensor"][3] == 3
    assert memoized("a", lambda: pytest.fail("nothing is kept"), lambda: "anew") == "anew"


def test_what_is_too_large_or_not_known_is_made_each_time(monkeypatch):
    made = []
    monkeypatch.setattr(memo, "LIMIT", 500)
    with memoizing():
        for _ in range(2):
            keep_one("large", made, size=501)
            assert memoized("unknown", lambda: None, lambda: made.append("unknown")) is None
    assert made == ["large", "unknown"] * 2


@pytest.mark.more
def test_the_least_recently_used_gives_way(monkeypatch):
    made = []
    monkeypatch.setattr(memo, "LIMIT", 1000)  # room for two
    with memoizing() as keep:
        for name in ("a", "b", "a", "c", "a", "b"):
            keep_one(name, made)
        assert len(keep) == 2
    assert made == ["a", "b", "c", "b"]


def test_a_copy_of_a_model_begins_where_the_model_does():
    """Products may round otherwise where a matrix begins elsewhere in a line of the cache."""
    model = nn.Linear(5, 7)
    odd = torch.frombuffer(bytearray(4 * 35 + 24), dtype=torch.uint8)[24:].view(torch.float32).view(7, 5)
    model.weight = nn.Parameter(odd.copy_(model.weight.detach()))
    other = build._copy(model)
    assert torch.equal(other.weight, model.weight) and other.weight.data_ptr() != model.weight.data_ptr()
    assert all(a.data_ptr() % 64 == b.data_ptr() % 64 for a, b in zip(model.parameters(), other.parameters()))


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
    monkeypatch.setattr(data.build, "_build", counting("data", data.build._build))
    return counts


@pytest.mark.parametrize("kind", ["settings", "causal_settings", "vision_settings"])
@pytest.mark.more
def test_runs_in_one_process_are_those_of_fresh_ones(kind, request, tmp_path, loaded, no_curves):
    keys = {"federate.total_round_num": 2, "federate.client_num": 3, "federate.method": "fedavg"}
    if kind == "settings":
        keys |= {"federate.method": "fedloru", "lowrank.tau": 1}  # merges into the base

    def run(name, **more):
        config = fs_lowrank.load_config(request.getfixturevalue(kind), {**keys, "outdir": str(tmp_path / name), **more})
        return fs_lowrank.run(config)

    alone = run("alone")
    loaded.update(model=0, data=0)
    with memoizing():
        run("other", **{"train.optimizer.lr": 0.3})
        run("seed", seed=7)
        torch.rand(3), np.random.rand(3)
        after = run("after")
        # Once for each seed; images are not tokenized.
        assert loaded == {"model": 2, "data": 3 if kind == "vision_settings" else 2}
    same_model(alone, after)
    assert not difference(after.outdir, alone.outdir)
    assert alone.facts == after.facts


@pytest.mark.slow
def test_what_a_run_left_is_freed_before_the_next(settings, tmp_path, no_curves):
    left = []

    def short(name):
        config = fs_lowrank.load_config(settings, {"federate.total_round_num": 1, "outdir": str(tmp_path / name)})
        left.append(weakref.ref(fs_lowrank.run(config).model))

    gc.disable()  # so that nothing but the next run frees it
    try:
        with memoizing():
            for name in ("one", "two", "three"):
                short(name)
    finally:
        gc.enable()
    assert [model() is None for model in left] == [True, True, False]


@pytest.mark.more
def test_a_changed_file_is_noticed(settings, tmp_path, loaded, reviews_csv):
    rows = tmp_path / "rows.csv"
    rows.write_bytes(reviews_csv.read_bytes())
    settings["data"]["type"] = str(rows)
    config = fs_lowrank.load_config(settings)
    with memoizing():
        first = Workspace(config).data.fingerprint
        rows.write_text(rows.read_text().rsplit("\n", 2)[0] + "\n")
        assert Workspace(config).data.fingerprint != first
        assert loaded == {"model": 1, "data": 2}
        place = build.locate(build.model_name(config.model.type))
        os.utime(f"{place}/config.json")
        Workspace(config)
        assert loaded == {"model": 2, "data": 2}
