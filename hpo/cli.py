"""The command line: ``fs-lowrank hpo tune | status | best | plot``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from fs_lowrank import UserError
from fs_lowrank.errors import hint, nearest
from fs_lowrank.jobs import shell, tables

#: what is said where Optuna is missing
NEEDS_OPTUNA = "error: hpo needs Optuna: pip install 'fs-lowrank[hpo]'"
console = shell.make_console(140)


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    from .objectives import OBJECTIVES
    from .settings import PRUNERS, SAMPLERS

    parser = shell.Parser(prog="fs-lowrank hpo", description="Search hyperparameters over any config.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def storage_options(command: argparse.ArgumentParser) -> None:
        command.add_argument("--study", metavar="NAME", help="the study, or the first part of the names of several")
        command.add_argument(
            "--dir",
            default="runs/hpo",
            metavar="FOLDER",
            type=Path,
            help="folder of the trials' runs and of the storage (default: %(default)s)",
        )
        command.add_argument(
            "--storage",
            default="",
            metavar="URL",
            help="a SQLite file, or a database's URL (default: study.db in --dir)",
        )

    tune = commands.add_parser("tune", help="search; the same command continues an interrupted search")
    tune.add_argument("--cfg", required=True, metavar="FILE", help="the config that is searched around")
    tune.add_argument(
        "--space",
        required=True,
        metavar="FILE",
        help="the searched keys: a YAML file, or the name of a space that ships",
    )
    storage_options(tune)
    tune.add_argument("--methods", metavar="A,B", help="one study for each method")
    tune.add_argument("--data", metavar="X,Y", help="one study for each data set (data.type)")
    tune.add_argument(
        "--trials",
        type=shell.at_least(1),
        default=0,
        metavar="N",
        help="number of points of a study (default: the whole grid, or 20)",
    )
    tune.add_argument(
        "--budget",
        dest="limit",
        type=shell.above_zero,
        metavar="N",
        help="client-steps after which no trial of a study starts",
    )
    tune.add_argument("--timeout", type=shell.above_zero, metavar="S", help="seconds after which this call ends")
    tune.add_argument(
        "--workers",
        type=int,
        default=None,
        metavar="N",
        help="processes (default: 1, or one for each GPU); 0 runs in this one",
    )
    tune.add_argument("--gpus", metavar="0,1", help="a GPU for each worker; or all")
    tune.add_argument("--sampler", choices=SAMPLERS, default="", help="default: grid where all keys are, else tpe")
    tune.add_argument("--sampler-seed", type=int, default=0, metavar="N", help="seed of the sampler")
    tune.add_argument("--pruner", choices=PRUNERS, default="", help="default: median, and none for a grid")
    tune.add_argument("--rungs", metavar="4,8,16", help="rounds at which the better part continues from its checkpoint")
    tune.add_argument(
        "--objective",
        default="val_acc",
        metavar="NAMES",
        help=f"one or more of {', '.join(OBJECTIVES)}; several give a Pareto front (default: val_acc)",
    )
    tune.add_argument("--seeds", type=shell.at_least(1), default=1, metavar="K", help="runs averaged in a trial")
    tune.add_argument("--confirm", type=int, default=3, metavar="K", help="fresh seeds for the winner (default: 3)")
    tune.add_argument("--engine", default="local", metavar="NAME", help="what runs the trials (default: local)")
    tune.add_argument("--retry-failed", action="store_true", help="run failed trials once more")
    tune.add_argument("overrides", nargs="*", metavar="KEY VALUE", help="override the config")
    tables.option(tune)
    tune.set_defaults(do=partial(_stored, _tune))
    status = commands.add_parser("status", help="the studies: trials, best value, cost, failures")
    storage_options(status)
    tables.option(status)
    status.set_defaults(do=partial(_stored, _status))
    best = commands.add_parser("best", help="the best config, as a file that `fs-lowrank run --cfg` takes")
    storage_options(best)
    best.add_argument("--out", metavar="FILE", help="where to write it; {study} becomes the study's name")
    best.add_argument("--trial", type=int, metavar="N", help="number of a trial on the Pareto front")
    best.add_argument(
        "--unconfirmed",
        action="store_true",
        help="write the winner even if it was not run on fresh seeds, or failed on one",
    )
    best.add_argument("--unlearned", action="store_true", help="write the winner even if it has learned nothing")
    tables.option(best)
    best.set_defaults(do=partial(_stored, _best))
    plot = commands.add_parser("plot", help="Optuna's pictures: history, rounds, slices, Pareto front; trials.csv")
    storage_options(plot)
    plot.add_argument("--out", metavar="FOLDER", type=Path, help="default: plots in --dir")
    plot.set_defaults(do=partial(_stored, _plot))
    return parser, commands.choices.values()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 success, 1 failure, 2 wrong use, 130 interrupted)."""
    try:
        from .storage import quiet

        with quiet():
            return shell.run(_parser, argv, console, folder=lambda args: args.dir)
    except ImportError as error:
        if (error.name or "").split(".")[0] != "optuna":
            raise
        print(NEEDS_OPTUNA, file=sys.stderr)
        return shell.WRONG_USE


