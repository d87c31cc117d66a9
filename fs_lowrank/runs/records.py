"""``rounds.jsonl``: one JSON object per round."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CannotContinue
from ..jobs.files import from_json, sync, to_json, write_text, writing

logger = logging.getLogger("fs_lowrank")

Record = dict[str, Any]


def flat_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The ``metrics`` of a round, by split and name, by ``SPLIT_NAME``; those of single clients are left out."""
    return {f"{split}_{n}": value for split, values in metrics.items() for n, value in values.items() if n != "clients"}


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file, in UTF-8; it is on the disk when this returns.

    Raises:
        RunFailed: it cannot be written.
    """
    with writing(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        sync(path)


class Records:
    """The records of a run, on disk and in memory.

    Args:
        path: the file; created with its folder.
        keep: records of the interrupted run that is continued.
    Attributes:
        history: the records. A metric that is not finite is NaN; in the file it is null, as JSON has no word for it.
        digests: of each record's line; a checkpoint keeps them, and ``read_records`` compares.
    """

    def __init__(self, path: Path, keep: Sequence[Record] = ()):
        self.path, self.history = path, list(keep)
        lines = [to_json(record) for record in keep]
        self.digests = [_digest(line) for line in lines]
        write_text(path, "".join(line + "\n" for line in lines))

    def add(self, record: Record) -> None:
        """Append a record; it is on the disk when this returns.

        Raises:
            RunFailed: it cannot be written.
        """
        line = to_json(record)
        append_line(self.path, line)
        self.digests.append(_digest(line))
        self.history.append(_parsed(line))  # so that the history is the same as in a resumed run


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:12]


def _parsed(line: str | bytes) -> Record:
    record: Record = from_json(line)
    if record.get("loss", 0.0) is None:  # of a round that was left out before anybody trained
        record["loss"] = math.nan
    for values in (*record["metrics"].values(), *record.get("client_scores", {}).values()):
        values.update({name: math.nan for name, value in values.items() if value is None})
    return record


def read_records(path: Path, up_to: int, digests: Sequence[str] = ()) -> list[Record]:
    """The records of rounds 1 … ``up_to``; none if there is no file.

    A last line without its end was cut by a crash or a full disk: it is left out, with a warning.

    Args:
        digests: of the first lines, as ``Records`` has them; without them, changed figures are not noticed.
    Raises:
        CannotContinue: a line is not a record of a round, or not the one that was written; names file and line.
    """
    records: list[Record] = []
    *lines, tail = path.read_bytes().split(b"\n") if path.exists() else [b""]
    remedy = "restore the file, or start the run anew with overwrite=True or in another outdir"
    for number, line in enumerate([*lines, tail] if tail else lines, start=1):
        try:
            record = _parsed(line)
            included = record["round"] <= up_to
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number > len(lines):
                logger.warning("%s: line %d was cut off while it was written; it is left out", path, number)
                break
            reason = f"{type(error).__name__}: {error}"[:200]
            raise CannotContinue(
                f"{path}, line {number}: expected the record of a round ({reason}); {remedy}"
            ) from None
        if number <= len(digests) and hashlib.sha256(line).hexdigest()[:12] != digests[number - 1]:
            problem = f"the record of round {record['round']} is not what the run wrote there"
            raise CannotContinue(f"{path}, line {number}: {problem}; {remedy}")
        if included:
            records.append(record)
    return records
