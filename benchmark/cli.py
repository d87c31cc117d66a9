"""``fs-lowrank benchmark list | run SUITE… | report | score RUN``."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fs_lowrank import UserError
from fs_lowrank.errors import RunFailed, hint
from fs_lowrank.jobs import shell, tables
from fs_lowrank.jobs.shell import say

from . import score
from .suite_keys import SIZES

if TYPE_CHECKING:
    from .job import Options

console = shell.make_console(140)


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    parser = shell.Parser(prog="fs-lowrank benchmark", description="Run suites of experiments and report on them.")
    parser.example = "fs-lowrank benchmark run glue"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def common(command: argparse.ArgumentParser, size: str = "small") -> None:
        command.add_argument("--size", default=size, choices=(*SIZES, *({size} - set(SIZES))), help=f"default: {size}")
        command.add_argument("--engine", default="local", metavar="NAME", help="engine of the runs (default: local)")
        command.add_argument("--results", default="results", metavar="FOLDER", help="default: results")
        command.add_argument(
            "--data",
            default=os.environ.get("FS_LOWRANK_DATA", ""),
            metavar="FOLDER",
            help="folder of the data that `fs-lowrank fetch` does not download (default: $FS_LOWRANK_DATA)",
        )
        command.add_argument("--only", default="", metavar="A,B", help="only these experiments of the suite")
        command.add_argument(
            "--methods", default="", metavar="A,B", help="only these methods, which need not be in the suite"
        )

    listing = commands.add_parser("list", help="list the suites, or the experiments of some suites")
    listing.add_argument("suites", nargs="*", metavar="SUITE")
    common(listing)
    tables.option(listing)
    listing.example = "fs-lowrank benchmark list glue"
    listing.set_defaults(do=_list)
    runs = commands.add_parser("run", help="run the unfinished cells")
    runs.add_argument("suites", nargs="+", metavar="SUITE", help="a name from `list`, or the path of a .yaml file")
    common(runs)
    runs.example = "fs-lowrank benchmark run glue --only sst2 --workers 2"
    runs.add_argument("--workers", type=shell.at_least(1), metavar="N", help="default: 1, or one for each GPU")
    runs.add_argument("--gpus", default="", metavar="0,1", help="GPUs, one for each worker; or all")
    runs.add_argument("--redo", action="store_true", help="repeat finished cells, but no searches")
    runs.add_argument("--cell", default="", metavar="HASH", help="only the cell of this hash, as its result has it")
    runs.add_argument("--verify", default="", metavar="HASH", help="run this cell again and compare its metrics")
    runs.add_argument("--keep", action="store_true", help="keep the runs' folders: adapters, records, checkpoints")
    runs.add_argument("--work", default="runs/benchmark", metavar="FOLDER", help="folder of unfinished work")
    runs.add_argument(
        "--estimate",
        action="store_true",
        help="say what it will take: runs, samples, time, memory, disk; train nothing",
    )
    tables.option(runs, "with --estimate or --verify: ")
    runs.add_argument("--unsafe-code", action="store_true", help="let HumanEval execute generated code")
    runs.set_defaults(do=_run)
    report = commands.add_parser("report", help="write results/report.md, report.html and their figures")
    report.add_argument("suites", nargs="*", metavar="SUITE", help="default: all that have results")
    common(report, "all")
    report.example = "fs-lowrank benchmark report glue"
    report.set_defaults(do=_report)
    score.add(commands)
    return parser, commands.choices.values()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0 for success; 1 if a cell failed or results could not be written; 2 for a usage error; 130 if interrupted.
    """
    return shell.run(_parser, argv, console, folder=lambda args: Path(args.work) if "work" in args else None)


def _options(args: argparse.Namespace, suites: Sequence[str]) -> Options:
    from fs_lowrank import list_engines

    from .job import Options
    from .suite import among

    if args.engine not in list_engines():
        raise UserError(f"--engine {args.engine}: no such engine{among(list_engines(), args.engine)}")
    data = os.path.abspath(os.path.expanduser(args.data)) if args.data else ""
    if data and not os.path.isdir(data):
        raise UserError(f"--data {args.data}: there is no such folder")
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options) if field.name in args}
    listed = {name: shell.names(getattr(args, name)) for name in ("only", "methods")}
    return Options(**{**values, **listed, "suites": tuple(suites), "data": data})


