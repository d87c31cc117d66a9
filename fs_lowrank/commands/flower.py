"""``fs-lowrank flower app FOLDER --cfg FILE``: a Flower app from a configuration, for ``flwr run``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..jobs.shell import say


def add(commands) -> None:
    flower = commands.add_parser("flower", help="run a configuration on a federation of Flower's SuperNodes")
    actions = flower.add_subparsers(dest="action", required=True, metavar="ACTION")
    app = actions.add_parser("app", help="write a Flower app, which `flwr run` starts")
    app.add_argument("folder", metavar="FOLDER", type=Path, help="where to write it")
    app.add_argument("--cfg", metavar="FILE", type=Path, required=True, help="configuration (YAML)")
    app.example = f"{app.prog} my_app --cfg reviews.yaml"
    app.set_defaults(do=_app)


def _app(args: argparse.Namespace) -> None:
    from ..engines.flower.project import write_app

    for path in write_app(args.folder, args.cfg):
        say(f"written: {path}")
    say(f"start it with: flwr run {args.folder} NAME_OF_YOUR_SUPERLINK")
