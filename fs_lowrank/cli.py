"""The command line: ``fs-lowrank run | compare | cache | methods | doctor | fetch``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

from rich.table import Table
from rich.text import Text

from . import __version__
from .commands import add_commands, init, seeds
from .commands.extensions import extensions, run_extension
from .errors import UserError, between, counted, hint
from .jobs import shell, tables
from .jobs.progress import line
from .jobs.shell import console, say

_CODES = "exit code: 0; 1 if a run could not continue, or doctor misses something; 2 for wrong use; 130 if interrupted"
#: the commands that are entry points of this package
_OURS = {
    "benchmark": "run suites of experiments, and report their results with verdicts",
    "hpo": "search hyperparameters over any configuration",
}
#: title -> the commands that ``--help`` shows with an example
_GROUPS = {
    "Begin": ("init", "run", "compare"),
    "Use a finished run": ("predict", "evaluate", "report"),
    "Look something up": ("methods", "keys"),
}
#: command -> the command line with which its help begins
_EXAMPLES = {
    "init": "fs-lowrank init reviews.csv",
    "run": "fs-lowrank run --cfg reviews.yaml train.optimizer.lr 0.05",
    "compare": "fs-lowrank compare --cfg reviews.yaml --methods rolora,local",
    "predict": "fs-lowrank predict runs/reviews --data new.csv",
    "evaluate": "fs-lowrank evaluate runs/reviews --data more.csv",
    "report": "fs-lowrank report runs/reviews",
    "methods": "fs-lowrank methods rolora",
    "keys": "fs-lowrank keys train.optimizer",
    "examples": "fs-lowrank examples demo",
    "fetch": "fs-lowrank fetch minilm sentiment",
    "doctor": "fs-lowrank doctor",
    "cache": "fs-lowrank cache --clear",
    "check": "fs-lowrank check my_server.py:aggregate",
    "flower": "fs-lowrank flower app my_app --cfg reviews.yaml",
}


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    parser = shell.Parser(prog="fs-lowrank", description="Federated low-rank fine-tuning.", epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"fs-lowrank {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def run_options(command: argparse.ArgumentParser) -> None:
        command.add_argument("--cfg", required="compare" in command.prog, metavar="FILE", help="configuration (YAML)")
        command.add_argument("--engine", default="local", metavar="NAME", help="engine of the run (default: local)")
        command.add_argument("--workers", metavar="P", help="processes that train, or auto (federate.process_num)")
        command.add_argument("--client_cfg", metavar="FILE", help="settings of single clients (lowrank.clients)")
        existing = command.add_mutually_exclusive_group()
        existing.add_argument("--resume", action="store_true", help="continue from the last checkpoint in outdir")
        existing.add_argument("--overwrite", action="store_true", help="remove the run in outdir and start again")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="KEY VALUE",
            help="override the file, e.g.: federate.total_round_num 20 train.optimizer.lr 0.05",
        )

    def add(do: Callable, help: str, description: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(do.__name__[1:], help=help, description=description, epilog=_CODES)
        command.set_defaults(do=do)
        return command

    run = add(_run, "run a configuration", "Run a configuration: prints a line per round, then the files.")
    run_options(run)
    run.add_argument("--data", metavar="FILE", type=Path, help="in place of --cfg: write a configuration, run it")
    run.add_argument("--dry-run", action="store_true", help="estimate memory, disk and time; exit code 1: too little")
    tables.option(run)
    init.options(run)
    run.set_defaults(cfg=None)
    compare = add(_compare, "run a configuration with several methods; a table and a plot")
    run_options(compare)
    compare.add_argument("--methods", required=True, metavar="A,B,C", help="methods; also local, pooled, relora")
    compare.add_argument("--seeds", metavar="0,1,2", help="one comparison for each seed; means and spreads")
    tables.option(compare)
    cache = add(_cache, "list the stored states of frozen layers, which other runs use, or remove them")
    cache.add_argument("--clear", action="store_true", help="remove all of them")
    tables.option(cache, "without --clear: ")
    methods = add(_methods, "list the methods, or show one in full")
    methods.add_argument("name", nargs="?", metavar="NAME")
    doctor = add(_doctor, "show what is installed and usable, and how to get the rest")
    doctor.add_argument("--quick", action="store_true", help="only the versions of packages, without importing them")
    fetch = add(_fetch, "download the small models and data sets of the quick start")
    fetch.add_argument("names", nargs="*", metavar="NAME", help="items to download; without any, list them")
    for command in (methods, doctor, fetch):
        tables.option(command)
    add_commands(commands)
    parsers = list(commands.choices.values())
    for name, example in _EXAMPLES.items():
        commands.choices[name].example = example
    parser.groups = _GROUPS
    for name, point in _added().items():
        help_text = _OURS.get(name) or f"added by {point.dist.name if point.dist else point.value}"
        commands.add_parser(name, help=f"{help_text}; has its own --help")
    return parser, parsers


def _added() -> dict[str, EntryPoint]:
    """The commands of entry points, by name; none takes the place of one of ours."""
    return {name: point for name, point in extensions().items() if name not in _EXAMPLES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (``_CODES``)."""
    arglist = list(sys.argv[1:] if argv is None else argv)
    completing = os.environ.get("COMP_LINE", "").split(" ")[1:-1][:1]  # the command of a line that a shell completes
    if "_ARGCOMPLETE" in os.environ and {*completing} & {*_added()}:
        arglist, os.environ["_ARGCOMPLETE"] = completing, "2"  # its own parser completes it, without the first word

    def again(args: argparse.Namespace) -> str:
        if not hasattr(args, "resume"):
            return ""
        outdir = getattr(args, "outdir", None)
        if outdir is None or not any(outdir.rglob("checkpoint")):
            return " before a round was saved, so there is nothing to continue; the same command begins anew"
        words = [word for word in arglist if word not in ("--overwrite", "--resume")]
        return f"; continue with: {hint(words[0], '--resume', *words[1:])}"

    extension = _added().get(arglist[0]) if arglist else None
    return run_extension(extension, arglist[1:]) if extension else shell.run(_parser, arglist, console, again, _folder)


