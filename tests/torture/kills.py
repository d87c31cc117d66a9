"""Kills at random times: a run is killed once or several times, and then resumed to its end."""

from __future__ import annotations

import random
import signal

from .bench import COMMAND_LINE, Bench, Outcome, variants

SHARD = 25


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    run, command_line = draw.choice(variants()), seed % COMMAND_LINE == 0
    seconds, done = bench.reference(run).seconds, []
    with bench.place() as outdir:
        for number in range(1 if command_line else draw.choice((1, 1, 2, 3))):
            # The times are relative to a run that is not resumed, so later kills may come after the end.
            moment = draw.uniform(0.02, seconds)
            ended = bench.start(run, outdir, resume=number > 0, command_line=command_line, kill_at=moment)
            done.append(f"{run}: killed after {ended.seconds:.3f} s")
            if ended.code != -signal.SIGKILL and (ended.code or ended.fault):
                return [Outcome("failed", done[-1], ended.fault or ended.err)]
        last = bench.start(run, outdir, resume=True, command_line=command_line)
        seen = "command line" if command_line else "forked"
        outcome = bench.judge(run, outdir, last, "; ".join(done), resumed=True, seen=seen)
        if outcome.ending == "refused":  # a killed run can be continued
            outcome = Outcome("failed", outcome.what, f"refused to go on: {outcome.reason}", seen)
        return [outcome] * len(done)
