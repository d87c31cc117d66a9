"""A study as a command: ``python -m MODULE [options] [--out FOLDER]`` writes a JSON file and a figure."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fs_lowrank.jobs import shell
from fs_lowrank.jobs.files import replacing, write_text
from fs_lowrank.runs.environment import versions
from fs_lowrank.versions import SCHEMA

from .page import value_of


def script(
    module: str,
    docstring: str,
    options: Mapping[str, Mapping[str, Any]],
    study: Callable[..., dict],
    *,
    plot: Callable[[dict], Any] | None = None,
    lines: Callable[[dict], Iterable[str]] | None = None,
    readme: Callable[[Path], str] | None = None,
    out: str = "results/analysis",
) -> Callable[..., int]:
    """Make the ``main`` of the module of a study.

    Args:
        module: its ``__spec__.name``, which is also correct under ``python -m``. docstring: the module's.
        options: flag -> arguments of ``add_argument``. A ``type=int`` is a count, 1 or more.
        study: called with the options by name; returns plain data.
        plot: returns a ``matplotlib.figure.Figure`` of the result. lines: returns the lines to print.
        readme: returns the text of the README of the folder, which then has the result. out: the default folder.

    Returns:
        A function of the command line's arguments that writes the result and returns the exit code, as ``fs-lowrank``
        does. Further keywords go to ``study``. The files are named by the module, and by ``--data`` where there is such
        an option.
    """

    def write(actions: Sequence[argparse.Action], extra: Mapping[str, Any], args: argparse.Namespace) -> None:
        values, folder = {action.dest: getattr(args, action.dest) for action in actions}, args.out
        began = time.perf_counter()
        content = study(**values, **extra)
        result = {
            "schema": SCHEMA,
            "command": " ".join([f"python -m {module}", *filter(None, (_flag(a, values[a.dest]) for a in actions))]),
            "versions": versions(),
            **content,
            "seconds": round(time.perf_counter() - began, 1),
        }
        stem = "_".join([module.rpartition(".")[2], *([values["data"]] if "data" in values else [])])
        write_text(folder / f"{stem}.json", json.dumps(short(result), indent=1) + "\n")
        if plot:
            with replacing(folder / f"{stem}.png") as aside:
                plot(result).savefig(aside, format="png", dpi=110)
        if readme:
            write_text(folder / "README.md", readme(folder))
        for line in lines(result) if lines else ():
            print(line)

    def main(argv: Sequence[str] | None = None, **extra: Any) -> int:
        def make_parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
            parser = shell.Parser(prog=f"python -m {module}", description=docstring.split("\n")[0])
            actions = []
            for flag, arguments in options.items():
                count: dict[str, Any] = {"type": shell.at_least(1)} if arguments.get("type") is int else {}
                actions.append(parser.add_argument(flag, **{**arguments, **count}))
            parser.add_argument(
                "--out", type=Path, default=Path(out), help="folder of the files (default: %(default)s)"
            )
            parser.set_defaults(do=partial(write, actions, extra))
            return parser, [parser]

        return shell.run(make_parser, argv, shell.make_console(140), folder=lambda args: args.out)

    return main


def _flag(action: argparse.Action, value: Any) -> str:
    """An option as text on a command line, without folders of the user."""
    if value is None or value is False or value == []:
        return ""
    if value is True:
        return action.option_strings[0]
    words = [value_of(v) for v in (value if isinstance(value, list) else [value])]
    return " ".join([*action.option_strings[:1], *(["DIR"] if isinstance(value, Path) else words)])


def short(value: Any, digits: int = 6) -> Any:
    """Plain data with its floats rounded to ``digits`` significant digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.{digits}g}"))