def _folder(args: argparse.Namespace) -> Path | None:
    """The folder for the traceback of an error of the package: that of the command's run."""
    named = (getattr(args, name, None) for name in ("outdir", "run"))
    return next(filter(None, (*named, *getattr(args, "runs", ()))), None)


def _on_round(config) -> Callable[[dict], None]:
    """A function that prints one line per round."""
    from .runs.progress import chief_scores
    from .runs.summary import human_bytes

    def on_round(record: dict) -> None:
        answers = (f"answers {n.replace('_', ' ')} {v:.3f}" for n, v in record.get("answers", {}).items())
        scores = chief_scores(record["metrics"], config.is_language)
        cells = [f"loss {record['loss']:.3f}", scores, *answers]
        note = f"  {len(record['failed'])} failed" * bool(record["failed"]) + "  left out" * bool(record.get("skipped"))
        sent = f"  up {human_bytes(record['uplink_bytes'] / max(len(record['clients']), 1))}"
        end = f"  {sum(record['seconds'].values()):.1f} s"
        line = Text.assemble(
            f"round {record['round']:>3}/{config.federate.total_round_num}",
            (note, "yellow"),
            *(f"  {cell}" for cell in cells if cell),
        )
        if len(line) + len(sent + end) <= console.width:  # the table at the end has the bytes too
            line.append(sent)
        line.append(end)
        console.print(line)

    return on_round


def _beginning() -> list:
    """A callback that prints the number of trained weights, the cached layers, and the folder of the results."""
    from . import Callback
    from .models.shortcuts.masks import draws
    from .runs.summary import human_bytes, human_percent

    class Beginning(Callback):
        def on_start(self, run):
            total, trains = run.workspace.parameters["total"], run.workspace.parameters["trainable"]
            text = f"trains {trains:,} of {total:,} weights ({human_percent(trains / total)})"
            if prefix := run.workspace.prefix:
                cached = f" once ({human_bytes(prefix.planned)})" if prefix.planned else ""
                text += f"; computes the first {prefix.depth} of {len(prefix.layers)} layers{cached} without dropout"
            dropout = "acts" if draws(run.workspace.model.train()) else "is 0"
            resumes = f"; continues after round {len(run.history)}" if run.history else ""
            console.print(f"  {text}; dropout {dropout}{' in the others' * bool(prefix)}{resumes}")
            say(f"  results go to {run.outdir}")

    return [Beginning()]


