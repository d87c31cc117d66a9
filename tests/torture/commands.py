"""Faults inside the writing of a comparison, a search of two trials and a suite of one cell.

Every call on the disk fails once, or finds the disk full. The command then ends with one line that names file and
reason, or goes on with the same result; given again, it ends with the same result.

Seeds go through all calls of the three, with the two faults in turn, and then once more with the other fault of each.
A search and a suite do without processes of their own here, which would count calls of their own; from the command
line a suite has them, and the fault occurs in each of its processes.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .bench import Bench, Outcome, by_command_line
from .child import Ended, fork
from .shim import Mode, arm, armed_environment, count
from .tiny import settings

SHARD = 25
NEEDS_SHIM = True
MODES = (Mode.EIO_ONCE, Mode.FULL)
NAMES = ("compare", "search", "suite")


def where(seed: int, bench: Bench) -> tuple[str, int, Mode]:
    """The command, the number of the call, and what happens there."""
    calls = [(name, n) for name in NAMES for n in range(1, reference(name, bench)["calls"] + 1)]
    turn, index = divmod(seed, len(calls))
    return *calls[index], MODES[(index + turn) % len(MODES)]


def case(seed: int, bench: Bench) -> list[Outcome]:
    name, n, mode = where(seed, bench)
    what, seen = f"{name}: {mode.name} at call {n}", f"{name}, {mode.name}"
    with bench.place() as left:
        command_line = by_command_line(seed)
        seen += ", command line" if command_line else ""
        first = start(name, left, bench, fault=(n, mode), command_line=command_line)
        if first.fault:
            return [Outcome("failed", what, first.fault, seen)]
        if first.code and not (
            re.search(r"Input/output error|No space left on device", first.err) and "/" in first.err
        ):
            return [Outcome("failed", what, f"names no file, or no reason: {first.err}", seen)]
        last = start(name, left, bench, again=True, command_line=command_line) if first.code else first
        if last.fault or last.code:
            reason = f"cannot go on: {last.fault or last.err}; before: {first.err}"
            return [Outcome("failed", what, reason, seen)]
        unlike = {k: v for k, v in figures(name, left).items() if v != reference(name, bench)["figures"].get(k)}
        if unlike:
            return [Outcome("failed", what, f"another result without a word: {str(unlike)[:300]}", seen)]
        return [Outcome("resumed" if first.code else "same", what, first.err, seen)]


def reference(name: str, bench: Bench) -> dict[str, Any]:
    """What the command leaves when nothing is done to it, and how often it touches the disk."""
    folder = bench.folder / "references" / name
    facts = folder / "facts.json"
    if not facts.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ended = start(name, folder / "run", bench, counting=folder / "calls")
        if ended.code:
            raise RuntimeError(f"{name} fails by itself: {ended.err or ended.out}")
        found = {"calls": int((folder / "calls").read_text()), "figures": figures(name, folder / "run")}
        facts.write_text(json.dumps(found))
    return json.loads(facts.read_text())


def start(
    name: str,
    left: Path,
    bench: Bench,
    again: bool = False,
    fault: tuple[int, Mode] | None = None,
    counting: Path | None = None,
    command_line: bool = False,
) -> Ended:
    """The command ``name``, which leaves its files in ``left``.

    Args:
        again: it is given once more.
        fault: the number of a call on the disk, and what happens there.
        counting: a file to write the number of calls to.
        command_line: in a new process instead of a forked child.
    """
    config = left.parent / "config.yaml"
    keys = {"federate.total_round_num": 1, "federate.client_num": 2, "federate.method": "rolora"}
    config.write_text(yaml.safe_dump(settings(bench.inputs, left, **keys)), encoding="utf-8")
    suite = left.parent / "suite.yaml"
    suite.write_text(yaml.safe_dump(_suite(bench, left)), encoding="utf-8")

    package, argv = _argv(name, config, suite, left, again)
    if command_line:
        armed = armed_environment(left, *fault) if fault else {}
        return bench.command(argv, left.parent / "printed.out", env=armed, package=package)

    def work() -> int:
        arm(left, *(fault or ()))
        code = _main(name, argv)
        if counting:
            total = count()
            counting.write_text(str(total))
        return code

    return fork(work, left.parent / "printed.out")


def _suite(bench: Bench, left: Path) -> Mapping[str, Any]:
    tree = settings(bench.inputs, left, **{"federate.total_round_num": 1, "federate.client_num": 2})
    for key in ("outdir", "seed"):
        del tree[key]
    cells = {"main": {"title": "One cell"}}
    return {
        "title": "One cell",
        "config": tree,
        "methods": ["rolora"],
        "seeds": [0],
        "metrics": ["test_acc"],
        "experiments": cells,
    }


def _argv(name: str, config: Path, suite: Path, left: Path, again: bool) -> tuple[str, list[str]]:
    """The package whose command it is, and the arguments."""
    if name == "compare":
        argv = ["compare", "--cfg", str(config), "--methods", "rolora,fedlora", "outdir", str(left)]
        return "fs_lowrank", [*argv, *(["--resume"] if again and left.exists() else [])]
    if name == "search":
        space = left.parent / "space.yaml"
        space.write_text("train.optimizer.lr: {grid: [1.0e-3, 1.0e-2]}\n")
        argv = ["tune", "--cfg", str(config), "--space", str(space), "--dir", str(left), "--workers", "0"]
        return "hpo", [*argv, "--confirm", "0"]
    return "benchmark", ["run", str(suite), "--results", str(left / "results"), "--work", str(left / "work")]


def _main(name: str, argv: list[str]) -> int:
    if name == "compare":
        from fs_lowrank import cli

        return cli.main(argv)
    if name == "search":
        from hpo import cli as searches

        return searches.main(argv)
    import benchmark.run
    from benchmark import cli as suites

    benchmark.run.worker_pool = lambda *given, **others: None
    benchmark.run.hand_out = _in_this_process
    return suites.main(argv)


def _in_this_process(board: Any, *others: Any) -> None:
    """In place of ``hand_out``: does the work of its processes here."""
    from benchmark.execute import work
    from fs_lowrank.jobs.memo import memoizing

    with memoizing():
        while job := board.claim():
            board.finish(job, work(job))
            board.look()


def figures(name: str, left: Path) -> dict[str, Any]:
    """What the command has found out: numbers that are the same each time."""
    if name == "compare":
        found = json.loads((left / "comparison.json").read_text())
        return {n: [part["final"], part["bytes_per_client_and_round"], part["model"]] for n, part in found.items()}
    if name == "suite":
        cells = [json.loads(path.read_text()) for path in sorted((left / "results/cells").glob("*.json"))]
        return {cell["hash"]: {k: v for k, v in cell["metrics"].items() if "second" not in k} for cell in cells}
    import optuna

    from hpo.storage import open_storage

    storage = open_storage(left / "study.db")
    (study, *_) = sorted(storage.get_all_studies(), key=lambda study: len(study.study_name))
    trials = [t for t in storage.get_all_trials(study._study_id) if t.state == optuna.trial.TrialState.COMPLETE]
    return {str(t.params["train.optimizer.lr"]): t.values for t in trials}


with contextlib.suppress(ImportError):  # warm, before anything is forked
    import hpo.cli  # noqa: F401
