"""Downloads by the client programs of package managers, npm and apt-get, from their configured sources."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fs_lowrank.errors import UserError
from fs_lowrank.fetch.items import Item

CLIENT_SECONDS = 300  # for one run of npm or apt-get

#: registry -> a command that runs no scripts, the file that it writes, and what to do if it is missing, and if it fails
_CLIENTS = {
    "npm": (
        "npm pack {package}@{version} --ignore-scripts --silent",
        "{filename}",
        "{package!r} is an npm package and npm is not installed: install Node.js (which brings npm), "
        "or put the files of {filename} where your config can name them",
        "check the network",
    ),
    "debian": (
        "apt-get download {package}",
        "{package}_*.deb",
        "{package!r} is a Debian package and apt-get is not installed; put the files where data.root can "
        "name them, or get them on a machine with Debian or Ubuntu",
        "run apt-get update, or check the network",
    ),
}


def download(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the archive of ``item`` to ``folder`` by the client of its registry; apt checks the archive."""
    command, pattern, absent, remedy = (text.format(**vars(item)) for text in _CLIENTS[item.registry])
    name, verb, package, *options = command.split()
    program, label = shutil.which(name), f"{name} {verb}"
    if program is None:
        raise UserError(absent)
    progress(f"{package}: running {label}, at most {CLIENT_SECONDS:g} s")
    try:
        process = subprocess.run(
            [program, verb, package, *options],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{package}: {label} did not end within {CLIENT_SECONDS:g} s; {remedy}") from error
    files = sorted(folder.glob(pattern))
    if process.returncode or not files:
        output = ((process.stderr or process.stdout).strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"{package}: {label} ended with status {process.returncode} and said: {output}; {remedy}")
    return files[0]