def _overrides(args: argparse.Namespace) -> list[str]:
    """The overrides of the command line, and its options that stand for a key."""
    options = {"federate.process_num": args.workers, "lowrank.clients": args.client_cfg}
    return [*args.overrides, *(word for key, value in options.items() if value for word in (key, value))]


def _announce(config, name: str) -> None:
    from .data.partition import BY_SITE

    text = (
        f": {counted(config.taking_part, 'client')}, {config.sampled_per_round} a round, "
        f"{counted(config.federate.total_round_num, 'round')}, lr {config.train.optimizer.lr}, seed {config.seed}"
    )
    if config.data.splitter not in BY_SITE:
        text += f"; simulated clients: one table is dealt out ({config.data.splitter})"
    console.print(Text.assemble((name, "bold"), text))


def _figures(title: str | None, lines: Sequence[Sequence[str]]) -> Table:
    """A table of figures that is not truncated at the width of the console; the first line is its header."""
    table = tables.rich_table(lines)
    table.title, table.title_justify = title, "left"
    for i, column in enumerate(table.columns):
        column.justify, column.no_wrap = "right" if i else "left", True
    table.width = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
    return table


def _print_figures(title: str | None, lines: Sequence[Sequence[str]], file: Path | None = None) -> None:
    """Print one row per method. If that is too wide, print one row per figure, with as many methods as fit.

    Args:
        file: as of ``tables.show``.
    """
    if file is tables.JSON:
        tables.show(console, lines, file)
        return
    if file:
        tables.write_tables(lines, file)
    table = _figures(title, lines)
    if (table.width or 0) <= console.width:
        console.print(table)
        return
    header, *columns = [[cell.replace("\n", " ") for cell in line] for line in lines]
    while columns:
        for count in range(len(columns), 0, -1):
            table = _figures(title, list(zip(header, *columns[:count])))
            if (table.width or 0) <= console.width:
                break
        console.print(table, crop=False)  # not truncated; a very narrow console wraps the lines
        columns, title = columns[count:], None


def _print_results(results: dict, file: Path | None = None) -> None:
    """Print a table of all methods, one of the clients' own models if there are any, and the total traffic."""
    from .runs.summary import human_bytes, of_clients
    from .runs.tables import client_lines, result_lines

    by = sorted({result.best["by"] for result in results.values() if result.best})
    chosen = f"; best round by {', '.join(by)}" if by else ""
    head = "" if all(result.language for result in results.values()) else "; the head is the classifier"
    _print_figures(f"bytes are per client and round{head}{chosen}", result_lines(results), file)
    if lines := client_lines(results):
        scored = [r.facts for r in results.values() if any(n.startswith("client_test_") for n in r.final)]
        _print_figures(of_clients(scored), lines)
    for name, result in results.items():
        say(f"  {name}: {human_bytes(result.bytes['uplink_bytes'] + result.bytes['downlink_bytes'])} in all")


def _print_notes(results: dict) -> None:
    """Print standard errors, scores before round 1, clients that never took part, and methods no better than chance."""
    from .runs.summary import for_people
    from .settings.metrics import standard_error

    alone = results["local"].final.get("test_acc") if "local" in results else None
    for name, result in results.items():
        rows = result.facts["held_out"].get("test", 0)
        if "test_acc" in result.final and rows and not result.language:
            score = result.final["test_acc"]
            error = f"{standard_error(score, rows):.3f} (one standard error of {rows:,} samples)"
            best, share = result.best.get("test_acc"), result.facts["majority"]
            details = f"; in the best round {best:.3f} ± {standard_error(best, rows):.3f}" if best is not None else ""
            details += f"; the most frequent class alone gives {share:.3f}" if share is not None else ""
            details += f"; local {alone:.3f}" if alone is not None and name != "local" else ""
            console.print(f"  {name}: test accuracy {score:.3f} ± {error}{details}")
        if result.before:
            scores = for_people({n: v for n, v in result.before.items() if n.count("_") == 1}, result.language)
            initial = ", ".join(f"{n.replace('_', ' ')} {v:.3f}" for n, v in scores.items())
            say(f"  {name}: before round 1: {initial}")
        if "unseen_test_acc" in result.final:
            listed = ", ".join(map(str, result.unseen[:20])) + (", …" if len(result.unseen) > 20 else "")
            score = f"test {'token ' * result.language}acc {result.final['unseen_test_acc']:.3f} on their test rows"
            part = f"{len(result.unseen)} of {len(result.facts['clients'])} clients never took part ({listed})"
            console.print(f"  {name}: {part}: {score}")
        if result.verdict:
            console.print(f"  {name}: {result.verdict}", style="yellow")


