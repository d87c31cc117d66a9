"""Adds our keys to the framework's configuration, and converts its configuration to ours and back.

In the framework the default of a key determines its type, and every key has a value. The hyperparameters of methods are
therefore not registered: the section ``lowrank`` takes any key. Values are checked in one place, ``load_config``, which
``from_framework`` calls.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...config import Config, check_engine, load_config
from ...errors import UserError, nearest, say_once, user_errors
from ...methods import get_method_class, list_methods, requirements
from ...settings import (
    Origin,
    Settings,
    check_method_params,
    flat_keys,
    framework,
    known_keys,
    unknown_key,
)
from ...settings.metrics import METRICS
from ...settings.parameters import general_keys
from .resources import check_resources

#: the prefix of a method of ours where the framework has a method of the same name
PREFIX = "lowrank_"
#: names of the framework's methods that are not in its tables
_WRAPPERS = (
    *("pfedme", "ditto", "fedem", "fedrep", "fedopt", "local"),
    *("global", "fedavg", "fedsageplus", "gcflplus", "fedgc"),
)
#: our trainer, which replaces the framework's; its own former names select it, too
TRAINER = "lowrank_trainer"


# -- names of methods ----------------------------------------------------------------------------------


def frameworks_own() -> frozenset[str]:
    """Names that ``federate.method`` has in the framework itself."""
    from federatedscope.core.configs import constants

    return frozenset({*constants.AGGREGATOR_TYPE, *constants.CLIENTS_TYPE, *constants.SERVER_TYPE, *_WRAPPERS})


def our_method(name: str) -> str | None:
    """Our name of the method that is ``name`` in the framework's configuration; None if it is not one of ours."""
    name = name.lower()
    plain = name.removeprefix(PREFIX)
    if plain == name and name in frameworks_own():
        return None
    try:
        return get_method_class(plain).name
    except UserError:
        return None


def frameworks_name(method: str) -> str:
    """The name of our method in the framework's configuration."""
    return PREFIX + method if method in frameworks_own() else method


def check_method_name(name: str) -> None:
    """Raise ``UserError`` if there is no method ``name``, for which the framework would run FedAvg without a word."""
    if our_method(name) or name.lower() in frameworks_own():
        return
    import federatedscope.core.auxiliaries.worker_builder  # noqa: F401  (imports the user's contrib.worker)
    from federatedscope import register

    if any(function(name.lower()) is not None for key, function in register.worker_dict.items() if key != "lowrank"):
        return
    valid = [*list_methods(), *sorted(frameworks_own())]
    raise UserError(
        f"federate.method: no method {name!r}{nearest(name, valid)}; ours: {', '.join(list_methods())}; "
        f"the framework's: {', '.join(sorted(frameworks_own()))}"
    )


# -- our keys in the framework's configuration ---------------------------------------------------------


def extend(cfg) -> None:
    """Add the section ``lowrank`` and our keys in other sections to a configuration of the framework."""
    from federatedscope.core.configs.config import CN

    cfg.lowrank = CN(new_allowed=True)
    for name, default, _ in flat_keys(Settings()):
        node, key = _node(cfg, name, create=CN)
        if key not in node:
            node[key] = "" if default is None else default
    cfg.register_cfg_check_fun(check)


def merge_new_keys(merge):
    """``merge``, the framework's ``merge_from_list``, for sections that take new keys; see ``compat``."""

    @functools.wraps(merge)
    def merge_from_list(cfg, pairs):
        for name, value in zip(pairs[::2], pairs[1::2]):
            *sections, key = name.split(".")
            node = cfg
            for section in sections:
                node = node.get(section) if isinstance(node, Mapping) else None
            # The framework would also make the type of a value that of the value before: 2.5 is then 2.
            if node is not None and hasattr(node, "is_new_allowed") and node.is_new_allowed():
                node[key] = node._decode_cfg_value(value)
        return merge(cfg, pairs)

    return merge_from_list


def unknown_key_in(error: Exception) -> str | None:
    """The message for a key that the framework's configuration does not have; None if ``error`` is another."""
    match = re.fullmatch(r"Non-existent (?:config )?key: (\S+)", str(error.args[0] if error.args else ""))
    return f"unknown key {match[1]!r}{nearest(match[1], known_keys())}" if match else None


def _node(cfg, name: str, create=None):
    """The section that holds the dotted key ``name``, and the key's last part."""
    *sections, key = name.split(".")
    for section in sections:
        if section not in cfg:
            cfg[section] = create()
        cfg = cfg[section]
    return cfg, key


def check(cfg) -> None:
    """Adapt the framework's defaults to our methods; the framework calls this on every merge.

    A file is merged before the command line, so the configuration may be incomplete here: nothing is refused before
    ``check_method_name`` and ``from_framework``, when the framework asks for the data.
    """
    if our_method(cfg.federate.method) is None:
        return
    if cfg.trainer.type.lower() in framework.SAME_AS_OURS["trainer.type"]:
        cfg.trainer.type = TRAINER
    if cfg.eval.freq < 1 <= cfg.federate.total_round_num:
        cfg.eval.freq = cfg.federate.total_round_num  # after the last round only; the framework divides by this
    if not cfg.eval.metrics:
        cfg.eval.metrics = ["acc", "loss"]


def _method_params(cfg) -> dict[str, Any]:
    """The hyperparameters of the method."""
    names = cfg.lowrank.keys() - {*general_keys(), *_BOOKKEEPING}
    return {key: cfg.lowrank[key] for key in sorted(names)}


