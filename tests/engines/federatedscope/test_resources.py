"""What a sampler of the framework needs to know is missed before anything runs, not by a traceback after it."""

from __future__ import annotations

import pickle

import pytest

import fs_lowrank
from fs_lowrank.errors import UserError

pytestmark = pytest.mark.federatedscope
KEYS = {"federate.method": "rolora", "federate.total_round_num": 1, "federate.sampler": "group"}
ROW = {"computation": 10.0, "communication": 100.0}
BETWEEN = {"federate.mode": "distributed", "distribute.use": True}


def refused(quick, tmp_path, keys):
    """What refuses the run, of which no file but the log is there."""
    with pytest.raises(UserError) as error:
        fs_lowrank.run(quick("run", {**KEYS, **keys}), "federatedscope")
    assert not list(tmp_path.rglob("rounds.jsonl"))
    return str(error.value)


@pytest.mark.parametrize(
    "keys, said",
    [
        ({}, "federate.resource_info_file = '' cannot be read (FileNotFoundError"),
        ({"federate.sampler": "responsiveness"}, "for federate.sampler = 'responsiveness', name a pickled table"),
        ({"federate.resource_info_file": "nowhere.pkl"}, "= 'nowhere.pkl' cannot be read (FileNotFoundError"),
        ({"federate.sampler": "groop"}, "'groop': expected uniform, group, responsiveness; did you mean 'group'?"),
        ({**BETWEEN, "distribute.role": "server"}, "draws by how fast the clients are, in mode standalone"),
    ],
)
def test_a_sampler_without_what_it_needs(quick, tmp_path, keys, said):
    assert said in refused(quick, tmp_path, keys)


@pytest.mark.parametrize("content", [b"junk", *map(pickle.dumps, ({}, {1: {"computation": 10.0}}, [1, 2]))])
def test_a_file_that_is_no_table_of_clients(quick, tmp_path, content):
    file = tmp_path / "resources.pkl"
    file.write_bytes(content)
    said = refused(quick, tmp_path, {"federate.resource_info_file": str(file)})
    assert "\n" not in said and "cannot be read (" in said and "{number: {'computation': milliseconds a sample" in said


class Ran:
    """What a pickle can do when it is read."""

    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("sampler", ["group", "uniform"])
def test_a_table_that_would_run_code_is_refused_unread(quick, tmp_path, sampler):
    """Also where it is not used, since the framework reads it all the same."""
    file = tmp_path / "resources.pkl"
    file.write_bytes(pickle.dumps({1: ROW, 2: Ran()}))
    keys = {"federate.sampler": sampler, "federate.resource_info_file": str(file)}
    assert "it names builtins.exec, and what it names would run" in refused(quick, tmp_path, keys)
