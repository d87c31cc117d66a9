"""``--engine flower``: Flower's simulation on this machine, in which every client is a node.

Flower runs the nodes' messages on processes of Ray, as many as ``federate.process_num`` says; each of them loads data
and model once. The server is in a thread of this process.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...callbacks import Callback, callbacks_of
from ...config import Config
from ...errors import RunFailed, UserError
from ...rounds.loop import Loop
from ...runs.folder import check_outdir
from ...runs.result import RunResult
from ..locate_flower import require
from ..pool import processes_of
from ..process_settings import preserving_settings

require(simulation=True)
#: variables that keep Flower and Ray from reports to their makers, and Ray from advice
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ.update({**_QUIET, **os.environ})  # read when Flower is imported, and when Ray starts

from flwr.app import Context  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

from .client import client_app  # noqa: E402
from .keys import check  # noqa: E402
from .server import Nodes, client_folder  # noqa: E402


def run(
    config: Config,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """See ``fs_lowrank.run``."""
    check(config)
    check_outdir(config, resume)
    count, before, ended = processes_of(config), torch.get_num_threads(), threading.Event()
    threads = max(1, before // count)
    nodes = Nodes(config, stopped=ended.is_set, pause=0.05, simulated=True)
    loop = Loop(config, nodes, callbacks_of(config, callbacks), on_round, on_client)
    app, results = ServerApp(), []

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.set_num_threads(threads)  # of this thread
        nodes.grid = grid
        results.append(loop.run(resume))

    gpus = torch.cuda.device_count() if config.torch_device != "cpu" else 0
    # Flower logs its steps on the console, and that its function for simulations is to become a command.
    logger = logging.getLogger("flwr")
    level = logger.level
    if config.verbose < 2:
        logger.setLevel(logging.ERROR)
    with preserving_settings():
        os.environ.update({**_QUIET, **os.environ})
        try:
            run_simulation(
                server_app=app,
                client_app=client_app(client_folder(config), threads),
                num_supernodes=config.federate.client_num,
                backend_config={
                    "init_args": {"num_cpus": count, "include_dashboard": False, "log_to_driver": False},
                    "client_resources": {"num_cpus": 1, "num_gpus": gpus_each(gpus, count)},
                },
            )
        except UserError:
            raise
        except RuntimeError as error:
            cause = error.__cause__ or error
            raise RunFailed(f"Flower's simulation ended: {cause}; run again with resume=True") from error
        finally:
            ended.set()
            torch.set_num_threads(before)
            logger.setLevel(level)
    if not results:
        raise RunFailed("Flower's simulation ended before the run did; run again with resume=True")
    return results[0]


def gpus_each(gpus: int, count: int) -> float:
    """How many of ``gpus`` each of ``count`` processes asks Ray for: a whole number, or a share of one.

    Ray takes no other number above 1, and a process whose share no single GPU has left would never start.
    """
    return gpus // count or (1 / math.ceil(count / gpus) if gpus else 0.0)
