"""A short torture: a few cases of every kind that needs neither network nor root, by ``python -m tests.torture``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("kills", "writes", "damage", "updates", "configs")


@pytest.mark.slow  # kills come at random times, so a run may find a new failure
def test_a_short_torture(tmp_path):
    command = [sys.executable, "-m", "tests.torture", "--kinds", ",".join(KINDS), "--number", "2", "--seed", "3"]
    ended = subprocess.run(
        [*command, "--results", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shards = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("*/*.json")]
    assert {shard["kind"] for shard in shards} >= set(KINDS) - {"writes"}, ended.stderr  # the shim needs a compiler
    assert all(shard["cases"] >= 2 for shard in shards)
    assert not [failure for shard in shards for failure in shard["failures"]], ended.stdout
    assert ended.returncode == 0
    assert "| damaged files | 2 |" in (tmp_path / "results" / "README.md").read_text()
