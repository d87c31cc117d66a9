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
    case: str, figure: str, value: float, target: str, holds: bool, note: str = "", agreement: float | None = None
) -> dict:
    """One line of the table.

    Args:
        case: what was measured. figure: what ``value`` is. target: what it should be, in words.
        note: the times behind it. agreement: relative difference between fast and slow results.
    """
    return {
        "case": case,
        "figure": figure,
        "value": value,
        "target": target,
        "holds": bool(holds),
        "note": note,
        "agreement": agreement,
    }


def machine() -> dict:
    """What the figures were taken on."""
    from fs_lowrank.runs.environment import versions

    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions()}
