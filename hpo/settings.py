"""The settings of a study (config, space, sampler, pruner), and the checks that they fit together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from fs_lowrank import Config, UserError, load_config
from fs_lowrank.versions import check_schema

from .objectives import FILE
from .space import Space, space_from

#: the attribute of a study that holds its settings
META = "fs_lowrank_hpo"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options that decide the values of trials.

    Attributes:
        sampler, pruner: empty for those that fit the space.
        seeds: number of runs averaged in a trial, at the config's seed and the following ones.
    """

    objectives: tuple[str, ...] = ("val_acc",)
    sampler: str = ""
    sampler_seed: int = 0
    pruner: str = ""
    seeds: int = 1
    engine: str = "local"


@dataclass(frozen=True)
class Search(Choices):
    """The options of a search.

    Attributes:
        name: of the study, or the first part of the names of several.
        trials: number of points of a study, including pruned and failed ones, of a grid the first ones; 0: the whole
            grid, or ``start.TRIALS``.
        limit: client-steps after which no trial of a study starts.
        timeout: seconds for this call.
        workers: number of processes; 0 runs the trials in this one.
        gpus: each worker gets one of them.
        confirm: number of fresh seeds for the winner; 0 leaves it unconfirmed.
    """

    name: str
    trials: int = 0
    limit: float | None = None
    timeout: float | None = None
    workers: int = 1
    gpus: tuple[str, ...] = ()
    confirm: int = 3
    storage: str | Path = ""
    folder: str | Path = "runs/hpo"
    retry_failed: bool = False

    @property
    def where(self) -> str:
        return str(self.storage or Path(self.folder) / FILE)


@dataclass(frozen=True)
class Settings(Choices):
    """The settings of a study, with its sampler and its pruner; it cannot be continued with others."""

    config: dict
    space: dict

    @property
    def base(self) -> Config:
        return load_config(self.config)

    @staticmethod
    def stored_config(config: Config) -> dict:
        """``config`` as a study stores it: without ``llm.adapter.use`` if the file has none, since methods decide."""
        plain = config.to_dict()
        if config.source.adapter is None:
            plain["llm"]["adapter"]["use"] = None
        return plain

    def to_dict(self) -> dict:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def decisive(self) -> dict[str, Any]:
        """All that decides the values of trials, by name."""
        plain = self.to_dict()
        del plain["config"]
        return plain | self.base.decisive()

    @classmethod
    def from_dict(cls, plain: Mapping) -> Settings:
        values = {f.name: plain[f.name] for f in dataclasses.fields(cls)}  # earlier versions had more
        return cls(**{**values, "objectives": tuple(plain["objectives"])})


def check_fit(settings: Settings, space: Space) -> None:
    """Refuse a sampler or a pruner that does not fit the space or the config.

    Raises:
        UserError: names the setting and what fits.
    """
    ranges = [p for p in space.parameters if not p.values and settings.space.keys().isdisjoint(p.when)]
    if settings.sampler == "cmaes" and (len(settings.objectives) > 1 or len(ranges) < max(2, len(space.parameters))):
        raise UserError("the sampler cmaes needs one objective and two or more ranges that always apply; use tpe or gp")
    if settings.pruner != "none" and (reason := unprunable(settings)):
        raise UserError(reason)


def unprunable(settings: Settings) -> str:
    """Why no trial of the study can be pruned, and what to do; empty if trials can be."""
    if len(settings.objectives) > 1 or settings.base.eval.freq < 1:
        return (
            f"pruner {settings.pruner}: it needs one objective, and evaluations between the rounds; leave it out, or "
            "set eval.freq 1"
        )
    if "federate.method" in settings.space:
        return (
            "federate.method is searched, and a method is not pruned by the curves of another; give each method a "
            "study (studies: {federate.method: [...]}), or leave the pruner out"
        )
    if "federate.total_round_num" in settings.space:
        return "federate.total_round_num is searched, so rounds cannot decide what to prune; leave pruner out"
    return ""


def make_sampler(settings: Settings, wanted: int, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler of a study of ``wanted`` points. The points of a grid are queued, and no sampler draws them."""
    by_name: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
        "gp": partial(optuna.samplers.GPSampler, deterministic_objective=False),
        "cmaes": optuna.samplers.CmaEsSampler,
        "tpe": optuna.samplers.TPESampler,
    }
    if settings.sampler not in by_name:
        return optuna.samplers.RandomSampler(seed=seed)
    return by_name[settings.sampler](seed=seed, n_startup_trials=max(4, min(10, wanted // 3)))


def first_passes(config: Config) -> int:
    """The number of rounds after which everything that the method trains has been trained at least once."""
    from fs_lowrank.rounds.workspace import method_of  # imports torch, which looking at a study needs not

    method, rounds = method_of(config), range(1, config.federate.total_round_num + 1)
    trained = [{tag for phase in method.phases(t) for tag in phase.train} for t in rounds]
    everything = set[str]().union(*trained)
    return next(t for t in rounds if everything == set[str]().union(*trained[:t]))


def make_pruner(settings: Settings) -> optuna.pruners.BasePruner:
    """The pruner; its steps are rounds. None of them prunes before ``first_passes``."""
    if settings.pruner == "none":
        return optuna.pruners.NopPruner()
    rounds, freq = settings.base.federate.total_round_num, max(settings.base.eval.freq, 1)
    warm_up = first_passes(settings.base)
    min_resource = max(freq, -(-rounds // 9), warm_up)
    if settings.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=max(rounds // 4, warm_up))
    if settings.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=min_resource, reduction_factor=3)
    return optuna.pruners.HyperbandPruner(min_resource=min_resource, max_resource=rounds, reduction_factor=3)


def settings_of(study: optuna.Study) -> Settings:
    """The settings that the study was started with.

    Raises:
        UserError: the study was not made by ``fs-lowrank hpo``, or by a newer version of fs-lowrank.
    """
    check_schema(study.user_attrs, f"the study {study.study_name!r}")
    try:
        return Settings.from_dict(study.user_attrs[META])
    except (KeyError, TypeError):
        raise UserError(f"the study {study.study_name!r} was not made by fs-lowrank hpo; name another study") from None


def space_of(study: optuna.Study) -> Space:
    return space_from(settings_of(study).space, study.study_name)
