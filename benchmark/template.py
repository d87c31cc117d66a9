"""The report's template ``report.md``, and the functions that it calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from .conditions import verdict
from .job import at_the_end
from .metrics import title_of, to_a_target
from .page import plain, range_of, value_of
from .plan import command
from .results import ExperimentResults, head_of
from .verdicts import gap_text

Table = list[tuple[str, ...]]


def markdown(part: str, *arguments: Any, **named: Any) -> str:
    """A part of the report: the text of a macro of ``report.md`` with these arguments."""
    text = str(getattr(_template(), part)(*arguments, **named))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader(__package__), trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "flow": lambda text: " ".join(text.split()) + "\n",  # one paragraph
        "plain": plain,
        "verdict": verdict,
        "gap": lambda gap, subject: gap_text(subject, *gap),
        "command": command,
        "head": head_of,
        "unit": lambda by: "steps" if by == "batch" else "epochs",
        "ticked": lambda name: f"`{name}`",
        "each": lambda values: " / ".join(dict.fromkeys(map(str, values))),
        "range": lambda values: range_of(sorted(set(values))),
        "of": lambda records, key: [record["config"][key] for record in records],
        "searched": lambda search: search["label"].removeprefix("learning rate of "),
        "figures": lambda metrics: [(name, f"{value:.5g}") for name, value in metrics.items()],
        "majorities": _majorities,
        "lost_rows": _lost,
        "repeats": _repeats,
        "several": _several,
        "tables": tables,
        "seeds": _seeds,
        "papers": _papers,
        "rates": _rates,
        "at_the_end_of_a_table": _open_rates,
        "sent": _sent,
    }
    environment.tests["at_end"] = at_the_end
    return environment.get_template("report.md").module


# -- the setting ------------------------------------------------------------------------------------------


def _majorities(records: Sequence[Mapping]) -> list[str]:
    return sorted({f"{100 * r['majority']:.1f}" for r in records if r.get("majority")}, key=float)


def _several(records: Sequence[Mapping]) -> list[str]:
    """The properties in which the methods differ within a setting and seed, and should not."""
    frame = pd.DataFrame(
        {
            "place": [str((r["seed"], r["setting"])) for r in records],
            "data (their fingerprints differ within a setting and seed)": [r["data"]["fingerprint"] for r in records],
            "rounds": [r["rounds"] for r in records],
            "samples": [r["samples"] for r in records],
            "local steps": [r["config"]["train.local_update_steps"] for r in records],
            "batches": [r["config"]["dataloader.batch_size"] for r in records],
        }
    )
    varies = (frame.groupby("place").nunique() > 1).any()
    return [*varies.index[varies]]


def _lost(records: Sequence[Mapping]) -> list[str]:
    """The rows left out or cut, where the results have counted them: those of one run, if runs differ."""
    from fs_lowrank.data import row_lines

    texts = [row_lines(r["data"].get("rows", {"read": 0, "skipped": {}, "truncated": {}})) for r in records]
    lossy = [s for s in texts if len(s) > 1]
    if not lossy:
        return []
    first = lossy[0]
    return first if all(s == first for s in texts) else [*first[:-1], f"{first[-1]} (in one of the runs)"]


def _repeats(records: Sequence[Mapping]) -> str:
    """A sentence about test rows that are in the training data as well, if the results have counted some."""
    counts = [r["data"]["test_rows_in_training"] for r in records if "test_rows_in_training" in r["data"]]
    repeated, rows = max(counts, default=(0, 0))
    return f"up to {repeated} of {rows:,} test rows are in the training data as well" if repeated else ""


# -- tables -----------------------------------------------------------------------------------------------


def tables(results: ExperimentResults) -> list[tuple[str, Table, str]]:
    """One table per metric with settings as columns, and one per scorer and setting with tasks as columns.

    Each has a title, rows, and the place of the paper's figures: ``beside`` ours, ``alone`` since we have none of their
    columns, or empty for none.
    """
    listed = []
    plain = [m for m in results.experiment.metrics if m.count(":") < 2 or to_a_target(m)]
    for index, metric in enumerate(plain):
        columns = [(c or title_of(metric, results.language), metric, c) for c in results.columns]
        paper = index == 0 and not _scorer_of_reference(results)
        listed.append((title_of(metric, results.language), *_table(results, columns, results.columns, paper)))
    by_scorer: dict[str, list[str]] = {}
    for metric in results.experiment.metrics:
        if metric not in plain:
            by_scorer.setdefault(metric.partition(":")[0], []).append(metric)
    for scorer, metrics in by_scorer.items():
        for column in results.columns:
            tasks = [m.split(":")[1] for m in metrics]
            names = {m: task if tasks.count(task) == 1 else m.partition(":")[2] for m, task in zip(metrics, tasks)}
            columns = [(names[metric], metric, column) for metric in metrics]
            title = f"Scorer `{scorer}`, {_scorer_in_words(results, scorer)}" + (f", {column}" if column else "")
            paper = _scorer_of_reference(results) == scorer
            listed.append((title, *_table(results, columns, list(dict.fromkeys(tasks)), paper)))
    return listed


def _scorer_of_reference(results: ExperimentResults) -> str:
    return str((results.experiment.reference or {}).get("scorer", ""))


def _scorer_in_words(results: ExperimentResults, scorer: str) -> str:
    spec = next((s for s in results.experiment.evaluation if s["scorer"] == scorer), {})
    return ", ".join(f"{k} {v}" for k, v in spec.items() if k not in ("scorer", "tasks")) or "all samples"


def _table(
    results: ExperimentResults, columns: Sequence[tuple[str, str, str]], keys: Sequence[str], paper: bool
) -> tuple[Table, str]:
    """A table with columns (header, metric, setting), then the paper's figures by ``keys``."""
    values = (results.experiment.reference or {}).get("values", {}) if paper else {}
    paper_keys = [k for k in keys if any(_paper(values, m, k) for m in results.methods)]
    rows = [("method", *(head for head, _, _ in columns), *(f"paper: {k}" if k else "paper" for k in paper_keys))]
    for method in results.methods:
        cells = (results.cell(method, at, metric) for _, metric, at in columns)
        rows.append((method, *cells, *(_paper(values, method, k) or "–" for k in paper_keys)))
    return rows, "beside" if paper_keys else "alone" if values else ""


