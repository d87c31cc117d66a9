"""``lowrank.robust`` on the embedded engine: keys, records, and runs that are refused."""

import json

import pytest

import fs_lowrank


@pytest.fixture
def config(settings, tmp_path, no_curves):
    def make(**keys):
        few = {"federate.client_num": 5, "federate.total_round_num": 2, "federate.method": "rolora"}
        return fs_lowrank.load_config(settings, {**few, "outdir": str(tmp_path / "run"), **keys})

    return make


@pytest.mark.more
@pytest.mark.parametrize("rule, left_out", [("krum", 4), ("multi_krum", 1)])
def test_the_record_on_disk_names_the_clients_that_were_left_out(config, tmp_path, rule, left_out):
    result = fs_lowrank.run(config(**{"lowrank.robust": rule}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == len(result.history) == 2
    for record in lines:
        assert len(record["robust"]) == left_out and record["clients"] == [1, 2, 3, 4, 5]
        assert all(note["reason"].startswith(f"left out by {rule}: its score") for note in record["robust"])
        assert {note["client"] for note in record["robust"]} <= {1, 2, 3, 4, 5}


def test_a_round_with_fewer_updates_than_the_rule_needs_is_a_bad_round(config):
    keys = {"lowrank.robust": "krum", "lowrank.drop_rate": 0.5, "seed": 3}
    with pytest.raises(fs_lowrank.RunFailed, match="robust_malicious = 1 needs 5 updates, got"):
        fs_lowrank.run(config(**keys))


def test_a_server_that_sees_only_sums_is_refused(config):
    with pytest.raises(fs_lowrank.UserError, match="needs the update of each client"):
        fs_lowrank.run(config(**{"lowrank.robust": "median", "federate.online_aggr": True}))
