"""The search space: a YAML file with config keys and their values or ranges.

    train.optimizer.lr: {loguniform: [5e-4, 1e-1]}
    lowrank.tau: {grid: [20, 40, 80], when: {federate.method: fedloru}}
    federate.sample_client_num: {int: [2, 16], step: 2}
    studies: {federate.method: [rolora, fedloru]}       # one study for each

``grid`` and ``choice`` list values of any kind. ``uniform``, ``loguniform`` and ``int`` take a lower and an upper
bound, both included; ``uniform`` and ``int`` take a ``step``, ``int`` also ``log``. With ``when``, a key is part of
a point only if other keys, searched or not, have one of the values given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from fs_lowrank import Config, UserError
from fs_lowrank.errors import nearest
from fs_lowrank.settings import Key, Origin, check_keys, check_value, read_yaml, yaml_beside

_VALUES = Key(list, {"filled": True, "once": True, "words": "a list of values"})
_RANGE = Key(tuple[float, float], {"words": "[low, high]"})
_KEYS = {
    "grid": _VALUES,
    "choice": _VALUES,
    "loguniform": _RANGE,
    "uniform": _RANGE,
    "int": Key(tuple[int, int], {"words": "[low, high], two whole numbers"}),
    "step": Key(float | None, {"above": 0}),
    "log": Key(bool),
    "when": Key(dict | None, {"words": "keys and their values, such as {federate.method: [fedloru]}"}),
}
#: kind -> its options
KINDS = {"grid": (), "choice": (), "loguniform": (), "uniform": ("step",), "int": ("step", "log")}


@dataclass(frozen=True)
class Parameter:
    """One searched key.

    Attributes:
        entry: of the file, checked: listed values or the two bounds under ``kind``, and its options.
    """

    key: str
    kind: str
    entry: Mapping[str, Any]

    @property
    def values(self) -> list:
        """The listed values; none of a range."""
        return self.entry[self.kind] if _KEYS[self.kind] is _VALUES else []

    @property
    def when(self) -> Mapping[str, list]:
        return self.entry.get("when", {})

    def suggest(self, trial: Any) -> Any:
        """The value that an Optuna trial suggests."""
        domain, step = self.entry[self.kind], self.entry.get("step")
        if self.values:
            return decode(trial.suggest_categorical(self.key, [encode(v) for v in domain]))
        if self.kind == "int":
            return trial.suggest_int(self.key, *domain, step=int(step or 1), log=self.entry.get("log", False))
        return trial.suggest_float(self.key, *domain, step=step, log=self.kind == "loguniform")


def at_an_end(
    point: Mapping[str, Any], tried: Iterable[Mapping[str, Any]], config: Config | None = None
) -> dict[str, int]:
    """The keys of a winning ``point`` whose value is the smallest (-1) or largest (1) of two or more ``tried``.

    A better value may lie beyond. Values that are not numbers have no order, and a key with one value was not searched.

    Args:
        config: the base of the search; an end counts only if the config accepts a value beyond it. None: all count.
    """
    ends = {}
    tried = list(tried)
    for key, value in point.items():
        values = [value, *(p[key] for p in tried if key in p)]
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values) or min(values) == max(values):
            continue
        if value in (min(values), max(values)):
            end = 1 if value == max(values) else -1
            nearest_beyond = math.nextafter(value, end * math.inf), value + end  # the second for whole numbers
            if config is None or any(accepts(config, {**point, key: beyond}) for beyond in nearest_beyond):
                ends[key] = end
    return ends


def accepts(config: Config, point: Mapping[str, Any]) -> bool:
    """Whether ``config`` accepts the values of a point."""
    try:
        config.replace(point)
    except UserError:
        return False
    return True


def encode(value: Any) -> Any:
    """``value`` in a form that Optuna can store: a list or a mapping becomes JSON text."""
    return "json:" + json.dumps(value) if isinstance(value, (list, dict)) else value


def decode(value: Any) -> Any:
    """The inverse of ``encode``."""
    return json.loads(value[5:]) if isinstance(value, str) and value.startswith("json:") else value


def decoded(params: Mapping[str, Any]) -> dict[str, Any]:
    """The point of a trial: its ``params`` as config values."""
    return {key: decode(value) for key, value in params.items()}


@dataclass(frozen=True)
class Space:
    """The searched keys, each after the keys that it depends on, and the keys whose values get a study each."""

    parameters: tuple[Parameter, ...]
    studies: Mapping[str, tuple] = field(default_factory=dict)
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The space as plain data, which is equal for two files of the same meaning."""
        return {p.key: dict(p.entry) for p in self.parameters}

    def for_config(self, base: Config) -> Space:
        """The space without the keys that never apply to ``base``.

        Raises:
            UserError: an unknown key or method, or a range or a value that Optuna or the config does not accept.
        """
        applicable: dict[str, Parameter] = {}
        for p in (_spelled(parameter, base) for parameter in self.parameters):
            # Of a key that does not apply, the config's own value counts.
            if all(key in applicable or base.get(key) in values for key, values in p.when.items()):
                applicable[p.key] = p
        if not applicable:
            raise UserError(f"{self.source}: no key of this space applies to {base.federate.method}")
        for parameter in applicable.values():
            _check(parameter, _context(parameter, applicable), base, self.source)
        return Space(tuple(applicable.values()), {}, self.source)

    def active(self, point: Mapping[str, Any], base: Config, parameter: Parameter) -> bool:
        return all((point[k] if k in point else base.get(k)) in v for k, v in parameter.when.items())

    def suggest(self, trial, base: Config) -> dict[str, Any]:
        """A point that the sampler proposes: the values of the keys that apply."""
        point: dict[str, Any] = {}
        for parameter in self.parameters:
            if self.active(point, base, parameter):
                point[parameter.key] = parameter.suggest(trial)
        return point

    def grid(self, base: Config) -> list[dict[str, Any]]:
        """All points.

        Raises:
            UserError: a key has a range, not a list of values.
        """
        points: list[dict[str, Any]] = [{}]
        for p in self.parameters:
            if not p.values:
                raise UserError(
                    f"{self.source}: {p.key} is a {p.kind}, which a grid cannot list; "
                    "give it `grid: [...]`, or use the sampler tpe or random"
                )
            points = [
                {**point, **choice}
                for point in points
                for choice in ([{p.key: value} for value in p.values] if self.active(point, base, p) else [{}])
            ]
        return points

    @property
    def all_grid(self) -> bool:
        return all(p.kind == "grid" for p in self.parameters)


