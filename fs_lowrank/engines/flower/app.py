"""The two halves of a Flower app, for ``flwr run``; ``pyproject.toml`` (``project.py``) names them.

``client`` runs at every SuperNode, whose ``--node-config`` says which client it is. ``server`` runs at the SuperLink,
reads the configuration of the app, and writes the run's folder there.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...config import load_config
from ...errors import UserError
from ...jobs.escaped import Formatter
from ...runs.folder import holds_run, outdir_of, remove_run
from ...runs.progress import chief_scores
from ..locate_flower import require
from ..transport import run_over
from .client import client_app
from .keys import check
from .server import Nodes

require()
logger = logging.getLogger("fs_lowrank")

client = client_app()
server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the app's configuration on the nodes of ``grid``."""
    if not logger.handlers:  # of ours only: Flower's libraries report every request
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    options = context.run_config
    config = load_config(_app_file(str(options["cfg"])))
    resume, folder = bool(options["resume"]), outdir_of(config)
    check(config)
    if resume and not holds_run(folder):
        raise UserError(f"{folder.absolute()} holds no run to continue; leave out resume=true")
    if options["overwrite"] and not resume:
        remove_run(folder)
    result = run_over(Nodes(config, grid), config, resume, partial(_report, config.is_language))
    logger.info("finished: %s", result.outdir.absolute())


def _app_file(name: str) -> Path:
    """A file of the app; Flower puts the app's folder on the path of modules, and no other place has it."""
    for folder in map(Path, sys.path):
        if (folder / "pyproject.toml").is_file() and (folder / name).is_file():
            return folder / name
    raise UserError(f"the app has no file {name}; write a complete app with fs-lowrank flower app")


def _report(language: bool, record: dict[str, Any]) -> None:
    scores = chief_scores(record["metrics"], language)
    failed = "".join(f"; client {f['client']} {f['kind']}: {f['reason']}" for f in record["failed"])
    logger.info("round %d: loss %.4f %s%s", record["round"], record["loss"], scores, failed)