def _stored(command: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int | None:
    """Run a command; an error of its storage is a ``UserError``."""
    from .storage import storage_errors

    with storage_errors(args.storage or str(args.dir / "study.db")):
        return command(args)


def _tune(args: argparse.Namespace) -> int:
    import dataclasses

    from fs_lowrank import load_config
    from fs_lowrank.settings import parse_overrides

    from .best import summary
    from .objectives import parse_objectives
    from .space import load_space
    from .storage import open_storage
    from .tune import Search, tune

    if args.confirm < 0 or (args.workers is not None and args.workers < 0):
        raise UserError("--confirm and --workers: expected 0 or more")
    config = load_config(args.cfg, **parse_overrides(args.overrides))
    space = load_space(args.space)
    studies = dict(space.studies)
    for key, text in (("federate.method", args.methods), ("data.type", args.data)):
        if text:
            studies[key] = shell.names(text)
    if any(p.key in studies for p in space.parameters):
        raise UserError(
            f"{args.space}: {', '.join(studies)} is searched, and also given a study for each value; keep one"
        )
    space = dataclasses.replace(space, studies=studies)
    try:
        rungs = tuple(int(r) for r in shell.names(args.rungs))
    except ValueError:
        raise UserError(f"--rungs {args.rungs}: expected numbers of rounds, such as 4,8,16") from None
    gpus = shell.gpus(args.gpus)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Search) if hasattr(args, f.name)}
    made = {
        "name": args.study or re.sub(r"[^\w+-]+", "_", f"{Path(args.cfg).stem}-{Path(args.space).stem}"),
        "objectives": parse_objectives(args.objective),
        "rungs": rungs,
        "workers": max(1, len(gpus)) if args.workers is None else args.workers,
        "gpus": gpus,
        "folder": args.dir,
    }
    options = Search(**{**given, **made})
    ended = tune(config, space, options, say=_say)
    if ended.how == "interrupted":
        _say(f"interrupted; continue with:\n  {args.again}")
        return shell.INTERRUPTED
    storage = open_storage(options.where)
    found = [summary(storage, n) for n in ended.studies]
    _print_table(found, args.table)
    if ended.how == "timeout":
        _say(f"time is up; continue with:\n  {args.again}")
        return shell.OK
    if not all(f["winners"] for f in found):
        missing = ", ".join(f["study"] for f in found if not f["winners"])
        _say(f"no trial completed in {missing}; see the reasons with: {hint('hpo', 'status', *_where(args))}")
        return shell.FAILED
    learned = [f["study"] for f in found if not f["winners"][0]["nothing_learned"]]
    if learned:
        _say(f"next: {hint('hpo', 'best', *_where(args), '--study', learned[0], '--out', 'best.yaml')}")
    return shell.OK


def _where(args: argparse.Namespace) -> list[str]:
    where = ["--dir", str(args.dir)] if str(args.dir) != "runs/hpo" else []
    return [*where, *(["--storage", args.storage] if args.storage else [])]


def _say(text: str) -> None:
    console.print(text, soft_wrap=True)


