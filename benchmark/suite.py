"""A suite: a YAML with a base config, a grid, an evaluation, the papers' figures and the claims to check.

    config: {model: {type: minilm@transformers}, data: {type: reviews.csv, args: [{text: review, label: stars}]}}
    methods: [rolora, ffa_lora, fedlora]
    grid: {federate.client_num: [3, 20]}
    seeds: [0, 1, 2]

is a whole one. ``small:`` and ``paper:`` hold what differs between the two sizes, ``experiments:`` several grids that
share the rest; a config is laid over the one around it, any other key replaces it. ``docs/benchmark.md`` has every key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fs_lowrank import UserError, list_methods
from fs_lowrank.errors import nearest

SIZES = ("small", "paper")
SHIPPED = Path(__file__).parent / "suites"
EXPERIMENT = (
    "title",
    "note",
    "config",
    "methods",
    "grid",
    "seeds",
    "learning_rates",
    "evaluation",
    "metrics",
    "reference",
    "samples",
    "evaluations",
    "test",
    "script",
    "args",
    "values",
    "plots",
    "training_file",
    "extra",
)
SIZE = (*EXPERIMENT, "experiments")
SUITE = (*SIZE, "source", "imports", "figures", "claims", *SIZES)
METHOD = ("name", "method", "config", "where", "extra")
RATES = ("table", "budget", "found_by", "search")
SEARCH = ("space", "each", "at", "config", "seed", "seeds", "objective", "samples")
TRAINING_FILE = ("tasks", "per_task", "seed")
REFERENCE = ("from", "setting", "unit", "scale", "scorer", "values")
CLAIM = ("says", "source", "experiments", "rule")


@dataclass(frozen=True)
class MethodEntry:
    """A row of the grid: a method by name, what its config sets besides, and what only under an axis' label.

    Attributes:
        where: axis -> label -> dotted keys. extra: runs only where ``--methods`` names it.
    """

    label: str
    method: str
    config: dict
    where: dict[str, dict[str, dict]] = field(default_factory=dict)
    extra: bool = False

    def keys(self, setting: Mapping[str, str]) -> dict:
        """Dotted keys of the config in a setting."""
        keys = self.config
        for axis, labels in self.where.items():
            keys = lay(keys, labels.get(setting[axis], {}))
        return keys


@dataclass(frozen=True)
class Experiment:
    """One grid: methods × settings × seeds.

    Attributes:
        config: dotted key -> value. axes: name -> label -> dotted keys that the label stands for.
        rates: ``learning_rates`` of the suite. samples: all that the clients train on in a run, together; sets the
            rounds. evaluations: how many in a run, about. test: ``once``, after the last round,
            ``rounds`` or ``none``.
        training_file: train on the commonsense tasks' training files, thinned.
        extra: runs only where ``--only`` names it.
        script: a module to run in place of a grid, with ``args``; values: metric -> dotted path into what it wrote.
    """

    name: str
    title: str
    note: str
    config: dict
    methods: tuple[MethodEntry, ...] | str
    axes: dict[str, dict[str, dict]]
    seeds: tuple[int, ...]
    rates: dict | None
    evaluation: tuple[dict, ...]
    metrics: tuple[str, ...]
    reference: dict | None
    samples: int | None
    evaluations: int | None
    test: str
    script: str
    args: tuple[str, ...]
    values: dict
    plots: bool
    training_file: dict | None
    extra: bool


@dataclass(frozen=True)
class Suite:
    """A suite at one size."""

    name: str
    path: Path
    size: str
    title: str
    note: str
    source: str
    imports: tuple[str, ...]
    experiments: dict[str, Experiment]
    claims: dict[str, dict] = field(default_factory=dict)
    #: whether its sizes differ
    sized: bool = True


class _Loader(yaml.SafeLoader):
    """Reads ``5e-3`` as a number, and refuses a key that is there twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge" and key_node.value in seen:
                raise UserError(f"line {key_node.start_mark.line + 1}: the key {key_node.value!r} is there twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9.]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def shipped() -> list[str]:
    """Names of the suites in this package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_suite(name: str, size: str) -> Suite:
    """The suite of that name, or in the file of that path, at ``size``.

    Raises:
        UserError: no such suite, bad YAML, an unknown key (names the nearest), a value of the wrong form.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / f"{name}.yaml"
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise UserError(
            f"no suite {name!r}{nearest(name, shipped())}; there are: {', '.join(shipped())}, or the path "
            "of a .yaml file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path.name}: not valid YAML: {error}") from None
    except UserError as error:
        raise UserError(f"{path.name}, {error}") from None
    where = path.name
    _keys(tree, SUITE, where)
    sized = _mapping(tree.get(size) or {}, f"{where}: {size}")
    _keys(sized, SIZE, f"{where}: {size}")
    if size not in tree and any(s in tree for s in SIZES):
        raise UserError(f"{where} has no size {size!r}; there is: {', '.join(s for s in SIZES if s in tree)}")
    outer = _over({k: v for k, v in tree.items() if k in EXPERIMENT}, sized)
    named = sized.get("experiments", tree.get("experiments", {"main": {"title": tree.get("title")}}))
    experiments = {}
    for key, given in _mapping(named, f"{where}: experiments").items():
        at = f"{where}: {size}: experiments: {key}" if size in tree else f"{where}: {key}"
        given = _mapping(given or {}, at)
        _keys(given, EXPERIMENT, at)
        whole = _over(outer, given)
        if isinstance(whole.get("reference"), str):
            whole["reference"] = _figure(tree.get("figures", {}), whole["reference"], at)
        experiments[str(key)] = _experiment(str(key), whole, at, given.get("title"))
    return Suite(
        path.stem,
        path,
        size,
        str(tree.get("title", path.stem)),
        str(outer.get("note", "")),
        str(tree.get("source", "")),
        tuple(_listed(tree.get("imports", []), f"{where}: imports")),
        experiments,
        _claims(tree.get("claims", {}), _names(tree), experiments, where),
        any(s in tree for s in SIZES),
    )


def _figure(figures: Any, name: str, where: str) -> dict:
    _mapping(figures, f"{where}: figures")
    if name not in figures:
        raise UserError(
            f"{where}: reference: no figures {name!r}{nearest(name, figures)}; there are: {', '.join(figures)}"
        )
    return figures[name]


def _names(tree: Mapping) -> set[str]:
    """Names of the experiments of all sizes."""
    named = [tree.get("experiments"), *((tree.get(s) or {}).get("experiments") for s in SIZES)]
    return {str(name) for given in named if isinstance(given, Mapping) for name in given} or {"main"}


def _claims(given: Any, names: set[str], experiments: Mapping, where: str) -> dict[str, dict]:
    """The claims, their rules checked; also against the axes and methods of the experiments at this size."""
    from .claims import check_rule

    claims = _mapping(given, f"{where}: claims")
    for name, claim in claims.items():
        _keys(_mapping(claim, f"{where}: claims: {name}"), CLAIM, f"{where}: claims: {name}")
        for key in ("says", "experiments", "rule"):
            if key not in claim:
                raise UserError(f"{where}: claims: {name}: {key!r} is missing")
        for condition in _listed(claim["rule"], f"{where}: claims: {name}: rule"):
            check_rule(condition, f"{where}: claims: {name}")
        for key in _listed(claim["experiments"], f"{where}: claims: {name}: experiments"):
            if key not in names:
                raise UserError(
                    f"{where}: claims: {name}: no experiment {key!r}{nearest(key, names)}; there are: "
                    f"{', '.join(sorted(names))}"
                )
            for condition in claim["rule"] if key in experiments else ():
                _check_axes(condition, experiments[key], f"{where}: claims: {name}: {key}")
        _check_methods(
            claim, [experiments[e] for e in claim["experiments"] if e in experiments], f"{where}: claims: {name}"
        )
    return dict(claims)


def _check_axes(condition: Mapping, experiment: Experiment, where: str) -> None:
    for axis in [*condition.get("where", {}), *([condition["along"]] if "along" in condition else [])]:
        if axis not in experiment.axes:
            raise UserError(
                f"{where}: rule: no axis {axis!r}{nearest(str(axis), experiment.axes)}; there are: "
                f"{', '.join(experiment.axes) or 'none'}"
            )
    asked = [
        *condition.get("where", {}).items(),
        *((condition["along"], condition[end]) for end in ("from", "to") if "along" in condition),
    ]
    for axis, label in asked:
        if str(label) not in experiment.axes[axis]:
            raise UserError(
                f"{where}: rule: {axis} has no {str(label)!r}; there are: {', '.join(experiment.axes[axis])}"
            )


def _check_methods(claim: Mapping, experiments: list[Experiment], where: str) -> None:
    """That every method of a rule is in one of the claim's experiments, or one that ``--methods`` can add."""
    if not experiments or any(e.methods == "all" or e.script for e in experiments):
        return
    known = {*list_methods(), *(entry.label for e in experiments for entry in e.methods)}
    for condition in claim["rule"]:
        named = [
            condition[k]
            for k in ("better", "to", "of")
            if condition["is"] in ("above", "close", "ratio") and k in condition
        ]
        for name in [*named, *condition.get("methods", ()), *condition.get("than", ())]:
            if str(name) not in known:
                raise UserError(
                    f"{where}: rule: no method {name!r}{nearest(str(name), known)}; there are: "
                    f"{', '.join(sorted(known))}"
                )


def _experiment(name: str, given: Mapping, where: str, title: str | None) -> Experiment:
    script = str(given.get("script") or "")
    if not script:
        for key in ("config", "methods"):
            if not given.get(key):
                raise UserError(f"{where}: {key!r} is missing")
    test = given.get("test", "once")
    if test not in ("once", "rounds", "none"):
        raise UserError(
            f"{where}: test = {test!r}: expected once (after the last round), rounds (each evaluation) or none"
        )
    made = given.get("training_file")
    if made is not None:
        _keys(made, TRAINING_FILE, f"{where}: training_file")
    numbers = {}
    for key in ("samples", "evaluations"):
        numbers[key] = given.get(key)
        if numbers[key] is not None and (not isinstance(numbers[key], int) or numbers[key] < 1):
            raise UserError(f"{where}: {key} = {numbers[key]!r}: expected a whole number, 1 or more")
    seeds = tuple(_listed(given.get("seeds", [0]), f"{where}: seeds"))
    if not seeds or not all(isinstance(s, int) and not isinstance(s, bool) for s in seeds):
        raise UserError(f"{where}: seeds = {list(seeds)}: expected a list of whole numbers")
    reference = given.get("reference")
    if reference is not None:
        _keys(_mapping(reference, f"{where}: reference"), REFERENCE, f"{where}: reference")
    methods, axes = _methods(given.get("methods", []), where), _axes(given.get("grid") or {}, where)
    for entry in methods if methods != "all" else ():
        for axis, labels in entry.where.items():
            for label in labels if axis in axes else [None]:
                if label not in axes.get(axis, {}):
                    raise UserError(
                        f"{where}: methods: {entry.label}: where: the grid has no "
                        + (f"{axis} {label!r}" if axis in axes else f"axis {axis!r}")
                    )
    return Experiment(
        name,
        str(title or name.replace("_", " ")),
        str(given.get("note", "")),
        flatten(given.get("config") or {}),
        methods,
        axes,
        seeds,
        _rates(given.get("learning_rates"), where),
        tuple(_evaluation(given.get("evaluation") or [], where)),
        tuple(_listed(given.get("metrics", ["test_acc"]), f"{where}: metrics")),
        reference,
        **numbers,
        test=test,
        script=script,
        args=tuple(str(a) for a in _listed(given.get("args", []), f"{where}: args")),
        values=_mapping(given.get("values", {}), f"{where}: values"),
        plots=bool(given.get("plots", True)),
        training_file=made,
        extra=_switch(given, where),
    )


def _methods(given: Any, where: str) -> tuple[MethodEntry, ...] | str:
    if given == "all":
        return "all"
    entries = []
    for entry in _listed(given, f"{where}: methods"):
        if isinstance(entry, str):
            entries.append(MethodEntry(entry, entry, {}))
            continue
        entry = _mapping(entry, f"{where}: methods")
        _keys(entry, METHOD, f"{where}: methods")
        if "method" not in entry:
            raise UserError(f"{where}: methods: {entry}: 'method' is missing, the name of a method")
        entries.append(
            MethodEntry(
                str(entry.get("name", entry["method"])),
                str(entry["method"]),
                flatten(entry.get("config") or {}),
                _axes(entry.get("where") or {}, where),
                _switch(entry, f"{where}: methods"),
            )
        )
    labels = [e.label for e in entries]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise UserError(f"{where}: methods: {twice!r} is there twice; give one of them another 'name'")
    return tuple(entries)


def _axes(given: Any, where: str) -> dict[str, dict[str, dict]]:
    """An axis is a config key with a list of values, or a name with labels and the keys each stands for."""
    axes = {}
    for name, values in _mapping(given, f"{where}: grid").items():
        shown = short(name) if isinstance(values, list) else str(name)
        if shown in axes:
            raise UserError(
                f"{where}: grid: two axes would be called {shown!r}; give one a name, with labels and the "
                "keys that each sets"
            )
        if isinstance(values, list) and values:
            axes[shown] = {str(v): {name: v} for v in values}
        elif isinstance(values, Mapping) and values:
            axes[shown] = {
                str(label): flatten(_mapping(keys, f"{where}: grid: {name}: {label}")) for label, keys in values.items()
            }
        else:
            raise UserError(
                f"{where}: grid: {name}: expected a list of values for a config key, or labels with the "
                f"keys that each stands for, got {values!r}"
            )
    return axes


def short(key: str) -> str:
    """How a config key is called in tables: ``client_num`` for ``federate.client_num``."""
    return {"federate.client_num": "clients", "llm.adapter.args.0.r": "rank"}.get(key, key.rpartition(".")[2])


def _rates(given: Any, where: str) -> dict | None:
    if given is None:
        return None
    rates = _mapping(given, f"{where}: learning_rates")
    _keys(rates, RATES, f"{where}: learning_rates")
    if ("table" in rates) == ("search" in rates):
        raise UserError(f"{where}: learning_rates: expected either table (method: rate) or search")
    if "table" in rates:
        _mapping(rates["table"], f"{where}: learning_rates: table")
        if "budget" not in rates:
            raise UserError(f"{where}: learning_rates: a table says what the search that found it cost; give 'budget'")
        return dict(rates)
    search = _mapping(rates["search"], f"{where}: learning_rates: search")
    _keys(search, SEARCH, f"{where}: learning_rates: search")
    if "space" not in search:
        raise UserError(
            f"{where}: learning_rates: search: 'space' is missing, such as "
            "{train.optimizer.lr: {grid: [1e-3, 1e-2]}}"
        )
    return dict(rates)


def _evaluation(given: Any, where: str) -> list[dict]:
    entries = [given] if isinstance(given, Mapping) else _listed(given, f"{where}: evaluation")
    for entry in entries:
        if "scorer" not in _mapping(entry, f"{where}: evaluation"):
            raise UserError(f"{where}: evaluation: {entry}: 'scorer' is missing")
    tasks = [(entry["scorer"], task) for entry in entries for task in entry.get("tasks", [""])]
    twice = next((t for t in tasks if tasks.count(t) > 1), None)
    if twice:
        raise UserError(
            f"{where}: evaluation: {twice[0]}: {twice[1]} is there twice; one of the two results would be lost"
        )
    return [dict(entry) for entry in entries]


# -- helpers -------------------------------------------------------------------------------------------


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; a later key replaces an earlier one and what is below it."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found = flatten(value, name + ".") if isinstance(value, Mapping) and value else {name: value}
        flat = lay(flat, found)
    return flat


def lay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``, both of dotted keys."""
    merged = dict(below)
    for key, value in above.items():
        for old in [k for k in merged if k.startswith(key + ".")]:
            del merged[old]
        merged[key] = value
    return merged


def _over(outer: Mapping, inner: Mapping) -> dict:
    merged = {**outer, **{k: v for k, v in inner.items() if k in EXPERIMENT}}
    merged["config"] = lay(*(flatten(_mapping(part.get("config") or {}, "config")) for part in (outer, inner)))
    return merged


def _switch(given: Mapping, where: str) -> bool:
    value = given.get("extra", False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: extra = {value!r}: expected true or false")
    return value


def _keys(given: Any, known: tuple[str, ...], where: str) -> None:
    for key in _mapping(given, where):
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), known)}; there are: {', '.join(known)}")


def _mapping(given: Any, where: str) -> Mapping:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: expected a mapping, got {given!r}")
    return given


def _listed(given: Any, where: str) -> list:
    if not isinstance(given, (list, tuple)):
        raise UserError(f"{where}: expected a list, got {given!r}")
    return list(given)


@cache
def import_all(modules: tuple[str, ...]) -> None:
    """Import the modules that register a suite's own methods.

    Raises:
        UserError: one cannot be imported.
    """
    from importlib import import_module

    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(
                f"imports: {name}: {error}; it must be installed, or lie in the folder that the command is started in"
            ) from error
        except Exception as error:  # whatever a user's module does while it is imported
            raise UserError(f"imports: {name}: {type(error).__name__}: {error}") from error
