"""Keys without effect: because of other keys, such as ``device`` without ``use_gpu``, or because of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import framework
from .adapter import AdapterSpec
from .schema import Settings, flat_keys


def _conditions(config: Settings) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Whether keys or sections have an effect, the reason if they have none, and their names."""
    model, vision = f"model.type is {config.model.type!r}", config.is_vision
    yield config.use_gpu or config.device == "cpu", "use_gpu is False", ("device",)
    rate = config.federate.sample_client_rate
    yield rate <= 0, f"federate.sample_client_rate = {rate:g} takes precedence", ("federate.sample_client_num",)
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
    cache = ("train.cache_frozen_bytes", "train.cache_frozen_dir")
    yield (
        not vision,
        f"it is for text, and {model}",
        (
            "llm.tok_len",
            "train.frozen_dropout",
            "train.only_read",
            "train.blocks",
            *cache,
        ),
    )
    yield vision or config.train.cache_frozen != "off", "train.cache_frozen is off", cache
    yield (
        config.llm.adapter.use is not False or config.federate.method not in framework.WITH_ADAPTERS,
        f"federate.method = {config.federate.method} trains all weights without an adapter",
        ("llm.adapter.args",),
    )
    yield config.lowrank.checkpoint_freq > 0, "lowrank.checkpoint_freq is 0", ("lowrank.keep_checkpoints",)


def without_effect(config: Settings, local: bool) -> list[tuple[str, Any, str]]:
    """The keys of ``config`` that differ from their defaults but have no effect: name, value and reason.

    Args:
        local: include the keys that have no effect in the local engine, and do not affect the result in others.
    """
    defaults = {name: value for name, value, _ in flat_keys(Settings())}
    defaults["llm.adapter.args"] = [AdapterSpec().to_args()]
    changed = {
        name: (value, meta)
        for name, value, meta in flat_keys(config)
        if name not in defaults or value != defaults[name]
    }
    reasons = {
        name: reason
        for effective, reason, names in _conditions(config)
        for name in changed
        if not effective and framework.within(name, names)
    }
    if local:
        reasons |= {name: meta["idle"] for name, (_, meta) in changed.items() if "idle" in meta}
    idle = [(name, changed[name][0], reason) for name, reason in reasons.items()]
    for name, value in config.framework.items():
        switch = framework.off_switch(name, config.framework)
        if switch:
            idle.append((name, value, f"{switch} is {framework.DEFAULTS[switch]!r}"))
        elif local and framework.within(name, framework.HARMLESS):
            idle.append((name, value, "only FederatedScope uses it"))
    return idle
