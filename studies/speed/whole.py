"""Whole jobs with everything that saves work, and the same jobs without: the four methods of ``make demo``, a search
of 16 trials and a suite of 12 cells over the demo's data. The demo is also compared with one process.
Needs: fs-lowrank fetch minilm sentiment.

"Without" is one process whose clients train one by one, on whole batches and all positions, and which takes nothing
from other runs; the states of frozen layers are kept within a run. Every job begins with nothing kept on disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmark.script import script
from fs_lowrank.settings.reading import read_yaml
from fs_lowrank.settings.tree import flatten

from . import ROOT, in_a_process, row, row_lines, table

DEMO = ROOT / "examples" / "demo.yaml"
METHODS = ("rolora", "ffa_lora", "fedlora", "flexlora")
PLAIN = {"train.cohort": "off", "train.only_read": "off", "train.blocks": 1, "train.cache_frozen_shared": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"federate.process_num": "auto"},
    "one process": {},
    "without": PLAIN,
}
#: of the search and the suite, whose runs are shorter than the demo's
SHORT = {"federate.total_round_num": 6, "eval.freq": 3, "eval.split": ["val"]}
RATES = [float(f"{10 ** (-3.5 + 0.15 * i):.3g}") for i in range(16)]


def command(kind: str, settings: dict[str, Any], folder: Path) -> list[str]:
    """The command of the demo, a search or a suite, whose files are written to ``folder``."""
    if kind == "demo":
        arguments = ["--cfg", str(DEMO), "--methods", ",".join(METHODS), "outdir", str(folder / "demo")]
        return ["compare", *arguments, *(text for key, value in settings.items() for text in (key, str(value)))]
    keys = {**SHORT, **settings}
    if kind == "search":
        (folder / "rates.yaml").write_text(yaml.safe_dump({"train.optimizer.lr": {"grid": RATES}}))
        arguments = ["--cfg", str(DEMO), "--space", str(folder / "rates.yaml"), "--dir", str(folder / "hpo")]
        words = [text for key, value in keys.items() for text in (key, str(value))]
        return ["hpo", "tune", *arguments, "--methods", "rolora", "--workers", "2", "--confirm", "0", *words]
    config = {**flatten(read_yaml(DEMO)[1]), **keys}
    suite = {"config": config, "methods": list(METHODS), "seeds": [0, 1, 2], "test": "none", "metrics": ["val_acc"]}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    places = ["--results", str(folder / "results"), "--work", str(folder / "work")]
    return ["benchmark", "run", str(folder / "suite.yaml"), "--workers", "2", *places]


def _job(kind: str, setting: str) -> float:
    """Seconds of a whole command, which begins with empty caches."""
    with tempfile.TemporaryDirectory() as name:
        arguments, started = command(kind, SETTINGS[setting], Path(name)), time.perf_counter()
        in_a_process("-m", "fs_lowrank", *arguments, HF_HUB_OFFLINE="1", FS_LOWRANK_FROZEN=f"{name}/frozen")
        return time.perf_counter() - started


def study(turns: int) -> dict[str, Any]:
    """The result of the command, as plain data: the demo ``turns`` times in turn, the search and the suite once."""
    demos: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(turns):
        for setting in SETTINGS:
            demos[setting].append(_job("demo", setting))
    pairs = product(("search", "suite"), ("one process", "without"))  # these have a process for each worker
    jobs = {pair: _job(*pair) for pair in pairs}
    medians, cores = {setting: statistics.median(times) for setting, times in demos.items()}, os.cpu_count()
    demo, ratio = "the demo's four methods, the whole command", "÷ ours"
    plain = "clients one by one, whole batches, nothing stored for other runs"
    threads = f"one process with {cores} threads ÷ {cores} processes"
    rows = [
        row(demo, f"one process, {plain} {ratio}", *_ratio(medians["without"], medians["all"]), minimum=3),
        row("the same", threads, *_ratio(medians["one process"], medians["all"]), minimum=1.2),
    ]
    for kind, name in (("search", "a search of 16 trials"), ("suite", "a suite of 12 cells")):
        case = f"{name} over the demo's data, two workers, the whole command"
        times = _ratio(jobs[kind, "without"], jobs[kind, "one process"])
        rows.append(row(case, f"{plain} {ratio}", *times, minimum=3))
    results = {"demo": demos, "jobs": {", ".join(job): seconds for job, seconds in jobs.items()}}
    return {"threads": cores, "rows": rows, "results": results}


def _ratio(over: float, under: float) -> tuple[float, str]:
    return over / under, f"{over:.0f} s ÷ {under:.0f} s"


OPTIONS = {"--turns": dict(type=int, default=1)}
main = script(__spec__.name, __doc__, OPTIONS, study, lines=row_lines, readme=table, out="results/speed")


if __name__ == "__main__":
    raise SystemExit(main())
