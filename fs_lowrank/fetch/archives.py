"""Extraction of files from archives: from wheels and other zip files, from tar files, and from Debian packages."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from fs_lowrank.errors import UserError


def extract(archive: Path, files: Iterable[str], target: Path) -> None:
    """Extract ``files`` into ``target``, without their folders; a name that ends with ``/`` means all below it.

    Args:
        archive: already compared with its SHA-256, or checked by apt.
    Raises:
        UserError: a damaged archive or a missing file.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        if archive.suffix == ".deb":
            _unpack_deb(archive, folder)
        else:
            shutil.unpack_archive(archive, folder, "zip" if zipfile.is_zipfile(archive) else "gztar")
        for name in files:
            path = Path(folder, name)
            if not path.exists():
                raise UserError(f"{archive.name} lacks {name!r}")
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            else:
                shutil.copy(path, target)


def _unpack_deb(archive: Path, folder: str) -> None:
    process = subprocess.run(["dpkg-deb", "--extract", archive, folder], capture_output=True, check=False)
    if process.returncode:
        message = process.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise UserError(f"{archive.name}: not a Debian package, or damaged: {message[-1]}")
