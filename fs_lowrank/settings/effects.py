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
#: said of the framework's keys that our methods do not use, on whatever engine
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
    """What decides whether keys of a result have an effect on ``engine``, under the class ``method``; later reasons
    prevail. Of keys of speed, memory and files nothing is said.
    """
    values = {name: value for name, value, _ in flat_keys(config)}
    for names, (key, allowed) in _DEPENDS.items():
        takes = "" if isinstance(values[key], bool) else f"; it is for {', '.join(allowed)}"
        yield values[key] in allowed, f"{key} is {show(values[key])}{takes}", names
    yield config.use_gpu or config.device == "cpu", "use_gpu is False", ("device",)
    rate = config.federate.sample_client_rate
    yield rate <= 0, f"federate.sample_client_rate = {rate:g} takes precedence", ("federate.sample_client_num",)
    rule = config.lowrank.robust
    weighs = rule in ROBUST_WEIGHS or needs.own_robust_mean  # which may weight what it adds to the mean
    yield weighs, f"lowrank.robust = {rule} does not weight clients", ("federate.ignore_weight",)
    yield needs.validation, f"{method.name} selects nothing by validation data", ("lowrank.validation_samples",)
    momentum = config.train.optimizer.extra.get("momentum")
    yield bool(momentum), "train.optimizer.momentum is 0", ("train.optimizer.dampening",)
    most, held_out = config.dataloader.batch_tokens, config.eval.batch_size
    # Of a method's own kind of upload nothing is known; it may go through a client's data in batches.
    batches = not (most and held_out) or needs.own_upload or needs.validation
    both = f"dataloader.batch_tokens = {most} and eval.batch_size = {held_out} take precedence"
    yield batches, both, ("dataloader.batch_size",)
    of_text = ("llm.tok_len", "train.frozen_dropout")
    yield not config.is_vision, f"it is for text, and model.type is {config.model.type!r}", of_text
    length = one_mapping("data.args", config.data.args, config.source).get("max_len")
    longest = f"max_len = {length} of data.args takes precedence"
    yield config.is_vision or length is None, longest, ("llm.tok_len",)
    yield from _of_adapters(config, method, needs)
    yield from _of_evaluation(config, engine)
    for name, reason in needs.idle.items():
        yield False, reason, (name,)


def _of_adapters(config: Settings, method: Any, needs: Any) -> Iterator[Condition]:
    adapted, whole = bool(config.llm.adapter.use), f"{method.name} trains all weights without an adapter"
    frozen = config.is_vision or adapted or "base" not in method.shared
    yield frozen, f"{whole}, so that no layer is frozen", ("train.frozen_dropout",)
    yield adapted, whole, ("lowrank.base_init",)
    optional = method.name in framework.WITH_ADAPTERS or needs.adapter == "optional"
    yield adapted or not optional, f"federate.method = {whole}", (_ADAPTER,)
    peft_sets = tuple(f"{_ADAPTER}.0.{name}" for name in OF_PEFT)
    yield False, "PEFT sets it itself; it describes an adapter that is saved", peft_sets
    others = tuple(f"{_ADAPTER}.0.{name}" for name in config.llm.adapter.args[0] if name not in OF_LAYERS)
    yield not needs.layers, f"{method.name} adds no adapter, and takes the choice of layers alone from it", others
    larger = config.adapter.r > max(needs.ranks, default=0)
    yield larger, "lowrank.ranks gives the ranks of the clients, and the largest is no less", (f"{_ADAPTER}.0.r",)


def _of_evaluation(config: Settings, engine: str) -> Iterator[Condition]:
    freq, stop = config.eval.freq, ("early_stop.patience", "early_stop.delta")
    count = math.ceil(config.federate.total_round_num / freq) if freq > 0 else 1
    ends = f"eval.freq is {freq}, and the run has {count} evaluation{'s' * (count > 1)}"
    yield config.early_stop.patience < count, ends, stop
    yield config.early_stop.patience > 0, "early_stop.patience is 0", stop[1:]
    by_clients = "federate.make_global_eval is False, and clients are evaluated on their shares of the test set"
    whole = config.federate.make_global_eval or engine == "federatedscope"
    yield whole, by_clients + ", by loss and accuracy", ("eval.metrics", "eval.split")


def _changed(config: Settings, method: Any = None) -> dict[str, Any]:
    """The values of our keys that differ from their defaults.

    Args:
        method: whose hyperparameters' defaults are meant; None: they all differ.
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
    ours, given = framework.OURS_REFUSED[engine], config.framework
    refused = [(name, value, ours[name]) for name, value in _changed(config).items() if name in ours]
    for name, value in given.items():
        if framework.word(name, engine, given) == "refused":
            there = framework.word(name, "federatedscope", given) == "followed"
            refused.append((name, value, _instead(name, "engine='federatedscope' honours it" if there else UNUSED)))
    # Of a feature that is on, the key that turns it on says all: without it the others have no effect.
    names = {name for name, _, _ in refused}
    return [of for of in refused if names.isdisjoint(framework.switches(of[0]))]


def on_engine(name: str, engine: str) -> str:
    """What an engine does with a value of ``name`` that is not the default, in words."""
    if name in framework.DEFAULTS:
        switch, word = framework.off_switch(name, {}), framework.word(name, engine)
        return f"{word} with {switch}" if switch and word == "refused" else word
    refused, idle = framework.OURS_REFUSED[engine].get(name), framework.OURS_IDLE[engine].get(name)
    return f"refused ({refused})" if refused else f"no effect ({idle})" if idle else "followed"


def _instead(name: str, reason: str) -> str:
    """What takes the place of a key of the framework, else ``reason``."""
    instead = (key for section, key in framework.INSTEAD.items() if framework.within(name, [section]))
    return next((f"take {key} in place of it" for key in instead), reason)


def without_effect(config: Settings, engine: str, method: Any) -> list[tuple[str, Any, str]]:
    """The keys of ``config`` that differ from their defaults but have no effect: name, value and reason.

    Those of the method that take effect in more rounds than the run has (``Requires.begins``) are among them also at
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
    if _ADAPTER in reasons:  # which is said as a whole
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
    sizes = sorted({own["batch_size"] for own in config.own_settings.values() if "batch_size" in own})
    if sizes and (most := config.dataloader.batch_tokens):
        idle.append(("batch_size of lowrank.clients", sizes, f"dataloader.batch_tokens = {most} takes precedence"))
    for name, value in config.framework.items():
        if framework.word(name, engine, config.framework) == "no effect":
            switch = framework.off_switch(name, config.framework)
            unused = _instead(name, UNUSED if engine == "federatedscope" else "only FederatedScope uses it")
            idle.append((name, value, f"{switch} is {framework.DEFAULTS[switch]!r}" if switch else unused))
    return idle
