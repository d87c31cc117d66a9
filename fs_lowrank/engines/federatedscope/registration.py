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
    from . import data, model, trainer, worker

    _once(register.register_data, register.data_dict, data.load)
    _once(register.register_splitter, register.splitter_dict, data.splitter)
    _once(register.register_model, register.model_dict, model.build)
    # The framework takes the first function that returns a model, and one of its own fails on every name with "resnet"
    # in it, so ours is moved to the front.
    register.model_dict.update({key: register.model_dict.pop(key) for key in list(register.model_dict) if key != _KEY})
    _once(register.register_trainer, register.trainer_dict, trainer.choose)
    _once(register.register_worker, register.worker_dict, worker.choose)
    compat.mend(compat.LATE, locate_federatedscope.require())
    logging.getLogger("federatedscope.lowrank").setLevel(logging.INFO)


def _once(register, registered: dict, function) -> None:
    # The framework warns about a key that is registered a second time.
    if registered.get(_KEY) is not function:
        registered.pop(_KEY, None)
        register(_KEY, function)
