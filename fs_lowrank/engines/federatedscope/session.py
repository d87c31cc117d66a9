"""The session, which the workers of one process share: the run's data, method and model, and the server's ledger.

The framework gives its workers data, a model and a configuration separately, and gives a model builder only the
section ``model``. The session is opened when the framework asks for the data, which it does first; the model builder
and the workers then use the current session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from ...callbacks import Callback, callbacks_of
from ...config import Config
from ...data import Examples, ImageExamples
from ...errors import UserError
from ...methods import Method
from ...models.shortcuts.frozen import FrozenPrefix
from ...rounds.evaluator import Evaluator
from ...rounds.ledger import Ledger
from ...rounds.recorder import Recorder
from ...rounds.task import Task
from ...rounds.trainer import Trainer
from ...rounds.workspace import Workspace
from ...runs.result import RunResult
from .config import from_framework
from .saved import SavedModels

logger = logging.getLogger("federatedscope.lowrank")

_current: Session | None = None


class Session:
    """One process's part of a run.

    Args:
        config: the run's configuration. cfg: the framework's.
        role: ``standalone``, ``server`` or ``client``.
        index: the number of the client whose part of the data a client process holds; -1 if all the data that it reads
            are its own.

    Attributes:
        outdir: the folder of the run's files, the framework's and ours.
        own_callbacks: the user's. on_round: called with the record of each round; a true value ends the run.
        on_client: called with the round, a client and the number of clients in the round, before the client trains.
        resume: whether the run continues from the checkpoint in ``outdir``.
        result: of a finished run.
    """

    def __init__(self, config: Config, cfg: Any, role: str, index: int = -1):
        self.config, self.cfg, self.role, self.index = config, cfg, role, index
        self.outdir = Path(cfg.outdir)
        self.shares_model = role == "standalone" and config.get("federate.share_local_model")
        self.has_own_data = role == "client" and index < 1
        self.own_callbacks: Sequence[Callback] = ()
        self.on_round: Callable[[dict], object] = lambda record: None
        self.on_client: Callable[[int, int, int], object] = lambda *_: None
        self.resume = False
        self.result: RunResult | None = None
        #: by client, the task of the last order, for clients that share the model
        self.tasks: dict[int, Task] = {}
        self._models_built = 0

    # A server of other processes has these in its loop, and a client has no ledger.

    @cached_property
    def workspace(self) -> Workspace:
        return Workspace(self.config, serves=self.role != "client", undivided=self.has_own_data)

    @cached_property
    def trainer(self) -> Trainer:
        return Trainer(self.workspace)

    @property
    def method(self) -> Method:
        return self.workspace.method

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.workspace, clients_evaluate=True)

    @cached_property
    def ledger(self) -> Ledger:
        parts = self.workspace.method, self.workspace.initial_state, self.workspace.sizes
        return Ledger(self.config, *parts, keep_messages=not self.shares_model, heads=self.workspace.heads)

    @cached_property
    def recorder(self) -> Recorder:
        # wandb is told by the framework
        callbacks = self.callbacks(self.config.lowrank.trackers)
        recorder = Recorder(self.evaluator, self.ledger, self.outdir, callbacks)
        recorder.config_name = self.config_name
        return recorder

    def callbacks(self, trackers: Sequence[str] | None = None) -> list[Callback]:
        """The run's callbacks; ``trackers``: see ``callbacks_of``."""
        return callbacks_of(self.config, [*self.own_callbacks, SavedModels(self.cfg.federate)], trackers)

    @property
    def config_name(self) -> str:
        """The name of the file for our configuration; the framework may have written its own."""
        return "lowrank.yaml" if not self.resume and (self.outdir / "config.yaml").exists() else "config.yaml"

    # -- models ------------------------------------------------------------------------------------

    def next_model(self) -> nn.Module:
        """The model for the next worker: the workspace's, for the first worker and all that share it."""
        self._models_built += 1
        if self.shares_model or self._models_built == 1:
            return self.workspace.model
        return self.workspace.adapted(self.workspace.plain_model())

    def prefix_for(self, model: nn.Module, number: int) -> FrozenPrefix | None:
        """The cache of the frozen layers' outputs for client ``number``; the workspace's own for its model."""
        if self.shares_model:
            return self.workspace.prefix
        return self.workspace.shortcuts.frozen_prefix(model, number, share=1 / len(self.workspace.clients))

    def held_out_for(self, number: int) -> dict[str, Examples | ImageExamples]:
        """The held-out data that client ``number`` evaluates on, by split; a split without a row is left out.

        Of the test set they are its share (``FederatedData.test_shares``), of validation data every K-th row, for K
        clients.
        """
        workspace, index = self.workspace, number - 1
        rows: dict[str, Sequence[int]] = {
            split: workspace.data.test_shares[index]
            if split == "test"
            else range(index, len(e), len(workspace.clients))
            for split, e in workspace.held_out().items()
        }
        return {split: workspace.held_out()[split].select(share) for split, share in rows.items() if len(share)}

    def client_result(self) -> RunResult:
        """The result of a client process, which keeps no records and no global model."""
        return RunResult(
            history=[],
            final={},
            outdir=self.outdir,
            model=self.workspace.model,
            base_changed=True,
            facts={"method": self.method.name, "client": self.index},
        )


def open_session(cfg) -> Session:
    """Open the session that the framework's configuration describes; it replaces any session before it.

    Raises:
        UserError: a value in the configuration is wrong.
    """
    global _current
    config = from_framework(cfg)
    distributed, process = config.federate.mode == "distributed", cfg.distribute
    role, index = (process.role, process.data_idx) if distributed else ("standalone", -1)
    _current = Session(config, cfg, role, index)
    return _current


def current() -> Session:
    """The session of this process.

    Raises:
        UserError: there is none, because the framework's ``get_data`` was not called.
    """
    if _current is None:
        raise UserError("this method needs its data from the framework's get_data(cfg), which was not called")
    return _current


def build_model(model_config: Any, input_shape: Any) -> nn.Module | None:
    """The model for the next worker of the current session; None leaves a model of another type to the framework."""
    return _current.next_model() if _current is not None and _current.config.model.type == model_config.type else None


def close_session() -> None:
    """Release the current session, its models and its lock on the run's folder."""
    global _current
    if _current is not None:
        if "recorder" in vars(_current):
            _current.recorder.release()
    _current = None