def _print_saved(result) -> None:
    images = result.facts.get("images")
    meanings = {
        "adapter": "the global adapter, for plain PEFT" + (" over its folder base" if images else ""),
        "model": "the whole model, for " + ("fs_lowrank.models.vision.load_vision" if images else "plain transformers"),
        **dict.fromkeys(("adapter_best", "model_best"), f"the same after the best round, {result.best.get('round')}"),
        "personal": "every client's own adapter over that model, for plain PEFT",
        "curves": "learning curves",
    }
    for name, path in result.saved.items():
        if name in meanings:
            say(f"  {meanings[name]}: {path}")
    say(f"  records, configuration, checkpoints, pictures, tables: {result.outdir}")


def _dry_run(config, engine: str, file: Path | None) -> int:
    from .config import check_engine
    from .engines import get_engine
    from .engines.catalogue import added_engines
    from .estimate import estimate

    get_engine(engine)
    if engine not in added_engines():  # the others refuse what they do not honour when they run
        check_engine(config, engine)
    usage = estimate(config)
    tables.show(console, usage.lines(), file, right=("MB",))
    if usage.seconds is not None and usage.steps is not None:
        from .runs.summary import human_time

        or_less = f" or less, as {usage.cohort} clients train at once," if usage.cohort > 1 else ""
        steps = f"{usage.steps:,.0f} steps of clients"
        console.print(f"  about {human_time(usage.seconds)}{or_less} for {steps}, and evaluation")
    for resource in usage.lacking:
        say(f"  it will not fit: {resource}", style="yellow")
    for advice in usage.advice:
        say(f"  set {advice}")
    return 1 if usage.lacking else 0


def _run(args: argparse.Namespace) -> int | None:
    if (args.cfg is None) == (args.data is None):
        raise UserError("usage: run needs --cfg FILE, a configuration, or --data FILE, for which one is written")
    if args.data is not None:
        args.cfg = init.write(args, None)
        say(f"{args.cfg}: written for {args.data}; its comments mark every guess")
    elif options := init.used_options(args):
        raise UserError(f"{', '.join(options)}: options of --data FILE; with --cfg, the file or `key value` says it")
    from .config import load_config

    with line("reading the configuration", 1, at_once=True):  # PyTorch checks the arglist of its optimizers
        config = load_config(args.cfg, _overrides(args))
    _announce(config, config.federate.method)
    if args.dry_run:
        return _dry_run(config, args.engine, args.table)
    from .api import run  # takes seconds, and errors of the file are reported before
    from .runs.folder import outdir_of

    args.outdir = outdir_of(config)
    if args.resume and not (folder := args.outdir / "checkpoint").exists():
        say(f"there is no {folder}: starting at round 1")
    existing = {"resume": "auto" if args.resume else False, "overwrite": args.overwrite}
    result = run(config, args.engine, callbacks=_beginning(), **existing, on_round=_on_round(config))
    if not result.history:  # a client process of a distributed run: the results are the server's
        say(f"done; this client's log: {result.outdir}")
        return None
    _print_results({result.facts["method"]: result}, args.table)
    _print_notes({result.facts["method"]: result})
    _print_saved(result)
    if result.verdict:
        longer = ("--resume", "federate.total_round_num", 2 * len(result.history))
        say(f"  next, for more rounds: {hint('run', '--cfg', result.outdir / 'config.yaml', *longer)}")
    unused = result.facts.get("images") or result.facts.get("personal")
    commands = () if unused else (("evaluate", "--data", "FILE"), ("predict", "--data", "FILE"))
    for words in (("report",), *commands):
        say(f"  next: {hint(words[0], result.outdir, *words[1:])}")
    return None


