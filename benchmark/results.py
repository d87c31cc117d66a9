"""Results by experiment, method and setting, with mean and spread over seeds, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fs_lowrank import Gathering, create_method, list_methods
from fs_lowrank.runs.summary import human_bytes

from .claims import Spread, paired_noise, spread
from .plan import Cell, Options, Search, jobs_of, settings
from .store import Store
from .suite import Experiment, Suite

#: endings of metrics that are better when smaller
_LOWER = ("loss", "perplexity", "bits_per_byte", "brier_score", "unparsed", "_stderr")
_BYTES = ("uplink", "downlink", "uplink_without_head", "downlink_without_head")


@dataclass
class ExperimentResults:
    """The results of one experiment.

    Attributes:
        records: (method, column) -> one result per seed. columns: the settings with results, in order.
        searches: results of searches. failed: failures. wanted: number of cells in the grid. stale: results of searches
            and cells from earlier revisions of a method, which are not in ``records`` and ``searches``.
    """

    suite: Suite
    experiment: Experiment
    records: dict[tuple[str, str], list[dict]] = field(default_factory=dict)
    searches: list[dict] = field(default_factory=list)
    failed: list[dict] = field(default_factory=list)
    stale: list[dict] = field(default_factory=list)
    wanted: int = 0

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.records))

    @property
    def columns(self) -> list[str]:
        order = [" / ".join(s.values()) for s in settings(self.experiment)]
        there = {column for _, column in self.records}
        return [c for c in order if c in there]

    @property
    def fullest(self) -> str | None:
        """The first setting that has all methods, else the first setting; None without results."""
        whole = (c for c in self.columns if all((m, c) in self.records for m in self.methods))
        return next(whole, self.columns[0] if self.columns else None)

    @property
    def all_records(self) -> list[dict]:
        return [record for records in self.records.values() for record in records]

    @property
    def cells(self) -> int:
        return len(self.all_records)

    @property
    def has_any(self) -> bool:
        return bool(self.cells or self.failed or self.searches or self.stale)

    def figure(self, method: str, column: str, metric: str) -> Spread | None:
        """None if no seed has the metric, or if a seed did not reach the target of ``bytes_to`` or ``rounds_to``.

        The mean of the other seeds would favour a method that rarely reaches the target.
        """
        values = {r["seed"]: value(r, metric) for r in self.records.get((method, column), ())}
        if _to_a_target(metric) and None in values.values():
            return None
        return spread({seed: v for seed, v in values.items() if v is not None})

    def cell(self, method: str, column: str, metric: str) -> str:
        """The figure as text for a table."""
        records, found = self.records.get((method, column), ()), self.figure(method, column, metric)
        if found is None and records and _to_a_target(metric):
            reached = sum(value(r, metric) is not None for r in records)
            return f"reached by {reached} of {len(records)}" if reached else "not reached"
        return shown(found, metric)

    def error(self, method: str, column: str, metric: str) -> float | None:
        """The standard error from the scorer, if there is only one seed."""
        records = self.records.get((method, column), ())
        return value(records[0], f"{metric}_stderr") if len(records) == 1 and metric.count(":") > 1 else None

    def look(self, method: str, labels: Mapping[str, str], metric: str) -> Spread | None:
        """The figure at these labels; None unless they determine one setting."""
        fitting = [s for s in settings(self.experiment) if all(s.get(k) == v for k, v in labels.items())]
        return self.figure(method, " / ".join(fitting[0].values()), metric) if len(fitting) == 1 else None


def find(suite: Suite, experiment: Experiment, options: Options, store: Store) -> ExperimentResults:
    """All results of an experiment, including those of methods that were given by ``--methods``."""
    found = ExperimentResults(suite, experiment)
    searches: dict[str, dict] = {}
    jobs = jobs_of(suite, experiment, options)
    if not (experiment.script or options.methods or experiment.every_method):
        known = [e.label for e in experiment.methods]
        there = store.methods.get((suite.name, suite.size, experiment.name), set())
        if others := sorted(there - set(known) & set(list_methods())):
            jobs = jobs_of(suite, experiment, replace(options, methods=(*known, *others)))
    for job in jobs:
        if isinstance(job, Search):
            if record := job.result(store):
                searches[job.key] = record
            elif failed := store.read("failed", job.key):
                found.failed.append(failed)
            elif stale := job.stale(store):
                found.stale.append(stale)
            continue
        now = job.rated(store) or job
        record = now.result(store)
        if record is not None:
            column = job.column if isinstance(job, Cell) else ""
            label = job.method.label if isinstance(job, Cell) else record["method"]
            found.records.setdefault((label, column), []).append(
                {**record, "setting": dict(getattr(job, "setting", {}))}
            )
        elif failed := store.read("failed", now.key):
            found.failed.append(failed)
        elif stale := now.stale(store):
            found.stale.append(stale)
        found.wanted += record is not None or not (isinstance(job, Cell) and job.method.extra)
    found.searches = list(searches.values())
    return found


# -- metrics -------------------------------------------------------------------------------------------


def value(record: Mapping, metric: str) -> float | None:
    """The value of a metric in a result; None if it has none.

    ``test_acc`` and the like; ``uplink`` … ``downlink_without_head`` and ``traffic`` (both directions), bytes per
    client and round; ``formula``, the papers' estimate of ``traffic``, twice what goes up; ``aggregation``,
    ``training``, ``memory``; ``bytes_to:val_acc:0.7``, all bytes until a value is reached; ``SCORER:TASK:METRIC``.
    """
    kind, _, rest = metric.partition(":")
    if metric in record["metrics"]:
        return record["metrics"][metric]
    sent = record.get("bytes", {}).get("per_client_and_round", {})
    if metric in _BYTES:
        return sent.get(metric)
    if kind.startswith("traffic"):
        bare = metric.removeprefix("traffic")
        return sent[f"uplink{bare}"] + sent[f"downlink{bare}"] if sent else None
    if metric == "formula":
        return 2 * sent["uplink"] if sent else None
    if metric == "majority":
        return record.get("majority")
    if metric == "memory":
        return record.get("peak_memory_bytes", {}).get("host")
    if metric in ("aggregation", "training"):
        return record.get("seconds", {}).get({"aggregation": "aggregation_median"}.get(metric, metric))
    if kind in ("bytes_to", "rounds_to"):
        name, _, target = rest.partition(":")
        return _reaches(record["history"]["evaluated"], name, float(target), kind == "rounds_to")
    task, _, name = rest.rpartition(":")
    found = record.get("scores", {}).get(kind, {}).get(task, {}).get(name)
    return found if isinstance(found, (int, float)) else None


def _reaches(points: Sequence[Mapping], name: str, target: float, rounds: bool) -> float | None:
    for point in points:
        if name in point and (point[name] <= target if name.endswith("loss") else point[name] >= target):
            return point["round"] if rounds else point["uplink"] + point["downlink"]
    return None


def head_of(record: Mapping) -> str:
    """A description of how the method treats a new head."""
    sent = record["bytes"]["per_client_and_round"]
    if sent["uplink"] <= sent["uplink_without_head"]:
        return "none is sent"
    name = record["config"]["federate.method"]
    method = create_method(name) if name in list_methods() else None
    if isinstance(method, Gathering) and "head" not in method.averaged:
        return "trained, sent and combined as the other layers are"
    return "trained, sent and averaged"


def _to_a_target(metric: str) -> bool:
    return metric.partition(":")[0] in ("bytes_to", "rounds_to")


def shown(found: Spread | None, metric: str) -> str:
    """Mean ± standard deviation in the unit of the metric; ``–`` for none."""
    if found is None:
        return "–"
    scale, digits = scale_of(metric)
    if scale == 0:
        return human_bytes(found.mean) + (f" ± {human_bytes(found.std)}" if found.std else "")
    text = f"{found.mean * scale:.{digits}f}"
    return text + (f" ± {found.std * scale:.{digits}f}" if found.std is not None else "")


def scale_of(metric: str) -> tuple[float, int]:
    """The factor on a figure and its number of digits; 0 for bytes."""
    name = metric.rpartition(":")[2]
    of_bytes = ("uplink", "downlink", "traffic", "formula", "memory")
    if metric.startswith("bytes_to") or metric.partition("_")[0] in of_bytes:
        return 0, 0
    if metric.startswith("rounds_to"):
        return 1, 0
    if metric == "aggregation":
        return 1000, 2
    accuracy = "acc" in name or "exact_match" in name or "pass@" in name
    return (100, 2) if accuracy else (1, 3)


def title_of(metric: str) -> str:
    """A description of the metric, with its unit."""
    kind, _, rest = metric.partition(":")
    words = {
        "test_acc": "test accuracy, %",
        "test_loss": "test loss",
        "val_acc": "validation accuracy, %",
        "client_test_acc": "accuracy of the clients' own models on their test shares, %",
        "test_acc_last5": "test accuracy, mean of the last five evaluations, %",
        "uplink": "sent up, per client and round",
        "downlink": "sent down, per client and round",
        "uplink_without_head": "sent up without the head, per client and round",
        "downlink_without_head": "sent down without the head, per client and round",
        "traffic": "both directions, per client and round",
        "formula": "both directions by the papers' formula, 2 × up",
        "traffic_without_head": "both directions without the head, per client and round",
        "aggregation": "server aggregation, median of a round, ms",
        "memory": "peak memory",
    }
    if kind in ("bytes_to", "rounds_to"):
        name, _, target = rest.partition(":")
        what = "all bytes, both directions" if kind == "bytes_to" else "rounds"
        return f"{what}, until {name} is {target}"
    return words.get(metric, metric.replace("_", " "))


def best_of(row: Mapping[str, Spread | None], metric: str) -> str | None:
    """The method that is better than every other by more than the spread; None if there is none or it is unknown."""
    there = {name: found for name, found in row.items() if found is not None}
    if len(there) < 2 or any(found.std is None for found in there.values()):
        return None
    lower = (
        scale_of(metric)[0] == 0
        or metric in ("aggregation", "training")
        or metric.startswith("rounds_to")
        or metric.rpartition(":")[2].endswith(_LOWER)
    )
    ranked = sorted(there, key=lambda n: there[n].mean, reverse=not lower)
    first = there[ranked[0]]
    ahead = all(abs(first.mean - there[n].mean) > paired_noise(first, there[n]) for n in ranked[1:])
    return ranked[0] if ahead else None
