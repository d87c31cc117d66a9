"""Extraction of files from archives. Entries that would be written outside the folder are refused."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from fs_lowrank.errors import UserError


def undeb(archive: Path, target: Path, names: tuple[str, ...]) -> None:
    """Extract the files ``names`` of a Debian package into ``target``, without their folders, with ``dpkg-deb``.

    Raises:
        UserError: not a Debian package, or a missing file.
    """
    unpacked = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=False)
    if unpacked.returncode:
        message = unpacked.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise UserError(f"{archive.name}: not a Debian package, or damaged: {message[-1]}")
    with tarfile.open(fileobj=io.BytesIO(unpacked.stdout)) as bundle:
        members = {member.name.removeprefix("./"): member for member in bundle.getmembers()}
        for name in names:
            source = bundle.extractfile(members[name]) if name in members else None
            if source is None:
                raise UserError(f"{archive.name} lacks {name!r}")
            (target / PurePosixPath(name).name).write_bytes(source.read())


def _safe(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in path.parts[0]:
        raise UserError(f"{archive.name}: refusing the entry {name!r}, which would be written outside the folder")
    return path


def unzip(archive: Path, target: Path, prefix: str = "") -> list[Path]:
    """Extract the files under ``prefix`` of a zip file into ``target``, without the prefix.

    Raises:
        UserError: an entry would be written outside ``target``, or no file is under ``prefix``.
    """
    written = []
    with zipfile.ZipFile(archive) as bundle:
        for info in bundle.infolist():
            path = _safe(info.filename, archive)
            if info.is_dir() or not info.filename.startswith(prefix):
                continue
            out = target / path.relative_to(prefix) if prefix.endswith("/") else target / path.name
            out.parent.mkdir(parents=True, exist_ok=True)
            with bundle.open(info) as source, out.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            written.append(out)
    if not written:
        raise UserError(f"{archive.name} holds no file under {prefix!r}")
    return written


def untar(archive: Path, target: Path, names: tuple[str, ...] | None = None) -> None:
    """Extract ``names`` (all if None) of a tar file under ``target``.

    Raises:
        UserError: an entry would be written outside ``target``, or a file is missing.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as bundle:
        members = {member.name: member for member in bundle.getmembers()}
        missing = [name for name in names or () if name not in members]
        if missing:
            raise UserError(f"{archive.name} lacks {missing[0]!r}")
        try:
            bundle.extractall(target, members=[members[n] for n in names or members], filter="data")
        except tarfile.FilterError as error:
            raise UserError(f"{archive.name}: refusing an entry: {error}") from error
