"""Results on disk: one JSON file for each job, replaced atomically, with a checksum; and the locks of running jobs.

``RESULTS/cells/HASH.json`` is the result of a cell or a script, ``searches/HASH.json`` that of a search of learning
rates, ``failed/HASH.json`` the reason why a job failed, ``superseded/HASH.json`` the result of a cell of which there is
one by a later revision of its method. The command that has a job run holds the lock ``WORK/claims/HASH.lock``, which
is released when its process ends, and alone writes the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from filelock import FileLock

from fs_lowrank.jobs.files import read_json, write_text
from fs_lowrank.jobs.locks import take
from fs_lowrank.versions import SCHEMA, NewerSchema, check_schema


def digest(content: object) -> str:
    """The first 12 hex digits of the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """The results below the folder ``results``, and the locks of running jobs below ``work``."""

    def __init__(self, results: Path, work: Path):
        self.results, self.work = Path(results), Path(work)
        #: path of a damaged file -> reason
        self.damaged: dict[str, str] = {}

    def path(self, kind: str, key: str) -> Path:
        return self.results / kind / f"{key}.json"

    def read(self, kind: str, key: str) -> dict | None:
        """The result; None if there is none, or if its file is damaged, which ``damaged`` then says.

        Raises:
            NewerSchema: a newer version of fs-lowrank wrote it.
        """
        path = self.path(kind, key)
        try:
            record = read_json(path, missing=None, remedy="")
            if record is None:
                return None
            if record.pop("sha256", "") != digest(record):
                raise ValueError("its checksum does not match; it was cut short or changed by hand")
            if record.get("hash") != key:
                raise ValueError(f"it is the result of {record.get('hash', 'nothing')}")
            check_schema(record, path)
            record.pop("schema", None)
        except NewerSchema:  # an intact file: if it counted as missing, it would be overwritten
            raise
        except ValueError as error:
            self.damaged[str(path)] = str(error).removeprefix(f"{path} ")
            return None
        return record

    def all(self, kind: str) -> list[dict]:
        """All results of a kind that can be read."""
        paths = sorted((self.results / kind).glob("*.json"))
        return [record for path in paths if (record := self.read(kind, path.stem))]

    @cached_property
    def methods(self) -> dict[tuple[str, str, str], set[str]]:
        """(suite, size, experiment) -> the methods that have cells; read once."""
        methods: dict[tuple[str, str, str], set[str]] = {}
        for r in self.all("cells"):
            methods.setdefault((r["suite"], r["size"], r["experiment"]), set()).add(r["method"])
        return methods

    def write(self, kind: str, record: Mapping) -> Path:
        """Write a result under its ``hash``. The record of an earlier failure of the same job is removed.

        Raises:
            RunFailed: it cannot be written, for example because the disk is full; an older file is not changed.
        """
        path = self.path(kind, record["hash"])
        content = {"schema": SCHEMA, **json.loads(json.dumps(record))}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in {**content, "sha256": digest(content)}.items()]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
        if kind != "failed":
            self.forget_failure(record["hash"])
        return path

    def supersede(self, keys: Iterable[str]) -> None:
        """Put results of a cell aside, since there is one by a later revision of its method."""
        for path in (self.path("cells", key) for key in keys):
            if path.exists():
                self.path("superseded", "").parent.mkdir(exist_ok=True)
                path.replace(self.path("superseded", path.stem))

    def forget_failure(self, key: str) -> None:
        self.path("failed", key).unlink(missing_ok=True)

    def claim(self, key: str) -> FileLock | None:
        """The lock on the job ``key``, to be released; None if another command holds it."""
        return take(self.work / "claims" / f"{key}.lock")
