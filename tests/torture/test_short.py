"""A short torture: a few cases of every kind that can run here, by ``python -m tests.torture``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture import child, driver

ROOT = Path(__file__).parents[2]


def torture(tmp_path, kinds, number):
    """Run so many seeds of each kind that can run here; none may fail."""
    command = [
        sys.executable,
        "-m",
        "tests.torture",
        "--kinds",
        ",".join(kinds),
        "--number",
        str(number),
        "--seed",
        "3",
    ]
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
    assert all(shard["cases"] >= number for shard in shards)
    assert not [failure for shard in shards for failure in shard["failures"]], ended.stdout
    assert ended.returncode == 0


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
    torture(tmp_path, kinds, 1)
    table = (tmp_path / "results" / "README.md").read_text()
    assert f"| {driver.KINDS[kinds[0]]} | 1 |" in table


@pytest.mark.slow  # kills come at random times, so a run may find a new failure
def test_cases_of_every_kind(tmp_path):
    torture(tmp_path, [*driver.KINDS], 3)


@pytest.mark.parametrize(
    "code, err, fault",
    [
        (0, "a warning", ""),
        (2, "error: lowrank.r = -1: expected a whole number", ""),
        (2, "error: fedavg does not honour; remove:\n  a: because\n  b: because", ""),
        (2, "error: this\nand that", "several lines"),
        (2, "error: ", "or none"),
        (1, "", "0 lines of errors"),
        (
            1,
            "error: KeyError: 'a' (an error in fs-lowrank; please report it, with the traceback in x)",
            "of the package",
        ),
        (0, "failed: KeyError (an error in fs-lowrank; please report it)", "of the package"),
        (3, "error: x", "exit code 3"),
        (-9, "", "SIGKILL"),
        (None, "", "did not end"),
    ],
)
def test_what_counts_as_a_fault(code, err, fault):
    found = child.Ended(code, "", err, 1.0).fault
    assert fault in found and bool(found) == bool(fault)
