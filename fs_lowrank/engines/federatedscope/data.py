"""Gives the framework our data sets."""

from __future__ import annotations

import numpy as np
from federatedscope.core.data import ClientData

from ...settings import Origin
from ...settings.clients import read_clients
from .config import check_method_name, our_method
from .session import Session, open_session


class WorkerData(ClientData):
    """The data of one worker: tokenized examples by split, from which our trainers draw batches.

    Each split is a mapping with the keys ``examples`` and ``x``. The framework looks in ``x`` of at least one split for
    the shape of the inputs, and warns if there is none; the array in it has a row for each example and no columns.
    """

    def __init__(self, client_cfg, **splits):
        super().__init__(client_cfg)
        for split, examples in (splits or {"test": None}).items():
            self[split] = {"examples": examples, "x": np.empty((len(examples or ()), 0))}

    def setup(self, new_client_cfg=None):
        """Do nothing where the framework would build data loaders, because our trainers need none."""
        self.client_cfg = new_client_cfg
        return False


def load(config, client_cfgs=None):
    """The data of a run with one of our methods, and its configuration; None leaves both to the framework.

    Raises:
        UserError: there is no such method, or a value in the configuration is wrong.
    """
    check_method_name(config.federate.method)
    if our_method(config.federate.method) is None:
        return None
    if client_cfgs:
        config.lowrank.clients = read_clients(client_cfgs, config.federate.client_num, Origin())
    session = open_session(config)
    if session.role != "standalone" or config.federate.process_num > 1:  # processes read their data themselves
        return WorkerData(config), config
    if session.workspace.device.index is not None:  # of -1 the framework would take the GPU with the most free memory
        config.device = session.workspace.device.index
    if session.config.alone:  # the framework's launcher would look for that client among the workers
        config.federate.client_idx_for_local_train = 0
        config.federate.client_num = config.federate.sample_client_num = 1
    return worker_data(session, config), config


def worker_data(session: Session, config):
    """The data of the workers by number."""
    workspace = session.workspace
    held_out = {split: examples for split, examples in workspace.held_out().items() if len(examples)}

    def of_client(number: int) -> WorkerData:
        evaluated = {} if config.federate.make_global_eval else session.held_out_for(number)
        return WorkerData(config, train=workspace.data.clients[number - 1], **evaluated)

    return {0: WorkerData(config, **held_out), **{n: of_client(n) for n in range(1, len(workspace.clients) + 1)}}
