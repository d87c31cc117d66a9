"""``federate.client_idx_for_local_train``: the data of one client are trained on, as if there were no other client."""

import numpy as np
import pytest

import fs_lowrank
from fs_lowrank import load_config
from fs_lowrank.baselines import row_config
from fs_lowrank.errors import UserError
from fs_lowrank.methods import DriftCorrection
from fs_lowrank.rounds.workspace import Workspace

ALONE = "federate.client_idx_for_local_train"
KEYS = {"federate.method": "rolora", "federate.total_round_num": 2, "train.local_update_steps": 2}


def rows_of(config, client):
    """The rows of a client in the loaded data, and all that are held out."""
    workspace = Workspace(config)
    arrays, ends = workspace.data.arrays(), np.cumsum(workspace.data.partition.sizes())
    return arrays["clients"][: ends[client - 1]][-workspace.clients[client - 1].num_samples :], arrays["test"]


@pytest.mark.more
@pytest.mark.parametrize("client", [1, 4])
def test_it_has_the_rows_that_it_has_among_the_others(settings, client):
    rows, held_out = rows_of(load_config(settings, KEYS), client)
    alone = load_config(settings, {**KEYS, ALONE: client})
    own, same = rows_of(alone, 1)
    assert own.tolist() == rows.tolist() and same.tolist() == held_out.tolist()
    assert len(Workspace(alone).clients) == alone.sampled_per_round == alone.taking_part == 1


@pytest.mark.more
def test_a_run_of_one_client(settings, tmp_path, no_curves):
    config = load_config(settings, {**KEYS, ALONE: 3, "federate.sample_client_num": 4})
    result = fs_lowrank.run(config)
    size = len(rows_of(load_config(settings, KEYS), 3)[0])
    assert [r["selected"] for r in result.history] == [r["clients"] for r in result.history] == [[1], [1]]
    assert result.facts["clients"] == [size]
    again = load_config(tmp_path / "run" / "config.yaml")
    assert again.alone == 3 and again.fingerprint() == config.fingerprint() != load_config(settings, KEYS).fingerprint()


def test_all_data_in_one_place_are_those_of_all_clients(settings, tmp_path):
    pooled = row_config("pooled", load_config(settings, {**KEYS, ALONE: 3}), tmp_path / "pooled")
    assert pooled.alone == 0 and pooled.taking_part == 1


def test_a_correction_of_drift_counts_the_clients_of_the_run(settings):
    keys = {"federate.method": "fedlora", "lowrank.drift": "feddyn", "lowrank.drift_weight": 0.1}
    assert DriftCorrection.from_config(load_config(settings, {**KEYS, **keys, ALONE: 2})).clients == 1


@pytest.mark.parametrize(
    "keys, message",
    [
        ({ALONE: 6}, "client_idx_for_local_train = 6: expected the number of a client, 1 to 5; or 0 for all clients"),
        ({ALONE: -1}, "client_idx_for_local_train = -1: expected the number of a client, 1 to 5"),
        ({ALONE: "two"}, "client_idx_for_local_train = 'two': expected a whole number"),
        ({ALONE: 2, "federate.mode": "distributed"}, "trains one client alone; leave federate.mode, federate.use_ss"),
        ({ALONE: 2, "federate.use_ss": True}, "trains one client alone; leave federate.mode, federate.use_ss"),
        (
            {ALONE: 2, "lowrank.clients": [{"clients": [2], "lr": 0.1}]},
            "federate.use_ss, lowrank.clients and lowrank.ranks out",
        ),
        (
            {ALONE: 2, "federate.method": "flexlora", "lowrank.ranks": [2, 4]},
            "federate.use_ss, lowrank.clients and lowrank.ranks out",
        ),
    ],
)
def test_errors(settings, keys, message):
    with pytest.raises(UserError) as caught:
        load_config(settings, {**KEYS, **keys})
    assert message in str(caught.value) and "\n" not in str(caught.value)
