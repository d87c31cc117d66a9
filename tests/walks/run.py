"""Builds the wheel, installs it into a folder, and runs the walks, each in an empty folder.

    python tests/walks/run.py [WALK…]

The libraries that the package stands on are those of the Python that runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WALKS = ("own_csv", "own_instructions", "own_model", "own_method", "own_suite", "own_search")


def install(folder: Path) -> Path:
    """The wheel of this tree, unpacked with its commands, in ``folder``."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), "build", "--build-base"]
    command += [str(folder / "build"), "bdist_wheel", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    start = site / "bin" / "fs-lowrank"
    start.parent.mkdir()
    start.write_text(f"#!{sys.executable}\nimport sys\nfrom fs_lowrank.cli import main\nsys.exit(main())\n")
    start.chmod(0o755)
    return site


def main() -> int:
    wanted = sys.argv[1:] or list(WALKS)
    unknown = [name for name in wanted if name not in WALKS]
    if unknown:
        print(f"error: no walk {unknown[0]!r}; there are: {', '.join(WALKS)}", file=sys.stderr)
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        site = install(Path(folder))
        environment = {
            **os.environ,
            "PATH": f"{site / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # The tools of the walks come after the package, and this tree is not on the path.
            "PYTHONPATH": f"{site}{os.pathsep}{HERE}",
            "FS_LOWRANK_HOME": str(Path(folder) / "home"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        for name in wanted:
            print(f"== {name}", flush=True)
            place = Path(folder) / name
            place.mkdir()
            if subprocess.run([sys.executable, str(HERE / f"{name}.py")], cwd=place, env=environment).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(wanted)} walks, none failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
