"""How threads wait on a busy machine: two rounds of the demo beside processes that compute (``fs_lowrank/spin.py``).

In turn, with as many threads as there are cores. The machine must do nothing else.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from benchmark.script import script

from . import in_a_process, row, row_lines, table

#: the environment of a run, by its way to wait; OpenMP's own number is 300,000
POLICIES = {
    "default": {"GOMP_SPINCOUNT": "300000"},
    "100,000": {"GOMP_SPINCOUNT": "100000"},
    "10,000": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
NEIGHBOURS = (0, 1, 2)


def one_run(policy: dict[str, str], folder: str) -> tuple[float, float]:
    """Seconds of the clock and of the processor of two rounds of the demo in a process of its own."""
    words = f"-m fs_lowrank run --cfg examples/demo.yaml --overwrite outdir {folder} federate.total_round_num 2"
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    in_a_process(*words.split(), HF_HUB_OFFLINE="1", **policy)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def study(turns: int) -> dict:
    """The result of the command, as plain data: every policy beside every number of neighbours."""
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in NEIGHBOURS:
            runs = results[str(number)] = {name: [] for name in POLICIES}
            for _ in range(turns):
                for name, policy in POLICIES.items():
                    # A neighbour's own seconds count for this process once it has been waited for, after the run.
                    with ExitStack() as busy:
                        for _ in range(number):
                            neighbour = busy.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                            busy.callback(neighbour.kill)
                        runs[name].append(one_run(policy, f"{folder}/run"))
    rows = []
    for neighbours, runs in results.items():
        wall, processor = ({n: statistics.median(p[i] for p in pairs) for n, pairs in runs.items()} for i in (0, 1))
        for name in list(POLICIES)[1:]:
            note = f"{wall[name]:.1f} s, {wall['default']:.1f} s; processor {processor[name]:.1f} s, "
            note += f"{processor['default']:.1f} s"
            case = f"the demo's first two rounds beside {neighbours} busy processes, {name}"
            rows.append(row(case, "seconds ÷ those by OpenMP's default", wall[name] / wall["default"], note))
    return {"rows": rows, "results": results}


OPTIONS = {"--turns": dict(type=int, default=5)}
main = script(__spec__.name, __doc__, OPTIONS, study, lines=row_lines, readme=table, out="results/speed")


if __name__ == "__main__":
    raise SystemExit(main())
