"""Our keys in the framework's configuration, and the way between its configuration and ours.

The framework's values are typed by their defaults and it knows no "not given", so a hyperparameter of a method
is registered as its ``Argument`` without a value. One place checks values: ``load_config``, to which
``from_framework`` hands everything.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...config import Config, load_config
from ...errors import UserError, nearest
from ...methods import get_method_class, list_methods, requirements
from ...settings import Lowrank, Settings, check_method_params, flat_keys, framework, infer_task, known_keys
from ...settings.parameters import params_defaults, params_fields

#: in front of one of our methods' names where the framework has a method of the same name
PREFIX = "lowrank_"
#: methods that the framework itself tells by name, besides those in its own tables
_WRAPPERS = (
    "pfedme",
    "ditto",
    "fedem",
    "fedrep",
    "fedopt",
    "local",
    "global",
    "fedavg",
    "fedsageplus",
    "gcflplus",
    "fedgc",
)
#: our trainer for each task, and the framework's trainers whose place it takes
TRAINERS = {
    "CausalLM": "lowrank_llmtrainer",
    "SequenceClassification": "lowrank_nlptrainer",
    "ImageClassification": "lowrank_cvtrainer",
}
_REPLACED = ("general", "llmtrainer", "nlptrainer", "cvtrainer", "torchtrainer")

#: parts of the framework that act where our methods do, by key: the values under which they are off, and why not both
_ACTS_ELSEWHERE = {
    "backend": (("torch",), "our methods are torch's"),
    "asyn.use": ((False,), "a round of ours is synchronous; a late client is brought up to date instead"),
    "fedprox.use": ((False,), "its penalty would have to enter our training loop, which does not know it"),
    "fedswa.use": ((False,), "it averages the framework's server model, ours is the method's state"),
    "nbafl.use": ((False,), "its noise is drawn on the framework's server model, ours is the method's state"),
    "sgdmf.use": ((False,), "it is for matrix factorisation"),
    "vertical.use": ((False,), "our methods are for clients that share a model"),
    "hpo.fedex.use": ((False,), "use `python -m hpo`"),
    "hpo.fts.use": ((False,), "use `python -m hpo`"),
    "hpo.pfedhpo.use": ((False,), "use `python -m hpo`"),
    "llm.deepspeed.use": ((False,), "our training loop does not drive it"),
    "llm.offsite_tuning.use": ((False,), "it brings its own server and client"),
    "finetune.before_eval": ((False,), "evaluation is of the model as the round left it"),
    "personalization.local_param": (([],), "which part stays with a client is the method's business"),
    "aggregator.robust_rule": (("fedavg",), "the method aggregates"),
    "attack.attack_method": (("",), "attackers wrap the framework's own workers"),
    "feat_engr.type": (("",), "our data come ready"),
    "federate.use_diff": ((False,), "what is sent is the method's business"),
    "federate.unseen_clients_rate": ((0.0,), "held-out data are evaluated instead"),
    "federate.data_weighted_aggr": (
        (False,),
        "updates weigh by the client's number of samples already; see federate.ignore_weight",
    ),
    "model.model_num_per_trainer": ((1,), "a client trains one model"),
    "llm.retry_on_nan_loss": ((False,), "a client whose update is not finite is left out of the round"),
    "train.data_para_dids": (([],), "our training loop uses one device"),
}


# -- which method is meant -----------------------------------------------------------------------------


def frameworks_own() -> frozenset[str]:
    """Names that ``federate.method`` has in the framework itself."""
    from federatedscope.core.configs import constants

    return frozenset({*constants.AGGREGATOR_TYPE, *constants.CLIENTS_TYPE, *constants.SERVER_TYPE, *_WRAPPERS})


def our_method(name: str) -> str | None:
    """Our name of the method that ``federate.method = name`` means in the framework; None if it is none of ours."""
    name = name.lower()
    plain = name.removeprefix(PREFIX)
    if plain == name and name in frameworks_own():
        return None
    try:
        return get_method_class(plain).name
    except UserError:
        return None


def frameworks_name(method: str) -> str:
    """How our method is called in the framework's configuration."""
    return PREFIX + method if method in frameworks_own() else method


def check_method_name(name: str) -> None:
    """Raise ``UserError`` if ``name`` is no method at all; the framework would silently run FedAvg."""
    if our_method(name) or name.lower() in frameworks_own():
        return
    import federatedscope.core.auxiliaries.worker_builder  # noqa: F401  (brings in the user's contrib.worker)
    from federatedscope import register

    if any(function(name.lower()) is not None for key, function in register.worker_dict.items() if key != "lowrank"):
        return
    known = [*list_methods(), *sorted(frameworks_own())]
    raise UserError(
        f"federate.method: no method {name!r}{nearest(name, known)}; ours: {', '.join(list_methods())}; "
        f"the framework's: {', '.join(sorted(frameworks_own()))}"
    )


# -- our keys in theirs --------------------------------------------------------------------------------


