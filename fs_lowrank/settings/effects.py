"""Keys that an engine refuses, and keys without effect: because of other keys, such as ``device`` without ``use_gpu``,
or because of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import framework
from .adapter import AdapterSpec
from .schema import Settings, flat_keys


def _conditions(config: Settings, engine: str) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Whether keys or sections have an effect on ``engine``, the reason if they have none, and their names."""
    model, vision = f"model.type is {config.model.type!r}", config.is_vision
    yield config.use_gpu or config.device == "cpu", "use_gpu is False", ("device",)
    rate = config.federate.sample_client_rate
    yield rate <= 0, f"federate.sample_client_rate = {rate:g} takes precedence", ("federate.sample_client_num",)
    alone = config.federate.mode == "standalone" and config.federate.process_num == 1 and engine != "flower"
    yield not alone, "no process waits for another", ("lowrank.timeout",)
    yield config.early_stop.patience > 0, "early_stop.patience is 0", ("early_stop.delta",)
    yield config.fedopt.use, "fedopt.use is False", ("fedopt.optimizer", "fedopt.annealing")
    yield (
        config.fedopt.annealing,
        "fedopt.annealing is False",
        ("fedopt.annealing_step_size", "fedopt.annealing_gamma"),
    )
    yield (
        vision,
        f"it is for images, and {model}",
        ("model.use_bias", "data.transform", "data.val_transform", "data.test_transform"),
    )
    cache = tuple(f"train.cache_frozen_{name}" for name in ("bytes", "dir", "shared"))
    yield (
        not vision,
        f"it is for text, and {model}",
        (
            "llm.tok_len",
            "train.frozen_dropout",
            "train.only_read",
            "train.blocks",
            "train.checkpointing",
            "train.cohort",
            "model.attn_implementation",
            "train.cache_frozen",
            *cache,
        ),
    )
    folder = config.train.cache_frozen_dir
    yield vision or not folder, f"train.cache_frozen_dir = {folder!r} takes precedence", ("train.cache_frozen_shared",)
    yield vision or config.train.cache_frozen != "off", "train.cache_frozen is off", cache
    drops = config.train.frozen_dropout
    yield vision or not drops, "train.frozen_dropout is True", ("train.cache_frozen", *cache)
    yield (
        config.llm.adapter.use is not False or config.federate.method not in framework.WITH_ADAPTERS,
        f"federate.method = {config.federate.method} trains all weights without an adapter",
        ("llm.adapter.args",),
    )
    answers = config.model.task == "CausalLM"
    yield answers, f"it is for causal language models, and {model}, for {config.model.task}", ("eval.generate",)
    further = ("split", "prompts", "max_tokens", "temperature", "score")
    yield config.eval.generate.freq > 0, "eval.generate.freq is 0", tuple(f"eval.generate.{name}" for name in further)
    spread = ("model.max_memory", "model.offload_folder")
    yield bool(config.model.device_map), "model.device_map is empty", spread
    dtype = f"lowrank.dtype is {config.lowrank.dtype}"
    yield bool(config.quantised), dtype, ("lowrank.compute_dtype",)
    yield config.quantised == "nf4", dtype, ("lowrank.double_quant",)
    yield config.lowrank.checkpoint_freq > 0, "lowrank.checkpoint_freq is 0", ("lowrank.keep_checkpoints",)


def _changed(config: Settings) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """The keys of ours that differ from their defaults: name -> value and metadata."""
    defaults = {name: value for name, value, _ in flat_keys(Settings())}
    defaults["llm.adapter.args"] = [AdapterSpec().to_args()]
    return {
        name: (value, meta)
        for name, value, meta in flat_keys(config)
        if name not in defaults or value != defaults[name]
    }


def not_honoured(config: Settings, engine: str) -> list[tuple[str, Any, str]]:
    """The keys of ``config`` whose values an engine refuses: name, value and reason.

    Args:
        engine: local, federatedscope or flower; flower honours what local does, and more.
    """
    local, given = engine != "federatedscope", config.framework
    more = framework.ON_FLOWER["honoured"] if engine == "flower" else ()
    refused = [
        (name, value, "" if local else framework.REFUSED[name])
        for name, (value, meta) in _changed(config).items()
        if (value != meta.get("local", value) if local else name in framework.REFUSED)
    ]
    for name, value in given.items():
        if local:
            taken = framework.decides_nothing(name, given) or framework.within(name, more)
        else:
            taken = framework.within(name, framework.HONOURED) or bool(_idle(name, given, engine))
            taken = taken or value in framework.SAME_AS_OURS.get(name, ())
        if not taken:
            refused.append((name, value, "" if local else framework.REFUSED.get(name, "our methods do not use it")))
    if not local:
        return refused
    why = {name: reason for name, _, reason in not_honoured(config, "federatedscope")}
    why |= framework.ON_FLOWER["refused"] if engine == "flower" else {}
    return [(name, value, why.get(name, "engine='federatedscope' honours it")) for name, value, _ in refused]


def _idle(name: str, given: Mapping[str, Any], engine: str) -> str:
    """Why a key of FederatedScope has no effect in a run on ``engine``; empty if it has one, or is refused."""
    switch = framework.off_switch(name, given)
    if switch:
        return f"{switch} is {framework.DEFAULTS[switch]!r}"
    if engine != "federatedscope":
        harmless = framework.within(name, framework.HARMLESS)
        followed = engine == "local" and name in framework.FOLLOWED
        return "only FederatedScope uses it" if harmless and not followed else ""
    return _idle_by(name, framework.IDLE)


def _idle_by(name: str, table: Mapping[str, list[str]]) -> str:
    """The reason in ``table`` why a key has no effect; empty if it is not in it."""
    return next((why for why, names in table.items() if framework.within(name, names)), "")


def on_the_framework(name: str) -> str:
    """What engine federatedscope does with a value of ``name`` that is not the default, in words."""
    idle = _idle_by(name, framework.IDLE)
    if idle:
        return f"no effect ({idle})"
    if name in framework.DEFAULTS and not framework.within(name, framework.HONOURED):
        switch = framework.off_switch(name, {})
        return f"refused with {switch}" if switch else f"refused ({framework.REFUSED.get(name, 'not used')})"
    return f"refused ({framework.REFUSED[name]})" if name in framework.REFUSED else "honoured"


def without_effect(config: Settings, engine: str) -> list[tuple[str, Any, str]]:
    """The keys of ``config`` that differ from their defaults but have no effect: name, value and reason.

    Args:
        engine: local, federatedscope or flower.
    """
    changed = _changed(config)
    reasons = {
        name: reason
        for effective, reason, names in _conditions(config, engine)
        for name in changed
        if not effective and framework.within(name, names)
    }
    for name, (value, meta) in changed.items():
        if engine != "local" and value in framework.AS_IT_IS.get(name, ()):
            continue
        if engine == "federatedscope":
            reason = _idle(name, {}, engine)
        else:
            more = framework.ON_FLOWER["idle"] if engine == "flower" else {}
            reason = meta.get("idle") or _idle_by(name, more)
        if reason:
            reasons[name] = reason
    idle = [(name, changed[name][0], reason) for name, reason in reasons.items()]
    for name, value in config.framework.items():
        if reason := _idle(name, config.framework, engine):
            idle.append((name, value, reason))
    return idle
