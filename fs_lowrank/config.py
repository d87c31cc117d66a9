"""The typed configuration: FederatedScope's keys, and the section ``lowrank`` for what it has no key for.

    config = load_config("run.yaml", federate__method="rolora", **{"train.optimizer.lr": 5e-3})
    config.train.optimizer.lr, config.adapter.r, config.method_params

Defaults are FederatedScope's (branch ``llm``), except where a comment says otherwise. Its own files load
unchanged: a key that has no field here is kept in ``config.framework`` if the framework knows it, and
``check_local`` refuses the ones that the local engine cannot honour. Anything else is an error.

``federate.method`` follows the framework where its name means something else there: ``FedAvg``, which is
also its default, averages adapters if ``llm.adapter.use`` is True. So ``fedavg``, or no method, becomes
``fedlora`` where ``llm.adapter.use`` is True, and trains all weights otherwise. All other names are ours.
The config holds the resolved name.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UserError
from .settings import (
    VISION_MODELS,
    AdapterSpec,
    Origin,
    Settings,
    as_overrides,
    assign,
    check_method_params,
    check_together,
    flat_keys,
    flatten,
    framework,
    infer_task,
    known_keys,
    lookup,
    merge,
    parse_overrides,
    read_section,
    read_yaml,
    show,
)
from .settings.adapter import LOW_RANK_METHODS, adapter_args, resolved_name
from .settings.parameters import general_keys, params_defaults, params_fields, taken_keys, unknown_parameter

__all__ = [
    "VISION_MODELS",
    "AdapterSpec",
    "Config",
    "check_local",
    "check_method_params",
    "known_keys",
    "load_config",
    "load_for",
    "parse_overrides",
]


logger = logging.getLogger("fs_lowrank")


@dataclass(frozen=True)
class Config(Settings):
    """A checked configuration; made by ``load_config``, changed by ``replace``."""

    def replace(self, overrides: Mapping[str, Any] | Sequence[str] | None = None, /, **keys: Any) -> Config:
        """A changed copy, checked anew. Keys as in ``load_config``.

        A new ``federate.method`` is taken as our name (``fedavg`` then trains all weights). It keeps the
        hyperparameters that it shares with the old method and that are not at the old default, and drops the
        rest; whether adapters are used is decided anew, unless the new method takes either.
        """
        changes = {**flatten(as_overrides(overrides)), **flatten(as_overrides(keys))}
        changes = {resolved_name(key): value for key, value in changes.items()}
        tree = self.to_dict()
        method = changes.get("federate.method")
        if isinstance(method, str):
            old, new = _method_class(self.federate.method, self.source), _method_class(method, self.source)
            if old is not new:
                kept, defaults, takes = self.lowrank.params, params_defaults(old), params_fields(new)
                for name in kept:
                    if name not in takes or kept[name] == defaults.get(name):
                        del tree["lowrank"][name]
                if not getattr(new, "either", False):
                    tree["llm"]["adapter"]["use"] = False if method.lower() in framework.WITH_ADAPTERS else None
        if "model.type" in changes and self.model.task == infer_task(self.model.type):
            tree["model"]["task"] = ""
        merge(tree, changes)
        return _build(tree, dataclasses.replace(self.source, overridden=self.source.overridden | set(changes)))


def load_config(
    path: str | os.PathLike | Mapping[str, Any] | Config | None = None,
    /,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    **keys: Any,
) -> Config:
    """Read a configuration and check it.

    Args:
        path: a YAML file, or a mapping in its place (nested, dotted, or both).
        overrides: values that go first: a mapping, or ``key value`` pairs as on the command line.
        keys: more of them, which go before all: ``federate__method="rolora"`` or
            ``**{"federate.method": "rolora"}``.
    Raises:
        UserError: no such file, bad YAML, an unknown key, a wrong type, a value out of range. The message
            names file, line, dotted key, value, and what was expected.
    """
    if isinstance(path, Config):
        return path.replace(overrides, **keys) if overrides is None else path.replace(overrides).replace(**keys)
    return _build(*_content(path, as_overrides(overrides), as_overrides(keys)))


def load_for(
    path: str | os.PathLike | Mapping[str, Any] | Config | None,
    methods: Sequence[str],
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
) -> tuple[Config, dict[str, dict[str, Any]]]:
    """Read a configuration that several methods are to run.

    Args:
        path: as for ``load_config``. What it has in ``lowrank`` is its own method's.
        methods: their names.
        overrides: values that go first; those in ``lowrank`` may belong to any of ``methods``.
    Returns:
        The configuration with its own method; by resolved name of a method, the overrides that belong to it.
    Raises:
        UserError: as ``load_config``; an unknown method, one that is given twice, or none; an override in ``lowrank``
            that none of the methods has.
    """
    classes = [_method_class(name, Origin()) for name in methods]
    if not classes or len({cls.name for cls in classes}) < len(classes):
        raise UserError(f"compare needs distinct methods, got {', '.join(methods) or 'none'}")
    flat, general = flatten(as_overrides(overrides)), general_keys()
    own = {key: value for key, value in flat.items() if key.startswith("lowrank.") and key.split(".")[1] not in general}
    for key in own:
        if not any(taken_keys(cls, [key]) for cls in classes):
            unknown_parameter(key.split(".")[1], classes, Origin(overridden=frozenset(own)))
    shared = {key: value for key, value in flat.items() if key not in own}
    config = path.replace(shared) if isinstance(path, Config) else _build(*_content(path, shared), own)
    return config, {cls.name: {key: own[key] for key in taken_keys(cls, own)} for cls in classes}


def _content(path: Any, *changes: Mapping[str, Any]) -> tuple[dict[str, Any], Origin]:
    """What ``path`` holds, with ``changes`` made to it in turn, and where every value came from."""
    tree: dict[str, Any] = {}
    origin, content = (Origin(), path or {}) if path is None or isinstance(path, Mapping) else read_yaml(path)
    merge(tree, content)
    for mapping in changes:
        merge(tree, mapping)
        origin = dataclasses.replace(origin, overridden=origin.overridden | set(flatten(mapping)))
    return tree, origin


def _build(tree: Mapping[str, Any], origin: Origin, own: Mapping[str, Any] | None = None) -> Config:
    """The checked config; of ``own``, overrides in ``lowrank``, its method takes what it has and leaves the rest."""
    others: dict[str, Any] = {}
    config = read_section(Config, tree, "", origin, others)
    named = lookup(tree, "federate.method") is not None
    method, use = _resolve_method(config, named, origin)
    federate = dataclasses.replace(config.federate, method=method.name)
    adapter = dataclasses.replace(config.llm.adapter, use=use, args=[adapter_args(config.llm.adapter.args, origin)])
    task = config.model.task or infer_task(config.model.type)
    params = dict(config.lowrank.params)
    given = own or {}
    for key in taken_keys(method, given):
        assign(params, key.removeprefix("lowrank."), given[key])
        origin = dataclasses.replace(origin, overridden=origin.overridden | {key})
    params = check_method_params(method, params, origin)
    config = dataclasses.replace(
        config,
        federate=federate,
        framework=others,
        source=origin,
        model=dataclasses.replace(config.model, task=task),
        llm=dataclasses.replace(config.llm, adapter=adapter),
        lowrank=dataclasses.replace(config.lowrank, params=params),
    )
    check_together(config, origin)
    _check_optimizers(config, origin)
    tasks = getattr(method, "tasks", (task,))
    if task and task not in tasks:
        origin.fail(
            "federate.method",
            f"= {method.name} is not for model.type = {config.model.type} ({task}); "
            f"it takes models of {', '.join(tasks)}",
        )
    return config


def _check_optimizers(config: Config, origin: Origin) -> None:
    if config.fedopt.use:
        from .methods.server_optimizer import ServerOptimizer

        server = config.fedopt.optimizer
        ServerOptimizer.from_config({"type": server.type, "lr": server.lr, **server.extra}, origin)
    if not config.train.optimizer.extra:
        return
    from .training.optimizer import check_optimizer  # imports torch, which reading a config's schema should not

    try:
        check_optimizer(config.train.optimizer)
    except UserError as error:
        raise UserError(f"{origin.where('train.optimizer')}{error}") from None


def _method_class(name: str, origin: Origin) -> Any:
    from .methods import get_method_class  # imports torch, which reading a config's schema should not

    try:
        return get_method_class(name.lower())
    except UserError as error:
        raise UserError(f"{origin.where('federate.method')}{error}") from None


def _resolve_method(config: Config, named: bool, origin: Origin) -> tuple[Any, bool]:
    """The method's class, and whether it uses adapters; see the module's docstring."""
    name, use = config.federate.method.lower(), config.llm.adapter.use
    if name in framework.WITH_ADAPTERS:
        if use:
            name = framework.WITH_ADAPTERS[name]
        elif use is None and not named and any(config.llm.adapter.args):
            origin.fail(
                "federate.method",
                "is missing, and llm.adapter.args is given without llm.adapter.use: the "
                "framework would ignore the adapter and train all weights; say which method, such as fedlora, "
                "or set llm.adapter.use",
            )
    cls = _method_class(name, origin)
    adapts = "adapter" in getattr(cls, "shared", ("adapter",)) or (bool(use) and getattr(cls, "either", False))
    if use is False and adapts:
        origin.fail(
            "llm.adapter.use",
            f"= False, but federate.method = {cls.name} trains adapters; "
            "remove the key, or choose fedavg to train all weights",
        )
    return cls, adapts if use is None else use


def check_local(config: Config) -> None:
    """Refuse what only the framework can do, and name what is left out; the local engine calls it before a run.

    Raises:
        UserError: names every such key at once.
    """
    refused = [(name, value) for name, value, meta in flat_keys(config) if "local" in meta and value != meta["local"]]
    refused += [
        (name, value)
        for name, value in config.framework.items()
        if not framework.decides_nothing(name, config.framework)
    ]
    method = config.adapter.method
    if config.llm.adapter.use and method not in LOW_RANK_METHODS:
        refused.append(("llm.adapter.args.0.adapter_method", method))
    defaults = Config()
    for name, value, meta in flat_keys(config):
        if "idle" in meta and value != defaults.get(name):
            logger.warning("%s = %s is left out by this engine: %s", name, show(value), meta["idle"])
    if refused:
        file, lines = config.source.file, config.source.lines
        listed = [
            f"{name} = {show(value)}" + (f" (line {lines[name]})" if name in lines else "") for name, value in refused
        ]
        raise UserError(
            f"{file + ': ' if file else ''}honoured only by --engine federatedscope; remove, or run with "
            "that engine:\n  " + "\n  ".join(listed)
        )
