"""The settings of a study (config, space, sampler, pruner), and the checks that they fit together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

import optuna

from fs_lowrank import Config, UserError, load_config
from fs_lowrank.rounds.site import method_of
from fs_lowrank.versions import check_schema

from .space import Space, space_from

SAMPLERS = ("grid", "tpe", "random", "cmaes", "gp")
PRUNERS = ("none", "median", "halving", "hyperband")
#: the attribute of a study that holds its settings
META = "fs_lowrank_hpo"


@dataclass(frozen=True)
class Settings:
    """The settings of a study; it cannot be continued with others."""

    config: dict
    space: dict
    objectives: tuple[str, ...] = ("val_acc",)
    sampler: str = "tpe"
    sampler_seed: int = 0
    pruner: str = "none"
    rungs: tuple[int, ...] = ()
    #: number of runs of a trial, at the config's seed and the following ones
    seeds: int = 1
    engine: str = "local"

    @property
    def base(self) -> Config:
        return load_config(self.config)

    @staticmethod
    def kept(config: Config) -> dict:
        """``config`` as a study keeps it: without ``llm.adapter.use`` where that was not given: methods decide."""
        plain = config.to_dict()
        if config.source.adapter is None:
            plain["llm"]["adapter"]["use"] = None
        return plain

    def to_dict(self) -> dict:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, plain: Mapping) -> Settings:
        return cls(**{**plain, "objectives": tuple(plain["objectives"]), "rungs": tuple(plain["rungs"])})


def check_fit(settings: Settings, space: Space) -> None:
    """Refuse a sampler, a pruner or rungs that do not fit the space or the config.

    Raises:
        UserError: names the setting and what fits.
    """
    several, base = len(settings.objectives) > 1, settings.base
    if settings.sampler == "cmaes":
        listed = [p.key for p in space.parameters if p.values or any(k in space_keys(space) for k, _ in p.when)]
        if several or listed or len(space.parameters) < 2:
            why = f"{listed[0]} is listed or conditional" if listed else "one key is too few"
            why = "it has one objective only" if several else why
            raise UserError(f"the sampler cmaes needs two or more ranges that always apply, and {why}; use tpe or gp")
    if several and (settings.pruner != "none" or settings.rungs):
        raise UserError("several objectives cannot be pruned by rounds; leave pruner and rungs out")
    if settings.rungs and settings.pruner != "none":
        raise UserError("rungs stop trials by themselves; leave pruner out")
    freq, rounds = base.eval.freq, base.federate.total_round_num
    if settings.pruner != "none" and freq < 1:
        raise UserError(
            f"pruner {settings.pruner} needs evaluations between the rounds, and eval.freq = {freq}; set eval.freq 1"
        )
    rungs = settings.rungs
    if rungs:
        if len(rungs) < 2 or list(rungs) != sorted(set(rungs)) or rungs[0] < 1:
            raise UserError(
                f"rungs {','.join(map(str, rungs))}: expected two or more growing numbers of rounds, such as 4,8,16"
            )
        if rungs[-1] != rounds:
            raise UserError(
                f"rungs end at {rungs[-1]} rounds, but federate.total_round_num = {rounds}; make them the same"
            )
        if freq < 1 or any(r % freq for r in rungs[:-1]):
            raise UserError(
                f"rungs {','.join(map(str, rungs))}: there is no evaluation after each of these rounds "
                f"with eval.freq = {freq}; set eval.freq 1"
            )
        if rungs[0] < (passes := first_passes(base)):
            raise UserError(
                f"rungs {','.join(map(str, rungs))}: {base.federate.method} has trained everything that it trains only "
                f"after {passes} rounds, and no trial is stopped before; begin with {passes} or more"
            )
    searched = space_keys(space)
    if "federate.method" in searched and (rungs or settings.pruner != "none"):
        raise UserError(
            "federate.method is searched, and a method is not pruned by the curves of another; give each method a "
            "study (studies: {federate.method: [...]}), or leave pruner and rungs out"
        )
    if "federate.total_round_num" in searched and (rungs or settings.pruner != "none"):
        raise UserError(
            "federate.total_round_num is searched, so rounds cannot decide what is pruned; leave pruner and rungs out"
        )


def space_keys(space: Space) -> set[str]:
    return {p.key for p in space.parameters}


def make_sampler(settings: Settings, wanted: int, drawn: int) -> optuna.samplers.BaseSampler:
    """The sampler for draw number ``drawn``, seeded with it, so that a continued search repeats no random point."""
    seed = (settings.sampler_seed * 1_000_003 + drawn) % 2**32
    if settings.sampler in ("grid", "random"):
        return optuna.samplers.RandomSampler(seed=seed)
    startup = max(4, min(10, wanted // 3))
    if settings.sampler == "gp":
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup, deterministic_objective=False)
    if settings.sampler == "cmaes":
        try:
            import cmaes  # noqa: F401  # Optuna imports it only inside a trial
        except ImportError:
            raise UserError("the sampler cmaes needs the package cmaes: pip install 'fs-lowrank[hpo]'") from None
        return optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=startup)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)


def first_passes(config: Config) -> int:
    """The number of rounds after which everything that the method trains has been trained at least once."""
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
    least = max(freq, -(-rounds // 9), warm_up)
    if settings.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=max(rounds // 4, warm_up))
    if settings.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=3)
    return optuna.pruners.HyperbandPruner(min_resource=least, max_resource=rounds, reduction_factor=3)


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
