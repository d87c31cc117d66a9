"""Start-up: the processor's seconds of commands, and of the runs that a worker makes ready one after the other.

Every command is timed in processes of its own, in turn. A worker's runs are made ready in one process, with and without
what ``keeping`` keeps of the runs before.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from collections.abc import Sequence

from . import ONE_THREAD, in_a_process, race, row
from .clients import SETTINGS

#: the interpreter alone, and the libraries without which no run begins
BARE = {"python": "", "torch": "import torch", "libraries": "import torch, pandas, peft, transformers.modeling_utils"}
FIRST_STEP = """
import sys
from fs_lowrank import load_config, run
class Begun(Exception): pass
def begun(*given): raise Begun
try: run(load_config(sys.argv[1], outdir=sys.argv[2]), on_client=begun, progress=False)
except Begun: pass
"""


def processor_seconds(arguments: Sequence[str]) -> float:
    """Of a Python process with ``arguments``, and of those that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_a_process(*arguments, **ONE_THREAD, HF_HUB_OFFLINE="1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ready(turns: int) -> dict[str, float]:
    """Median seconds in which a run is made ready in a process that has made others ready before."""
    import torch

    from fs_lowrank import load_config
    from fs_lowrank.jobs.kept import keeping
    from fs_lowrank.rounds.site import Site

    torch.set_num_threads(1)
    config = load_config(SETTINGS, {"federate.client_num": 24})

    def anew() -> None:
        _ = Site(config).cohort  # with the trials of all that saves work

    anew()
    with keeping():
        anew()
        again = race({"kept": anew}, turns)
    return {**again, **race({"anew": anew}, turns)}


def run(turns: int = 5) -> dict:
    """Measure the commands and the runs of a worker."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        commands = {name: ["-c", code] for name, code in BARE.items()}
        commands |= {name: ["-m", "fs_lowrank", *name.split()] for name in ("--help", "methods")}
        commands["run"] = ["-c", FIRST_STEP, "examples/demo.yaml", folder]
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(turns):
            for name, arguments in commands.items():
                place = [*arguments[:-1], f"{folder}/{turn}"] if name == "run" else arguments
                taken[name].append(processor_seconds(place))
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    worker = json.loads(in_a_process("-m", __name__, str(turns)).splitlines()[-1])
    rows = [
        row(
            f"fs-lowrank {name}",
            f"processor seconds ÷ those of {what}",
            median[name] / median[bare],
            f"{median[name]:.2f} s, {median[bare]:.2f} s",
        )
        for name, bare, what in (
            ("--help", "python", "Python alone"),
            ("methods", "torch", "importing torch"),
            ("run", "libraries", "importing torch, transformers, PEFT and pandas"),
        )
    ]
    rows[-1]["case"] = "fs-lowrank run, the demo to its first training step"
    rows.append(
        row(
            "a trial or a cell in a worker that has done another, until it trains",
            "loaded anew ÷ kept",
            worker["anew"] / worker["kept"],
            f"{worker['anew']:.2f} s, {worker['kept']:.2f} s",
            least=1.5,
        )
    )
    return {"threads": 1, "rows": rows, "results": {"commands": taken, "worker": worker}}


if __name__ == "__main__":
    print(json.dumps(ready(int(sys.argv[1]))))
