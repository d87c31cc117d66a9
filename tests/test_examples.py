"""Every configuration file that is shipped loads."""

from pathlib import Path

import pytest

import fs_lowrank

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_loads_and_survives_being_written_out(path, tmp_path):
    config = fs_lowrank.load_config(path)
    config.dump(tmp_path / "copy.yaml")
    assert fs_lowrank.load_config(tmp_path / "copy.yaml").to_dict() == config.to_dict()
    assert config.federate.client_num >= 3


def test_there_are_examples():
    assert {"demo", "smollm2", "own_data"} <= {p.stem for p in EXAMPLES}