def _parameters() -> dict[str, tuple[Any, str]]:
    """Every hyperparameter of every method: its type and help; a name that two methods share counts once."""
    found: dict[str, tuple[Any, str]] = {}
    for name in list_methods():
        cls = get_method_class(name)
        hints = typing.get_type_hints(cls.Params)
        for f in dataclasses.fields(cls.Params):
            found.setdefault(f.name, (hints[f.name], f.metadata.get("help", "")))
    return found


def _framework_type(hint: Any) -> type:
    """The type by which the framework may check a value. Whole numbers too are float: it would cut 2.5 to 2."""
    bare = typing.get_origin(hint) or hint
    if bare in (int, float):
        return float
    return bare if bare in (bool, str, dict) else list if bare in (list, tuple) else str


def extend(cfg) -> None:
    """Add the section ``lowrank``, and our keys in the framework's own sections, to a configuration."""
    from federatedscope.core.configs.config import CN
    from federatedscope.core.configs.yacs_config import Argument

    if "lowrank" not in cfg:
        cfg.lowrank = CN(new_allowed=True)
    for key, (hint, text) in _parameters().items():
        if key not in cfg.lowrank:
            cfg.lowrank[key] = Argument(None, description=text, required_type=_framework_type(hint))
    for name, default, _ in flat_keys(Settings()):
        node, key = _node(cfg, name, create=CN)
        if key not in node:
            node[key] = "" if default is None else default
    if check not in cfg.__cfg_check_funcs__:
        cfg.register_cfg_check_fun(check)


def _node(cfg, name: str, create=None):
    """The section that holds the dotted key ``name``, and the key's last part."""
    *sections, key = name.split(".")
    for section in sections:
        if section not in cfg:
            cfg[section] = create()
        cfg = cfg[section]
    return cfg, key


def check(cfg) -> None:
    """The framework's own configuration check, of what can be told from a configuration that is not complete yet.

    Raises:
        UserError: no such method; a hyperparameter that the method does not have, or out of its range.
    """
    name = cfg.federate.method
    check_method_name(name)
    method = our_method(name)
    if method is None:
        return
    cls = get_method_class(method)
    check_method_params(cls, _given_parameters(cfg, cls))
    if cfg.model.type and cfg.trainer.type.lower() in (*_REPLACED, *TRAINERS.values()):
        cfg.trainer.type = TRAINERS.get(infer_task(cfg.model.type), TRAINERS["ImageClassification"])
    if cfg.eval.freq < 1 <= cfg.federate.total_round_num:
        cfg.eval.freq = cfg.federate.total_round_num  # after the last round only; it divides by it
    if not cfg.eval.metrics:
        cfg.eval.metrics = ["acc", "loss"]


def _given_parameters(cfg, cls) -> dict[str, Any]:
    general = {f.name for f in dataclasses.fields(Lowrank)}
    hints = typing.get_type_hints(cls.Params)
    given = {}
    for key, value in cfg.lowrank.items():
        value = getattr(value, "value", value)  # an Argument
        if key in general or key in _BOOKKEEPING or value is None:
            continue
        whole = typing.get_origin(hints.get(key)) is None and hints.get(key) is int
        given[key] = int(value) if whole and isinstance(value, float) and value.is_integer() else value
    return given


# -- there and back ------------------------------------------------------------------------------------

#: bookkeeping of the framework's configuration, no keys
_BOOKKEEPING = ("__help_info__", "__cfg_check_funcs__", "is_ready_for_run")


