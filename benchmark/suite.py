"""A suite: a YAML file with a base config, a grid, an evaluation, the papers' figures and claims to check.

    config: {model: {type: minilm@transformers}, data: {type: reviews.csv, args: [{text: review, label: stars}]}}
    methods: [rolora, ffa_lora, fedlora]
    grid: {federate.client_num: [3, 20]}
    seeds: [0, 1, 2]

is a complete suite. ``small:`` and ``paper:`` hold what differs between the two sizes, ``experiments:`` several grids
that share the rest. An inner config is merged into the outer one; any other key replaces the outer one.
``docs/guides/benchmark.md`` describes every key.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fs_lowrank import UserError, declared
from fs_lowrank.errors import nearest, user_errors
from fs_lowrank.settings import Key, Origin, check_keys, check_value, keys_of, read_yaml, yaml_beside
from fs_lowrank.settings import flatten as dotted
from fs_lowrank.settings.reading import read_packaged

from .beside import hpo
from .conditions import check_rule
from .metrics import unknown
from .scorers import parse
from .suite_keys import (
    CAUSE,
    CLAIM,
    EXPERIMENT,
    METHOD,
    RATES,
    REFERENCE,
    SEARCH,
    SIZE,
    SIZES,
    SUITE,
    TRAINING_FILE,
    PlainKeys,
)

SHIPPED = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class MethodEntry:
    """A row of the grid: a method, additional config keys, and keys for single labels of an axis.

    Attributes:
        where: axis -> label -> dotted keys. extra: runs only if ``--methods`` names it.
    """

    label: str
    method: str
    config: dict = field(default_factory=dict)
    where: dict[str, dict[str, dict]] = field(default_factory=dict)
    extra: bool = False

    def keys(self, setting: Mapping[str, str]) -> dict:
        """The additional config in a setting, by dotted key."""
        keys = self.config
        for axis, labels in self.where.items():
            keys = lay(keys, labels.get(setting[axis], {}))
        return keys


@dataclass(frozen=True, kw_only=True)
class Experiment(PlainKeys):
    """One grid: methods × settings × seeds.

    Attributes:
        config: dotted key -> value. methods: those of the file, or all that are registered.
        axes: name -> label -> dotted keys that the label sets.
        rates: ``learning_rates`` of the suite.
        training_file: train on a sample of the commonsense tasks' training files.
    """

    name: str
    config: dict
    methods: tuple[MethodEntry, ...]
    axes: dict[str, dict[str, dict]]
    rates: dict | None
    evaluation: tuple[dict, ...]
    reference: dict | None
    training_file: dict | None


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
    #: whether the sizes of the suite differ
    sized: bool = True


def among(available: Iterable[str], name: object) -> str:
    """For a message that ``name`` is not among the available names: the nearest one, and all of them."""
    names = list(available)
    return f"{nearest(str(name), names)}; there are: {', '.join(names) or 'none'}"


def overview() -> Iterator[tuple[str, ...]]:
    """The suites of this package: name, title and number of experiments at each of ``SIZES``; none is checked."""
    for name in shipped():
        tree = read_packaged(__package__, f"suites/{name}.yaml")
        by_size = [{**tree, **(tree.get(size) or {})}.get("experiments") or ["main"] for size in SIZES]
        yield name, tree["title"], *(str(len(experiments)) for experiments in by_size)


def shipped() -> list[str]:
    """The names of the suites in this package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def sizes_of(name: str) -> list[str]:
    """The sizes that a suite, by name or path, tells apart; none if it has no ``small`` and no ``paper``.

    Raises:
        UserError: as of ``load_suite``.
    """
    _, _, tree = _read(name)
    return [size for size in SIZES if size in tree]


def load_suite(name: str, size: str) -> Suite:
    """Load a suite by name or path, at ``size``.

    Raises:
        UserError: no such suite, invalid YAML, an unknown key (the message suggests the nearest), an invalid value.
    """
    path, origin, tree = _read(name)
    if size not in tree and any(s in tree for s in SIZES):
        raise UserError(f"{path} has no size {size!r}; there is: {', '.join(s for s in SIZES if s in tree)}")
    import_all(tree.get("imports", []))
    sized = check_keys(tree.get(size) or {}, SIZE, origin, size)
    layers = [("", tree), *([(size, sized)] if size in tree else [])]
    experiments, figures = {}, tree.get("figures", {})
    if "experiments" not in {**tree, **sized}:
        experiments["main"] = _experiment("main", layers, figures, origin)
    else:
        base = f"{size}.experiments" if "experiments" in sized else "experiments"
        for key, section in (sized.get("experiments", tree.get("experiments")) or {}).items():
            at = f"{base}.{key}"
            checked = check_keys(section or {}, EXPERIMENT, origin, at)
            outer = [(prefix, {k: v for k, v in part.items() if k != "title"}) for prefix, part in layers]
            experiments[str(key)] = _experiment(str(key), [*outer, (at, checked)], figures, origin)
    return Suite(
        path.stem,
        path,
        size,
        str(tree.get("title") or path.stem),
        str({**tree, **sized}.get("note") or ""),
        tree.get("source", ""),
        tuple(tree.get("imports", [])),
        experiments,
        _claims(tree.get("claims", {}), tree, origin),
        any(s in tree for s in SIZES),
    )


