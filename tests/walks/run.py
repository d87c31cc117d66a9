"""Builds the wheel, installs it into an environment, and runs the walks there, each in an empty folder.

    python tests/walks/run.py [WALK…] [--jobs N]

The libraries that the package stands on are those of the Python that runs this.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: walk -> its script and arguments, the longest first, so that two at a time end together
WALKS = {
    **{name: (f"{name}.py",) for name in ("first_hour", "own_search", "own_csv", "own_suite")},
    **{page.stem: ("tutorial.py", page) for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))},
}
#: walks that install a package of the user's; each has an environment of its own
INSTALL = ("new_method",)
# `make flower-slow` walks through this one, and the framework is needed for the other
del WALKS["three_sites"]
if "FEDERATEDSCOPE_ROOT" not in os.environ:
    del WALKS["plug_in"]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-python-version-warning")


def build(folder: Path) -> Path:
    """The wheel of this tree; nothing is left in the tree."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), "build", "--build-base"]
    command += [str(folder / "build"), "bdist_wheel", "--dist-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the wheel was not built:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *options: str) -> None:
    """A virtual environment in ``folder`` with the wheel, by ``options`` of pip, and this Python's libraries."""
    venv.create(folder, with_pip=False)
    (place,) = folder.glob("lib/python*/site-packages")
    libraries = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    # The lines of a file .pth are added to the path. Files .pth in there, as of an editable install, are not read.
    (place / "libraries.pth").write_text("\n".join(libraries or site.getsitepackages()) + "\n")
    command = [*PIP, "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--ignore-installed", *options, str(wheel)], check=True)


def walk(name: str, wheel: Path, folder: Path, threads: int) -> tuple[bool, str]:
    """Run one walk; returns whether it passed, and what it printed."""
    installed, place = folder / "environment", folder / name / "empty"
    if name in INSTALL:
        install(wheel, installed := folder / name / "environment")
    place.mkdir(parents=True)
    environment = {
        **os.environ,
        "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),  # the tools of the walks; this tree is not on the path
        "PYTHONUNBUFFERED": "1",
        "FS_LOWRANK_HOME": str(folder / name / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        # What `pip install .` of a user's package needs is here, and no index is asked.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    begun = time.monotonic()
    script, *arguments = WALKS[name]
    command = [str(installed / "bin" / "python"), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.monotonic() - begun
    return not done.returncode, f"== {name}: {seconds:.0f} s\n{done.stdout}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"default: {' '.join(WALKS)}")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="walks at a time")
    args = parser.parse_args()
    wanted = args.walks or list(WALKS)
    unknown = [name for name in wanted if name not in WALKS]
    if unknown:
        parser.error(f"no walk {unknown[0]!r}; there are: {', '.join(WALKS)}")
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    failed = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(temporary)
        wheel = build(folder)
        install(wheel, folder / "environment")
        for name, (passed, printed) in zip(wanted, pool.map(lambda n: walk(n, wheel, folder, threads), wanted)):
            print(printed, flush=True)
            failed += [] if passed else [name]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(wanted)} walks, none failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
