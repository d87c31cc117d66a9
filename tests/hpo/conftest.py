from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("optuna")

from fs_lowrank import load_config  # noqa: E402
from hpo.space import space_from  # noqa: E402
from hpo.start import Search, tune  # noqa: E402


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

    def go(space=RATES, base=config, stop_after=None, **options):
        lines = []

        def say(text):
            lines.append(text)
            if stop_after is not None and len(lines) >= stop_after:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGINT)

        made = Search(**{"name": "s", "folder": tmp_path / "hpo", "workers": 0, "confirm": 0, **options})
        ended = tune(base, space_from(space), made, say=say)
        return dataclasses.replace(made), ended, lines

    return go
