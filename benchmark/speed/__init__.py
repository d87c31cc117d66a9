"""How fast the fast forms are, each against the slow form it replaces, in one run.

    python -m benchmark.speed [server_step|clients|frozen_cache|overhead|vision|one_shot|all]

Only ratios from one run mean anything: the variants are timed in turn, so that other load on the machine
falls on all of them, and the median is kept.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch


def race(
    variants: Mapping[str, Callable[[], object]], repeats: int, fewer: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Median seconds of each variant, run in turn ``repeats`` times.

    On one thread seconds of the processor are counted, which leaves out the time that other processes had it.

    Args:
        fewer: variants that are too slow for that -> how often they run.
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
    """Torch on ``number`` threads; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    """One line of the table.

    Args:
        case: what was measured. figure: what ``value`` is. note: the times behind it.
        agreement: relative difference between fast and slow results.
        least: a bound that ``value`` should keep; without it or ``most`` there is no target.
        most: the same from above.
    """
    target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else "–"
    holds = (least is None or value >= least) and (most is None or value <= most)
    found = {"case": case, "figure": figure, "value": value, "target": target, "holds": bool(holds)}
    return {**found, "note": note, "agreement": agreement}


def memory_row(case: str, found: Mapping, allowed: float) -> dict:
    """The peak of a run against its base, its clients' adapters and ``allowed`` bytes; ``found`` by ``clients``."""
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
    """What the figures were taken on."""
    from fs_lowrank.runs.environment import versions

    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions()}
