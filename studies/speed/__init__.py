"""Speed of the optimised implementations relative to the plain ones they replace.

    python -m studies.speed [PART|all]

with one of the parts that ``__main__`` lists.

Only ratios from one run are meaningful. The variants are timed in turn, so that other load on the machine affects all
of them, and medians are compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def race(
    variants: Mapping[str, Callable[[], object]], repeats: int, fewer: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Median seconds of each variant, run in turn ``repeats`` times.

    With one thread, processor time is measured, which excludes the time of other processes.

    Args:
        fewer: variants that are too slow for that -> number of their runs.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name, variant in variants.items():
            if turn < (fewer or {}).get(name, repeats):
                started = clock()
                variant()
                seconds[name].append(clock() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """A context with ``number`` torch threads; None: unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_a_process(*arguments: str, **environment: str) -> str:
    """What a new Python process printed to standard output.

    Args:
        arguments: of ``python``. environment: variables beside those of this process.

    Raises:
        RuntimeError: it failed; with what it wrote to standard error.
    """
    given = {**os.environ, **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)[:200]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference over all tensors, in the Frobenius norm."""
    return max(
        float((ours[n].double() - t.double()).norm() / t.double().norm().clamp_min(1e-30)) for n, t in theirs.items()
    )


def row(
    case: str,
    figure: str,
    value: float,
    note: str = "",
    agreement: float | None = None,
    *,
    least: float | None = None,
    most: float | None = None,
) -> dict:
    """A row of the table.

    Args:
        case: what was measured. figure: the meaning of ``value``. note: the times.
        agreement: relative difference between fast and slow results.
        least: a lower bound for ``value``; without it and ``most`` there is no target.
        most: an upper bound.
    """
    target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else "–"
    holds = (least is None or value >= least) and (most is None or value <= most)
    found = {"case": case, "figure": figure, "value": value, "target": target, "holds": bool(holds)}
    return {**found, "note": note, "agreement": agreement}


def memory_row(case: str, found: Mapping, allowed: float) -> dict:
    """A row for the peak memory relative to the base, the clients' adapters and ``allowed`` bytes."""
    limit = found["base_bytes"] + found["clients"] * found["adapter_bytes"] + allowed
    return row(
        case,
        f"peak memory ÷ (base + all adapters + {allowed / 1e9:g} GB)",
        found["peak_bytes"] / limit,
        f"{found['peak_bytes'] / 1e6:.0f} MB of {limit / 1e6:.0f} MB; base {found['base_bytes'] / 1e6:.0f} MB, "
        f"adapter {found['adapter_bytes'] / 1e3:.0f} kB, libraries alone "
        f"{found['imported_peak_bytes'] / 1e6:.0f} MB",
        most=1,
    )


def machine() -> dict:
    """A description of the machine."""
    from fs_lowrank.runs.environment import versions

    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions()}