def _list(args: argparse.Namespace) -> None:
    from .suite import load_suite, overview

    lines: list[tuple[str, ...]]
    if not args.suites:
        sizes = ("experiments\nsmall", "experiments\npaper")
        return tables.show(console, [("suite", "what", *sizes), *overview()], args.table, right=sizes)
    from .job import Search
    from .plan import check_only, chosen, jobs_of

    counts = ("searches", "cells", "done", "took")
    lines = [("suite", "experiment", "what", *counts)]
    for name in args.suites:
        options = _options(args, [name])
        store = options.store
        suite = load_suite(name, options.size)
        check_only([suite], options)
        for experiment in chosen(suite, options.only, extra=True):
            jobs = jobs_of(suite, experiment, options)
            searches = sum(isinstance(j, Search) for j in jobs)
            finished = [(j.kind, r) for j in jobs if (r := (j.rated(store) or j).result(store)) is not None]
            done = sum(kind == "cells" for kind, _ in finished)
            minutes = sum(r["seconds_in_all"] for _, r in finished) / 60
            cells = (searches, len(jobs) - searches, done, f"{minutes:.0f} min" if minutes else "")
            lines.append((name, experiment.name + " *" * experiment.extra, experiment.title, *map(str, cells)))
    tables.show(console, lines, args.table, right=counts, leaves=("took", "suite", "searches"))
    console.print("took: minutes of all finished jobs, summed over processes; shared jobs count in each experiment")
    if any(" *" in line[1] for line in lines):
        console.print("* runs only if --only names it")


def _run(args: argparse.Namespace) -> int:
    from .run import run

    gpus = shell.gpus(args.gpus)
    workers = max(1, len(gpus)) if args.workers is None else args.workers
    if args.estimate:
        return _estimate(_options(args, args.suites), workers, gpus, args.table)
    if args.verify:
        return _verify(dataclasses.replace(_options(args, args.suites), cell=args.verify), args.table)
    if args.table:
        raise UserError(
            f"--table {args.table}: of --estimate and --verify; `fs-lowrank benchmark report` has the tables of results"
        )
    board = run(_options(args, args.suites), workers, gpus)
    say(
        f"{board.finished} done, {len(board.failed)} failed, {board.remaining} remain, {board.skipped} were done before"
    )
    for failure in board.failed:
        say(f"failed: {failure['suite']}/{failure['experiment']}  {failure['label']}: {failure['error']}")
    if board.interrupted:
        say("interrupted; the same command continues")
        return shell.INTERRUPTED
    if board.finished:
        from .report import write_boards

        for path in write_boards(_options(args, args.suites)):
            say(str(path))
    if board.finished or board.skipped:
        say(f"next: {hint('benchmark', 'report', *args.suites, *changed_options(args))}")
    if board.failed:
        raise RunFailed(f"{len(board.failed)} of the runs failed, for the reasons above; the same command tries again")
    return shell.OK


def _verify(options: Options, file: Path | None) -> int:
    from .run import verify

    differences = verify(options)
    rows = [("metric", "result", "again"), *((name, str(old), str(new)) for name, old, new in differences)]
    if differences or file:
        tables.show(console, rows, file, right=("result", "again"))
    if not differences:
        say(f"{options.cell}: every metric is the same again")
        return shell.OK
    raise RunFailed(
        f"{options.cell}: {len(differences)} of its metrics differ; its record has the commit, the versions and the "
        "processor that it was made with, on which results depend"
    )


def _estimate(options: Options, workers: int, gpus: Sequence[str], file: Path | None) -> int:
    from .estimate import table

    lines = table(options, workers, say, gpus)
    if len(lines) <= 3:
        say("nothing is left to do")
        return shell.OK
    tables.show(console, lines, file, right=lines[0][1:])
    console.print(
        "time: of local training and evaluation one client after the other, by one probed client of each setting; "
        "without the server's steps, scorers (lm-eval's tasks, generated answers, HumanEval), scripts, pruned trials, "
        "and values beyond the end of a grid. memory, disk: of the largest run. Clients that several methods share are "
        "counted for each"
    )
    return shell.OK


def changed_options(args: argparse.Namespace) -> list[str]:
    """The options that say which results there are, if they are not at their defaults."""
    values = {name: str(getattr(args, name)) for name in ("engine", "results", "data", "only", "methods")}
    changed = [(f"--{name}", value) for name, value in values.items() if value != str(args.parser.get_default(name))]
    return [word for pair in changed for word in pair]


def _report(args: argparse.Namespace) -> None:
    from .report import write_report

    for path in write_report(_options(args, args.suites)):
        say(str(path))
