"""What an installation holds: `benchmark` and `hpo` inside the package, and no top-level name but the package's own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PARTS = ("fs_lowrank", "benchmark", "hpo", "examples", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def walks():
    """The module that builds the wheel, and installs it beside the libraries of this Python."""
    spec = importlib.util.spec_from_file_location("walks_run", ROOT / "tests" / "walks" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what the packages are made from, so that an installation leaves nothing in this tree."""
    folder = tmp_path_factory.mktemp("clone")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def said(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = """
import importlib.util, fs_lowrank.benchmark.suite as suites, fs_lowrank.hpo as hpo
from fs_lowrank.benchmark.scorers import scorer
assert suites.hpo is hpo and hpo.load_space("rolora_lr").parameters and len(list(suites.SHIPPED.glob("*.yaml"))) > 3
assert scorer("generate").__name__ == "fs_lowrank.benchmark.scorers.generate"
print(hpo.__file__, *(name for name in ("benchmark", "hpo") if importlib.util.find_spec(name)))
"""


def test_installed_names(walks, clone, tmp_path):
    """`pip install .`: the wheel holds one package, whose commands run in any folder."""
    wheel = walks.build(tmp_path)
    held = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {path.parts[0].partition("-")[0] for path in held} == {"fs_lowrank"}
    inside = ["py.typed", "benchmark/suites/glue.yaml", "hpo/spaces/rolora_lr.yaml"]
    inside += [f"examples/{path.name}" for path in (ROOT / "examples").iterdir()]
    assert {Path("fs_lowrank", name) for name in inside} <= held
    walks.install(wheel, tmp_path / "env")
    binaries = tmp_path / "env" / "bin"
    where, *top_level = said(str(binaries / "python"), "-c", NAMES, cwd=tmp_path).split()
    assert Path(where).is_relative_to(tmp_path / "env") and not top_level
    assert "--space" in said(str(binaries / "fs-lowrank"), "hpo", "tune", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_names_of_an_editable_install(walks, clone, tmp_path):
    """`pip install -e .`: the same names as in a wheel; in the clone itself also `python -m benchmark` and `hpo`."""
    walks.install(clone, tmp_path / "env", "--no-build-isolation", "--editable")
    binaries = tmp_path / "env" / "bin"
    where, *top_level = said(str(binaries / "python"), "-c", NAMES, cwd=tmp_path).split()
    assert Path(where) == clone / "hpo" / "__init__.py" and not top_level
    assert "--space" in said(str(binaries / "fs-lowrank"), "hpo", "tune", "--help", cwd=tmp_path)
    assert "--space" in said(str(binaries / "python"), "-m", "hpo", "tune", "--help", cwd=clone)
    assert "glue" in said(str(binaries / "python"), "-m", "benchmark", "list", cwd=clone)


@pytest.mark.slow
def test_a_clone_that_is_not_installed_has_the_same_names(clone, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(clone)!r}){NAMES}"
    where, *top_level = said(sys.executable, "-c", code, cwd=tmp_path).split()
    assert Path(where) == clone / "hpo" / "__init__.py" and top_level == ["benchmark", "hpo"]