def _seeds(results: ExperimentResults) -> str:
    seeds = {len(rs) for rs in results.records.values()}
    return "one seed" if seeds == {1} else f"{range_of(sorted(seeds))} seeds"


def _paper(values: dict, method: str, key: str) -> str:
    figure = {str(k): v for k, v in values.get(method, {}).items()}.get(key)
    if figure is None:
        return ""
    return " ± ".join(map(str, figure)) if isinstance(figure, list) else str(figure)


def _papers(reference: Mapping) -> Table:
    """A table of the paper's figures alone."""
    values = reference["values"]
    keys = list(dict.fromkeys(str(k) for row in values.values() for k in row))
    return [("the paper", *keys), *((m, *(_paper(values, m, k) or "–" for k in keys)) for m in values)]


def _rates(results: ExperimentResults) -> Table:
    from .beside import hpo

    merged: dict[tuple, list[str]] = {}
    for (method, column), records in results.records.items():
        rate = records[0]["learning_rate"]
        budget = rate.get("budget") or "no search"
        cost = hpo.budget_text(budget) if isinstance(budget, dict) and "client_steps" in budget else str(budget)
        values = ", ".join(f"{k} {v:.4g}" for k, v in rate.get("validation", {}).items())
        point = ", ".join(value_of(v) for v in rate["point"].values())
        merged.setdefault((method, point, rate["from"], values, cost), []).append(column)
    return [
        ("method", "setting", "learning rate", "from", "validation", "what the search cost"),
        *((method, ", ".join(filter(None, columns)), *cells) for (method, *cells), columns in merged.items()),
    ]


def _open_rates(results: ExperimentResults) -> list[str]:
    """The methods whose rate is from a table, and won at the end of the grid of its search."""
    return [
        *dict.fromkeys(
            method
            for (method, _), records in results.records.items()
            if records[0]["learning_rate"]["from"] == "table" and any(r.get("at_end") for r in records)
        )
    ]


def _sent(results: ExperimentResults) -> Table:
    without_head = ("uplink_without_head", "downlink_without_head")
    metrics = (*without_head, "uplink", "downlink", "traffic", "formula", "aggregation", "memory")
    column = results.fullest
    if column is None or not any(results.has(m, column, "uplink") for m in results.methods):
        return []
    return _table(results, [(title_of(metric), metric, column) for metric in metrics], (), False)[0]