def _read(name: str) -> tuple[Path, Origin, dict]:
    """The file of a suite, by name or path, and its content."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / f"{name}.yaml"
    if not path.exists():
        raise UserError(
            f"no suite {name!r}{nearest(Path(name).name, [*shipped(), *yaml_beside(name)])}; there are: "
            f"{', '.join(shipped())}, or the path of a .yaml file"
        )
    origin, tree = read_yaml(path)
    return path, origin, check_keys(tree, SUITE, origin)


def _reference(value: dict | str | None, figures: Mapping[str, Any], origin: Origin, at: str) -> dict | None:
    """The papers' figures, given directly or by their name in ``figures``."""
    if isinstance(value, str):
        if value not in figures:
            origin.fail(at, f"= {value!r}: there are no such figures{among(figures, value)}")
        value, at = figures[value], f"figures.{value}"
    return None if value is None else check_keys(value, REFERENCE, origin, at)


def _claims(entries: Mapping, tree: Mapping, origin: Origin) -> dict[str, dict]:
    """The claims, whose experiments may be of any size."""
    sections = [tree.get("experiments"), *((tree.get(s) or {}).get("experiments") for s in SIZES)]
    names = {str(name) for section in sections if isinstance(section, Mapping) for name in section} or {"main"}
    claims = {}
    for name, claim in entries.items():
        at = f"claims.{name}"
        claim = claims[name] = check_keys(claim, CLAIM, origin, at)
        claim["rule"] = [check_rule(c, origin, f"{at}.rule.{i}") for i, c in enumerate(claim["rule"])]
        claim["experiments"] = [str(key) for key in claim["experiments"]]
        for key in claim["experiments"]:
            if key not in names:
                origin.fail(f"{at}.experiments", f"= {key!r}: there is no such experiment{among(sorted(names), key)}")
        if "cause" in claim:
            claim["cause"] = check_keys(claim["cause"], CAUSE, origin, f"{at}.cause")
    return claims


def _experiment(
    name: str, layers: Sequence[tuple[str, Mapping]], figures: Mapping[str, Any], origin: Origin
) -> Experiment:
    """An experiment from its keys and those of the suite and size around it, outermost first, each with its place."""
    merged, at = {}, dict.fromkeys(EXPERIMENT, layers[-1][0])
    for prefix, part in layers:
        merged.update({key: value for key, value in part.items() if key in EXPERIMENT})
        at.update({key: prefix for key in part if key in EXPERIMENT})
    at = {key: f"{prefix}.{key}".lstrip(".") for key, prefix in at.items()}
    config: dict[str, Any] = {}
    for _, part in layers:
        config = lay(config, flatten(part.get("config") or {}))
    for key, value in (("config", config), ("methods", merged.get("methods"))):
        if not (value or merged.get("script")):
            origin.fail(at[key], "is missing")
    methods = _methods(merged.get("methods", []), origin, at["methods"])
    axes = _axes(merged.get("grid") or {}, origin, at["grid"])
    for entry in methods:
        for axis, labels in entry.where.items():
            for label in labels if axis in axes else [None]:
                if label not in axes.get(axis, {}):
                    missing = f"{axis} {label!r}" if axis in axes else f"axis {axis!r}"
                    origin.fail(at["methods"], f": where of {entry.label}: the grid has no {missing}")
    plain = {key: merged[key] for key in keys_of(PlainKeys) if merged.get(key) is not None}
    for metric in plain.get("metrics", ()):
        if reason := unknown(metric, plain.get("values", ())):
            origin.fail(at["metrics"], f"has {metric!r}: {reason}")
    spec = merged.get("training_file")
    texts = {"title": plain.get("title") or name.replace("_", " "), "args": tuple(map(str, plain.get("args", ())))}
    return Experiment(
        **{**plain, **texts},
        name=name,
        config=config,
        methods=methods,
        axes=axes,
        rates=_rates(merged.get("learning_rates"), origin, at["learning_rates"]),
        evaluation=tuple(_evaluation(merged.get("evaluation") or [], origin, at["evaluation"])),
        reference=_reference(merged.get("reference"), figures, origin, at["reference"]),
        training_file=None if spec is None else check_keys(spec, TRAINING_FILE, origin, at["training_file"]),
    )


