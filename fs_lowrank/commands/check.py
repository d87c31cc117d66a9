"""``fs-lowrank check FILE:FUNCTION``: whether a server step of any origin gives the mean of the clients' products."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from rich.text import Text

from ..errors import UserError, user_errors
from ..jobs import shell, tables
from ..jobs.shell import console


def add(commands) -> None:
    parser = commands.add_parser(
        "check",
        help="compare somebody's server step with the exact mean of the products",
        description="The function is called as aggregate(states, sizes, ranks, alphas), with the state dicts of three "
        "clients in PEFT's names, and returns the server's. Or name a strategy or an aggregator of another system.",
    )
    parser.add_argument("step", metavar="FILE:FUNCTION", help="a Python file and a name in it")
    parser.add_argument("--scale", type=float, metavar="S", help="factor on the server's B A (default: alpha / r)")
    tables.option(parser)
    parser.set_defaults(do=_check)


def _check(args: argparse.Namespace) -> int:
    from ..testing.referee import judge_server_step

    file, _, name = args.step.rpartition(":")
    if not file or not Path(file).is_file():
        raise UserError(f"{args.step}: expected FILE:FUNCTION, such as server.py:aggregate; there is no file {file!r}")
    sys.path.append(str(Path(file).resolve().parent))  # for modules beside it, as python FILE
    with user_errors(file):
        names = runpy.run_path(file, run_name="fs_lowrank.check")
    if name not in names:
        listed = ", ".join(sorted(n for n, v in names.items() if callable(v) and not n.startswith("_")))
        raise UserError(f"{file} has no function {name!r}; it has: {listed or 'none'}")
    findings = judge_server_step(names[name], args.scale)
    lines: list = [("clients", "layer", "exact", "relative error", "likely cause")]
    for f in findings:
        exact = Text("yes", "green") if f.exact else Text("no", "red")
        lines.append((f.case, f.layer, exact, f"{f.error:.1e}", shell.as_options(f.cause, ["scale"])))
    tables.show(console, lines, args.table, right=("relative error",))
    return shell.OK if all(f.exact for f in findings) else shell.FAILED
