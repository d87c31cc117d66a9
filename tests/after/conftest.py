"""Two finished runs, shared by all tests, which write in copies: a classification and an instruction tuning."""

import pytest

import fs_lowrank
from fs_lowrank.testing import small


@pytest.fixture(scope="session")
def runs(tiny_encoder, tiny_causal, reviews_csv, instructions_jsonl, tmp_path_factory):
    """Folders by task; the results of both runs are beside them."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for task, settings in (
        ("classes", small.encoder_settings(tiny_encoder, reviews_csv, folder / "classes")),
        ("instructions", small.causal_settings(tiny_causal, instructions_jsonl, folder / "instructions")),
    ):
        settings["data"]["splits"] = [0.7, 0.1, 0.2]
        rate = {"train.optimizer.lr": 0.03, "federate.total_round_num": 3, "federate.method": "rolora"}
        made[task] = fs_lowrank.run(fs_lowrank.load_config(settings, rate))
    return made
