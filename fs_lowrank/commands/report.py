"""``fs-lowrank report RUN…``: one HTML file about one run, or several side by side."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import UserError
from ..jobs import shell
from ..jobs.shell import say


def add(commands) -> None:
    parser = commands.add_parser("report", help="one HTML file about one run, or several side by side")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run, or of a comparison")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: report.html in the first folder")
    parser.add_argument("--live", action="store_true", help="renew it until every run has ended (Ctrl-C ends it)")
    parser.add_argument(
        "--every",
        type=shell.at_least(0.1, float),
        default=10.0,
        metavar="S",
        help="with --live: seconds between two renewals (default: 10)",
    )
    parser.set_defaults(do=_report)


def _report(args: argparse.Namespace) -> None:
    from ..draw.report import write_page
    from ..runs.shown import read_runs

    out = args.out or args.runs[0] / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {out}: expected a file that ends with .html")
    announced = False
    while True:
        runs = read_runs(args.runs)
        write_page(runs, out, args.every if args.live else 0.0)
        if not announced:
            say(str(out))
            announced = True
        if not args.live or all(run.ended for run in runs):
            return
        time.sleep(args.every)
