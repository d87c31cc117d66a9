"""Keys that an engine refuses, and keys without effect: because of other keys, such as ``device`` without ``use_gpu``,
or because of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from . import framework
from .adapter import OF_LAYERS, OF_PEFT, AdapterSpec
from .check import one_mapping
from .origin import show
from .parameters import params_defaults
from .schema import Settings, flat_keys
from .sections import QUANTISED, ROBUST_WEIGHS, VISION_MODELS, WITH_NORM

#: whether keys or sections have an effect, the reason if they have none, and their names
Condition = tuple[bool, str, tuple[str, ...]]
_ADAPTER, _SERVER = "llm.adapter.args", "fedopt.optimizer"
#: the reason for keys of the framework that our methods use on no engine
UNUSED = "our methods do not use it"
#: keys or sections -> the key that they depend on, and its values with which they have an effect; later rows prevail
_DEPENDS: dict[tuple[str, ...], tuple[str, tuple[Any, ...]]] = {
    ("lowrank.robust_malicious",): ("lowrank.robust", ("trimmed_mean", "krum", "multi_krum")),
    ("lowrank.robust_norm",): ("lowrank.robust", ("norm_bound",)),
    (f"{_SERVER}.momentum",): (f"{_SERVER}.type", ("SGD",)),
    (f"{_SERVER}.betas", f"{_SERVER}.tau"): (f"{_SERVER}.type", ("Adam", "Adagrad", "Yogi")),
    (_SERVER,): ("fedopt.use", (True,)),
    ("data.transform", "data.val_transform", "data.test_transform"): ("model.type", VISION_MODELS),
    ("model.use_bias", "lowrank.width", "lowrank.weights", "lowrank.base_init"): ("model.type", VISION_MODELS),
    ("lowrank.norm",): ("model.type", WITH_NORM),
    ("lowrank.compute_dtype",): ("lowrank.dtype", QUANTISED),
    ("lowrank.double_quant",): ("lowrank.dtype", ("nf4",)),
    ("eval.generate",): ("model.task", ("CausalLM",)),
}


def _conditions(config: Settings, engine: str, method: Any, needs: Any) -> Iterator[Condition]:
    """Whether keys that affect results have an effect on ``engine`` with the class ``method``; later reasons prevail.
    Most keys of speed, memory and files are left out.
    """
    values = {name: value for name, value, _ in flat_keys(config)}
    for names, (key, allowed) in _DEPENDS.items():
        suffix = "" if isinstance(values[key], bool) else f"; it is for {', '.join(allowed)}"
        yield values[key] in allowed, f"{key} is {show(values[key])}{suffix}", names
    yield config.use_gpu or config.device == "cpu", "use_gpu is False", ("device",)
    yield config.eval.generate.freq > 0, "eval.generate.freq is 0", ("eval.generate",)
    yield config.train.cache_frozen_shared > 0, "train.cache_frozen_shared is 0", ("train.cache_frozen_dir",)
    yield bool(config.model.device_map), "model.device_map is empty", ("model.max_memory", "model.offload_folder")
    rate = config.federate.sample_client_rate
    yield rate <= 0, f"federate.sample_client_rate = {rate:g} takes precedence", ("federate.sample_client_num",)
    rule = config.lowrank.robust
    weighs = rule in ROBUST_WEIGHS or needs.own_robust_mean  # which may weight its additions to the mean
    yield weighs, f"lowrank.robust = {rule} does not weight clients", ("federate.ignore_weight",)
    yield needs.validation, f"{method.name} selects nothing by validation data", ("lowrank.validation_samples",)
    momentum = config.train.optimizer.extra.get("momentum")
    yield bool(momentum), "train.optimizer.momentum is 0", ("train.optimizer.dampening",)
    tokens, size = config.dataloader.batch_tokens, config.eval.batch_size
    # A method with its own kind of upload may go through a client's data in batches.
    batches = not (tokens and size) or needs.own_upload or needs.validation
    precedence = f"dataloader.batch_tokens = {tokens} and eval.batch_size = {size} take precedence"
    yield batches, precedence, ("dataloader.batch_size",)
    text_keys = ("llm.tok_len", "train.frozen_dropout")
    yield not config.is_vision, f"it is for text, and model.type is {config.model.type!r}", text_keys
    length = one_mapping("data.args", config.data.args, config.source).get("max_len")
    longest = f"max_len = {length} of data.args takes precedence"
    yield config.is_vision or length is None, longest, ("llm.tok_len",)
    yield from _of_adapters(config, method, needs)
    yield from _of_evaluation(config, engine)
    for name, reason in needs.idle.items():
        yield False, reason, (name,)


def _of_adapters(config: Settings, method: Any, needs: Any) -> Iterator[Condition]:
    adapted, untrained = bool(config.llm.adapter.use), f"{method.name} trains all weights without an adapter"
    frozen = config.is_vision or adapted or "base" not in method.shared
    yield frozen, f"{untrained}, so that no layer is frozen", ("train.frozen_dropout",)
    yield adapted, untrained, ("lowrank.base_init",)
    optional = method.name in framework.WITH_ADAPTERS or needs.adapter == "optional"
    yield adapted or not optional, f"federate.method = {untrained}", (_ADAPTER,)
    peft_sets = tuple(f"{_ADAPTER}.0.{name}" for name in OF_PEFT)
    yield False, "PEFT sets it itself; it describes an adapter that is saved", peft_sets
    ignored = tuple(f"{_ADAPTER}.0.{name}" for name in config.llm.adapter.args[0] if name not in OF_LAYERS)
    yield not needs.layers, f"{method.name} adds no adapter, and takes the choice of layers alone from it", ignored
    larger = config.adapter.r > max(needs.ranks, default=0)
    yield larger, "lowrank.ranks gives the ranks of the clients, and the largest is no less", (f"{_ADAPTER}.0.r",)


def _of_evaluation(config: Settings, engine: str) -> Iterator[Condition]:
    freq, stop = config.eval.freq, ("early_stop.patience", "early_stop.delta")
    count = math.ceil(config.federate.total_round_num / freq) if freq > 0 else 1
    ends = f"eval.freq is {freq}, and the run has {count} evaluation{'s' * (count > 1)}"
    yield config.early_stop.patience < count, ends, stop
    yield config.early_stop.patience > 0, "early_stop.patience is 0", stop[1:]
    local = "federate.make_global_eval is False, and clients are evaluated on their shares of the test set"
    is_global = config.federate.make_global_eval or engine == "federatedscope"
    yield is_global, local + ", by loss and accuracy", ("eval.metrics", "eval.split")


def _changed(config: Settings, method: Any = None) -> dict[str, Any]:
    """The values of our keys that differ from their defaults.

    Args:
        method: its hyperparameters have defaults; None: all hyperparameters count as changed.
    """
    defaults = {name: value for name, value, _ in flat_keys(Settings())}
    defaults |= {f"lowrank.{name}": value for name, value in (params_defaults(method) if method else {}).items()}
    usual = AdapterSpec().to_args()
    defaults[_ADAPTER] = [usual]
    flat = {name: value for name, value, _ in flat_keys(config)}
    changed = {name: value for name, value in flat.items() if name not in defaults or value != defaults[name]}
    args = {name: value for name, value in config.llm.adapter.args[0].items() if value and value != usual.get(name)}
    return changed | {f"{_ADAPTER}.0.{name}": value for name, value in args.items()}


def not_honoured(config: Settings, engine: str) -> list[tuple[str, Any, str]]:
    """The keys of ``config`` whose values an engine refuses: name, value and reason."""
    ours, values = framework.OURS_REFUSED[engine], config.framework
    refused = [(name, value, ours[name]) for name, value in _changed(config).items() if name in ours]
    for name, value in values.items():
        if framework.treatment(name, engine, values) == "refused":
            followed = framework.treatment(name, "federatedscope", values) == "followed"
            refused.append((name, value, _instead(name, "engine='federatedscope' honours it" if followed else UNUSED)))
    # For a feature that is on, the key that turns it on is enough: without it the others have no effect.
    names = {name for name, _, _ in refused}
    return [entry for entry in refused if names.isdisjoint(framework.switches(entry[0]))]


def on_engine(name: str, engine: str) -> str:
    """How an engine treats a value of ``name`` that is not the default, in words."""
    if name in framework.DEFAULTS:
        switch, word = framework.off_switch(name, {}), framework.treatment(name, engine)
        return f"{word} with {switch}" if switch and word == "refused" else word
    refused, idle = framework.OURS_REFUSED[engine].get(name), framework.OURS_IDLE[engine].get(name)
    return f"refused ({refused})" if refused else f"no effect ({idle})" if idle else "followed"


def _instead(name: str, reason: str) -> str:
    """The replacement of a key of the framework, else ``reason``."""
    instead = (key for section, key in framework.INSTEAD.items() if framework.within(name, [section]))
    return next((f"take {key} in place of it" for key in instead), reason)


def without_effect(config: Settings, engine: str, method: Any) -> list[tuple[str, Any, str]]:
    """The keys of ``config`` that differ from their defaults but have no effect: name, value and reason.

    Keys of the method that take effect only after more rounds than the run has (``Requires.begins``) are listed also at
    their defaults.

    Args:
        engine: local, federatedscope or flower.
        method: the class of ``federate.method``.
    """
    changed, needs = _changed(config, method), method.requires(method.Params(**config.lowrank.params))
    reasons = {
        name: reason
        for effective, reason, names in _conditions(config, engine, method, needs)
        for name in changed
        if not effective and framework.within(name, names)
    }
    if _ADAPTER in reasons:  # one line for the whole section
        reasons = {name: reason for name, reason in reasons.items() if not name.startswith(f"{_ADAPTER}.")}
    for name, reason in framework.OURS_IDLE[engine].items():
        if name in changed and changed[name] not in framework.SAME_AS_OURS.get(name, ()):
            reasons[name] = reason
    idle = [(name, changed[name], reason) for name, reason in reasons.items()]
    rounds, params = config.federate.total_round_num, config.lowrank.params
    for name, (fewest, why) in needs.begins.items():
        if rounds < fewest:
            run = f"the run has {rounds} round{'s' * (rounds > 1)}"
            idle.append((name, params[name.removeprefix("lowrank.")], f"{run}, and {why}"))
    sizes = sorted({settings["batch_size"] for settings in config.client_settings.values() if "batch_size" in settings})
    if sizes and (tokens := config.dataloader.batch_tokens):
        idle.append(("batch_size of lowrank.clients", sizes, f"dataloader.batch_tokens = {tokens} takes precedence"))
    for name, value in config.framework.items():
        if framework.treatment(name, engine, config.framework) == "no effect":
            switch = framework.off_switch(name, config.framework)
            unused = _instead(name, UNUSED if engine == "federatedscope" else "only FederatedScope uses it")
            idle.append((name, value, f"{switch} is {framework.DEFAULTS[switch]!r}" if switch else unused))
    return idle