# -- conversion ----------------------------------------------------------------------------------------

#: names in the framework's configuration that are not keys
_BOOKKEEPING = ("__help_info__", "__cfg_check_funcs__", "is_ready_for_run")


def _walk(node: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key in _BOOKKEEPING:
            continue
        if isinstance(value, Mapping) and hasattr(value, "is_frozen"):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield prefix + key, getattr(value, "value", value)  # an Argument of the framework


def from_framework(cfg) -> Config:
    """Our configuration, from the framework's.

    Raises:
        UserError: a value is wrong, or a feature of the framework is on that does not work with our methods.
    """
    method = our_method(cfg.federate.method)
    if method is None:
        raise UserError(f"federate.method = {cfg.federate.method!r} is not a method of fs-lowrank")
    cls = get_method_class(method)
    from federatedscope.core.configs.config import global_cfg

    valid, registered, tree = set(known_keys()), {name for name, _ in _walk(global_cfg)}, {}
    for name, value in _walk(cfg):
        if name.startswith("lowrank."):
            if name in valid:
                tree[name] = value
        elif name in valid or framework.within(name, framework.OPEN) or _extra(name):
            tree[name] = value
        elif name not in registered:  # in a section of the framework that takes any key
            unknown_key(name, Origin())
    params = _method_params(cfg)
    check_method_params(cls, params)
    needs = requirements(method, params)
    tree.update({f"lowrank.{key}": value for key, value in params.items()})
    tree["federate.method"] = method
    # False is the framework's default, so it does not say that the user wants no adapter.
    tree["llm.adapter.use"] = True if needs.adapts(cfg.llm.adapter.use) else None
    if cfg.trainer.type == TRAINER:
        del tree["trainer.type"]  # in place of the framework's
    tree["device"] = cfg.device if isinstance(cfg.device, int) else "cpu"
    if cfg.federate.sample_client_rate > 0 or cfg.federate.sample_client_num == cfg.federate.client_num:
        # The framework has computed the number from the rate, or from the default.
        tree["federate.sample_client_num"] = -1
    if cfg.federate.process_num < 1:
        tree["federate.process_num"] = 1  # without a GPU the framework sets it to 0
    tree["federate.sampler"] = cfg.federate.sampler
    for name, default in (
        ("fedopt.optimizer.lr", None if cfg.fedopt.use else 0.01),
        ("personalization.lr", cfg.train.optimizer.lr),
        ("personalization.local_update_steps", cfg.train.local_update_steps),
    ):
        if tree[name] == default:
            tree.pop(name)  # the framework has set it
    config = load_config(tree)
    best = cfg.eval.best_res_update_round_wise_key
    if cfg.federate.mode == "distributed" and not cfg.federate.make_global_eval and "client_test" not in best:
        say_once(
            f"eval.best_res_update_round_wise_key = {best} has no effect: federate.make_global_eval is False, and "
            "between processes clients report client_test_loss and client_test_acc"
        )
    check_engine(config, "federatedscope")
    check_resources(cfg)
    return config


def _extra(name: str) -> bool:
    """Whether ``name`` is in a section that takes any key."""
    return name.startswith(("train.optimizer.", "train.scheduler.", "fedopt.optimizer."))


def to_framework(config: Settings):
    """The framework's configuration, from ours; not frozen."""
    from federatedscope.core.configs.config import CN, global_cfg

    cfg = global_cfg.clone()
    flat = {name: value for name, value, _ in flat_keys(config)} | dict(config.framework)
    flat["federate.method"] = frameworks_name(config.federate.method)
    flat["use_gpu"] = config.torch_device != "cpu"
    flat["device"] = config.device if isinstance(config.device, int) else -1
    flat["outdir"], flat["expname"] = config.outdir, config.expname
    if not config.model.task:
        flat.pop("model.task")
    # The framework lowers this to the number of GPUs and warns; ``run`` starts our processes itself.
    flat["federate.process_num"] = int(torch.cuda.is_available())
    for name, value in flat.items():
        node, key = _node(cfg, name, create=CN)
        node[key] = list(value) if isinstance(value, tuple) else value
    with user_errors("the framework's check of the configuration"):
        cfg.assert_cfg()
    return cfg


def for_frameworks_workers(cfg, rows: Sequence[str]):
    """``cfg`` for the framework's workers, without the features that our workers implement.

    With the method's name the framework would warn that it has no such aggregator; with the other keys it would set up
    its own form of each feature. It ends a run in which a split without rows is to be evaluated, or the key of the best
    result names another; that is then of the first split.

    Args:
        rows: the splits of which the worker has rows.
    """
    plain = cfg.clone()
    plain.defrost()
    plain.federate.method, plain.federate.restore_from = "fedavg", ""
    plain.federate.online_aggr = plain.federate.use_ss = False
    plain.train.is_enable_half = False  # the framework would convert the adapters as well
    plain.fedopt.use = False
    plain.quantization.method = "none"
    plain.early_stop.patience = 0  # callbacks stop a run, also by a global evaluation
    # Ours measure the other metrics, and choose by them.
    plain.eval.metrics = [name for name in cfg.eval.metrics if name in ("acc", "loss")]
    split, _, metric = cfg.eval.best_res_update_round_wise_key.partition("_")
    metric = "loss" if metric in METRICS.keys() - {"acc", "loss"} else metric
    if rows:
        plain.eval.split, split = list(rows), rows[0] if split in {"val", "test"} - set(rows) else split
    plain.eval.best_res_update_round_wise_key = f"{split}_{metric}"
    plain._immutable(True)
    return plain
