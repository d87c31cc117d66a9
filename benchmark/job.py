"""The jobs of a suite: searches of learning rates, cells that train, and scripts; and whether they are finished."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

from fs_lowrank import Config, UserError, load_config
from fs_lowrank.data import user_files
from fs_lowrank.methods import revisions

from .store import Store, digest
from .suite import Experiment, MethodEntry, Suite

#: the key of the learning rate
RATE = "train.optimizer.lr"
#: how many seeds a trial of a search averages
SEEDS = 3
#: options of scorers that do not affect a result
_PERMISSIONS = ("run_unsafe_code",)


@dataclass(frozen=True)
class Options:
    """The options of the command line, the same for all workers.

    Attributes:
        data: folder of the data; a suite's ``data.root`` is below it. since: start time of this call, in seconds;
            jobs that failed before are tried again. cell: the hash of the only cell to run.
        overrides: config keys that do not affect a result, such as the device.
    """

    suites: tuple[str, ...]
    size: str = "small"
    engine: str = "local"
    results: str = "results"
    work: str = "runs/benchmark"
    data: str = ""
    only: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    cell: str = ""
    redo: bool = False
    keep: bool = False
    unsafe_code: bool = False
    since: float = field(default_factory=time.time)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return Store(Path(self.results), Path(self.work))


@dataclass(frozen=True)
class Job(ABC):
    """A job. ``key`` is the hash of the first of its ``contents``, which is everything that affects its result.

    Attributes:
        kind: the folder of its result.
    """

    kind: ClassVar[str]
    suite: Suite
    experiment: Experiment
    options: Options
    method: MethodEntry
    setting: Mapping[str, str]
    seed: int

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the job in messages."""

    @property
    @abstractmethod
    def contents(self) -> list[dict]:
        """Everything that affects the result, as plain data; then the same of earlier results that still count."""

    def rated(self, store: Store) -> Job | None:
        """This job with the learning rate that it needs; None while the search of that rate is not finished."""
        return self

    @property
    def revisions(self) -> dict[str, int]:
        """The revisions above 1 of its methods. A result of another revision does not belong to this job."""
        return {}

    def _keys(self, revisions: Mapping[str, int]) -> list[str]:
        extra = {"revisions": revisions} if revisions else {}
        return [digest({**content, **extra}) for content in self.contents]

    @cached_property
    def keys(self) -> list[str]:
        """``key``, then the keys of earlier results that still count."""
        return self._keys(self.revisions)

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def earlier_keys(self) -> list[str]:
        """The keys of earlier revisions of its method, whose results no longer belong to this job."""
        revisions = itertools.product(*(range(1, n + 1) for n in self.revisions.values()))
        earlier = [{name: n for name, n in zip(self.revisions, numbers) if n != 1} for numbers in revisions]
        return [key for older in earlier if older != self.revisions for key in self._keys(older)]

    @property
    def where(self) -> str:
        return f"{self.suite.name}/{self.suite.size}/{self.experiment.name}"

    @property
    def column(self) -> str:
        """The setting as the name of a table column: its labels, such as ``3 / 4``."""
        return " / ".join(self.setting.values())

    @property
    def folder(self) -> Path:
        """The folder of its runs until it is finished."""
        return Path(self.options.work) / self.key

    def result(self, store: Store) -> dict | None:
        return next(filter(None, (store.read(self.kind, key) for key in self.keys)), None)

    def done(self, store: Store) -> bool:
        """Whether the job is finished, or has failed since this call began."""
        finished = self.result(store)
        if finished and not (self.options.redo and self.kind == "cells"):
            return True
        records = finished, store.read("failed", self.key)
        return any(record is not None and record["finished"] >= self.options.since for record in records)

    def identity(self) -> dict:
        """The entries of a result file that identify the job."""
        return {
            "suite": self.suite.name,
            "size": self.suite.size,
            "experiment": self.experiment.name,
            "label": self.label,
            "hash": self.key,
            "method": self.method.label,
            "setting": dict(self.setting),
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Trained(Job):
    """A job with a configuration."""

    config: Config

    @property
    def revisions(self) -> dict[str, int]:
        return revisions(self.config)


@dataclass(frozen=True)
class Search(Trained):
    """A search of the learning rate for one method in one setting, on validation data."""

    kind = "searches"
    spec: Mapping[str, Any]

    @property
    def label(self) -> str:
        at = " ".join(f"{k}={v}" for k, v in self.setting.items())
        return f"learning rate of {self.method.label}" + (f" at {at}" if at else "")

    @property
    def seeds(self) -> int:
        return self.spec.get("seeds", SEEDS)

    @property
    def contents(self) -> list[dict]:
        """Earlier searches had one seed by default, and no last step around the winner."""
        spec = {k: self.spec.get(k) for k in ("space", "seeds", "objective")}
        spec.update({"grow": self.spec["grow"]} if "grow" in self.spec else {})
        current = {**spec, "seeds": self.seeds, "last_step": True} if self.seeds > 1 else spec
        shared = {"search": _non_defaults(self.config), **_content(self), **_engine(self.options)}
        return [{**shared, "spec": current}, {**shared, "spec": spec}]

    def last_step(self, winner: Mapping[str, Any]) -> dict[str, dict]:
        """The space of a last step around the winning point, by √3 in the rate; empty where no rate was listed, or it
        is within the noise of one seed."""
        if self.seeds == 1 or "grid" not in self.spec["space"].get(RATE, {}):
            return {}
        around = [float(f"{winner[RATE] * factor:.3g}") for factor in (3**-0.5, 3**0.5)]
        return {**{key: {"grid": [value]} for key, value in winner.items()}, RATE: {"grid": around}}


@dataclass(frozen=True)
class Cell(Trained):
    """A method in a setting with a seed. While ``search`` is given, ``config`` does not have its learning rate yet."""

    kind = "cells"
    search: Search | None = None
    rate: Mapping[str, Any] = field(default_factory=dict)
    #: seed -> the cell with the learning rate that was found, for the cells that differ in nothing else
    with_rate: dict[int, Cell] = field(default_factory=dict, compare=False, repr=False)

    def with_seed(self, seed: int) -> Cell:
        """The same cell with another seed, whose configuration needs no further check."""
        return replace(self, seed=seed, config=replace(self.config, seed=seed))

    @property
    def label(self) -> str:
        return " ".join([self.method.label, *(f"{k}={v}" for k, v in self.setting.items()), f"seed={self.seed}"])

    def rated(self, store: Store) -> Cell | None:
        if self.search is None:
            return self
        by_seed = self.with_rate
        if not by_seed and (search := self.search.result(store)) is not None:  # which does not change
            rate = {
                "from": "search",
                "search": search["hash"],
                "point": search["winner"]["point"],
                "validation": search["winner"]["values"],
                "budget": search["budget"],
                "seeds": search.get("seeds", 1),
            }
            config = self.config.replace(search["winner"]["point"])
            by_seed[self.seed] = replace(self, config=config, search=None, rate=rate, with_rate={})
        if by_seed and self.seed not in by_seed:
            by_seed[self.seed] = next(iter(by_seed.values())).with_seed(self.seed)
        return by_seed.get(self.seed)

    @property
    def contents(self) -> list[dict]:
        """While the search is not finished: the contents of the search and of the cell."""
        evaluation = [{k: v for k, v in e.items() if k not in _PERMISSIONS} for e in self.experiment.evaluation]
        content = {
            "config": _non_defaults(self.config),
            "evaluation": evaluation,
            "test": self.experiment.test,
            **_content(self),
            **_engine(self.options),
        }
        return [content if self.search is None else {**content, "waits_for": self.search.key}]


@dataclass(frozen=True)
class Script(Job):
    """A module that runs a study and writes JSON."""

    kind = "cells"

    @property
    def label(self) -> str:
        return f"python -m {self.experiment.script} {' '.join(self.experiment.args)}".strip()

    @property
    def contents(self) -> list[dict]:
        experiment = self.experiment
        return [{"script": experiment.script, "args": list(experiment.args), "values": dict(experiment.values)}]


def at_the_end(search: Mapping) -> bool:
    """Whether a better value than a search's winner may lie beyond the values that it tried: ``open_ends``."""
    return bool(open_ends(search, _config_of(search)))


def _config_of(search: Mapping) -> Config | None:
    """The config of a search; None if the record has none, or is of a version with other keys."""
    try:
        return load_config(search["config"]) if "config" in search else None
    except UserError:
        return None


def open_ends(search: Mapping, config: Config | None) -> dict[str, int]:
    """The keys of a search that are open at their smallest (-1) or largest (1) value.

    The winner is there, or else a point that is as good. If nothing was learned at any point, and the winner is
    inside, every key is open at both ends, which take turns as the grid grows.

    Args:
        search: its record, also a part of it.
        config: of the search; an end beyond which it accepts no value is not open. None: all are.
    """
    from .beside import hpo

    winner, tried, grown = search["winner"]["point"], search["tried"], search.get("grown", ())
    listed = [{key: v} for key, kind in search.get("space", {}).items() for v in kind.get("grid", ())]
    points = [*tried, *grown, *listed]
    best = next((p["value"] for p in tried if winner.items() <= p.items()), None)
    if ends := hpo.at_an_end(winner, points, config):
        return ends
    if not search.get("nothing_learned"):
        ties = [{key: p[key] for key in winner if key in p} for p in tried if p["value"] == best]
        return next(filter(None, (hpo.at_an_end(point, points, config) for point in ties)), {})
    for key in winner:
        values = [p[key] for p in points if key in p]
        outer = {-1: min(values), 1: max(values)} if all(isinstance(v, (int, float)) for v in values) else {}
        for end in (1, -1) if len(grown) % 2 == 0 else (-1, 1):  # the last that is open counts
            if outer and hpo.at_an_end({**winner, key: outer[end]}, points, config).get(key) == end:
                ends[key] = end
    return ends


def next_point(search: Mapping, config: Config | None) -> dict | None:
    """The point by which a search's grid grows, beyond one of ``open_ends``; None if none lies there.

    Args:
        search, config: as for ``open_ends``.
    """
    from .beside import hpo

    grown, winner = search.get("grown", ()), search["winner"]["point"]
    for key, end in open_ends(search, config).items():
        listed = search.get("space", {}).get(key, {}).get("grid", ())
        value = _next_value([*(p[key] for p in (*search["tried"], *grown) if key in p), *listed], end)
        point = {**winner, key: value}
        if value is not None and point not in grown and (config is None or hpo.accepts(config, point)):
            return point
    return None


def _next_value(values: Iterable[float], end: int) -> float | None:
    """The next value below (-1) or above (1) two or more numbers, at the ratio of the last two; None if it is not above
    0."""
    ordered = sorted(set(values), reverse=end < 0)
    previous, last = ordered[-2:]
    if previous <= 0 or last <= 0:
        return None
    value = float(f"{last * last / previous:.3g}")
    return int(value) if isinstance(last, int) and value == int(value) else value


def _content(job: Search | Cell) -> dict:
    """The facts beside the config that affect the result: the user's files, and a data folder that the grid varies."""
    content: dict[str, Any] = {}
    if job.experiment.training_file is None and (digests := user_files(job.config.data)):
        content["files"] = digests
    if any("data.root" in keys for labels in job.experiment.axes.values() for keys in labels.values()):
        content["root"] = job.config.data.root.removeprefix(job.options.data or "\0")
    return content


def decisive(config: Config) -> dict:
    """The settings that affect a result, without the folder of the data."""
    return {k: v for k, v in config.decisive().items() if k != "data.root"}


def _non_defaults(config: Config) -> dict:
    """The settings that affect a result and are not defaults, so that a new key does not change hashes."""
    defaults = _defaults(config.federate.method)
    return {k: v for k, v in decisive(config).items() if k not in defaults or defaults[k] != v}


@cache
def _defaults(method: str) -> dict:
    plain = load_config({"federate.method": method, "federate.client_num": 1}).decisive()
    return {k: v for k, v in plain.items() if k not in ("federate.method", "federate.client_num")}


def _engine(options: Options) -> dict:
    return {} if options.engine == "local" else {"engine": options.engine}
