"""Speed of code that saves work, relative to the plain form: ``python -m studies.speed.cohort``, ``….whole``,
``….busy``, ``….gpu``, and ``….peers.case`` against other systems.

Only ratios from one run are meaningful. The variants are timed in turn, so that other load on the machine affects all
of them, and medians are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from fs_lowrank.jobs.files import read_json

ROOT = Path(__file__).parents[2]


def race(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each variant, run in turn ``repeats`` times.

    With one thread, processor time is measured, which excludes the time of other processes.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            started = clock()
            variant()
            seconds[name].append(clock() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def in_a_process(*arguments: str, **environment: str) -> str:
    """The standard output of a new Python process.

    Args:
        arguments: of ``python``. environment: variables beside those of this process.

    Raises:
        RuntimeError: it failed; with its standard error.
    """
    variables = {**os.environ, **environment}
    process = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)[:200]} ended with {process.returncode}: {process.stderr[-2000:]}")
    return process.stdout


def difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference over all tensors, in the Frobenius norm."""
    return max(
        float((ours[n].double() - t.double()).norm() / t.double().norm().clamp_min(1e-30)) for n, t in theirs.items()
    )


def row(
    case: str, figure: str, value: float, note: str, agreement: float | None = None, minimum: float | None = None
) -> dict:
    """A row of the table.

    Args:
        case: what was measured. figure: the meaning of ``value``. note: the times.
        agreement: relative difference between fast and slow results.
        minimum: a lower bound for ``value``; without it there is no target.
    """
    target = "–" if minimum is None else f"≥ {minimum:g}"
    return dict(case=case, figure=figure, value=value, target=target, note=note, agreement=agreement)


def row_lines(result: Mapping) -> Iterator[str]:
    """The rows of a result as lines."""
    for line in result["rows"]:
        yield f"{line['case']}: {line['figure']}: {line['value']:.3g} ({line['target']}) {line['note']}"


def table(folder: Path) -> str:
    """The README of ``folder``, from all results in it, also those of measurements that are history."""
    lines = [
        "# Speed",
        "",
        "Written by `python -m studies.speed.cohort`, `….whole`, `….busy` and `….gpu`; the other rows were measured "
        "once, by code that is in the history, at commit 408ca991. Figures are medians of runs taken in turn on a "
        "shared machine, but for `scale`, `overhead` and `whole`, which are run once: compare within a line. Agreement "
        "is the relative difference between the results of the fast and the slow form.",
        "",
        "| measured by | case | figure | value | target | times | agreement |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted(folder.glob("*.json")):
        for line in read_json(path, remedy="measure it again").get("rows", ()):
            agreement = "" if line["agreement"] is None else f"{line['agreement']:.0e}"
            cells = (path.stem, line["case"], line["figure"], f"{line['value']:.3g}", line["target"])
            lines.append(f"| {' | '.join(cells)} | {line['note']} | {agreement} |")
    return "\n".join([*lines, "", "FederatedScope, Flower, pfl: [jobs](peers.md), [a short one](peers_10.md).", ""])
