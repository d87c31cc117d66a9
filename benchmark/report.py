"""``fs-lowrank benchmark report``: a report in Markdown and HTML with figures, from the results on disk."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from fs_lowrank import UserError
from fs_lowrank.errors import hint

from .blocks import Block, Heading, Image, PlainTable, markdown, page, range_of, value_of
from .figures import draw_all, draw_claim
from .frame import write_csv
from .job import Options, at_the_end
from .metrics import scale_of, title_of, to_a_target
from .plan import check_only, chosen, command
from .results import ExperimentResults, find, head_of
from .results_page import write_pages
from .store import Store, write_text
from .suite import SIZES, Suite, load_suite, shipped, sizes_of
from .verdicts import Judged, Row, adjust_all, claims_table, judged_claims, rows_of, said_of_claims, summary

Results = dict[str, ExperimentResults]


def write_report(options: Options) -> list[Path]:
    """Write ``report.md``, ``report.html``, ``report/*.png``, ``results.csv`` and ``claims.csv`` below the results.

    Raises:
        UserError: there are no results, or the report cannot be written.
    """
    root = Path(options.results)
    store = options.store
    sizes = [options.size] if options.size in SIZES else list(SIZES)
    names = options.suites or shipped()
    if not any(root.glob("*/*.json")):  # known at once; to plan every suite takes a minute
        raise _without_results(options, names)
    if options.only:
        both = [(name, size) for name in names for size in sizes if size in (sizes_of(name) or sizes)]
        check_only([load_suite(name, size) for name, size in both], options)
    suites = [(name, size) for name in names for size in sizes if _has(name, size, options, sizes[0])]
    found: list[tuple[Suite, Results, Results, dict[str, Judged], Options]] = []
    used: set[str] = set()
    for name, size in suites:
        sized = dataclasses.replace(options, suites=(name,), size=size)
        suite = load_suite(name, size)
        everything = dataclasses.replace(sized, methods=())  # by which claims are judged, whatever is shown
        results = {e.name: find(suite, e, everything, store) for e in suite.experiments.values()}
        for each in results.values():
            used |= {r["hash"] for r in (*each.all_records, *each.stale)}
        shown = {
            e.name: find(suite, e, sized, store) if options.methods else results[e.name]
            for e in chosen(suite, options.only, extra=True)
        }
        if any(each.has_any for each in shown.values()):
            judged = {
                claim: result
                for claim, result in judged_claims(suite, results).items()
                if not options.only or not shown.keys().isdisjoint(suite.claims[claim]["experiments"])
            }
            found.append((suite, results, shown, judged, sized))
    if not found:
        raise _without_results(options, names)
    adjust_all([claim for *_, judged, _ in found for claim in judged.values()])
    rows: list[Row] = []
    body: list[Block] = []
    for suite, results, shown, judged, sized in found:
        of_suite = rows_of(suite, judged, results, partial(_elsewhere, sized, store))
        rows += of_suite
        body += _suite(suite, shown, of_suite, root)
    parts = [Heading("Benchmark report", 1), _preface(options), *summary(rows), *body, *_damaged(store, used)]
    blocks = [block for block in parts if block]
    write_text(root / "report.md", markdown(blocks))
    write_text(root / "report.html", page(blocks, root))
    head, *claims = claims_table(rows)
    write_text(root / "claims.csv", pd.DataFrame(claims, columns=head).to_csv(index=False, lineterminator="\n"))
    whole = not (options.suites or options.only or options.methods) and options.size not in SIZES
    pages = write_pages(root, store, rows) if whole and options.engine == "local" else []
    return [root / "report.md", root / "report.html", root / "claims.csv", write_csv(store), *pages]


def _has(name: str, size: str, options: Options, first: str) -> bool:
    """Whether a suite has a size of its own; one whose sizes do not differ is reported at the first."""
    there = sizes_of(name)
    return size in there if there and options.size not in SIZES else bool(there) or size == first