def _compare(args: argparse.Namespace) -> None:
    from .api import compare
    from .baselines import split_names
    from .config import load_for
    from .runs.folder import outdir_of

    methods = list(shell.names(args.methods))
    args.overrides = _overrides(args)
    config, _ = load_for(args.cfg, split_names(methods)[0], args.overrides)
    args.outdir = outdir_of(config)
    if args.seeds is not None:
        bold = partial(say, style="bold")
        lines, path = seeds.compare_seeds(args, config, methods, bold, on_method=bold, on_round=_on_round(config))
        _print_figures(f"mean ± standard deviation over the seeds {args.seeds}", lines, args.table)
        say(f"every value: {path}; the table and the curves over seeds are beside it")
        return
    runner = partial(compare, on_method=partial(_announce, config), on_round=_on_round(config), callbacks=_beginning())
    results = runner(
        config, methods, args.engine, overrides=args.overrides, resume=args.resume, overwrite=args.overwrite
    )
    first = next(iter(results.values()))
    sizes = first.facts["clients"]
    say(f"\ndata: {first.facts['source']}; {counted(len(sizes), 'client')} of {between(sizes)} samples")
    _print_results(results, args.table)
    _print_notes(results)
    for name, result in results.items():
        console.print(name, style="bold")
        _print_saved(result)
    say(f"all curves: {first.saved['comparison']}")
    say(f"next: {hint('report', args.outdir)}")


def _methods(args: argparse.Namespace) -> None:
    import inspect

    from rich.markdown import Markdown

    from .declared import methods

    if args.name is None:
        lines = [("method", "source", "a client sends", "server step")]
        for name in methods().list_methods():
            cls = methods().get_method_class(name)
            step = "weighted mean" if issubclass(cls, methods().Averaging) else "its own"
            lines.append((name, cls.source, cls.sends, step))
        tables.show(console, lines, args.table, leaves=("source", "server step"))
        return
    tables.only_of_a_list(args)
    cls = methods().get_method_class(args.name)
    console.print(Markdown(inspect.cleandoc(inspect.getmodule(cls).__doc__ or cls.__doc__ or ""), "ansi_dark"))
    fields = dataclasses.fields(cls.Params)
    console.print("\nhyperparameters (config section lowrank):" if fields else "\nno hyperparameters of its own")
    for field in fields:
        limits = [f"{k} {field.metadata[k]}" for k in ("min", "max", "choices") if k in field.metadata]
        text = f"  {field.name} = {field.default!r}: {field.metadata.get('help', '')}"
        console.print(text + f" ({', '.join(limits)})" * bool(limits))


def _cache(args: argparse.Namespace) -> None:
    from .models.shortcuts.states import SharedStates, shared_folder
    from .runs.summary import human_bytes

    states = SharedStates(shared_folder(), limit=0)
    if args.clear:
        size = human_bytes(states.size())
        say(f"removed {states.make_room(-1)} entries, {size}, from {states.folder}")
        return
    stats = [path.stat() for path in reversed(states.entries())]
    say(f"{len(stats)} entries, {human_bytes(states.size())}, in {states.folder}")
    times = [f"{datetime.fromtimestamp(stat.st_mtime):%Y-%m-%d %H:%M}" for stat in stats]
    lines = [(f"{stat.st_size / 1e6:.3f}", time) for stat, time in zip(stats, times)]
    tables.show(console, [("MB", "last used"), *lines], args.table, right=("MB",))


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine, installed

    lines: list[Sequence[str | Text]] = [("", "part", "status and remedy")]
    checks = installed() if args.quick else examine()
    for check in checks:
        state, colour = ("ok", "green") if check.ok else ("missing", "red") if check.required else ("absent", "yellow")
        lines.append((Text(state, colour), check.subject, check.status + f"; {check.remedy}" * (not check.ok)))
    tables.show(console, lines, args.table)
    return shell.OK if all(c.ok or not c.required for c in checks) else shell.FAILED


def _fetch(args: argparse.Namespace) -> None:
    from .fetch import FETCHABLE, fetch, resolve

    if not args.names:
        lines = [("name", "what", "MB", "licence", "here")]
        for name, item in FETCHABLE.items():
            lines.append((name, item.description, f"{item.size:g}", item.licence, "yes" if resolve(name) else ""))
        tables.show(console, lines, args.table, right=("MB",), leaves=("licence", "MB"))
        return
    tables.only_of_a_list(args)
    for name in args.names:
        fetch(name, progress=say)


if __name__ == "__main__":
    sys.exit(main())
