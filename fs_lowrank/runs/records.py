"""``rounds.jsonl``: one JSON object a round."""

from __future__ import annotations

import json
from pathlib import Path

from ..jobs.files import write_text


class Records:
    """The records of a run, on disk and in memory.

    Args:
        path: the file; created with its folder. keep: records of an interrupted run to go on from.
    """

    def __init__(self, path: Path, keep: list[dict] | None = None):
        self.path = path
        self.history: list[dict] = list(keep or [])
        write_text(path, "".join(json.dumps(r) + "\n" for r in self.history))

    def add(self, record: dict) -> None:
        line = json.dumps(record)
        with self.path.open("a") as file:
            file.write(line + "\n")
        # As a resumed run reads it, so that both hold the same history.
        self.history.append(json.loads(line))


def read_records(path: Path, up_to: int) -> list[dict]:
    """The records of rounds 1 … ``up_to``; a line cut short by a crash is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["round"] <= up_to:
            records.append(record)
    return records
