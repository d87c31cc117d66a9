"""Run folders of version 0.1.0, and of 0.2.0.dev0 (``rolora_dev``), stopped after round 3 of 5, resume with the results
of that version.

Each folder holds the files of the stopped run (``checkpoint``, ``rounds.jsonl``, ``config.yaml``), and the results of
that version after it had continued the run: ``ends_with.jsonl``, and the global model in ``ends_with.safetensors``.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fs_lowrank

FOLDERS = Path(__file__).parent / "first_edition"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["rolora", "fedloru_adam", "mfedloru", "pfedloru", "rolora_dev"])
@pytest.mark.more
def test_a_run_of_an_earlier_version_is_resumed(tmp_path, monkeypatch, name):
    place = tmp_path / "place"
    shutil.copytree(FOLDERS, place)
    monkeypatch.chdir(place)
    then = records(place / name / "ends_with.jsonl")
    result = fs_lowrank.run(fs_lowrank.load_config(f"{name}/config.yaml"), resume=True)
    assert len(result.history) == len(then) == 5
    for now, before in zip(result.history, then):
        for key in (
            "round",
            "selected",
            "clients",
            "failed",
            "uplink_bytes",
            "downlink_bytes",
            "client_downlink_bytes",
        ):
            assert now[key] == before[key]
        assert now["loss"] == pytest.approx(before["loss"], abs=1e-5)
        assert now["metrics"].keys() == before["metrics"].keys()
    own = dict(result.model.named_parameters())
    wanted = load_file(place / name / "ends_with.safetensors")
    assert wanted
    for tensor, value in wanted.items():
        torch.testing.assert_close(own[tensor].detach(), value, atol=1e-5, rtol=1e-5)
