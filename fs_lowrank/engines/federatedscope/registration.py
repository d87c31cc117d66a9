"""Registers our configuration keys, data, models, trainers and workers with the framework."""

from __future__ import annotations

import logging

_KEY = "lowrank"


def register_all() -> None:
    """Register everything."""
    from federatedscope import register
    from federatedscope.core.configs.config import global_cfg

    from . import data, session, trainer
    from .config import extend

    extend(global_cfg)
    register.register_config(_KEY, extend)  # for configurations that the framework builds later
    register.register_data(_KEY, data.load)
    register.register_model(_KEY, session.build_model)
    # The framework takes the first function that returns a model, and one of its own fails on every name with "resnet"
    # in it, so ours is moved to the front.
    register.model_dict.update({key: register.model_dict.pop(key) for key in list(register.model_dict) if key != _KEY})
    register.register_trainer(_KEY, trainer.choose)
    register.register_worker(_KEY, _choose_workers)
    logging.getLogger("federatedscope.lowrank").setLevel(logging.INFO)


def _choose_workers(method: str):
    """Server and client classes for ``federate.method``; None leaves the method to the framework."""
    from .client import LowRankClient
    from .config import our_method
    from .server import LowRankServer

    return None if our_method(method) is None else {"client": LowRankClient, "server": LowRankServer}