def _walk(node: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key in _BOOKKEEPING:
            continue
        if isinstance(value, Mapping) and hasattr(value, "is_frozen"):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield prefix + key, getattr(value, "value", value)


def from_framework(cfg) -> Config:
    """Our configuration, from the framework's.

    Raises:
        UserError: a value that is wrong, or a part of the framework turned on that acts where our methods do.
    """
    method = our_method(cfg.federate.method)
    cls = get_method_class(method)
    known, tree = set(known_keys()), {}
    for name, value in _walk(cfg):
        if name.startswith("lowrank."):
            if name in known:
                tree[name] = value
        elif name in known or framework.within(name, framework.OPEN) or _extra(name):
            tree[name] = value
    given = _given_parameters(cfg, cls)
    needs = requirements(method, given)
    tree.update({f"lowrank.{key}": value for key, value in given.items()})
    tree["federate.method"] = method
    # The framework's default says only that it would not use the adapter by itself.
    tree["llm.adapter.use"] = True if needs.adapts(cfg.llm.adapter.use) else None
    # What became of the framework's trainer is our doing; which classes they are says the task.
    tree.pop("trainer.type", None)
    tree["device"] = cfg.device if isinstance(cfg.device, int) else "cpu"
    if cfg.federate.sample_client_rate > 0 or cfg.federate.sample_client_num == cfg.federate.client_num:
        # The framework works the number out from the rate, and where neither is given.
        tree["federate.sample_client_num"] = -1
    if cfg.federate.process_num < 1:
        tree["federate.process_num"] = 1  # what the framework makes of it without a GPU
    tree["federate.sampler"] = cfg.federate.sampler
    _refuse(cfg, method, needs.sums)
    return load_config(tree)


def _extra(name: str) -> bool:
    """Whether ``name`` is a further argument in one of the sections that take any."""
    return name.startswith(("train.optimizer.", "train.scheduler.", "fedopt.optimizer."))


def _refuse(cfg, method: str, sums: bool) -> None:
    refused = []
    for name, (off, why) in _ACTS_ELSEWHERE.items():
        try:
            node, key = _node(cfg, name)
            value = node[key]
        except (KeyError, AttributeError):
            continue
        if value not in off:
            refused.append(f"{name} = {value!r}: {why}")
    quantises, shares, online = (cfg.quantization.method != "none", cfg.federate.use_ss, cfg.federate.online_aggr)
    if shares and not sums:
        refused.append(
            f"federate.use_ss = True: {method}'s server step is not a weighted sum, so it cannot work on "
            f"shares; it applies to: {_additive()}"
        )
    if online and not sums:
        refused.append(
            f"federate.online_aggr = True: {method}'s server step needs all updates at once, not their "
            f"running sum; it applies to: {_additive()}"
        )
    if shares and quantises:
        refused.append(
            "federate.use_ss and quantization.method together: shares are random numbers over the whole "
            "range, and rounded ones do not add up"
        )
    if shares and cfg.federate.sample_client_num != cfg.federate.client_num:
        refused.append("federate.use_ss needs every client in every round: the shares of an absent one are missing")
    drop_rate = getattr(cfg.lowrank.drop_rate, "value", cfg.lowrank.drop_rate)  # an Argument
    if shares and drop_rate > 0:
        refused.append(
            f"federate.use_ss and lowrank.drop_rate = {drop_rate} together: the shares of a client that "
            "drops out are missing"
        )
    for key, blind, why in (
        ("max_update_norm", shares, "federate.use_ss together: the server sees no client's own update"),
        ("max_update_norm_factor", shares, "federate.use_ss together: the server sees no client's own update"),
        ("max_update_norm_factor", online, "federate.online_aggr together: no update is kept until the others are in"),
    ):
        value = getattr(cfg.lowrank[key], "value", cfg.lowrank[key])  # an Argument
        if blind and value:
            refused.append(f"lowrank.{key} = {value} and {why}")
    if shares and cfg.federate.client_num < 2:
        refused.append("federate.use_ss needs two clients at least")
    if quantises and cfg.quantization.method != "uniform":
        refused.append(f"quantization.method = {cfg.quantization.method!r}: the framework has none and uniform")
    if quantises and cfg.quantization.nbits not in (8, 16):
        refused.append(f"quantization.nbits = {cfg.quantization.nbits}: the framework has 8 and 16")
    best = cfg.eval.best_res_update_round_wise_key
    if "client_test_" in best:
        refused.append(
            f"eval.best_res_update_round_wise_key = {best!r}: the framework files clients' own metrics under test_"
        )
    if cfg.federate.save_freq == 0:
        refused.append("federate.save_freq = 0: rounds between saved models, or -1 for none")
    if cfg.trainer.type not in TRAINERS.values() and cfg.trainer.type.lower() not in _REPLACED:
        refused.append(
            f"trainer.type = {cfg.trainer.type!r}: it cannot train for {method}; leave it out, or one of "
            f"{', '.join(TRAINERS.values())}"
        )
    if refused:
        raise UserError(f"federate.method = {method} cannot run together with:\n  " + "\n  ".join(refused))


def _additive() -> str:
    known = [(n, get_method_class(n)) for n in list_methods()]
    complete = [n for n, cls in known if params_fields(cls).keys() == params_defaults(cls).keys()]
    return ", ".join(n for n in complete if requirements(n).sums) + " (with their default hyperparameters)"


def to_framework(config: Settings):
    """The framework's configuration, from ours; not frozen."""
    from federatedscope.core.configs.config import CN, global_cfg

    cfg = global_cfg.clone()
    flat = {name: value for name, value, _ in flat_keys(config)}
    flat.update(config.framework)
    flat["federate.method"] = frameworks_name(config.federate.method)
    flat["device"] = config.device if isinstance(config.device, int) else -1
    flat["outdir"], flat["expname"] = config.outdir, config.expname
    if not config.model.task:
        flat.pop("model.task")
    # The framework lowers it to the number of GPUs, with a warning; ``run`` starts ours by itself.
    flat["federate.process_num"] = int(torch.cuda.is_available())
    for name, value in flat.items():
        node, key = _node(cfg, name, create=CN)
        node[key] = list(value) if isinstance(value, tuple) else value
    cfg.assert_cfg()
    return cfg


def for_frameworks_workers(cfg):
    """The configuration as the framework's own workers are made with: without what ours do in their place.

    With the method's name it would warn that it has no such aggregator; with the rest it would prepare its own.
    """
    plain = cfg.clone()
    plain.defrost()
    plain.federate.method, plain.federate.restore_from = "fedavg", ""
    plain.federate.online_aggr = plain.federate.use_ss = False
    plain.train.is_enable_half = False  # it would turn the adapters too into 16 bits
    plain.fedopt.use = False
    plain.quantization.method = "none"
    plain._immutable(True)
    return plain
