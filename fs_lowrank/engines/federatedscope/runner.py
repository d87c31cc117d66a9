"""Runs by the loop of all engines in place of the framework's flow: of several processes, standalone or distributed.

Standalone with ``federate.process_num`` P, P processes train (``engines.pool``). The framework's own runner needs as
many GPUs, and a state dict of one shape in every message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...rounds.loop import Loop
from ..pool import Processes, processes_of
from .config import our_method
from .distributed import Clients, RemoteClient
from .session import current
from .sums import intake_of


class LoopRunner:
    """In place of a runner of the framework: a run over the loop of all engines, or one client of such a run.

    Args:
        config: the framework's configuration.
    """

    def __init__(self, config: Any):
        self.cfg = config

    def run(self) -> dict[str, Any]:
        """Run all rounds; the session has the result."""
        session, cfg = current(), self.cfg
        if session.role == "client":
            RemoteClient(session, cfg).run()
            return {}
        # The framework may have chosen another folder.
        config = session.config.replace(outdir=str(session.outdir.parent), expname=session.outdir.name)
        transport: Clients | Processes
        if session.role == "server":
            transport = Clients(config, cfg)
        else:
            config = config.replace({"train.cohort": 1})  # as with one process
            transport = Processes(config, processes_of(config))
        loop = Loop(config, transport, session.callbacks(), session.on_round, session.on_client)
        loop.intake = partial(intake_of, cfg, loop.workspace)
        loop.recorder.config_name = session.config_name
        session.result = loop.run(session.resume)
        return {}


def choosing_ours(frameworks: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the runner of a run: one of class ``frameworks``, or ours for our methods.

    Our configuration has the settings of single clients already, so that runner is not given those of ``--client_cfg``.
    """

    def make(*args: Any, config: Any, client_configs: Any = None, **kwargs: Any) -> Any:
        if our_method(config.federate.method) is None:
            return frameworks(*args, config=config, client_configs=client_configs, **kwargs)
        if config.federate.mode == "distributed" or config.federate.process_num > 1:
            return LoopRunner(config)
        return frameworks(*args, config=config, client_configs=None, **kwargs)

    return make