def _elsewhere(options: Options, store: Store, name: str, experiment: str) -> list[dict]:
    """The results of an experiment of another suite of the package."""
    suite = load_suite(name, options.size)
    if experiment not in suite.experiments:  # it is of the other size
        return []
    options = dataclasses.replace(options, suites=(name,), methods=())
    return find(suite, suite.experiments[experiment], options, store).all_records


def _without_results(options: Options, names: Sequence[str]) -> UserError:
    where = ["--results", options.results, *(["--data", options.data] if options.data else [])]
    run = hint("benchmark", "run", names[0], *where)
    return UserError(f"{options.results} holds no result of {', '.join(names)}; run a suite first: {run}")


def _preface(options: Options) -> str:
    engine = "" if options.engine == "local" else f" --engine {options.engine}"
    return (
        f"Written by `fs-lowrank benchmark report{engine}` from the JSON files in `cells/`, `searches/` and "
        "`failed/`. Figures are mean ± standard deviation over seeds. *Collapsed* seeds are at or below the "
        "majority class. Rates are chosen on validation data; the test set is scored after the last round, unless it "
        "says otherwise. "
        "The papers' figures stand beside ours with their setting: where ours is smaller, the order and the gap "
        "compare, the figure does not."
    )


# -- suites --------------------------------------------------------------------------------------------


def _suite(suite: Suite, results: Results, rows: Sequence[Row], root: Path) -> list[Block]:
    blocks: list[Block] = [Heading(suite.title + (f" ({suite.size})" if suite.sized else ""), 2)]
    blocks += [t for t in (suite.source, suite.note) if t]
    blocks += said_of_claims(rows, _drawn(rows, root))
    for each in results.values():
        if each.has_any:
            blocks += _experiment(each, root)
    return blocks


def _drawn(rows: Sequence[Row], root: Path) -> dict[str, str]:
    """Claim -> the figure of its conditions, below ``root``."""
    drawn: dict[str, str] = {}
    for row in rows:
        file = re.sub(r"[^\w]+", "-", f"claim-{row.suite.name}-{row.suite.size}-{row.name}")
        if f"report/{file}.png" in drawn.values():
            file += f"-{len(drawn)}"  # names may differ in what a file's cannot hold
        path = root / "report" / f"{file}.png"
        if draw_claim(str(row.claim["says"]), row.judged.by_experiment, path):
            drawn[row.name] = path.relative_to(root).as_posix()
    return drawn


def _experiment(results: ExperimentResults, root: Path) -> list[Block]:
    experiment = results.experiment
    blocks: list[Block] = [Heading(experiment.title, 3)]
    if experiment.note and experiment.note != results.suite.note:
        blocks.append(experiment.note)
    blocks.append(_setting(results))
    if results.cells < results.wanted:
        failed = f", {len(results.failed)} failed" if results.failed else ""
        blocks.append(f"**{results.cells} of {results.wanted} cells are there{failed}.**")
    blocks += _stale(results)
    if experiment.script:
        return blocks + _script(results) + _failures(results)
    if not results.cells:
        return blocks + _failures(results)
    blocks += _tables(results)
    blocks += _rates_table(results) + _bytes_table(results)
    if experiment.plots:
        for title, path in draw_all(results, root / "report").items():
            blocks.append(
                Image(f"{experiment.title}: {title[0].lower()}{title[1:]}", path.relative_to(root).as_posix())
            )
    return blocks + _failures(results)


def _stale(results: ExperimentResults) -> list[str]:
    """A description of the results of earlier revisions of methods."""
    if not results.stale:
        return []
    by_method = Counter(record["method"] for record in results.stale)
    return [
        f"**Stale results: {sum(by_method.values())}**, left out. Their methods have come to compute "
        "something else from the same configuration (CHANGELOG.md says what), and they have not been run again: "
        + ", ".join(f"{method} ({n})" for method, n in sorted(by_method.items()))
        + "."
    ]


