"""The typed configuration: FederatedScope's keys, and the section ``lowrank`` for everything else.

    config = load_config("run.yaml", federate__method="rolora", **{"train.optimizer.lr": 5e-3})
    config.train.optimizer.lr, config.adapter.r, config.method_params

Defaults are FederatedScope's (branch ``llm``), except where a comment says otherwise. Its files load
unchanged: a key of FederatedScope without a field here goes into ``config.framework``, and ``check_local``
refuses keys that the local engine does not support. Any other unknown key is an error.

In FederatedScope, ``federate.method: FedAvg`` (the default) averages adapters if ``llm.adapter.use`` is True.
Therefore ``fedavg``, or no method, becomes ``fedlora`` if ``llm.adapter.use`` is True, and trains all weights
otherwise. All other names are ours. The config holds the resolved name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .declared import declared, methods
from .errors import UserError, say_once
from .settings import (
    OPTIMIZERS_8BIT,
    AdapterSpec,
    Origin,
    Settings,
    check_method_params,
    flatten,
    framework,
    keys_of,
    one_mapping,
    read_yaml,
    show,
)
from .settings.adapter import OTHER_DEFAULTS, defaulted, resolved_name
from .settings.build import read_section
from .settings.clients import read_clients
from .settings.conflicts import check_together, conflicts_on
from .settings.effects import not_honoured, without_effect
from .settings.parameters import general_keys, taken_keys, unknown_parameter
from .settings.reading import as_overrides
from .settings.schema import infer_task
from .settings.tree import lookup, merge


@dataclass(frozen=True)
class Config(Settings):
    """A checked configuration. ``load_config`` makes it, and ``replace`` makes a changed copy."""

    def replace(self, overrides: Mapping[str, Any] | Sequence[str] | None = None, /, **keys: Any) -> Config:
        """A changed copy, checked anew. Keys as in ``load_config``.

        A new ``federate.method`` is one of our names (``fedavg`` then trains all weights). Hyperparameters of the old
        method that differ from its defaults stay, if the new method has them too. The use of adapters is decided again:
        from ``llm.adapter.use`` as given, if the new method works with and without them.
        """
        changes = {**flatten(as_overrides(overrides)), **flatten(as_overrides(keys))}
        changes = {resolved_name(key): value for key, value in changes.items()}
        method = str(changes.get("federate.method", self.federate.method))
        old, new = _method_class(self.federate.method, self.source), _method_class(method, self.source)
        tree, use = self.to_dict(), changes.get("llm.adapter.use", self.source.adapter)
        tree["llm"]["adapter"]["args"][0].pop(self.source.defaulted, None)  # it stays at its default
        if new is not old:
            tree["llm"]["adapter"]["use"] = False if method.lower() in framework.WITH_ADAPTERS else None
            for name, value in self.lowrank.params.items():
                if name not in keys_of(new.Params) or value == keys_of(old.Params)[name].default:
                    del tree["lowrank"][name]
        if "model.type" in changes and self.model.task == infer_task(self.model.type):
            tree["model"]["task"] = ""
        merge(tree, changes)
        overridden = self.source.overridden | set(changes)
        return _build(tree, dataclasses.replace(self.source, overridden=overridden, adapter=use))


def load_config(
    path: str | os.PathLike | Mapping[str, Any] | Config | None = None,
    /,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    *,
    origin: Origin | None = None,
    **keys: Any,
) -> Config:
    """Read and check a configuration.

    Args:
        path: a YAML file, or a mapping in its place (nested, dotted, or both).
        overrides: values that take precedence: a mapping, or ``key value`` pairs as on the command line.
        origin: the file and lines that a mapping was read from, for messages.
        keys: further values, which take precedence over ``overrides``: ``federate__method="rolora"`` or
            ``**{"federate.method": "rolora"}``.
    Raises:
        UserError: no such file, bad YAML, an unknown key, a wrong type, a value out of range. The message
            names file, line, dotted key, value, and the expected values.
    """
    if isinstance(path, Config):
        return path.replace(overrides, **keys) if overrides is None else path.replace(overrides).replace(**keys)
    return _build(*_content(path, as_overrides(overrides), as_overrides(keys), origin=origin))


def load_for(
    path: str | os.PathLike | Mapping[str, Any] | Config | None,
    methods: Sequence[str],
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
) -> tuple[Config, dict[str, dict[str, Any]]]:
    """Read a configuration for several methods.

    Args:
        path: as for ``load_config``. Hyperparameters in its ``lowrank`` belong to its own method.
        methods: names.
        overrides: values that take precedence; keys in ``lowrank`` may belong to any of ``methods``.
    Returns:
        The configuration with its own method, and the overrides of each method by its resolved name.
    Raises:
        UserError: as for ``load_config``; an unknown method, a repeated method, or none; an override in ``lowrank``
            that no method has.
    """
    classes = [_method_class(name, Origin()) for name in methods]
    if not classes or len({cls.name for cls in classes}) < len(classes):
        raise UserError(f"compare needs distinct methods, got {', '.join(methods) or 'none'}")
    flat, general = flatten(as_overrides(overrides)), general_keys()
    params = {
        key: value for key, value in flat.items() if key.startswith("lowrank.") and key.split(".")[1] not in general
    }
    for key in params:
        if not any(taken_keys(cls, [key]) for cls in classes):
            unknown_parameter(key.split(".")[1], classes, Origin(overridden=frozenset(params)), _all_methods())
    shared = {key: value for key, value in flat.items() if key not in params}
    by_method = {cls.name: {key: params[key] for key in taken_keys(cls, params)} for cls in classes}
    file_method = None if isinstance(path, Config) else lookup(_content(path, shared)[0], "federate.method")
    config = load_config(path, {**shared, **by_method.get(str(file_method).lower(), {})})  # it may need one of its own
    return config, by_method


def _content(path: Any, *changes: Mapping[str, Any], origin: Origin | None = None) -> tuple[dict[str, Any], Origin]:
    """The content of ``path`` with ``changes`` applied in order, and the origin of every value."""
    tree: dict[str, Any] = {}
    if not (path is None or isinstance(path, (Mapping, str, os.PathLike))):
        raise UserError(f"config = {show(path)}: expected the path of a YAML file, a mapping, or a Config")
    origin, content = (origin or Origin(), path or {}) if path is None or isinstance(path, Mapping) else read_yaml(path)
    merge(tree, content, origin)
    for mapping in changes:
        origin = dataclasses.replace(origin, overridden=origin.overridden | set(flatten(mapping)))
        merge(tree, mapping, origin)
    return tree, dataclasses.replace(origin, adapter=lookup(tree, "llm.adapter.use"))


def _build(tree: Mapping[str, Any], origin: Origin) -> Config:
    framework_keys: dict[str, Any] = {}
    config = read_section(Config, tree, "", origin, framework_keys)
    has_method = lookup(tree, "federate.method") is not None
    method = _resolve_method(config, has_method, origin)
    federate = dataclasses.replace(config.federate, method=method.name)
    task = config.model.task or infer_task(config.model.type)
    params = check_method_params(method, config.lowrank.params, origin, _all_methods())
    needs = method.requires(method.Params(**params))
    use, args = config.llm.adapter.use, one_mapping("llm.adapter.args", config.llm.adapter.args, origin)
    adapts = needs.adapts(origin.adapter if use is None else use)
    origin = dataclasses.replace(origin, defaulted=defaulted(args))
    adapter = {"use": adapts if use is None else use, "args": [AdapterSpec.from_args(args, origin).to_args()]}
    clients = read_clients(config.lowrank.clients, config.federate.client_num, origin)
    config = dataclasses.replace(
        config,
        federate=federate,
        framework=framework_keys,
        source=origin,
        model=dataclasses.replace(config.model, task=task),
        llm=dataclasses.replace(config.llm, adapter=dataclasses.replace(config.llm.adapter, **adapter)),
        lowrank=dataclasses.replace(config.lowrank, params=params, clients=clients),
    )
    check_together(config, method, needs, origin)
    _check_optimizers(config, origin)
    return config


def _check_optimizers(config: Config, origin: Origin) -> None:
    server = config.fedopt.optimizer
    if config.fedopt.use or server.extra:
        optimizer = declared("fs_lowrank.methods.server_optimizer").ServerOptimizer
        optimizer.from_config({"type": server.type, "lr": server.lr, **server.extra}, origin)
    has_8_bits = config.train.optimizer.type in OPTIMIZERS_8BIT
    if not config.train.optimizer.extra and not has_8_bits:
        return
    from .models.quantised import has_bitsandbytes
    from .training.optimizer import check_optimizer  # imports torch, which reading a config's schema should not

    if has_8_bits and not has_bitsandbytes():
        return  # a run will say so; a file can be read without

    check_optimizer(config.train.optimizer, origin)


def _all_methods() -> Iterator[Any]:
    return map(methods().get_method_class, methods().list_methods())


def _method_class(name: str, origin: Origin) -> Any:
    try:
        return methods().get_method_class(name.lower())
    except UserError as error:
        raise UserError(f"{origin.where('federate.method')}{error}") from None


def _resolve_method(config: Config, has_method: bool, origin: Origin) -> Any:
    """The class of the method; see the docstring of the module."""
    name, use = config.federate.method.lower(), config.llm.adapter.use
    if name in framework.WITH_ADAPTERS:
        if use:
            name = framework.WITH_ADAPTERS[name]
        elif use is None and not has_method and any(config.llm.adapter.args):
            origin.fail(
                "federate.method",
                "is missing, and llm.adapter.args is given without llm.adapter.use: the "
                "framework would ignore the adapter and train all weights; say which method, such as fedlora, "
                "or set llm.adapter.use",
            )
    return _method_class(name, origin)


def check_local(config: Config) -> None:
    """``check_engine`` for the embedded engine."""
    check_engine(config, "local")


def check_engine(config: Config, engine: str, further: Sequence[str] = ()) -> None:
    """Refuse values that an engine does not honour, and report every key without effect, before a run.

    Args:
        engine: local, federatedscope or flower.
        further: what an engine of your own refuses beside, in words.
    Raises:
        UserError: the message lists the refused keys, with the reasons; or ``train.scheduler`` has a key or value that
            is not ours.
    """
    from .training import schedule  # imports torch, which reading a config's schema should not

    refused = [*not_honoured(config, engine), *conflicts_on(config, engine)]
    idle = schedule.without_effect(config)
    idle += without_effect(config, engine, _method_class(config.federate.method, config.source))
    for name, value, reason in idle:
        say_once(f"{name} = {show(value)} has no effect: {reason}")
    if config.llm.adapter.use and (name := config.source.defaulted):
        spec = config.adapter
        ours, theirs = spec.to_args()[name], OTHER_DEFAULTS[spec.method][1]
        say_once(f"llm.adapter.args: {name} is not given: {ours} here, {theirs}")
    file, lines = config.source.file, config.source.lines
    listed = [
        f"{name} = {show(value)}" + (f" (line {lines[name]})" if name in lines else "") + f": {why}"
        for name, value, why in refused
    ]
    if listed := [*listed, *further]:
        subject = f"federate.method = {config.federate.method} on engine={engine!r} does not honour"
        raise UserError(f"{file + ': ' if file else ''}{subject}; remove:\n  " + "\n  ".join(listed))