def _methods(value: list | str, origin: Origin, at: str) -> tuple[MethodEntry, ...]:
    if isinstance(value, str) and value != "all":
        origin.wrong(at, value, str(EXPERIMENT["methods"].meta["words"]))
    entries = []
    for i, entry in enumerate(declared.methods().list_methods() if value == "all" else value):
        if isinstance(entry, str):
            entries.append(MethodEntry(entry, entry))
            continue
        path = f"{at}.{i}"
        entry = check_keys(entry, METHOD, origin, path)
        config, where = flatten(entry.get("config") or {}), _axes(entry.get("where") or {}, origin, f"{path}.where")
        name = entry.get("name", entry["method"])
        entries.append(MethodEntry(name, entry["method"], config, where, entry.get("extra", False)))
    labels = [e.label for e in entries]
    duplicate = next((label for label in labels if labels.count(label) > 1), None)
    if duplicate:
        origin.fail(at, f"has {duplicate!r} twice; give one of them another 'name'")
    return tuple(entries)


def _axes(grid: Mapping, origin: Origin, at: str) -> dict[str, dict[str, dict]]:
    """The axes: a config key with a list of values, or a name with labels and the keys that each label sets."""
    axes = {}
    for name, values in grid.items():
        title = short(name) if isinstance(values, list) else str(name)
        if title in axes:
            origin.fail(
                f"{at}.{name}",
                f"would be a second axis called {title!r}; give one a name, with labels and the keys that each sets",
            )
        if isinstance(values, list) and values:
            check_value(f"{at}.{name}", values, Key(list, {"once": True}), origin)
            axes[title] = {str(v): {name: v} for v in values}
        elif isinstance(values, Mapping) and values:
            axes[title] = {
                str(label): flatten(check_value(f"{at}.{name}.{label}", keys, Key(dict), origin))
                for label, keys in values.items()
            }
        else:
            origin.wrong(
                f"{at}.{name}",
                values,
                "a list of values for a config key, or labels with the keys that each stands for",
            )
    return axes


def short(key: str) -> str:
    """The name of a config key in tables: ``client_num`` for ``federate.client_num``."""
    return {"federate.client_num": "clients", "llm.adapter.args.0.r": "rank"}.get(key, key.rpartition(".")[2])


def _rates(value: Mapping | None, origin: Origin, at: str) -> dict | None:
    if value is None:
        return None
    rates = check_keys(value, RATES, origin, at)
    if ("table" in rates) == ("search" in rates):
        origin.fail(at, "has both table and search, or none: expected either table (method: rate) or search")
    if "search" in rates:
        search = rates["search"] = check_keys(rates["search"], SEARCH, origin, f"{at}.search")
        hpo.space_from(search["space"], origin.below(f"{at}.search.space"))
        objective = search.get("objective", "val_acc")
        if len(hpo.parse_objectives(objective)) > 1:
            origin.wrong(f"{at}.search.objective", objective, "one: with two objectives there is no single best trial")
    elif "budget" not in rates:
        origin.fail(f"{at}.budget", "is missing: a table says what the search that found it cost")
    return rates


def _evaluation(value: list | Mapping, origin: Origin, at: str) -> list[dict]:
    entries = [value] if isinstance(value, Mapping) else value
    for i, entry in enumerate(entries):
        parse(entry, origin, at if isinstance(value, Mapping) else f"{at}.{i}")
    tasks = [(entry["scorer"], task) for entry in entries for task in entry.get("tasks", [""])]
    duplicate = next((t for t in tasks if tasks.count(t) > 1), None)
    if duplicate:
        origin.fail(at, f"has {duplicate[0]}: {duplicate[1]} twice; one of the two results would be lost")
    return [dict(entry) for entry in entries]


# -- helpers -------------------------------------------------------------------------------------------


def flatten(tree: Mapping) -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; a later key replaces an earlier one and all keys below it."""
    return lay({}, dotted(tree))


def lay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Override ``below`` by ``above``, both with dotted keys."""
    merged = dict(below)
    for key, value in above.items():
        for old in [k for k in merged if k.startswith(key + ".")]:
            del merged[old]
        merged[key] = value
    return merged


def import_all(modules: Sequence[str]) -> None:
    """Import modules that register methods of a suite, also from the folder that the command is started in.

    Raises:
        UserError: a module cannot be imported.
    """
    from importlib import import_module

    sys.path.extend({os.getcwd()} - {*sys.path})  # `python -m` has it, an installed command does not
    remedy = "a missing module must be installed, or lie in the folder that the command is started in"
    for name in modules:
        with user_errors(f"imports: {name}", remedy):
            import_module(name)
