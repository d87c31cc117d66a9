"""From suites to jobs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fs_lowrank import Config, UserError, load_config

from .beside import hpo
from .job import RATE, SEEDS, Cell, Job, Options, Script, Search
from .suite import SHIPPED, Experiment, MethodEntry, Suite, among, flatten, lay, load_suite

#: keys by which the samples of a round differ, or the number of rounds
OF_A_ROUND = {
    *("train.local_update_steps", "grad.grad_accum_count", "dataloader.batch_size", "dataloader.drop_last"),
    *("federate.client_num", "federate.sample_client_num", "federate.sample_client_rate", "federate.total_round_num"),
}


def plan(options: Options, extra: bool = False) -> list[Job]:
    """All jobs of all suites without repetition; searches come before the cells that need them.

    Args:
        extra: include experiments and methods that run only if ``--only`` or ``--methods`` names them.

    Raises:
        UserError: a suite is inconsistent; the message says where.
    """
    jobs: dict[str, Job] = {}
    suites = [load_suite(name, options.size) for name in options.suites]
    check_only(suites, options)
    for suite in suites:
        for experiment in chosen(suite, options.only, extra):
            for job in jobs_of(suite, experiment, options, extra):
                jobs.setdefault(job.key, job)
    if not jobs:
        methods = {e.name: [m.label for m in e.methods] for suite in suites for e in suite.experiments.values()}
        raise UserError(
            f"{', '.join(options.suites)}: nothing to run; name what is extra by --only and --methods, and where an "
            "experiment has fixed_methods, one of them: "
            + "; ".join(f"{name}: {', '.join(labels)}" for name, labels in methods.items())
        )
    return list(jobs.values())


def check_only(suites: Sequence[Suite], options: Options) -> None:
    """Raise ``UserError`` if ``--only`` names an experiment that no suite has."""
    available = list(dict.fromkeys(name for suite in suites for name in suite.experiments))
    for name in options.only:
        if name not in available:
            names = ", ".join(dict.fromkeys(s.name for s in suites))
            raise UserError(f"--only {name}: {names} ({options.size}) has no such experiment{among(available, name)}")


def chosen(suite: Suite, only: Sequence[str], extra: bool = False) -> list[Experiment]:
    """The experiments named by ``--only``; by default all, with extra ones if ``extra``."""
    return [e for e in suite.experiments.values() if (e.name in only if only else extra or not e.extra)]


def command(suite: Suite, experiments: Sequence[str], engine: str) -> str:
    """The command that runs experiments."""
    name = suite.name if suite.path.parent == SHIPPED else shlex.quote(str(suite.path))
    return f"fs-lowrank benchmark run {name} --size {suite.size} --only {','.join(experiments)}" + (
        f" --engine {engine}" if engine != "local" else ""
    )


def jobs_of(suite: Suite, experiment: Experiment, options: Options, extra: bool = True) -> list[Job]:
    """Searches, then cells seed by seed, so that early results cover the whole grid."""
    if experiment.script:
        name = experiment.script.rpartition(".")[2]
        return [Script(suite, experiment, options, MethodEntry(name, name), {}, 0)]
    grid = _Grid(suite, experiment, options)
    pairs = itertools.product(settings(experiment), methods_of(experiment, options, extra))
    cells = [grid.cell(method, setting) for setting, method in pairs]
    return [*grid.searches.values(), *(cell.with_seed(seed) for seed in experiment.seeds for cell in cells)]


def settings(experiment: Experiment) -> Iterator[dict[str, str]]:
    """All combinations of the labels of the axes."""
    for labels in itertools.product(*experiment.axes.values()):
        yield dict(zip(experiment.axes, labels))


def methods_of(experiment: Experiment, options: Options, extra: bool = True) -> list[MethodEntry]:
    """The methods named by ``--methods``, which need not be in the suite; by default those of the suite."""
    by_label = {e.label: e for e in experiment.methods}
    if options.methods:
        named = {name: by_label.get(name, MethodEntry(name, name, extra=True)) for name in options.methods}
        return [entry for name, entry in named.items() if name in by_label or not experiment.fixed_methods]
    return [e for e in experiment.methods if extra or not e.extra]


@dataclass
class _Grid:
    """An experiment by the options of a command, and the searches that its cells need, by method and setting."""

    suite: Suite
    experiment: Experiment
    options: Options
    searches: dict[tuple, Search] = field(default_factory=dict)

    def cell(self, method: MethodEntry, setting: Mapping[str, str]) -> Cell:
        """The cell of the first seed."""
        suite, experiment = self.suite, self.experiment
        seed, rates, search = experiment.seeds[0], experiment.rates, None
        rate: dict[str, Any] = {"from": "the suite's config, one for all methods", "budget": None}
        try:
            keys = self.keys(method, setting)
            if rates and "table" in rates:
                if method.label not in rates["table"] and "default" not in rates["table"]:
                    raise UserError(
                        f"learning_rates: table has no rate for {method.label}; there are: "
                        f"{', '.join(rates['table'])}; give it one, or a default, or a search"
                    )
                if (name := rates.get("found_by")) and name not in suite.experiments:
                    hint = among(suite.experiments, name)
                    raise UserError(f"learning_rates: found_by = {name!r}: no such experiment{hint}")
                keys[RATE] = rates["table"].get(method.label, rates["table"].get("default"))
                rate = {"from": "table", "budget": rates["budget"], "found_by": rates.get("found_by", "")}
            elif rates:
                labels = self.search_setting(rates["search"], setting)
                key = method.label, tuple(labels.items())
                search = self.searches[key] = self.searches.get(key) or self.search(method, labels, rates["search"])
            config = self.config({**keys, "seed": seed}, experiment.samples, experiment.evaluations, experiment.test)
            if experiment.evaluation and not config.is_language:
                raise UserError(f"evaluation: {experiment.evaluation[0]['scorer']} needs a language model")
        except UserError as error:
            raise UserError(f"{suite.path.name}: {suite.size}: {experiment.name}: {method.label}: {error}") from None
        rate["point"] = {RATE: config.train.optimizer.lr}
        return Cell(suite, experiment, self.options, method, dict(setting), seed, config, search, rate)

    def search_setting(self, spec: Mapping[str, Any], setting: Mapping[str, str]) -> dict[str, str]:
        """The setting of a cell's search: the cell's labels of the axes in ``each``, and ``at`` for the others."""
        axes, free, at = self.experiment.axes, spec.get("each", []), {k: str(v) for k, v in spec.get("at", {}).items()}
        for name in (*free, *at):
            if name not in axes:
                raise UserError(f"learning_rates: search: no axis {name!r}{among(axes, name)}")
        result = {}
        for name, labels in axes.items():
            result[name] = setting[name] if name in free else at.get(name, next(iter(labels)))
            if result[name] not in labels:
                raise UserError(
                    f"learning_rates: search: at: {name} has no {result[name]!r}; there are: {', '.join(labels)}"
                )
        return result

    def search(self, method: MethodEntry, setting: Mapping[str, str], spec: Mapping[str, Any]) -> Search:
        """The search of a method's rate in a setting."""
        keys = lay(self.keys(method, setting), {"eval.freq": 0, **flatten(spec.get("config", {}))})
        keys["seed"] = int(spec.get("seed", 100))
        trial_seeds = range(keys["seed"], keys["seed"] + spec.get("seeds", SEEDS))
        if shared := sorted(set(trial_seeds) & set(self.experiment.seeds)):
            raise UserError(
                f"learning_rates: search: its seed {shared[0]} is one of the cells' seeds; give it another "
                "'seed', since otherwise the search would select by a run that is reported"
            )
        samples = spec.get("samples", self.experiment.samples)
        searched = {key.rpartition(".")[0] for key in flatten(spec["space"])}
        if samples and (changing := sorted(searched & OF_A_ROUND)):
            raise UserError(
                f"learning_rates: search: space: {changing[0]} changes the samples of a round, so with samples = "
                f"{samples} its points would have unequal budgets; give federate.total_round_num instead of samples"
            )
        config = self.config(keys, samples, None, "none")
        hpo.check_config(config, [spec.get("objective", "val_acc")], self.options.engine)
        if any(key.startswith("early_stop.") for key in spec["space"]):
            _check_stop(config, stops=True)
        return Search(self.suite, self.experiment, self.options, method, dict(setting), keys["seed"], config, spec)

    def keys(self, method: MethodEntry, setting: Mapping[str, str]) -> dict[str, Any]:
        """The config of a method in a setting, by dotted key."""
        keys, spec, options = dict(self.experiment.config), self.experiment.training_file, self.options
        for name, label in setting.items():
            keys = lay(keys, self.experiment.axes[name][label])
        keys = lay(keys, {**method.keys(setting), "federate.method": method.method, **options.overrides})
        if spec is not None:
            keys |= {"data.type": _file_name(spec), "data.root": str(Path(options.work) / "data")}
        elif options.data:
            keys["data.root"] = str(Path(options.data) / str(keys.get("data.root", "")))
        return keys

    def config(self, keys: Mapping[str, Any], samples: int | None, evaluations: int | None, test: str) -> Config:
        """The checked config, with the number of rounds for the budget of samples, and the evaluation schedule.

        The sizes of the clients are not known here, so every batch counts as full; ``samples.within_budget`` corrects
        it. In a run of one round, clients do not depend on the method, so they are trained once for all methods.
        """
        config = load_config(keys)
        _check_stop(config, stops=config.early_stop.patience > 0)
        changes: dict[str, Any] = {"lowrank.keep_checkpoints": 1}
        rounds = config.federate.total_round_num
        if samples:
            if config.train.batch_or_epoch != "batch" or config.lowrank.clients:
                raise UserError(
                    "samples: a budget of samples needs train.batch_or_epoch batch, and no lowrank.clients; give "
                    "federate.total_round_num instead"
                )
            batches = config.sampled_per_round * config.train.local_update_steps * config.grad.grad_accum_count
            rounds = max(1, samples // (batches * config.dataloader.batch_size))
            changes["federate.total_round_num"] = rounds
        if evaluations:
            changes["eval.freq"] = max(1, rounds // evaluations)
        if test != "rounds":
            if not config.data.splits[1]:
                raise UserError(
                    f"data.splits = {list(config.data.splits)}: curves and rates go by validation data; give "
                    "the middle one a share"
                )
            changes["eval.split"] = ["val"]
        if config.data.splits[2] and "lowrank.test_seed" not in keys:
            changes["lowrank.test_seed"] = 0  # otherwise the search's validation data may be in the cells' test sets
        if rounds == 1:
            changes["lowrank.reuse_clients"] = str(Path(self.options.work).absolute() / "clients")
        if "lowrank.checkpoint_freq" not in keys:
            changes["lowrank.checkpoint_freq"] = max(1, rounds // 10)
        return load_config({**keys, **changes})


def _file_name(spec: Mapping[str, Any]) -> str:
    """The name of the file, which describes its content, so that it is made once."""
    tasks = "+".join(sorted(spec.get("tasks", []))) or "every_task"
    return f"commonsense_{tasks}_{spec.get('per_task') or 'all'}_{spec.get('seed', 0)}.jsonl"


def make_training_file(job: Job) -> None:
    """Write the training file of the job if it needs one that does not exist.

    Raises:
        UserError: the source files are missing.
    """
    from .scorers.commonsense import training_file

    spec = job.experiment.training_file
    if spec is None:
        return
    path = Path(job.options.work) / "data" / _file_name(spec)
    if not path.exists():
        training_file(
            Path(job.options.data or "."), path, spec.get("per_task"), int(spec.get("seed", 0)), spec.get("tasks", ())
        )


def _check_stop(config: Config, stops: bool) -> None:
    """Refuse to stop runs by the test set; ``stops``: whether runs stop early, also if by a searched key."""
    best = config.eval.best_res_update_round_wise_key
    if stops and "test" in best.rpartition(".")[2].split("_"):
        raise UserError(
            f"early_stop.patience = {config.early_stop.patience or 'searched'} with "
            f"eval.best_res_update_round_wise_key = {best}: a suite does not stop runs by the test set; choose "
            "val_loss or val_acc"
        )
