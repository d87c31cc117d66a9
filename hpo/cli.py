"""The command line: ``fs-lowrank hpo tune | status | best | plot``."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fs_lowrank import UserError
from fs_lowrank.errors import hint, nearest
from fs_lowrank.jobs import shell, tables
from fs_lowrank.jobs.files import read_json, write_text
from fs_lowrank.jobs.shell import say

console = shell.make_console(140)
_COSTS = ("rounds", "client-steps", "seconds")


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    from .objectives import FILE, OBJECTIVES, PRUNERS, SAMPLERS

    natural, pos = shell.at_least(0), shell.at_least(1)
    names, costs = ", ".join(OBJECTIVES), "client-steps after which no trial of a study starts"
    # option, metavar, help, and further arguments of add_argument
    storing: tuple[tuple, ...] = (
        ("--study", "NAME", "the study, or the first part of the names of several"),
        ("--dir", "FOLDER", "folder of the trials' runs and of the storage (default: %(default)s)", _FOLDER),
        ("--storage", "URL", f"a SQLite file, or a database's URL (default: {FILE} in --dir)", {"default": ""}),
    )
    searching: tuple[tuple, ...] = (
        ("--cfg", "FILE", "the config that is searched around", {"required": True}),
        ("--space", "FILE", "the searched keys: a YAML file, or the name of a space that ships", {"required": True}),
        *storing,
        ("--methods", "A,B", "one study for each method"),
        ("--data", "X,Y", "one study for each data set (data.type)"),
        ("--trials", "N", "number of points of a study (default: the whole grid, or 20)", {"type": pos, "default": 0}),
        ("--budget", "N", costs, {"type": pos, "dest": "limit"}),
        ("--timeout", "S", "seconds after which this call ends", {"type": shell.at_least(0.001, float)}),
        ("--workers", "N", "processes (default: 1, or one for each GPU); 0 runs in this one", {"type": natural}),
        ("--gpus", "0,1", "a GPU for each worker; or all"),
        ("--sampler", None, "default: grid where all keys are, else tpe", {"choices": SAMPLERS, "default": ""}),
        ("--sampler-seed", "N", "seed of the sampler", {"type": int, "default": 0}),
        ("--pruner", None, "default: median, and none for a grid", {"choices": PRUNERS, "default": ""}),
        ("--objective", "NAMES", f"of {names}; several give a Pareto front (default: val_acc)", {"default": "val_acc"}),
        ("--seeds", "K", "runs averaged in a trial", {"type": pos, "default": 1}),
        ("--confirm", "K", "fresh seeds for the winner (default: 3)", {"type": natural, "default": 3}),
        ("--engine", "NAME", "what runs the trials (default: local)", {"default": "local"}),
        ("--retry-failed", ..., "run failed trials once more"),
    )
    writing: tuple[tuple, ...] = (
        ("--out", "FILE", "where to write it; {study} becomes the study's name"),
        ("--trial", "N", "number of a trial on the Pareto front", {"type": int}),
        ("--unconfirmed", ..., "write the winner even if it was not run on fresh seeds, or failed on one"),
        ("--unlearned", ..., "write the winner even if it has learned nothing"),
    )
    drawing = ("--out", "FOLDER", "default: plots in --dir", {"type": Path})
    rows: tuple[tuple[str, str, Callable, tuple[tuple, ...]], ...] = (
        ("tune", "search; the same command continues an interrupted search", _tune, searching),
        ("status", "the studies: trials, best value, cost, failures", _status, storing),
        ("best", "the best config, as a file that `fs-lowrank run --cfg` takes", _best, (*storing, *writing)),
        ("plot", "Optuna's pictures: history, rounds, slices, Pareto front; trials.csv", _plot, (*storing, drawing)),
    )
    parser = shell.Parser(prog="fs-lowrank hpo", description="Search hyperparameters over any config.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.example = f"{parser.prog} tune --cfg reviews.yaml --space rolora_lr"
    examples = {"tune": parser.example, "best": f"{parser.prog} best --out best.yaml"}
    for name, help_text, do, options in rows:
        command = commands.add_parser(name, help=help_text)
        command.example = examples.get(name, command.prog)
        command.set_defaults(do=do if do is _status else partial(_stored, do))
        for option, metavar, text, *arguments in options:
            if metavar is ...:
                command.add_argument(option, action="store_true", help=text)
            else:
                command.add_argument(option, metavar=metavar, help=text, **(arguments[0] if arguments else {}))
        if do is not _plot:
            tables.option(command)
    commands.choices["tune"].add_argument("overrides", nargs="*", metavar="KEY VALUE", help="override the config")
    return parser, commands.choices.values()


_FOLDER: dict[str, Any] = {"default": Path("runs/hpo"), "type": Path, "dest": "folder"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 success, 1 failure, 2 wrong use, 130 interrupted)."""
    return shell.run(_parser, argv, console, folder=lambda args: args.folder)


