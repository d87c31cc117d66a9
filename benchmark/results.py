"""Results by experiment, method and setting, with mean and spread over seeds, for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fs_lowrank import Gathering, UserError, create_method, list_methods
from fs_lowrank.errors import DamagedFile
from fs_lowrank.jobs.files import file_digest, read_json
from fs_lowrank.runs.summary import human_bytes
from fs_lowrank.settings.metrics import LANGUAGE, larger_is_better

from .intervals import Figure, rows_of
from .job import Cell, Job, Options, Search, at_the_end
from .metrics import BYTES, scale_of, to_a_target
from .page import value_of
from .paths import quotients
from .plan import jobs_of, settings
from .samples import counted
from .store import Store
from .suite import Experiment, Suite

#: metrics that are counted, and have no spread over seeds that agree
_EXACT = (*BYTES, "traffic", "traffic_without_head", "formula", "majority")
#: metrics whose value for a model that learned nothing is the majority class
_ACCURACIES = ("test_acc", "val_acc", "client_test_acc")
#: a mean of equal accuracies is above them by rounding, by less than this
_ROUNDING = 1e-9


@dataclass
class ExperimentResults:
    """The results of one experiment.

    Attributes:
        records: (method, column) -> one result per seed. methods, columns: those that were run, also if all seeds have
            failed; the settings in order.
        searches: results of searches. failed: failures. wanted: number of cells in the grid. lost: (method, column) ->
            the seeds whose run failed. stale: (method, column) -> the seeds whose only result is of an earlier
            revision of the method. unmatched: method -> a sentence on its rate in a table, which no search of
            ``found_by`` has found.
    """

    suite: Suite
    experiment: Experiment
    records: dict[tuple[str, str], list[dict]] = field(default_factory=dict)
    searches: list[dict] = field(default_factory=list)
    failed: list[dict] = field(default_factory=list)
    lost: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    stale: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    wanted: int = 0

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in (*self.records, *self.lost)))

    @property
    def columns(self) -> list[str]:
        order = [" / ".join(s.values()) for s in settings(self.experiment)]
        available = {column for _, column in (*self.records, *self.lost)}
        return [c for c in order if c in available]

    @property
    def fullest(self) -> str | None:
        """The first setting that has all methods, else the first setting; None without results."""
        complete = (c for c in self.columns if all((m, c) in {**self.records, **self.lost} for m in self.methods))
        return next(complete, self.columns[0] if self.columns else None)

    @property
    def all_records(self) -> list[dict]:
        return [record for records in self.records.values() for record in records]

    @property
    def language(self) -> bool:
        """Whether a language model is trained."""
        return any(r.get("config", {}).get("model.task") in LANGUAGE for r in self.all_records[:1])

    @property
    def has_any(self) -> bool:
        return bool(self.records or self.failed or self.searches or self.stale)

    def figure(self, method: str, column: str, metric: str) -> Figure | None:
        """The figure at a setting; without a value if all seeds failed, missed their target or are stale, and None if
        there is no result.

        A seed that did not reach the target of ``bytes_to`` or ``rounds_to`` is ``missed``: the mean of the others
        favours a method that rarely does. A seed whose value is infinite or not a number has diverged, and counts as
        failed.
        """
        key = method, column
        records, by_seed = self.records.get(key, ()), self._by_seed(method, column, metric)
        values = {seed: v for seed, v in by_seed.items() if math.isfinite(v)}
        target = metric.split(":")[1] if to_a_target(metric) else None
        measured = [r for r in records if target and any(target in point for point in r["history"]["evaluated"])]
        missed = [r["seed"] for r in measured if value(r, metric) is None]
        failed, stale = self.lost.get(key, set()) | by_seed.keys() - values.keys(), self.stale.get(key, ())
        if not (values or failed or missed or stale):
            return None
        majority = [(m, values[r["seed"]]) for r in records if (m := _majority(r, metric)) and r["seed"] in values]
        return Figure(
            values,
            exact=metric in _EXACT and Figure(values).std == 0,
            collapsed=tuple(sorted(v for m, v in majority if v <= m + _ROUNDING)),
            majority=majority[0][0] if majority else None,
            failed=tuple(sorted(failed)),
            missed=tuple(sorted(missed)),
            stale=tuple(sorted(stale)),
            at_end=any(r.get("at_end") for r in records),
            splits={r["seed"]: r["data"]["fingerprint"] for r in records if _is_vision(r)},
            right={r["seed"]: rows_of(right) for r in records if (right := _right(r, metric))},
            versions=frozenset(r["versions"]["fs-lowrank"] for r in records if "versions" in r),
            processors=frozenset(r.get("machine", {}).get("processor", "") for r in records),
        )

    def has(self, method: str, column: str, metric: str) -> bool:
        """Whether a seed has a value."""
        figure = self.figure(method, column, metric)
        return figure is not None and figure.n > 0

    def _by_seed(self, method: str, column: str, metric: str) -> dict[int, float]:
        """The values of the seeds that have one, of a study those in its ``by_seed``."""
        records = self.records.get((method, column), ())
        values = {r["seed"]: v for r in records if (v := value(r, metric)) is not None}
        return next((r["by_seed"][metric] for r in records if metric in r.get("by_seed", {})), values)

    def cell(self, method: str, column: str, metric: str) -> str:
        """The figure as text for a table, that of a single run with the scorer's standard error."""
        figure = self.figure(method, column, metric)
        if figure is None:
            return "–"
        text, missed = figure_text(figure, metric), len(figure.missed)
        if missed:
            text = f"reached by {figure.n} of {figure.n + missed}" if figure.n else "not reached"
        counts = {"collapsed": len(figure.collapsed), "failed": len(figure.failed)}
        notes = ", ".join(f"{count} {label}" for label, count in counts.items() if count)
        records = self.records.get((method, column), ())
        error = _scored(records[0], f"{metric}_stderr") if len(records) == 1 else None
        spread = f" (s.e. {error * scale_of(metric)[0]:.2f})" if error is not None else ""
        return text + (f" ({notes})" if notes else "") + spread

    def look(self, method: str, labels: Mapping[str, str], metric: str) -> Figure | None:
        """The figure at these labels; None if they do not determine one setting."""
        column = self._column(labels)
        return None if column is None else self.figure(method, column, metric)

    def _column(self, labels: Mapping[str, str]) -> str | None:
        fitting = [s for s in settings(self.experiment) if all(s.get(k) == v for k, v in labels.items())]
        return " / ".join(fitting[0].values()) if len(fitting) == 1 else None

    def at(self, pairs: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[list[dict], int]:
        """The results of methods at labels, each once, and the number of runs that have failed."""
        keys = dict.fromkeys((method, self._column(labels) or "") for method, labels in pairs)
        records = {r["hash"]: r for key in keys for r in self.records.get(key, ())}
        return [*records.values()], sum(len(self.lost.get(key, ())) for key in keys)


def find(suite: Suite, experiment: Experiment, options: Options, store: Store) -> ExperimentResults:
    """All results of an experiment, including those of methods that were given by ``--methods``."""
    results = ExperimentResults(suite, experiment)
    searches: dict[str, dict] = {}
    at_end: dict[str, bool] = {}  # hash of a search -> whether a better rate may lie beyond
    jobs = jobs_of(suite, experiment, options)
    if not (experiment.script or options.methods):
        jobs += _extra_jobs(suite, experiment, options, store)
    for job in jobs:
        if isinstance(job, Search):
            if record := job.result(store):
                searches[job.key] = record
            elif failed := store.read("failed", job.key):
                results.failed.append(failed)
            continue
        rated = job.rated(store) or job
        record, failed, key = rated.result(store), store.read("failed", rated.key), (rated.method.label, rated.column)
        if failed and (record is None or failed["finished"] > record["finished"]):
            results.failed.append(failed)  # also a repetition, whose earlier result stays
        if record is not None:
            record = {**record, "setting": dict(rated.setting)}
            if isinstance(rated, Cell) and isinstance(job, Cell):
                record.update(counted(record, rated.config))
                source = _search_of(rated, job.search, store)
                if source is not None and source["hash"] not in at_end:
                    at_end[source["hash"]] = at_the_end(source)
                record.update(learning_rate=dict(rated.rate), at_end=source is not None and at_end[source["hash"]])
                if source is None and (name := rated.rate.get("found_by")):
                    rate = ", ".join(value_of(v) for v in rated.rate["point"].values())
                    results.unmatched[key[0]] = (
                        f"The table's rate of {key[0]}, {rate}, won in no finished search of `{name}`"
                    )
            elif experiment.by_seed:
                try:
                    record["by_seed"] = values_by_seed(record, experiment.by_seed, store)
                except UserError as error:
                    raise UserError(f"{suite.path.name}: {experiment.name}: {error}") from None
            results.records.setdefault(key, []).append(record)
        elif failed:
            results.lost.setdefault(key, set()).add(rated.seed)
        elif any(store.read(kind, k) for k in rated.earlier_keys for kind in ("cells", "superseded")):
            results.stale.setdefault(key, set()).add(rated.seed)
        results.wanted += record is not None or not rated.method.extra
    results.searches = list(searches.values())
    return results


def _extra_jobs(suite: Suite, experiment: Experiment, options: Options, store: Store) -> list[Job]:
    """The jobs of methods that ``--methods`` gave to experiments of the suite; those that share a cell run it once."""
    names, jobs = set[str](), list[Job]()
    for (name, size, grid), methods in store.methods.items():
        target = suite.experiments.get(grid) if (name, size) == (suite.name, suite.size) else None
        if target is not None:
            names |= methods & set(list_methods()) - {entry.label for entry in target.methods}
    for name in sorted(names - {entry.label for entry in experiment.methods}):
        with suppress(UserError):  # this experiment cannot have it, so that it has no result
            jobs += jobs_of(suite, experiment, replace(options, methods=(name,)))
    return jobs


def _search_of(cell: Cell, search: Search | None, store: Store) -> dict | None:
    """The result of the search that the rate of a cell is from: of its experiment, or of the one that its table names.

    The cell's own record may name the search of another experiment, since experiments that share a cell may search its
    rate in different settings.
    """
    if search is not None:
        return search.result(store)
    if not (name := cell.rate.get("found_by")):
        return None
    jobs = jobs_of(cell.suite, cell.suite.experiments[name], cell.options)
    searches = [s.result(store) for s in jobs if isinstance(s, Search) and s.method.label == cell.method.label]
    return next((s for s in searches if s and s["winner"]["point"] == cell.rate["point"]), None)


def values_by_seed(record: Mapping, paths: Mapping[str, str], store: Store) -> dict[str, dict[int, float]]:
    """Metric -> seed -> value, from the JSON files that a script wrote; nothing if one of them is damaged, missing, or
    not the one that the result was read from. (Older results do not have the checksums of their files.)

    Raises:
        UserError: a path does not exist in the files.
    """
    documents, checksums = {}, record.get("checksums", {})
    for name in (name for name in record["files"] if name.endswith(".json")):
        path = store.results / name
        try:
            documents[path.stem] = read_json(path, dict | list, remedy="its figures have no spread")
            if checksums.get(name, actual := file_digest(path)) != actual:
                raise DamagedFile(f"{path} is not the file that its result was read from; its figures have no spread")
        except DamagedFile as error:
            store.damaged[str(path)] = str(error).removeprefix(f"{path} ")
            return {}
    return {metric: quotients(documents, path) for metric, path in paths.items()}


# -- metrics -------------------------------------------------------------------------------------------


def value(record: Mapping, metric: str) -> float | None:
    """The value of a metric in a result; None if it has none.

    ``test_acc`` and the like; ``uplink`` … ``downlink_without_head`` and ``traffic`` (both directions), bytes per
    client and round; ``formula``, the papers' estimate of ``traffic``, twice the uplink; ``aggregation``,
    ``training``, ``memory``; ``bytes_to:val_acc:0.7``, all bytes until a value is reached; ``SCORER:TASK:METRIC``;
    ``majority:METRIC``, what a model that learned nothing has.
    """
    kind, _, remainder = metric.partition(":")
    if metric in record["metrics"]:
        return record["metrics"][metric]
    if metric in (measured := measurements(record)):
        return measured[metric]
    if kind == "majority":
        return _majority(record, remainder)
    if to_a_target(metric):
        name, _, target = remainder.partition(":")
        return _reaches(record["history"]["evaluated"], name, float(target), kind == "rounds_to")
    score = _scored(record, metric)
    return score if isinstance(score, (int, float)) else None


def _scored(record: Mapping, metric: str) -> Any:
    """The entry ``SCORER:TASK:NAME`` of the scores; None if there is none."""
    scorer, _, remainder = metric.partition(":")
    task, _, name = remainder.rpartition(":")
    return record.get("scores", {}).get(scorer, {}).get(task, {}).get(name)


def measurements(record: Mapping) -> dict[str, Any]:
    """Measurements of a run beside its metrics, by name; None where a study has none."""
    sent, seconds = record.get("bytes", {}).get("per_client_and_round", {}), record.get("seconds", {})
    values = {name: sent.get(name) for name in BYTES}
    if sent.keys() >= {*BYTES}:
        values |= {f"traffic{head}": sent[f"uplink{head}"] + sent[f"downlink{head}"] for head in ("", "_without_head")}
        values["formula"] = 2 * sent["uplink"]
    memory = record.get("peak_memory_bytes", {}).get("host")
    times = {"aggregation": seconds.get("aggregation_median"), "training": seconds.get("training")}
    return {**values, **times, "memory": memory, "majority": record.get("majority")}


def _right(record: Mapping, metric: str) -> Mapping | None:
    """The right rows of the test set, or of the task of a scorer; None where they are not recorded."""
    return record.get("right") if metric == "test_acc" else _scored(record, f"{metric}_right")


def _majority(record: Mapping, metric: str) -> float | None:
    """The majority class, of the test set or of the task that a scorer scored; None where the metric is no accuracy.

    Of the clients' own models it is each client's own, in results that have it, and otherwise that of the whole test
    set, which is less.
    """
    measured = metric.removesuffix("_last5")
    if measured == "client_test_acc" and record.get("client_majority") is not None:
        return record["client_majority"]
    if measured in _ACCURACIES:
        return record.get("majority")
    task, _, name = metric.rpartition(":")
    return value(record, f"{task}:majority") if name.startswith("acc") and not name.endswith("_stderr") else None


def _reaches(points: Sequence[Mapping], name: str, target: float, rounds: bool) -> float | None:
    for point in points:
        if name in point and (point[name] >= target if larger_is_better(name) else point[name] <= target):
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


def figure_text(figure: Figure, metric: str) -> str:
    """Mean ± standard deviation in the unit of the metric; ``–`` for no value."""
    if not figure.n:
        return "–"
    scale, digits = scale_of(metric)
    spread = figure.std if scale else figure.std or None  # bytes that agree have none
    numbers = [figure.mean] if spread is None else [figure.mean, spread]
    return " ± ".join(f"{number * scale:.{digits}f}" if scale else human_bytes(number) for number in numbers)


def _is_vision(record: Mapping) -> bool:
    return record.get("config", {}).get("model.task") == "ImageClassification"
