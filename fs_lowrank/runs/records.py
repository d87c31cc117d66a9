"""``rounds.jsonl``: one JSON object per round."""

from __future__ import annotations

import json
from pathlib import Path

from ..jobs.files import write_text


class Records:
    """The records of a run, on disk and in memory.

    Args:
        path: the file; created with its folder. keep: records of the interrupted run that is continued.
    """

    def __init__(self, path: Path, keep: list[dict] | None = None):
        self.path = path
        self.history: list[dict] = list(keep or [])
        write_text(path, "".join(json.dumps(r) + "\n" for r in self.history))

    def add(self, record: dict) -> None:
        line = json.dumps(record)
        with self.path.open("a") as file:
            file.write(line + "\n")
        # Parsed again, so that the history is the same as in a resumed run.
        self.history.append(json.loads(line))


def read_records(path: Path, up_to: int) -> list[dict]:
    """The records of rounds 1 … ``up_to``, without a line truncated by a crash."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["round"] <= up_to:
            records.append(record)
    return records
