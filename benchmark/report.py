"""``fs-lowrank benchmark report``: a report in Markdown and HTML with figures, from the results on disk."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank import UserError
from fs_lowrank.errors import hint
from fs_lowrank.jobs.progress import steps

from .conditions import adjust
from .figures import draw_all, draw_claim
from .frame import frame
from .job import Options
from .leaderboard import LEADERBOARD, write_leaderboard
from .page import html
from .plan import check_only, chosen
from .results import ExperimentResults, find
from .results_page import has_page, which_method, write_pages
from .store import write_text
from .suite import SIZES, Experiment, Suite, load_suite, shipped, sizes_of
from .template import markdown
from .verdicts import Row, cause_of, claims_table, judged_claims

Results = dict[str, ExperimentResults]
_CSV: dict[str, Any] = {"index": False, "float_format": "%.6g", "lineterminator": "\n"}


def write_report(options: Options) -> list[Path]:
    """Write ``report.md``, ``report.html``, ``report/*.png``, ``results.csv`` and ``claims.csv`` below the results.

    Beside the page of the committed results, a report of some suites leaves ``claims.csv``, which is of all, as it is.

    Raises:
        UserError: there are no results, or the report cannot be written.
    """
    root, store = Path(options.results), options.store
    names = options.suites or shipped()
    if not any(root.glob("*/*.json")):  # known at once; a plan of every suite takes seconds
        raise _without_results(options, names)
    # A suite whose sizes do not differ is reported at the first.
    all_sizes = [(name, size) for name in names for size in sizes_of(name) or SIZES[:1]]
    requested = [(name, options.size) for name in names] if options.size in SIZES else all_sizes
    check_only([load_suite(*pair) for pair in requested] if options.only else [], options)

    def results_of(suite: Suite, experiment: Experiment, methods: tuple[str, ...] = ()) -> ExperimentResults:
        sized = dataclasses.replace(options, suites=(suite.name,), size=suite.size, methods=methods)
        return find(suite, experiment, sized, store)

    @cache
    def planned(name: str, size: str) -> tuple[Suite, Results]:
        """A suite with all of its results, by which claims are judged, whatever is shown."""
        suite = load_suite(name, size)
        return suite, {e.name: results_of(suite, e) for e in suite.experiments.values()}

    sections: list[tuple[Suite, Results, Results, list[Row]]] = []
    used: set[str] = set()
    for suite, results in (planned(*pair) for pair in steps(requested, "reading suites")):
        used |= {r["hash"] for experiment in results.values() for r in experiment.all_records}
        selected = {
            e.name: results_of(suite, e, options.methods) if options.methods else results[e.name]
            for e in chosen(suite, options.only, extra=True)
        }
        if any(experiment.has_any for experiment in selected.values()):
            judged = [
                row
                for row in judged_claims(suite, results).values()
                if not options.only or not selected.keys().isdisjoint(row.claim["experiments"])
            ]
            sections.append((suite, results, selected, judged))
    if not sections:
        raise _without_results(options, names)
    rows = [row for *_, judged in sections for row in judged]
    adjust([c for row in rows for conditions in row.by_experiment.values() for c in conditions])
    suites = []
    for suite, results, selected, judged in sections:

        def elsewhere(name: str, experiment: str, size: str = suite.size) -> list[dict]:
            other = planned(name, size)[1].get(experiment)  # it may be of the other size
            return other.all_records if other else []

        for row in judged:
            row.cause = cause_of(row, results, elsewhere)
        shown = steps([entry for entry in selected.values() if entry.has_any], f"drawing {suite.name}")
        experiments = [(entry, draw_all(entry, root)) for entry in shown]
        suites.append((suite, judged, _drawn(judged, root), experiments))
    runs = {r["hash"]: r for row in rows for records in row.runs.values() for r in records if "rounds" in r}
    cells = frame(store)
    live = cells[cells["hash"].isin(used)] if len(cells) else cells
    full = not (options.suites or options.only or options.methods) and options.size not in SIZES
    official = full and options.engine == "local" and has_page(root)
    guide = which_method(root, live) if official else ""
    head, *claims = claims_table(rows)
    text = markdown(
        "report",
        options.engine,
        guide,
        [row[:-2] for row in (head, *claims)] if claims else [],
        unrecorded=sum("right" not in r for r in runs.values()),
        runs=len(runs),
        one_seed=sum(r.get("learning_rate", {}).get("seeds") == 1 for r in runs.values()),
        suites=suites,
        unused=len(cells) - len(live),
        damaged={str(Path(p).relative_to(root)): reason for p, reason in sorted(store.damaged.items())},
    )
    written = {"report.md": text, "report.html": html(text, root), "results.csv": cells.to_csv(**_CSV)}
    if full or not has_page(root):  # the committed table of claims is of all suites
        written["claims.csv"] = pd.DataFrame(claims, columns=head).to_csv(**_CSV)
    for name, content in written.items():
        write_text(root / name, content)
    boards = [(suite, results) for suite, results, *_ in sections if suite.name == LEADERBOARD]
    board = [path for entry in boards for path in write_leaderboard(*entry, root)]
    pages = write_pages(root, live, rows, guide) if official else []
    return [*(root / name for name in written), *board, *pages]


def write_boards(options: Options) -> list[Path]:
    """Write the leaderboard again if it is among the suites, with all methods that have results."""
    pages: list[Path] = []
    for suite in (load_suite(name, options.size) for name in options.suites):
        if suite.name == LEADERBOARD:
            whole = dataclasses.replace(options, suites=(suite.name,), methods=(), only=())
            results = {e.name: find(suite, e, whole, options.store) for e in suite.experiments.values()}
            pages += write_leaderboard(suite, results, Path(options.results))
    return pages


def _without_results(options: Options, names: Sequence[str]) -> UserError:
    flags = ["--results", options.results, *(["--data", options.data] if options.data else [])]
    run = hint("benchmark", "run", names[0], *flags)
    return UserError(f"{options.results} holds no result of {', '.join(names)}; run a suite first: {run}")


def _drawn(rows: Sequence[Row], root: Path) -> dict[str, str]:
    """Claim -> the figure of its conditions, below ``root``."""
    drawn: dict[str, str] = {}
    for row in rows:
        file = re.sub(r"[^\w]+", "-", f"claim-{row.suite.name}-{row.suite.size}-{row.name}")
        if f"report/{file}.png" in drawn.values():
            file += f"-{len(drawn)}"  # two names may differ in characters that no file name has
        path = root / "report" / f"{file}.png"
        if draw_claim(str(row.claim["says"]), row.by_experiment, path):
            drawn[row.name] = path.relative_to(root).as_posix()
    return drawn
