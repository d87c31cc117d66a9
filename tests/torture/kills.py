"""Kills at random times: a run is killed once or several times, and then resumed to its end.

Only a run that the signal ended counts as killed. One that has ended before is begun anew, to be killed earlier; if it
had been killed and resumed, it is over.
"""

from __future__ import annotations

import random
import shutil
import signal

from .bench import Bench, Outcome, by_command_line, variants

SHARD = 25
#: how often a run is begun anew at most
TRIES = 12


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    run, command_line = draw.choice(variants()), by_command_line(seed)
    seconds, done = bench.reference(run).seconds, []
    wanted = 1 if command_line else draw.choice((1, 1, 2, 3))
    with bench.place() as outdir:
        for _ in range(TRIES):
            moment = draw.uniform(0.02, seconds)
            ended = bench.start(run, outdir, resume=bool(done), command_line=command_line, kill_at=moment)
            if ended.code == -signal.SIGKILL:
                done.append(f"{run}: killed after {ended.seconds:.3f} s")
                if len(done) == wanted:
                    break
                continue
            if ended.code or ended.fault:
                return [Outcome("failed", f"{run}: {moment:.3f} s, then no kill", ended.fault or ended.err)]
            if done:
                break
            for path in outdir.parent.glob(f"{outdir.name}*"):
                shutil.rmtree(path)
            seconds *= 0.7
        if not done:
            return [Outcome("failed", run, f"it has ended before it was killed, {TRIES} times")]
        last = bench.start(run, outdir, resume=True, command_line=command_line)
        seen = "command line" if command_line else "forked"
        outcome = bench.judge(run, outdir, last, "; ".join(done), resumed=True, seen=seen)
        if outcome.ending == "refused":  # a killed run can be continued
            outcome = Outcome("failed", outcome.what, f"refused to go on: {outcome.reason}", seen)
        return [outcome] * len(done)
