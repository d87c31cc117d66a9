"""Runs whose tensors are on a device that is not the CPU (``device_cases.py``)."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("device_cases.py")


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "which", [pytest.param("not slow", marks=pytest.mark.more), pytest.param("slow", marks=pytest.mark.slow)]
)
def test_runs_on_a_device_that_does_not_mix_with_the_cpu(which):
    """In a process of its own, because torch has to know of a device before the first backward pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True, timeout=1900)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
