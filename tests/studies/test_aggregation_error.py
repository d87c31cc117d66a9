"""The error of averaging A and B separately: calculated by hand, zero if one half is frozen, and in real runs."""

import json

import pytest
import torch

import fs_lowrank
from studies.analysis import ServerStep, watch
from studies.analysis import aggregation_error as ae

pytestmark = pytest.mark.more

A, B = "x.lora_A.default.weight", "x.lora_B.default.weight"


def pair(b, a):
    return {A: torch.tensor([a]), B: torch.tensor([[v] for v in b])}


def test_the_error_by_hand():
    clients, weights = [pair([1.0, 0.0], [2.0, 0.0, 0.0]), pair([0.0, 1.0], [0.0, 2.0, 0.0])], [0.25, 0.75]
    mean = pair([0.25, 0.75], [0.5, 1.5, 0.0])
    before = pair([0.0, 1.0], [1.0, 0.0, 0.0])
    # mean of the products: 0.5, 0; 0, 1.5. Product of the means: 0.125, 0.375; 0.375, 1.125. Before: 0, 0; 1, 0.
    expected = (4 * 0.375**2) ** 0.5 / (0.5**2 + 1 + 1.5**2) ** 0.5
    assert ae.relative_error(ServerStep(1, clients, weights, mean, before, 4.0)) == pytest.approx(expected)
    same = [clients[0], clients[0]]
    assert ae.relative_error(ServerStep(1, same, weights, clients[0], before, 4.0)) == 0
    assert ae.relative_error(ServerStep(1, [before, before], weights, before, before, 4.0)) == 0


@pytest.mark.parametrize("method", ["rolora", "ffa_lora"])
def test_one_frozen_half_has_no_error(settings, tmp_path, method):
    errors = []
    name = watch(
        method,
        lambda seen: errors.append(
            ae.relative_error(
                seen._replace(tensors=[{**seen.before, **t} for t in seen.tensors], mean={**seen.before, **seen.mean})
            )
        ),
    )
    fs_lowrank.run(fs_lowrank.load_config(settings, **{"federate.method": name, "outdir": str(tmp_path / "a")}))
    assert len(errors) == 4 and max(errors) < 1e-5


def test_the_command_writes_json_and_png(settings, tmp_path):
    del settings["outdir"]
    varied = {
        "steps": {"1": {"train.local_update_steps": 1}, "6": {"train.local_update_steps": 6}},
        "clients": {"as it is": {}, "1 a round": {"federate.sample_client_num": 1}},
    }
    ae.main(
        ["--rounds", "3", "--seeds", "1", "--out", str(tmp_path), "train.optimizer.lr", "0.05"],
        base=settings,
        varied=varied,
    )
    written = json.loads((tmp_path / "aggregation_error.json").read_text())
    clients = written["means"]["clients"]
    first = {r["label"]: r["errors"][0] for r in written["runs"] if r["axis"] == "steps"}
    assert first["1"] < 1e-6 < first["6"]  # B starts at 0, so A has no gradient in the very first step
    assert clients["1 a round"]["error"] < 1e-6 < clients["as it is"]["error"]
    assert all(len(r["errors"]) == 3 and 0 <= r["test_acc"] <= 1 for r in written["runs"])
    assert (tmp_path / "aggregation_error.png").stat().st_size > 10_000
