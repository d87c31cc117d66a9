from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("optuna")

import fs_lowrank  # noqa: E402
from fs_lowrank import load_config  # noqa: E402
from hpo import Search, tune  # noqa: E402
from hpo.space import space_from  # noqa: E402


@pytest.fixture
def config(settings):
    """A run of a few seconds: 2 of 3 clients per round, 2 steps each, 2 rounds: 8 client-steps in all."""
    return load_config(
        {
            **settings,
            "federate": {"method": "fedlora", "client_num": 3, "sample_client_num": 2, "total_round_num": 2},
            "train": {**settings["train"], "local_update_steps": 2},
            "llm": {"tok_len": 12, "adapter": {"args": [{"r": 2, "alpha": 4, "modules": ["query"], "layers": [2]}]}},
            "data": {**settings["data"], "splitter": "iid", "splitter_args": [], "subsample": 0.3},
        }
    )


RATES = {"train.optimizer.lr": {"grid": [1e-3, 1e-2]}}


@pytest.fixture
def search(config, tmp_path):
    """``search(space, **options)`` runs a search in this process; returns how it ended, its options and its lines."""

    def go(space=RATES, base=config, **options):
        lines = []
        made = Search(**{"name": "s", "folder": tmp_path / "hpo", "workers": 0, "confirm": 0, **options})
        ended = tune(base, space_from(space), made, say=lines.append)
        return made, ended, lines

    return go


@pytest.fixture
def runs(monkeypatch):
    """``runs(accuracy, loss, rounds)`` lets ``fs_lowrank.run`` train nothing: it reports ``accuracy(config, round)``
    and ``loss(config)`` in these ``rounds``, on 100 validation rows of which the majority class has 60.
    """

    def replace(accuracy, loss=lambda config: 0.7, rounds=(2,)):
        def run(config, *args, on_round, **kwargs):
            folder = Path(config.outdir)
            folder.mkdir(parents=True, exist_ok=True)
            validation = {"from": "train", "rows": [], "labels": {"negative": 40, "positive": 60}}
            (folder / "data.json").write_text(json.dumps({"validation": validation}))
            for t in rounds:
                metrics = {"val": {"acc": accuracy(config, t), "loss": loss(config)}}
                if on_round({"round": t, "clients": [1], "uplink_bytes": 1, "downlink_bytes": 1, "metrics": metrics}):
                    return

        monkeypatch.setattr(fs_lowrank, "run", run)

    return replace
