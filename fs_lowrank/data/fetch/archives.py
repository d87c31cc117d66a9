"""Extraction of files from archives: those of wheels and other zip files, of tar files, and of Debian packages."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from fs_lowrank.errors import UserError


def extract(archive: Path, files: Iterable[str], target: Path) -> None:
    """Extract ``files`` into ``target``, without their folders; of a name that ends with ``/``, all that is below it.

    Raises:
        UserError: a damaged archive or a missing file, or one that would be written outside ``target``.
    """
    there, opened = _read_deb(archive) if archive.suffix == ".deb" else _read(archive)
    for wanted in files:
        names = [name for name in there if name == wanted or wanted.endswith("/") and name.startswith(wanted)]
        if not names:
            raise UserError(f"{archive.name} lacks {wanted!r}")
        for name in names:
            out = target / name[wanted.rfind("/") + 1 :]
            if not out.resolve().is_relative_to(target.resolve()):
                raise UserError(
                    f"{archive.name}: refusing the entry {name!r}, which would be written outside the folder"
                )
            out.parent.mkdir(parents=True, exist_ok=True)
            with opened(name) as source, out.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _read(archive: Path, content: IO[bytes] | None = None) -> tuple[list[str], Callable[[str], Any]]:
    """The names of the files in a zip or tar file, and what opens one of them."""
    if content is None and zipfile.is_zipfile(archive):
        whole = zipfile.ZipFile(archive)
        return [name for name in whole.namelist() if not name.endswith("/")], whole.open
    bundle = tarfile.open(archive, fileobj=content)
    members = {member.name.removeprefix("./"): member for member in bundle.getmembers() if member.isfile()}
    return list(members), lambda name: bundle.extractfile(members[name])


def _read_deb(archive: Path) -> tuple[list[str], Callable[[str], Any]]:
    unpacked = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=False)
    if unpacked.returncode:
        message = unpacked.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise UserError(f"{archive.name}: not a Debian package, or damaged: {message[-1]}")
    return _read(archive, io.BytesIO(unpacked.stdout))
