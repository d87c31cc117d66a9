"""A short torture: a few cases of every kind that can run here, by ``python -m tests.torture``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture import driver

ROOT = Path(__file__).parents[2]


#: kinds of which `make test-more` has a case; tests/data, tests/hpo and tests/benchmark have what the others damage
QUICK = ("damage",)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(QUICK, marks=pytest.mark.more),
        pytest.param([k for k in driver.KINDS if k not in QUICK], marks=pytest.mark.slow),
    ],
    ids=("damage", "others"),
)
def test_a_case_of_every_kind(tmp_path, kinds):
    """None may fail, of the kinds that can run here."""
    command = [sys.executable, "-m", "tests.torture", "--kinds", ",".join(kinds), "--number", "1", "--seed", "3"]
    ended = subprocess.run(
        [*command, "--results", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
    )
    shards = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("*/*.json")]
    left_out = [line.partition(":")[0] for line in ended.stdout.splitlines() if ": left out, " in line]
    assert {shard["kind"] for shard in shards} == set(kinds) - set(left_out), ended.stderr
    assert all(shard["cases"] >= 1 for shard in shards)
    assert not [failure for shard in shards for failure in shard["failures"]], ended.stdout
    assert ended.returncode == 0
    table = (tmp_path / "results" / "README.md").read_text()
    assert f"| {driver.KINDS[kinds[0]]} | 1 |" in table
