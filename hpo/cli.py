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

console = shell.make_console(140)
_COSTS = ("rounds", "client-steps", "seconds")


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    from .objectives import FILE, OBJECTIVES, PRUNERS, SAMPLERS

    whole, some = shell.at_least(0), shell.at_least(1)
    names, costs = ", ".join(OBJECTIVES), "client-steps after which no trial of a study starts"
    # option, metavar, help, and what else argparse has to know
    stored: tuple[tuple, ...] = (
        ("--study", "NAME", "the study, or the first part of the names of several"),
        ("--dir", "FOLDER", "folder of the trials' runs and of the storage (default: %(default)s)", _FOLDER),
        ("--storage", "URL", f"a SQLite file, or a database's URL (default: {FILE} in --dir)", {"default": ""}),
    )
    searched: tuple[tuple, ...] = (
        ("--cfg", "FILE", "the config that is searched around", {"required": True}),
        ("--space", "FILE", "the searched keys: a YAML file, or the name of a space that ships", {"required": True}),
        *stored,
        ("--methods", "A,B", "one study for each method"),
        ("--data", "X,Y", "one study for each data set (data.type)"),
        ("--trials", "N", "number of points of a study (default: the whole grid, or 20)", {"type": some, "default": 0}),
        ("--budget", "N", costs, {"type": some, "dest": "limit"}),
        ("--timeout", "S", "seconds after which this call ends", {"type": shell.at_least(0.001, float)}),
        ("--workers", "N", "processes (default: 1, or one for each GPU); 0 runs in this one", {"type": whole}),
        ("--gpus", "0,1", "a GPU for each worker; or all"),
        ("--sampler", None, "default: grid where all keys are, else tpe", {"choices": SAMPLERS, "default": ""}),
        ("--sampler-seed", "N", "seed of the sampler", {"type": int, "default": 0}),
        ("--pruner", None, "default: median, and none for a grid", {"choices": PRUNERS, "default": ""}),
        ("--objective", "NAMES", f"of {names}; several give a Pareto front (default: val_acc)", {"default": "val_acc"}),
        ("--seeds", "K", "runs averaged in a trial", {"type": some, "default": 1}),
        ("--confirm", "K", "fresh seeds for the winner (default: 3)", {"type": whole, "default": 3}),
        ("--engine", "NAME", "what runs the trials (default: local)", {"default": "local"}),
        ("--retry-failed", ..., "run failed trials once more"),
    )
    written: tuple[tuple, ...] = (
        ("--out", "FILE", "where to write it; {study} becomes the study's name"),
        ("--trial", "N", "number of a trial on the Pareto front", {"type": int}),
        ("--unconfirmed", ..., "write the winner even if it was not run on fresh seeds, or failed on one"),
        ("--unlearned", ..., "write the winner even if it has learned nothing"),
    )
    drawn = ("--out", "FOLDER", "default: plots in --dir", {"type": Path})
    rows: tuple[tuple[str, str, Callable, tuple[tuple, ...]], ...] = (
        ("tune", "search; the same command continues an interrupted search", _tune, searched),
        ("status", "the studies: trials, best value, cost, failures", _status, stored),
        ("best", "the best config, as a file that `fs-lowrank run --cfg` takes", _best, (*stored, *written)),
        ("plot", "Optuna's pictures: history, rounds, slices, Pareto front; trials.csv", _plot, (*stored, drawn)),
    )
    parser = shell.Parser(prog="fs-lowrank hpo", description="Search hyperparameters over any config.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.example = f"{parser.prog} tune --cfg reviews.yaml --space rolora_lr"
    examples = {"tune": parser.example, "best": f"{parser.prog} best --out best.yaml"}
    for name, about, do, options in rows:
        command = commands.add_parser(name, help=about)
        command.example = examples.get(name, command.prog)
        command.set_defaults(do=do if do is _status else partial(_stored, do))
        for option, metavar, text, *more in options:
            if metavar is ...:
                command.add_argument(option, action="store_true", help=text)
            else:
                command.add_argument(option, metavar=metavar, help=text, **(more[0] if more else {}))
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
    asked = {"federate.method": shell.names(args.methods), "data.type": shell.names(args.data)}
    space = load_space(args.space, {key: list(values) for key, values in asked.items() if values})
    name = args.study or re.sub(r"[^\w+-]+", "_", f"{Path(args.cfg).stem}-{Path(args.space).stem}")
    gpus, objectives = shell.gpus(args.gpus), parse_objectives(args.objective)
    workers = max(1, len(gpus)) if args.workers is None else args.workers
    given = vars(args) | {"name": name, "workers": workers, "gpus": gpus, "objectives": objectives}
    ended = tune(config, space, Search(**{f.name: given[f.name] for f in dataclasses.fields(Search)}), say=_say)
    if ended.how == "interrupted":
        _say(f"interrupted; continue with:\n  {args.again}")
        return shell.INTERRUPTED
    found = [summary(open_storage(args.where), n) for n in ended.studies]
    _print_table(found, args.table)
    if ended.how == "timeout":
        _say(f"time is up; continue with:\n  {args.again}")
        return shell.OK
    where = ["--dir", str(args.folder)] if args.folder != _FOLDER["default"] else []
    where += ["--storage", args.storage] if args.storage else []
    if missing := ", ".join(f["study"] for f in found if not f["winners"]):
        _say(f"no trial completed in {missing}; see the reasons with: {hint('hpo', 'status', *where)}")
        return shell.FAILED
    if learned := [f["study"] for f in found if not f["winners"][0]["nothing_learned"]]:
        _say(f"next: {hint('hpo', 'best', *where, '--study', learned[0], '--out', 'best.yaml')}")
    return shell.OK


def _say(text: str) -> None:
    console.print(text, soft_wrap=True)


def _selected(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The studies that ``--study`` selects."""
    wanted, names = args.study or "", sorted(names)
    chosen = [n for n in names if n == wanted] or [n for n in names if not wanted or n.startswith(f"{wanted}.")]
    if not chosen:
        there = ", ".join(names) or "none yet; start one with fs-lowrank hpo tune"
        where = args.storage or args.folder
        raise UserError(f"{where}: no study {wanted!r}{nearest(wanted, names)}; there are: {there}")
    return chosen


def _chosen(args: argparse.Namespace) -> tuple:
    """The storage, and the names of the studies that ``--study`` selects."""
    from .storage import open_storage, study_names

    storage = open_storage(args.where)
    return storage, _selected(args, study_names(storage))


def _summaries(args: argparse.Namespace) -> list[dict[str, Any]]:
    from .summary import summary

    storage, names = _chosen(args)
    return [summary(storage, name) for name in names]


def _print_table(found: Sequence[Mapping[str, Any]], file: Path | None) -> None:
    from fs_lowrank.runs.summary import for_people, shown_name

    from .best import point_text, spread_text

    def fresh(check: Mapping[str, Any] | None, language: bool) -> str:
        if check is None:
            return "not yet"
        shown = [n for n in check["metrics"] if n.endswith("acc") or len(check["metrics"]) < 3]
        values = [f"{shown_name(n, language)} {spread_text(check['metrics'][n])}" for n in shown]
        return "  ".join(values) or f"{len(check['failed'])} failed"

    lines = [("study", "trials", "best", "at", "fresh seeds", *_COSTS)]
    for f in found:
        cost, winners, language = f["budget"], f["winners"], f["language"]
        values = ["  ".join(f"{n} {v:.4g}" for n, v in for_people(w["values"], language).items()) for w in winners]
        best = "\n".join(f"{value} (#{w['trial']})" for value, w in zip(values, winners))
        at = "\n".join(point_text(w["point"]) for w in winners)
        checks = "\n".join(fresh(w["confirmed"], language) for w in winners)
        trials = "\n".join(f"{n} {k}" for k, n in sorted(f["trials"].items()))
        spent = str(cost["rounds"]), f"{cost['client_steps']:,}", f"{cost['seconds']:.0f}"
        lines.append((f["study"], trials, best or "-", at or "-", checks or "-", *spent))
    tables.show(console, lines, file, right=_COSTS, leaves=(*_COSTS, "trials"))
    for f in found:
        for winner in f["winners"]:
            for said in filter(None, (winner["nothing_learned"], winner["at_end"])):
                _say(f"{f['study']} #{winner['trial']}: {said}")


def _status(args: argparse.Namespace) -> None:
    """Of a search with a storage of its own as its command last wrote it, of another as its storage has it."""
    from .objectives import FILE, SUMMARY

    written = {} if args.storage else {file.parent.name: file for file in args.folder.glob(f"*/{SUMMARY}")}
    if written and (args.folder / FILE).exists():
        whole = f"see the storage itself with: {hint('hpo', 'status', '--storage', args.folder / FILE)}"
        _print_status(args, [read_json(written[name], remedy=whole) for name in _selected(args, written)])
    else:
        _stored(lambda args: _print_status(args, _summaries(args)), args)


def _print_status(args: argparse.Namespace, found: Sequence[Mapping[str, Any]]) -> None:
    from .best import budget_text

    _print_table(found, args.table)
    for f in found:
        cost = f"{f['points']} points; {budget_text(f['budget'])}"
        _say(f"{f['study']}: {f['sampler']}, pruner {f['pruner']}, {cost}")
        for number, (said, report), point in f["failures"]:
            _say(f"  #{number} {said} at {point}{report}")


def _best(args: argparse.Namespace) -> None:
    from .best import choose, header
    from .summary import config_of

    found = _summaries(args)
    _print_table(found, args.table)
    if not args.out:
        return
    if len(found) > 1 and "{study}" not in args.out:
        raise UserError(
            f"{len(found)} studies: {', '.join(f['study'] for f in found)}; choose one with --study, or write them all "
            "with --out 'best-{study}.yaml'"
        )
    for f, winner in [(f, choose(f, args.trial, args.unconfirmed, args.unlearned)) for f in found]:
        path = args.out.replace("{study}", f["study"])
        write_text(path, header(f, winner) + config_of(f, winner).to_yaml())
        _say(f"{path}: run it with: {hint('run', '--cfg', path)}")


def _plot(args: argparse.Namespace) -> None:
    from .plots import draw

    storage, names = _chosen(args)
    for path in draw(storage, names, args.out or args.folder / "plots"):
        _say(str(path))