def _spelled(parameter: Parameter, base: Config) -> Parameter:
    """``parameter`` with names of methods, and the values of its condition, as a config has them (``FedLoRU``)."""
    from fs_lowrank.methods import get_method_class

    def spelled(key: str, value: Any) -> Any:
        if key == "federate.method":
            return get_method_class(value).name
        return base.replace({key: value}).get(key) if accepts(base, {key: value}) else value

    entry = dict(parameter.entry)
    if parameter.when:
        entry["when"] = {key: [spelled(key, v) for v in values] for key, values in parameter.when.items()}
    if parameter.key == "federate.method":
        entry[parameter.kind] = [spelled(parameter.key, v) for v in parameter.values]
    return replace(parameter, entry=entry)


def _context(parameter: Parameter, searched: Mapping[str, Parameter]) -> dict[str, Any]:
    """Values of other searched keys with which a key applies."""
    context: dict[str, Any] = {}
    for key, values in parameter.when.items():
        if key in searched:
            context.update(_context(searched[key], searched), **{key: values[0]})
    return context


def _check(parameter: Parameter, context: Mapping[str, Any], base: Config, source: str) -> None:
    from optuna.trial import FixedTrial

    try:
        for value in parameter.entry[parameter.kind]:
            base.replace({**context, parameter.key: value})
        if not parameter.values:  # Optuna checks the range
            parameter.suggest(FixedTrial({parameter.key: parameter.entry[parameter.kind][0]}))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except ValueError as error:
        raise UserError(f"{source}: {parameter.key}: {error}") from None


