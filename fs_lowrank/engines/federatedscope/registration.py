"""Registers our configuration keys, data, models, trainers and workers with the framework."""

from __future__ import annotations

import logging

from .. import locate_federatedscope
from . import compat

_KEY = "lowrank"


def register_all() -> None:
    """Register everything; a second call changes nothing."""
    from federatedscope import register

    from .config import extend

    # The keys come first: if the framework has not been imported yet, its import builds the configuration from them.
    _once(register.register_config, register.config_dict, extend)
    from federatedscope.core.configs.config import global_cfg

    extend(global_cfg)  # if it had been imported before
    from . import data, trainer

    _once(register.register_data, register.data_dict, data.load)
    _once(register.register_model, register.model_dict, _build_model)
    # The framework takes the first function that returns a model, and one of its own fails on every name with "resnet"
    # in it, so ours is moved to the front.
    register.model_dict.update({key: register.model_dict.pop(key) for key in list(register.model_dict) if key != _KEY})
    _once(register.register_trainer, register.trainer_dict, trainer.choose)
    _once(register.register_worker, register.worker_dict, _choose_workers)
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


def _once(register, registered: dict, function) -> None:
    # The framework warns about a key that is registered a second time.
    if registered.get(_KEY) is not function:
        registered.pop(_KEY, None)
        register(_KEY, function)
