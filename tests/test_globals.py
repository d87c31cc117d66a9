"""Nothing that belongs to the whole process is changed by a call of the library: a notebook is the user's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fs_lowrank import UserError
from fs_lowrank.engines import get_engine
from fs_lowrank.testing import small

CODE = Path(__file__).with_name("globals_before_and_after.py")


def examine(settings, tmp_path, *calls):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    # -P: the folder of the tests has a folder ``hpo``, too.
    command = [sys.executable, "-P", str(CODE), str(tmp_path), *calls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:] or done.stdout[-4000:]
    assert done.stdout.splitlines()[-1:] == [f"unchanged by {', '.join(calls)}"]


@pytest.mark.slow
def test_a_run_a_comparison_a_search_and_their_pages(settings, tmp_path):
    pytest.importorskip("optuna")
    examine(settings, tmp_path, "run", "compare", "report", "tune", "figures")


@pytest.mark.slow
def test_the_first_use_does_not_draw_from_the_generator_of_python():
    code = "import random, fs_lowrank; state = random.getstate(); fs_lowrank.run; assert random.getstate() == state"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.federatedscope
def test_the_plug_in(settings, tmp_path):
    try:
        get_engine("federatedscope")
    except UserError as error:
        pytest.skip(str(error))
    examine(settings, tmp_path, "federatedscope")


@pytest.mark.slow
def test_images(tiny_images, tmp_path):
    examine(small.vision_settings(tiny_images, tmp_path / "run"), tmp_path, "run")