def load_space(path: str | Path, studies: Mapping[str, list] | None = None) -> Space:
    """Read a space from a file; ``path`` may also be the name of a space that ships, such as ``rolora_lr``.

    Args:
        studies: keys whose values get a study each, in addition to those of the file.

    Raises:
        UserError: no such file, invalid YAML, an unknown kind, or an empty or inverted range; names file and line.
    """
    shipped = {p.stem: p for p in sorted((Path(__file__).parent / "spaces").glob("*.yaml"))}
    name, file = str(path), Path(path).expanduser()
    exists = file.exists()
    if not exists and name not in shipped:
        suggestion = nearest(file.name, [*shipped, *yaml_beside(file)])
        raise UserError(f"{name}: no such file{suggestion}; spaces that ship: {', '.join(shipped)}")
    file = file if exists else shipped[name]
    origin, content = read_yaml(file)
    return space_from(content, replace(origin, file=name), studies)


def space_from(content: Any, source: str | Origin = "space", studies: Mapping[str, list] | None = None) -> Space:
    """The space that a YAML file's ``content`` describes.

    Args:
        source: the origin of ``content``, for messages.
        studies: as for ``load_space``.

    Raises:
        UserError: see ``load_space``.
    """
    origin = source if isinstance(source, Origin) else Origin(source)
    if not isinstance(content, Mapping) or not content:
        raise UserError(
            f"{origin.file}: expected config keys, such as `train.optimizer.lr: {{loguniform: [5e-4, 1e-1]}}`"
        )
    content = dict(content)
    studies = check_value("studies", content.pop("studies", None) or {}, Key(dict), origin) | dict(studies or {})
    for key, values in studies.items():
        words = "a list of values, such as {federate.method: [rolora, ffa_lora]}"
        check_value(f"studies.{key}", values, Key(list, {"filled": True, "once": True, "words": words}), origin)
    parameters = {p.key: p for p in _parameters(content, "", origin)}
    for key in studies:
        if key in parameters:
            origin.fail(key, "is searched and also given a study for each value; keep one")
    return Space(_ordered(parameters, origin), {k: tuple(v) for k, v in studies.items()}, origin.file)


def _parameters(content: Mapping, prefix: str, origin: Origin) -> Iterator[Parameter]:
    for key, entry in content.items():
        nested = isinstance(entry, Mapping) and entry and all(isinstance(value, Mapping) for value in entry.values())
        if nested and not entry.keys() & KINDS:
            yield from _parameters(entry, f"{prefix}{key}.", origin)
        else:
            yield _parameter(f"{prefix}{key}", entry, origin)


def _parameter(key: str, entry: Any, origin: Origin) -> Parameter:
    if key.split(".")[0] in ("seed", "eval", "outdir", "expname"):
        origin.fail(key, "is not searched: how trials are measured, and where, is the search's own; see its seeds")
    kinds = [k for k in entry if k in KINDS] if isinstance(entry, Mapping) else []
    if len(kinds) != 1:
        suggestion = nearest(str(next(iter(entry), "")), KINDS) if isinstance(entry, Mapping) and not kinds else ""
        origin.wrong(key, entry, f"exactly one of {', '.join(KINDS)}, such as {{grid: [1, 2]}}{suggestion}")
    kind = kinds[0]
    options = check_keys(entry, _KEYS, origin, key, (kind, *KINDS[kind], "when"))
    entry = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value}
    if kind == "int" and entry.get("step", 1) % 1:
        origin.wrong(f"{key}.step", entry["step"], "a whole number, since the value is one")
    if "when" in entry:
        entry["when"] = {k: v if isinstance(v, list) else [v] for k, v in entry["when"].items()}
    return Parameter(key, kind, entry)


def _ordered(parameters: Mapping[str, Parameter], origin: Origin) -> tuple[Parameter, ...]:
    """The parameters, each after the parameters that its condition names."""
    order: TopologicalSorter[str] = TopologicalSorter({name: () for name in parameters})
    for name, parameter in parameters.items():
        order.add(name, *(key for key in parameter.when if key in parameters))
    try:
        return tuple(parameters[name] for name in order.static_order())
    except CycleError as error:
        raise UserError(f"{origin.file}: {', '.join(error.args[1][1:])} depend on each other through `when`") from None
