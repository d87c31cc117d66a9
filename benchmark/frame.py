"""All results as one table, which the report writes as ``results.csv``: a line for each cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .metrics import BYTES
from .results import measurements
from .store import Store

_FIRST = ("hash", "suite", "size", "experiment", "method", "setting", "seed", "engine")
#: numbers of a scorer that are no metrics
_DETAILS = ("n", "version", "num_fewshot")


def frame(store: Store) -> pd.DataFrame:
    """A row for each result of a cell or a script; a metric is a column, of a scorer as ``SCORER:TASK:METRIC``."""
    rows = pd.DataFrame([row(record) for record in store.all("cells")])
    return rows.sort_values([*_FIRST[1:], "hash"], ignore_index=True) if len(rows) else rows


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    measured = measurements(record)
    scores = {
        f"{scorer}:{task}:{name}": value
        for scorer, tasks in record.get("scores", {}).items()
        for task, values in tasks.items()
        for name, value in values.items()
        if isinstance(value, (int, float)) and name not in _DETAILS and not name.endswith("_stderr")
    }
    return {
        **{name: record.get(name) for name in _FIRST},
        "setting": "; ".join(f"{axis} {label}" for axis, label in record.get("setting", {}).items()),
        "rate": record.get("learning_rate", {}).get("point", {}).get("train.optimizer.lr"),
        **{name: record.get(name) for name in ("rounds", "samples")},
        **{name: measured[name] for name in ("majority", *BYTES, "aggregation", "training", "memory")},
        "version": record.get("versions", {}).get("fs-lowrank"),
        "commit": record.get("commit"),
        "processor": record.get("machine", {}).get("processor"),
        **record.get("metrics", {}),
        **scores,
    }
