"""Faults during writing: at the n-th call on the disk the run is killed or the call fails, for every n.

The seeds enumerate all calls of the first variant with every kind of fault, then those of the next variant.
"""

from __future__ import annotations

import itertools
import signal

from .bench import Bench, Outcome, by_command_line, variants
from .shim import Mode

SHARD = 25
NEEDS_SHIM = True
MODES = (Mode.KILL_BEFORE, Mode.KILL_AFTER, Mode.EIO_ONCE, Mode.FULL, Mode.SHORT)


def where(seed: int, bench: Bench) -> tuple[str, int, Mode]:
    """The variant, the number of the call, and the fault."""
    for run in itertools.cycle(variants()):
        cases = bench.reference(run).calls * len(MODES)
        if seed < cases:
            break
        seed -= cases
    return run, seed // len(MODES) + 1, MODES[seed % len(MODES)]


def case(seed: int, bench: Bench) -> list[Outcome]:
    run, n, mode = where(seed, bench)
    what, seen = f"{run}: {mode.name} at call {n}", mode.name
    with bench.place() as outdir:
        first = bench.start(run, outdir, fault=(n, mode), command_line=by_command_line(seed))
        if mode in (Mode.KILL_BEFORE, Mode.KILL_AFTER):
            if first.code != -signal.SIGKILL:
                return [Outcome("failed", what, f"the call was never reached: {first.err or first.code}", seen)]
        elif first.fault:
            return [Outcome("failed", what, first.fault, seen)]
        elif not first.code:
            return [bench.judge(run, outdir, first, what, resumed=False, seen=seen)]
        outcome = bench.judge(run, outdir, bench.start(run, outdir, resume=True), what, resumed=True, seen=seen)
        if outcome.ending == "refused":  # the disk works again
            outcome = Outcome("failed", what, f"refused to go on: {outcome.reason}; before: {first.err}", seen)
        return [outcome]
