"""Results on disk: one JSON a cell, written aside and renamed, with a checksum; and who works on what.

``RESULTS/cells/HASH.json`` is finished, ``failed/HASH.json`` is not and says why, ``searches/HASH.json`` is a search
of learning rates. In the work folder ``claims/HASH.lock`` is locked by the process that works on it, so the lock of a
process that died is free again, and ``HASH.json`` beside it says how far that process is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from fs_lowrank.jobs.files import write_text
from fs_lowrank.jobs.locks import claimed
from fs_lowrank.versions import SCHEMA, NewerSchema, check_schema

KINDS = ("cells", "failed", "searches")


def digest(content: object) -> str:
    """12 hex digits over plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """The results below ``results`` and the claims below ``work``."""

    def __init__(self, results: Path, work: Path):
        self.results, self.work = Path(results), Path(work)
        #: files that could not be used -> why
        self.damaged: dict[str, str] = {}

    def path(self, kind: str, key: str) -> Path:
        return self.results / kind / f"{key}.json"

    def read(self, kind: str, key: str) -> dict | None:
        """The result; None where there is none, or where its file is damaged (then it is in ``damaged``).

        Raises:
            NewerSchema: a newer version of fs-lowrank wrote it.
        """
        path = self.path(kind, key)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(record, dict) or "hash" not in record:
                raise ValueError("it holds no result")
            if record.pop("sha256", "") != digest(record):
                raise ValueError("its checksum does not match; it was cut short or changed by hand")
            if record["hash"] != key:
                raise ValueError(f"it is the result of {record['hash']}")
            check_schema(record, path)
            record.pop("schema", None)
        except FileNotFoundError:
            return None
        except NewerSchema:  # it is good, and taken as missing it would be written over
            raise
        except (OSError, ValueError) as error:
            self.damaged[str(path)] = str(error)
            return None
        return record

    def all(self, kind: str) -> list[dict]:
        """Every result of a kind that can be read."""
        paths = sorted((self.results / kind).glob("*.json"))
        return [record for path in paths if (record := self.read(kind, path.stem))]

    @cached_property
    def methods(self) -> dict[tuple[str, str, str], set[str]]:
        """The methods that have cells, by suite, size and experiment; read once."""
        found: dict[tuple[str, str, str], set[str]] = {}
        for r in self.all("cells"):
            found.setdefault((r["suite"], r["size"], r["experiment"]), set()).add(r["method"])
        return found

    def write(self, kind: str, record: Mapping) -> Path:
        """Write a result under its ``hash``; a finished one takes the place of a failed one.

        Raises:
            RunFailed: it cannot be written, a full disk perhaps; what was there is as it was.
        """
        path = self.path(kind, record["hash"])
        content = {"schema": SCHEMA, **json.loads(json.dumps(record))}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in {**content, "sha256": digest(content)}.items()]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
        if kind != "failed":
            self.forget_failure(record["hash"])
        return path

    def forget_failure(self, key: str) -> None:
        self.path("failed", key).unlink(missing_ok=True)

    # -- claims --------------------------------------------------------------------------------------

    def _claim_file(self, key: str, suffix: str) -> Path:
        return self.work / "claims" / f"{key}.{suffix}"

    def claim(self, key: str) -> AbstractContextManager[bool]:
        """Whether ``key`` is ours alone; it is as long as the block runs."""
        return claimed(self._claim_file(key, "lock"))

    def mark(self, key: str, content: Mapping) -> None:
        """Say how far the work on ``key`` is."""
        write_text(self._claim_file(key, "json"), json.dumps(content), durable=False)

    def marked(self, key: str) -> dict | None:
        """What was last said of ``key``; left behind by a process that died."""
        try:
            return json.loads(self._claim_file(key, "json").read_text())
        except (OSError, ValueError):
            return None

    def unmark(self, key: str) -> None:
        self._claim_file(key, "json").unlink(missing_ok=True)