def _setting(results: ExperimentResults) -> str:
    """A line about the setting, from the results."""
    records = results.all_records
    if results.experiment.script:
        return f"`{results.experiment.script} {' '.join(results.experiment.args)}`"
    if not records:
        return ""
    first = records[0]
    seeds = sorted({r["seed"] for r in records})
    samples = sorted({r["samples"] for r in records})
    about = "about " if any(r["samples_estimated"] for r in records) else ""
    rounds = sorted({r["rounds"] for r in records})
    heads = sorted({head_of(r) for r in records})
    majorities = sorted({f"{100 * r['majority']:.1f}" for r in records if r.get("majority")}, key=float)

    def each(taken: Callable[[Mapping], object]) -> str:
        """The values of all results, in the order in which they occur."""
        return " / ".join(dict.fromkeys(str(taken(record)) for record in records))

    def unit(record: Mapping) -> str:
        return "steps" if record["config"]["train.batch_or_epoch"] == "batch" else "epochs"

    parts = [
        f"Data: {', '.join([each(lambda r: r['data']['source']), *_lost(records)])}",
        f"model {each(lambda r: '`' + r['model']['type'] + '`')}",
        f"clients train on {about}{range_of(samples)} samples in all",
        f"{range_of(rounds)} round{'s' * (rounds != [1])}",
        f"batch {each(lambda r: r['config']['dataloader.batch_size'])}",
        f"{each(lambda r: r['config']['train.local_update_steps'])} local {each(unit)}",
        each(lambda r: r["config"]["train.optimizer.type"]),
        f"split {each(lambda r: '`' + r['config']['data.splitter'] + '`')}",
        f"seeds {', '.join(map(str, seeds))}",
        f"head: {' / '.join(heads)}",
        f"majority class {' / '.join(majorities)} %" if majorities else "",
        "test set scored at every evaluation" if first["test"] == "rounds" else "",
        _repeats(records),
    ]
    line = "; ".join(p for p in parts if p) + "."
    if len(heads) > 1:
        line += " **The head is not treated alike by all methods.**"
    alike = pd.DataFrame(
        {
            "place": [str((r["seed"], r["setting"])) for r in records],
            "data (their fingerprints differ within a setting and seed)": [r["data"]["fingerprint"] for r in records],
            "rounds": [r["rounds"] for r in records],
            "samples": [r["samples"] for r in records],
            "local steps": [r["config"]["train.local_update_steps"] for r in records],
            "batches": [r["config"]["dataloader.batch_size"] for r in records],
        }
    )
    several = (alike.groupby("place").nunique() > 1).any()
    line += "".join(f" **The methods did not have the same {what}.**" for what in several.index[several])
    line += f" Command: `{command(results.suite, results.experiment, first['engine'])}`."
    extra = [e.label for e in results.experiment.methods if e.extra and e.label in results.methods]
    return line + (f" {', '.join(extra)}: by the same with `--methods {','.join(extra)}`." if extra else "")


def _lost(records: Sequence[Mapping]) -> list[str]:
    """What was left out or cut of the rows, where the results have counted it: of one, if they differ."""
    from fs_lowrank.data import rows_said

    said = [rows_said(r["data"].get("rows", {"read": 0, "skipped": {}, "truncated": {}})) for r in records]
    lossy = [s for s in said if len(s) > 1]
    if not lossy:
        return []
    first = lossy[0]
    return first if all(s == first for s in said) else [*first[:-1], f"{first[-1]} (in one of the runs)"]


def _repeats(records: Sequence[Mapping]) -> str:
    """A sentence about test rows that are in the training data as well, if the results have counted some."""
    counts = [r["data"]["test_rows_in_training"] for r in records if "test_rows_in_training" in r["data"]]
    most, rows = max(counts, default=(0, 0))
    return f"up to {most} of {rows:,} test rows are in the training data as well" if most else ""