def _chosen(args: argparse.Namespace) -> tuple:
    """The storage, and the names of the studies that ``--study`` selects."""
    from .storage import open_storage, study_names

    where = args.storage or str(args.dir / "study.db")
    storage = open_storage(where)
    names = study_names(storage)
    if not names:
        raise UserError(f"{where} holds no study yet; start one with fs-lowrank hpo tune")
    if not args.study:
        return storage, names
    chosen = [n for n in names if n == args.study] or [n for n in names if n.startswith(args.study + ".")]
    if not chosen:
        raise UserError(f"no study {args.study!r}{nearest(args.study, names)}; there are: {', '.join(names)}")
    return storage, chosen


def _at(winner: dict) -> str:
    return ", ".join(
        f"{k.rpartition('.')[2]} {v:.4g}" if isinstance(v, float) else f"{k.rpartition('.')[2]} {v}"
        for k, v in winner["point"].items()
    )


def _print_table(found: list[dict], file: Path | None) -> None:
    from fs_lowrank.runs.summary import for_people, shown_name

    from .best import spread_text

    costs = ("rounds", "client-steps", "seconds")
    lines = [("study", "trials", "best", "at", "fresh seeds", *costs)]
    for f in found:
        trials = "\n".join(f"{n} {k}" for k, n in sorted(f["trials"].items()))
        cost = f["budget"]
        best = at = fresh = "-"
        if f["winners"]:
            winners = f["winners"]
            best = "\n".join(
                "  ".join(f"{n} {v:.4g}" for n, v in for_people(w["values"], f["language"]).items())
                + f" (#{w['trial']})"
                for w in winners
            )
            at = "\n".join(_at(w) for w in winners)
            checks = [w["confirmed"] for w in winners]
            fresh = "\n".join(
                "not yet"
                if c is None
                else "  ".join(
                    f"{shown_name(n, f['language'])} {spread_text(v)}"
                    for n, v in c["metrics"].items()
                    if n.endswith("acc") or len(c["metrics"]) < 3
                )
                or f"{len(c['failed'])} failed"
                for c in checks
            )
        spent = str(cost["rounds"]), f"{cost['client_steps']:,}", f"{cost['seconds']:.0f}"
        lines.append((f["study"], trials, best, at, fresh, *spent))
    tables.show(console, lines, file, right=costs)
    for f in found:
        for winner in f["winners"]:
            for said in filter(None, (winner["nothing_learned"], winner["at_end"])):
                _say(f"{f['study']} #{winner['trial']}: {said}")


def _status(args: argparse.Namespace) -> None:
    from .best import budget_text, summary

    storage, names = _chosen(args)
    found = [summary(storage, n) for n in names]
    _print_table(found, args.table)
    for f in found:
        console.print(
            f"{f['study']}: {f['sampler']}, pruner {f['pruner']}"
            + (f", rungs {','.join(map(str, f['rungs']))}" if f["rungs"] else "")
            + f", {f['points']} points; {budget_text(f['budget'])}",
            soft_wrap=True,
        )
        for failure in f["failures"]:
            report = f"; please report it with {failure['traceback']}" if failure["traceback"] else ""
            _say(f"  #{failure['trial']} failed ({failure['kind']}): {failure['reason']} at {failure['point']}{report}")


def _best(args: argparse.Namespace) -> None:
    from .best import choose, config_of, header, summary, write

    storage, names = _chosen(args)
    found = [summary(storage, n) for n in names]
    _print_table(found, args.table)
    if not args.out:
        return
    if len(found) > 1 and "{study}" not in args.out:
        raise UserError(
            f"{len(found)} studies: {', '.join(names)}; choose one with --study, or write them all with "
            "--out 'best-{study}.yaml'"
        )
    chosen = [(f, choose(f, args.trial, args.unconfirmed, args.unlearned)) for f in found]
    for f, winner in chosen:
        path = write(args.out.replace("{study}", f["study"]), config_of(storage, f, winner), header(f, winner))
        _say(f"{path}: run it with: {hint('run', '--cfg', path)}")


def _plot(args: argparse.Namespace) -> None:
    from .plots import draw

    storage, names = _chosen(args)
    for path in draw(storage, names, args.out or args.dir / "plots"):
        _say(str(path))
