"""Registers our configuration keys, data, models, trainers and workers with the framework."""

from __future__ import annotations

import logging

from .. import locate_federatedscope
from . import compat

_KEY = "lowrank"


def register_all() -> None:
    """Register everything."""
    from federatedscope import register

    from .config import extend

    # The keys come first: if the framework has not been imported yet, its import builds the configuration from them.
    register.register_config(_KEY, extend)
    from federatedscope.core.configs.config import global_cfg

    extend(global_cfg)  # if it had been imported before
    from . import data, trainer

    register.register_data(_KEY, data.load)
    register.register_model(_KEY, _build_model)
    # The framework takes the first function that returns a model, and one of its own fails on every name with "resnet"
    # in it, so ours is moved to the front.
    register.model_dict.update({key: register.model_dict.pop(key) for key in list(register.model_dict) if key != _KEY})
    register.register_trainer(_KEY, trainer.choose)
    register.register_worker(_KEY, _choose_workers)
    compat.mend(locate_federatedscope.require(), late=True)
    logging.getLogger("federatedscope.lowrank").setLevel(logging.INFO)


def _build_model(model_config, input_shape):
    """The adapted model for the next worker of the session; None leaves the model to the framework."""
    from .session import next_model

    return next_model(model_config.type)


def _choose_workers(method: str):
    """Server and client classes for ``federate.method``; None leaves the method to the framework."""
    from .client import LowRankClient
    from .config import our_method
    from .server import LowRankServer

    return None if our_method(method) is None else {"client": LowRankClient, "server": LowRankServer}
