"""Engines on the small models, each with an outdir of its own."""

import pytest

from fs_lowrank import load_config
from fs_lowrank.engines.local import LocalEngine


@pytest.fixture
def make_engine(settings, causal_settings, tmp_path, no_curves):
    """``make_engine(task, keys)``: an embedded engine of 3 clients; ``task`` is ``encoder`` or ``causal``."""
    made = []

    def make(task, keys):
        made.append(task)
        small = causal_settings if task == "causal" else settings
        own = {"federate.client_num": 3, "outdir": str(tmp_path / f"run {len(made)}")}
        return LocalEngine(load_config(small, {**own, **keys}))

    return make