def _tables(results: ExperimentResults) -> list[Block]:
    """One table per metric with settings as columns, and one per scorer and setting with tasks as columns."""
    blocks: list[Block] = []
    plain = [m for m in results.experiment.metrics if m.count(":") < 2 or to_a_target(m)]
    for index, metric in enumerate(plain):
        columns = [(c or title_of(metric, results.language), metric, c) for c in results.columns]
        paper = index == 0 and not _scorer_of_reference(results)
        blocks += _table(results, title_of(metric, results.language), columns, results.columns, paper)
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
            tasks = list(dict.fromkeys(tasks))
            blocks += _table(results, title, columns, tasks, _scorer_of_reference(results) == scorer)
    return blocks


def _scorer_of_reference(results: ExperimentResults) -> str:
    return str((results.experiment.reference or {}).get("scorer", ""))


def _scorer_in_words(results: ExperimentResults, scorer: str) -> str:
    spec = next((s for s in results.experiment.evaluation if s["scorer"] == scorer), {})
    return ", ".join(f"{k} {v}" for k, v in spec.items() if k not in ("scorer", "tasks")) or "all samples"


def _table(
    results: ExperimentResults, title: str, columns: list[tuple[str, str, str]], keys: list[str], paper: bool
) -> list[Block]:
    """A table with columns (header, metric, setting), then the paper's figures by ``keys``."""
    reference = results.experiment.reference if paper else None
    values = (reference or {}).get("values", {})
    beside = [k for k in keys if any(_paper(values, m, k) for m in results.methods)]
    rows = [("method", *(head for head, _, _ in columns), *(f"paper: {k}" if k else "paper" for k in beside))]
    for method in results.methods:
        cells = []
        for _, metric, at in columns:
            cell = results.cell(method, at, metric)
            error = results.error(method, at, metric)
            cell += f" (s.e. {error * scale_of(metric)[0]:.2f})" if error is not None else ""
            cells.append(cell)
        rows.append((method, *cells, *(_paper(values, method, k) or "–" for k in beside)))
    axes = " / ".join(results.experiment.axes)
    seeds = {len(rs) for rs in results.records.values()}
    n = "one seed" if seeds == {1} else f"{range_of(sorted(seeds))} seeds"
    blocks: list[Block] = [(f"**{title}**{f', by {axes}' if axes else ''} ({n}):"), PlainTable(rows)]
    if reference and beside:
        blocks.append(f"Paper: {reference.get('from', '')}; {reference.get('setting', '')}.")
    elif reference and values:
        blocks += _reference_alone(reference)
    return blocks


def _paper(values: dict, method: str, key: str) -> str:
    figure = {str(k): v for k, v in values.get(method, {}).items()}.get(key)
    if figure is None:
        return ""
    return " ± ".join(map(str, figure)) if isinstance(figure, list) else str(figure)


def _reference_alone(reference: dict) -> list[Block]:
    """A separate table of the paper's figures, if we have none of its columns."""
    keys = list(dict.fromkeys(str(k) for row in reference["values"].values() for k in row))
    rows = [("the paper", *keys)]
    rows += [(m, *(_paper(reference["values"], m, k) or "–" for k in keys)) for m in reference["values"]]
    return [(f"Paper: {reference.get('from', '')}; {reference.get('setting', '')}:"), PlainTable(rows)]