def _stored(command: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int | None:
    """Run a command; an error of its storage is a ``UserError``."""
    from .objectives import FILE

    try:
        from .storage import quiet, storage_errors
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise UserError("hpo needs Optuna: pip install 'fs-lowrank[hpo]'") from None
    args.where = args.storage or str(args.folder / FILE)
    with quiet(), storage_errors(args.where):
        return command(args)


def _tune(args: argparse.Namespace) -> int:
    from fs_lowrank import load_config
    from fs_lowrank.settings import parse_overrides

    from .objectives import parse_objectives
    from .space import load_space
    from .start import Search, tune
    from .storage import open_storage
    from .summary import summary

    config = load_config(args.cfg, **parse_overrides(args.overrides))
    studies = {"federate.method": shell.names(args.methods), "data.type": shell.names(args.data)}
    space = load_space(args.space, {key: list(values) for key, values in studies.items() if values})
    name = args.study or re.sub(r"[^\w+-]+", "_", f"{Path(args.cfg).stem}-{Path(args.space).stem}")
    gpus, objectives = shell.gpus(args.gpus), parse_objectives(args.objective)
    workers = max(1, len(gpus)) if args.workers is None else args.workers
    options = vars(args) | {"name": name, "workers": workers, "gpus": gpus, "objectives": objectives}
    outcome = tune(config, space, Search(**{f.name: options[f.name] for f in dataclasses.fields(Search)}), say=say)
    if outcome.how == "interrupted":
        say(f"interrupted; continue with:\n  {args.again}")
        return shell.INTERRUPTED
    summaries = [summary(open_storage(args.where), n) for n in outcome.studies]
    _print_table(summaries, args.table)
    if outcome.how == "timeout":
        say(f"time is up; continue with:\n  {args.again}")
        return shell.OK
    location = ["--dir", str(args.folder)] if args.folder != _FOLDER["default"] else []
    location += ["--storage", args.storage] if args.storage else []
    if missing := ", ".join(s["study"] for s in summaries if not s["winners"]):
        say(f"no trial completed in {missing}; see the reasons with: {hint('hpo', 'status', *location)}")
        return shell.FAILED
    if learned := [s["study"] for s in summaries if not s["winners"][0]["nothing_learned"]]:
        say(f"next: {hint('hpo', 'best', *location, '--study', learned[0], '--out', 'best.yaml')}")
    return shell.OK


def _selected(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The studies that ``--study`` selects."""
    wanted, names = args.study or "", sorted(names)
    chosen = [n for n in names if n == wanted] or [n for n in names if not wanted or n.startswith(f"{wanted}.")]
    if not chosen:
        available = ", ".join(names) or "none yet; start one with fs-lowrank hpo tune"
        where = args.storage or args.folder
        raise UserError(f"{where}: no study {wanted!r}{nearest(wanted, names)}; there are: {available}")
    return chosen


def _open_studies(args: argparse.Namespace) -> tuple:
    """The storage, and the names of the studies that ``--study`` selects."""
    from .storage import open_storage, study_names

    storage = open_storage(args.where)
    return storage, _selected(args, study_names(storage))


def _summaries(args: argparse.Namespace) -> list[dict[str, Any]]:
    from .summary import summary

    storage, names = _open_studies(args)
    return [summary(storage, name) for name in names]


def _print_table(summaries: Sequence[Mapping[str, Any]], file: Path | None) -> None:
    from fs_lowrank.runs.summary import for_people, shown_name

    from .best import point_text, spread_text

    def fresh(check: Mapping[str, Any] | None, language: bool) -> str:
        if check is None:
            return "not yet"
        metrics = check["metrics"]
        names = [n for n in metrics if n.endswith("acc")] if len(metrics) > 2 else []
        values = [f"{shown_name(n, language)} {spread_text(metrics[n])}" for n in names or metrics]
        return "  ".join(values) or f"{len(check['failed'])} failed"

    lines = [("study", "trials", "best", "at", "fresh seeds", *_COSTS)]
    for study in summaries:
        cost, winners, language = study["budget"], study["winners"], study["language"]
        values = ["  ".join(f"{n} {v:.4g}" for n, v in for_people(w["values"], language).items()) for w in winners]
        best = "\n".join(f"{value} (#{w['trial']})" for value, w in zip(values, winners))
        points = "\n".join(point_text(w["point"]) for w in winners)
        checks = "\n".join(fresh(w["confirmed"], language) for w in winners)
        trials = "\n".join(f"{n} {k}" for k, n in sorted(study["trials"].items()))
        spent = str(cost["rounds"]), f"{cost['client_steps']:,}", f"{cost['seconds']:.0f}"
        lines.append((study["study"], trials, best or "-", points or "-", checks or "-", *spent))
    tables.show(console, lines, file, right=_COSTS, leaves=(*_COSTS, "trials"))
    for study in summaries:
        for winner in study["winners"]:
            for warning in filter(None, (winner["nothing_learned"], winner["at_end"])):
                say(f"{study['study']} #{winner['trial']}: {warning}")


def _status(args: argparse.Namespace) -> None:
    """Print the summaries that a search's own command wrote last; for any other storage, its content."""
    from .objectives import FILE, SUMMARY

    written = {} if args.storage else {file.parent.name: file for file in args.folder.glob(f"*/{SUMMARY}")}
    if written and (args.folder / FILE).exists():
        remedy = f"see the storage itself with: {hint('hpo', 'status', '--storage', args.folder / FILE)}"
        _print_status(args, [read_json(written[name], remedy=remedy) for name in _selected(args, written)])
    else:
        _stored(lambda args: _print_status(args, _summaries(args)), args)


def _print_status(args: argparse.Namespace, summaries: Sequence[Mapping[str, Any]]) -> None:
    from .best import budget_text

    _print_table(summaries, args.table)
    for study in summaries:
        cost = f"{study['points']} points; {budget_text(study['budget'])}"
        say(f"{study['study']}: {study['sampler']}, pruner {study['pruner']}, {cost}")
        for number, failure, point in study["failures"]:
            say(f"  #{number} at {point}: {failure}")


def _best(args: argparse.Namespace) -> None:
    from .best import choose, header
    from .summary import config_of

    summaries = _summaries(args)
    _print_table(summaries, args.table)
    if not args.out:
        return
    if len(summaries) > 1 and "{study}" not in args.out:
        raise UserError(
            f"{len(summaries)} studies: {', '.join(s['study'] for s in summaries)}; choose one with --study, or write "
            "them all with --out 'best-{study}.yaml'"
        )
    for s, winner in [(s, choose(s, args.trial, args.unconfirmed, args.unlearned)) for s in summaries]:
        path = args.out.replace("{study}", s["study"])
        write_text(path, header(s, winner) + config_of(s, winner).to_yaml())
        say(f"{path}: run it with: {hint('run', '--cfg', path)}")


def _plot(args: argparse.Namespace) -> None:
    from .plots import draw

    storage, names = _open_studies(args)
    for path in draw(storage, names, args.out or args.folder / "plots"):
        say(str(path))
