"""What a process keeps of the data that it has loaded; runs that use it are those of a fresh process."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import fs_lowrank
from fs_lowrank import data
from fs_lowrank.jobs import memo
from fs_lowrank.jobs.memo import memoized, memoizing
from fs_lowrank.models.shortcuts.frozen import FrozenPrefix
from fs_lowrank.models.shortcuts.reads import OnlyRead
from fs_lowrank.rounds import trainer, workspace
from fs_lowrank.rounds.workspace import Workspace
from tests.cases import same_model
from tests.torture.child import difference


def value(key, made):
    made.append(key)
    return {"tensor": torch.arange(100.0), "text": key}


def keep_one(key, made, size=400):
    return memoized(lambda: {"n": key}, lambda: value(key, made), lambda of: size)


def test_what_is_too_large_or_not_known_is_made_each_time(monkeypatch):
    made = []
    monkeypatch.setattr(memo, "LIMIT", 500)
    with memoizing():
        for _ in range(2):
            keep_one("large", made, size=501)
            assert memoized(lambda: None, lambda: made.append("unknown"), len) is None
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


@pytest.fixture
def tokenized(monkeypatch):
    """A list with an item for each time that data were tokenized."""
    calls, build = [], data.build._build

    def counted(*given):
        calls.append(given)
        return build(*given)

    monkeypatch.setattr(data.build, "_build", counted)
    return calls


@pytest.mark.parametrize("kind", ["settings", "causal_settings", "vision_settings"])
@pytest.mark.more
def test_runs_in_one_process_are_those_of_fresh_ones(kind, request, tmp_path, tokenized, no_curves):
    keys = {"federate.total_round_num": 2, "federate.client_num": 3, "federate.method": "fedavg"}
    if kind == "settings":
        keys |= {"federate.method": "fedloru", "lowrank.tau": 1}  # merges into the base

    def run(name, **more):
        config = fs_lowrank.load_config(request.getfixturevalue(kind), {**keys, "outdir": str(tmp_path / name), **more})
        return fs_lowrank.run(config)

    alone = run("alone")
    tokenized.clear()
    with memoizing():
        run("other", **{"train.optimizer.lr": 0.3})
        run("seed", seed=7)
        torch.rand(3), np.random.rand(3)
        after = run("after")
        # Once for each seed; images are not tokenized.
        assert len(tokenized) == (3 if kind == "vision_settings" else 2)
    same_model(alone, after)
    assert not difference(after.outdir, alone.outdir)
    assert alone.facts == after.facts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["settings", "vision_settings"])
def test_what_a_run_left_is_freed_before_the_next(kind, request, tmp_path, no_curves):
    left, settings = [], request.getfixturevalue(kind)

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
def test_shortcuts_are_tried_once_on_equal_models(settings, monkeypatch):
    tried = []
    trials = ((FrozenPrefix, "_differs"), (OnlyRead, "check"), (workspace, "check_steady"), (trainer, "never_together"))
    for kind, name in trials:
        trial = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given, trial=trial: tried.append(trial) or trial(*given))
    settings["llm"]["adapter"]["args"] = [{"r": 2, "layers": [1], "modules": ["value"]}]

    def count(**keys):
        tried.clear()
        made = Workspace(fs_lowrank.load_config(settings, keys))
        assert made.prefix and made.prefix.planned and made.reads.checked.usable_in_training
        assert trainer.Trainer(made).cohort > 1
        return len(tried)

    keys = {"train.cache_frozen": "all", "train.cohort": 3}
    with memoizing():
        assert count(**keys) == 4
        assert count(**keys, seed=7) == count(**keys, **{"train.optimizer.lr": 0.3, "federate.client_num": 3}) == 0
        assert count(**keys, **{"federate.method": "rolora"}) == count(**keys, **{"llm.tok_len": 20}) == 4
    assert count(**keys) == 4


@pytest.mark.more
def test_a_changed_file_is_noticed(settings, tmp_path, tokenized, reviews_csv):
    rows = tmp_path / "rows.csv"
    rows.write_bytes(reviews_csv.read_bytes())
    settings["data"]["type"] = str(rows)
    config = fs_lowrank.load_config(settings)
    with memoizing():
        first = Workspace(config).data.fingerprint
        rows.write_text(rows.read_text().rsplit("\n", 2)[0] + "\n")
        assert Workspace(config).data.fingerprint != first
        assert len(tokenized) == 2