def _rates_table(results: ExperimentResults) -> list[Block]:
    from .beside import hpo

    rates: dict[tuple[str, str], dict] = {}
    for (method, column), records in results.records.items():
        rates[method, column] = records[0]["learning_rate"]
    if not rates:
        return []
    rows = [("method", "setting", "learning rate", "from", "validation", "what the search cost")]
    merged: dict[tuple, list[str]] = {}
    for (method, column), rate in rates.items():
        budget = rate.get("budget") or "no search"
        cost = hpo.budget_text(budget) if isinstance(budget, dict) and "client_steps" in budget else str(budget)
        values = ", ".join(f"{k} {v:.4g}" for k, v in rate.get("validation", {}).items())
        point = ", ".join(value_of(v) for v in rate["point"].values())
        merged.setdefault((method, point, rate["from"], values, cost), []).append(column)
    for (method, point, origin, values, cost), columns in merged.items():
        rows.append((method, ", ".join(c for c in columns if c), point, origin, values, cost))
    blocks: list[Block] = ["**Learning rates:**", PlainTable(rows)]
    searches = {s["label"].removeprefix("learning rate of "): s for s in results.searches}
    if ends := [name for name, search in searches.items() if at_the_end(search)]:
        blocks.append(
            f"{len(ends)} of {len(searches)} searches won at an end of their grid, so a better rate may lie "
            f"beyond, and verdicts that rest on it are inconclusive: {', '.join(ends)}."
        )
    by_table = dict.fromkeys(
        method
        for (method, _), records in results.records.items()
        if records[0]["learning_rate"]["from"] == "table" and any(r.get("at_end") for r in records)
    )
    if by_table:
        blocks.append(
            "The rate in the table won at an end of the grid of the search that has found it, so a better rate may lie "
            f"beyond, and verdicts that rest on it are inconclusive: {', '.join(by_table)}."
        )
    if results.unlike:
        blocks.append(f"**{'; '.join(results.unlike.values())}.**")
    if once := sum(search.get("seeds", 1) == 1 for search in searches.values()):
        blocks.append(
            f"{once} of {len(searches)} searches are with one seed; which of their rates is best is a draw, "
            "too, which no interval counts."
        )
    for name, search in searches.items():
        if points := [[value_of(v) for k, v in p.items() if k != "value"] for p in search.get("within_noise") or ()]:
            listed = "; ".join(map(", ".join, points))
            blocks.append(f"Within the noise of its seeds the search of {name} could have chosen {listed} as well.")
        if search.get("nothing_learned"):
            blocks.append(f"The best trial of the search of {name}: {search['nothing_learned']}.")
    return blocks


def _bytes_table(results: ExperimentResults) -> list[Block]:
    without_head = ("uplink_without_head", "downlink_without_head")
    metrics = (*without_head, "uplink", "downlink", "traffic", "formula", "aggregation", "memory")
    column = results.fullest
    if column is None or not any(results.figure(m, column, "uplink") for m in results.methods):
        return []
    rows = [("method", *(title_of(m) for m in metrics))]
    rows += [(m, *(results.cell(m, column, k) for k in metrics)) for m in results.methods]
    at = f", {' / '.join(results.experiment.axes)} = {column}" if column else ""
    return [f"**Bytes, server and memory{at}:**", PlainTable(rows)]


def _script(results: ExperimentResults) -> list[Block]:
    blocks: list[Block] = []
    for records in results.records.values():
        for record in records:
            if record["metrics"]:
                blocks.append(
                    PlainTable([("figure", "value"), *((k, f"{v:.5g}") for k, v in record["metrics"].items())])
                )
            blocks += [Image(results.experiment.title, name) for name in record["files"] if name.endswith(".png")]
            blocks.append("Files: " + ", ".join(f"`{name}`" for name in record["files"]) + ".")
    if results.experiment.reference and results.experiment.reference.get("values"):
        blocks += _reference_alone(results.experiment.reference)
    return blocks


def _failures(results: ExperimentResults) -> list[Block]:
    lines = [f"- {failed['label']}: {failed['error']}" for failed in results.failed]
    return ["\n".join(["**Failed:**", *lines])] if lines else []


def _damaged(store, used: set[str]) -> list[Block]:
    others = {p.stem for p in (store.results / "cells").glob("*.json")} - used
    for key in sorted(others):
        store.read("cells", key)
    others -= {Path(p).stem for p in store.damaged}
    lines = [
        f"- `{Path(path).relative_to(store.results)}`: {why}; taken as missing"
        for path, why in sorted(store.damaged.items())
    ]
    blocks: list[Block] = [Heading("Damaged files", 2), "\n".join(lines)] if lines else []
    if others:
        blocks.append(f"{len(others)} more results in `cells/` belong to no cell of these suites, sizes and engine.")
    return blocks
