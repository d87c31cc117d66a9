"""Commands of other packages are found by their entry points, and a file of the user never replaces them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """A folder with the metadata of an installation of this tree."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def package(site, name, entry_points, **files):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fs_lowrank.commands]\n{entry_points}\n")
    for path, content in files.items():
        place = site / name / f"{path}.py"
        place.parent.mkdir(exist_ok=True)
        place.write_text(content)


def command(*arguments, path=(), cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "fs_lowrank", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "200"},
    )


@pytest.fixture
def at_home(tmp_path):
    """A working folder with a file ``hpo.py`` and a package ``benchmark`` of the user."""
    (tmp_path / "hpo.py").write_text("raise SystemExit('the user\\'s hpo ran')\n")
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "__init__.py").write_text("raise SystemExit('the user\\'s benchmark ran')\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["hpo", "tune", "--help"], "--pruner"),
        pytest.param(["benchmark", "run", "--help"], "SUITE", marks=pytest.mark.slow),
    ],
)
@pytest.mark.more
def test_a_file_of_the_user_does_not_take_the_place_of_a_command(metadata, at_home, arguments, said):
    # `python -m` looks in the working folder first.
    done = command(*arguments, path=(metadata, ROOT), cwd=at_home)
    assert done.returncode == 0 and said in done.stdout and f"usage: fs-lowrank {arguments[0]}" in done.stdout
    assert "the user's" not in done.stdout + done.stderr


@pytest.mark.more
def test_the_processes_of_a_command_find_its_package_too(tmp_path):
    package(
        tmp_path / "site",
        "own_tool",
        "own-tool = own_tool.cli:main",
        __init__="",
        cli=(
            "from fs_lowrank.jobs.pool import Pool\n"
            "from own_tool.work import job\n"
            "def main(argv):\n"
            "    pool = Pool(1)\n"
            "    print('the process says', pool.result(pool.submit(0, job)), argv)\n"
            "    pool.end()\n"
        ),
        work="def job():\n    return 'hello'\n",
    )
    done = command("own-tool", "a", "--b", path=(tmp_path / "site", ROOT), cwd=tmp_path)
    assert done.returncode == 0 and "the process says hello ['a', '--b']" in done.stdout, done.stderr
    listed = command("--help", path=(tmp_path / "site", ROOT), cwd=tmp_path).stdout
    assert "own-tool" in listed and "added by own_tool" in listed


@pytest.mark.more
def test_no_package_replaces_a_command_of_ours(tmp_path):
    package(tmp_path / "site", "own_tool", "doctor = own_tool:main", __init__="def main(argv):\n    print('theirs')\n")
    for arguments in (["doctor", "--help"], ["--help"]):
        done = command(*arguments, path=(tmp_path / "site", ROOT), cwd=tmp_path)
        assert done.returncode == 0 and ("--quick" if "doctor" in arguments else "doctor") in done.stdout, done.stderr
        assert "theirs" not in done.stdout and "own_tool" not in done.stdout


def test_no_text_says_to_run_a_command_by_its_module():
    # `python -m hpo` runs the user's own `hpo.py`. Modules that have no command, such as studies.speed, may be named.
    by_module = re.compile(r"python3? -m (?:hpo|benchmark)(?![.\w])")
    texts = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "Makefile", ROOT / "results" / "README.md"]
    for folder in ("fs_lowrank", "hpo", "benchmark", "docs", "examples"):
        texts += [p for kind in ("py", "md", "yaml", "ipynb") for p in (ROOT / folder).rglob(f"*.{kind}")]
    assert [str(path) for path in texts if by_module.search(path.read_text(encoding="utf-8"))] == []
