"""``checksums.json``: the SHA-256 of files in the folder beside it, by their names, in the order of these.

The folder of a run has one from its end on, until it is resumed, of the files that are read back of a finished run; and
the folder of a best round has one (``best``). Folders that versions before 0.2.0 wrote have none, and no file is
checked in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import DamagedFile
from ..jobs.files import file_digest, from_json, write_text

FILE = "checksums.json"
#: the folders that may be stored of a round, and are saved of the last one
KINDS = ("adapter", "model")
#: the files and folders of a finished run that are checked when they are read back
CONTENTS = (
    *("config.yaml", "lowrank.yaml", "summary.json", "rounds.jsonl", "environment.json", "data.json", "rows.npz"),
    *(place for kind in KINDS for place in (kind, f"{kind}_best")),
    "personal",
)


def seal(folder: Path) -> None:
    """Note the checksums of a run that has ended, or of a best round, in ``folder``.

    Model cards, into which people write, are left out.

    Raises:
        RunFailed: they cannot be written.
    """
    files = [path for place in CONTENTS for path in ((folder / place), *(folder / place).rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files if path.name != "README.md"}
    write_text(folder / FILE, json.dumps({name: file_digest(names[name]) for name in sorted(names)}, indent=1))


def unseal(folder: Path) -> None:
    """Remove the checksums, before files are written anew."""
    (folder / FILE).unlink(missing_ok=True)


def damaged(folder: Path, places: Iterable[str] | None = None) -> tuple[Path, str] | None:
    """The first file of ``folder`` that is not as it was when ``seal`` was called, and why; None if there is none.

    Args:
        places: only these are looked at, and one that is missing is damaged.
    """
    sums, path = folder / FILE, folder / FILE
    if not sums.exists() and not sums.is_symlink():
        return None
    names = None if places is None else {*places}
    try:
        for name, expected in from_json(sums.read_bytes()).items():
            if names is None or name.partition("/")[0] in names:
                path = folder / name
                if file_digest(path) != expected:
                    raise ValueError("its checksum does not match")
    except (OSError, ValueError) as error:
        return path, "it is missing" if isinstance(error, FileNotFoundError) else str(error).split(": '")[0]
    return None


def check_finished(folder: Path, places: Iterable[str], remedy: str = "") -> None:
    """Check the files and folders among ``places`` that a finished run had when it ended.

    Args:
        remedy: for the message, how to go on without them.
    Raises:
        DamagedFile: one differs from the run's, or the list of checksums is damaged; says how to go on.
    """
    if damage := damaged(folder, places):
        file, reason = damage
        advice = (
            "put back the file as it was, or run it again with resume=True (fs-lowrank run --cfg FILE --resume), which "
            f"writes its files anew from its checkpoint; if it was changed on purpose, remove {folder / FILE}, without "
            "which nothing is compared"
        )
        raise DamagedFile(f"{file} differs from the file that the run wrote ({reason}); {remedy or advice}")
