"""A study as a command: ``python -m MODULE [options] [--out FOLDER]`` writes a JSON file and a figure."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fs_lowrank import UserError
from fs_lowrank.runs.environment import versions
from fs_lowrank.versions import SCHEMA


def script(
    module: str,
    about: str,
    options: Mapping[str, Mapping[str, Any]],
    study: Callable[..., dict],
    *,
    plot: Callable[[dict], Any] | None = None,
    lines: Callable[[dict], Iterable[str]] | None = None,
    readme: Callable[[dict], str] | None = None,
    out: str = "results/analysis",
) -> Callable[..., dict]:
    """Make the ``main`` of the module of a study.

    Args:
        module: its ``__spec__.name``, which is also correct under ``python -m``. about: its docstring.
        options: flag -> arguments of ``add_argument``.
        study: called with the options by name; returns plain data.
        plot: returns a ``matplotlib.figure.Figure`` of the result. lines: returns the lines to print.
        readme: returns the result as Markdown. out: the default folder.

    Returns:
        A function of the command line's arguments that writes and returns the result. Further keywords go to ``study``.
        The files are named by the module, and by ``--data`` where there is such an option.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about.split("\n")[0])
    actions = [parser.add_argument(flag, **arguments) for flag, arguments in options.items()]
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the files (default: %(default)s)")

    def main(argv: Sequence[str] | None = None, **more: Any) -> dict:
        given = vars(parser.parse_args(argv))
        folder: Path = given.pop("out")
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        try:
            found = study(**given, **more)
        except UserError as error:
            parser.exit(2, f"error: {error}\n")
        result = {
            "schema": SCHEMA,
            "command": " ".join([f"python -m {module}", *filter(None, (_said(a, given[a.dest]) for a in actions))]),
            "versions": versions(),
            **found,
            "seconds": round(time.perf_counter() - began, 1),
        }
        stem = "_".join([module.rpartition(".")[2], *([given["data"]] if "data" in given else [])])
        (folder / f"{stem}.json").write_text(json.dumps(short(result), indent=1) + "\n")
        if plot:
            plot(result).savefig(folder / f"{stem}.png", dpi=110)
        if readme:
            (folder / "README.md").write_text(readme(result))
        for line in lines(result) if lines else ():
            print(line)
        return result

    return main


def _said(action: argparse.Action, value: Any) -> str:
    """An option as text on a command line, without folders of the user."""
    if value is None or value == []:
        return ""
    words = [f"{v:g}" if isinstance(v, float) else str(v) for v in (value if isinstance(value, list) else [value])]
    return " ".join([*action.option_strings[:1], *(["DIR"] if isinstance(value, Path) else words)])


def short(value, digits: int = 6):
    """Round floats to ``digits`` significant digits, recursively in lists and dictionaries."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {k: short(v, digits) for k, v in value.items()}
    return [short(v, digits) for v in value] if isinstance(value, (list, tuple)) else value
