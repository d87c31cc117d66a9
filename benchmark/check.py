"""Checks of all jobs before the first one starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fs_lowrank import Config, UserError
from fs_lowrank.engines import get_engine
from fs_lowrank.errors import counted
from fs_lowrank.jobs.files import write_text
from fs_lowrank.methods import RobustMean
from fs_lowrank.rounds.site import method_of

from .beside import hpo, module_of
from .execute import permitted
from .job import Cell, Job, Options, Search
from .plan import make_training_file
from .suite import import_all


def check(jobs: Sequence[Job], options: Options) -> None:
    """Check data, models, scorers, scripts and write access.

    Raises:
        UserError: the message lists everything that is wrong or missing, and how to get it.
    """
    problems: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    for job in jobs:
        for key, looks in _looks(job, options):
            if key not in seen:
                seen.add(key)
                try:
                    for look in looks:  # each needs what the one before has seen
                        look()
                except UserError as error:
                    problems[f"{job.suite.name}: {job.experiment.name}: {error}"] = None
    for folder in (options.results, options.work):
        try:
            write_text(probe := Path(folder) / ".writable", "")
            probe.unlink()
        except UserError as error:
            problems[f"writing: {error}"] = None
    if problems:
        hint = "" if options.data else " (where data are missing: --data FOLDER, or FS_LOWRANK_DATA)"
        raise UserError(
            f"nothing was started; {counted(len(problems), 'thing')} to put right{hint}:\n  " + "\n  ".join(problems)
        )


def _looks(job: Job, options: Options) -> Iterator[tuple[tuple[str, str], list[Callable[[], object]]]]:
    """The checks for a job, with a key; checks with the same key are the same."""
    if not isinstance(job, Cell | Search):
        yield ("script", job.experiment.script), [lambda: _check_script(job.experiment.script)]
        return
    config, made = job.config, job.experiment.training_file
    yield ("engine", options.engine), [lambda: get_engine(options.engine)]  # an import may fail
    tested = isinstance(job, Cell) and job.experiment.test == "once" and not config.data.splits[2]
    scored = isinstance(job, Cell) and bool(job.experiment.evaluation)
    data = (made, config.data.type, config.data.root, config.data.args, config.federate.client_num, tested, scored)
    yield ("data", repr(data)), [lambda: make_training_file(job), lambda: _check_data(job, tested, scored)]
    model = (config.model.type, config.model.task, config.lowrank.weights, config.llm.tok_len, config.data.args)
    yield ("model", repr(model)), [lambda: _check_model(config)]
    shape = (*model, *_of_method(config), config.lowrank.width, config.lowrank.norm)
    yield ("adapter", repr(shape)), [lambda: _check_adapter(config)]
    if isinstance(job, Search):
        yield ("search", job.key), [lambda: _check_search(job)]
    else:
        for spec in job.experiment.evaluation:
            yield ("evaluation", repr(spec)), [partial(_check_scorer, spec, options)]


def _of_method(config: Config) -> tuple[Any, ...]:
    """What ``method_of`` goes by, but for the seed and the number of rounds, which refuse nothing."""
    federate, lowrank = config.federate, config.lowrank
    return (
        *(federate.method, config.method_params, federate.ignore_weight, federate.use_ss or federate.online_aggr),
        *(config.adapter, config.from_scratch, config.llm.adapter.use, lowrank.train_head),
        *(config.train.local_update_steps, config.own_settings, RobustMean.of(lowrank), config.fedopt),
    )


def _check_adapter(config: Config) -> None:
    """Check that the method takes the configuration, and that the model has the layers for its adapter."""
    from fs_lowrank.models.build import build_skeleton

    method = method_of(config)
    try:
        skeleton = build_skeleton(config)
    except UserError:  # ``_check_model`` says why there is none
        return
    try:
        method.adapt(skeleton)
    except UserError as error:
        raise UserError(f"{config.federate.method} on {config.model.type}: {error}") from None


def _check_data(job: Cell | Search, tested: bool, scored: bool) -> None:
    """Check that the data have rows for all clients, a test set if the job uses one, and text to continue if a scorer
    needs it."""
    from fs_lowrank.data import CAUSAL_LM, load_raw

    config = job.config
    raw = load_raw(config.data, task=config.model.task)
    if config.federate.client_num > len(raw.train):
        raise UserError(
            f"federate.client_num = {config.federate.client_num}: {config.data.type} has only {len(raw.train)} rows to "
            "train on"
        )
    if tested and raw.test is None:
        raise UserError(
            f"data.splits = {list(config.data.splits)}: {config.data.type} has no test set of its own; "
            "give the last one a share, or say test: none"
        )
    if scored and raw.task != CAUSAL_LM:
        raise UserError(
            f"evaluation: {job.experiment.evaluation[0]['scorer']} needs a language model, and "
            f"{config.data.type} makes a classifier"
        )


def _check_model(config: Config) -> None:
    from safetensors import SafetensorError, safe_open

    from fs_lowrank.models.build import build_tokenizer, locate, model_name
    from fs_lowrank.models.vision import read_weights

    if config.is_vision:
        if config.lowrank.weights:
            read_weights(config.lowrank.weights)
        return
    place = Path(locate(model_name(config.model.type)))
    if place.is_dir() and not any(place.glob("*.safetensors")) and not any(place.glob("pytorch_model*.bin")):
        raise UserError(f"model.type: {config.model.type}: the folder {place} holds no weights")
    for path in place.glob("*.safetensors"):
        try:
            with safe_open(path, "pt"):  # reads the header, which has the expected length of the file
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.type: {config.model.type}: {path} is damaged ({error}); fetch it again") from None
    build_tokenizer(config)


def _check_search(search: Search) -> None:
    space = hpo.space_from(search.spec["space"], "learning_rates: search: space")
    for point in space.for_config(search.config).grid(search.config) if space.all_grid else ():
        search.config.replace(point)


def _check_scorer(spec: dict, options: Options) -> None:
    from . import scorers

    if spec["scorer"] == "humaneval" and not permitted(spec, options.unsafe_code).get("run_unsafe_code"):
        raise UserError(
            "HumanEval executes code that the model writes, with your rights; give --unsafe-code to allow it, in a "
            "container or a virtual machine"
        )
    scorers.check(permitted(spec, options.unsafe_code), Path(options.data or "."))


def _check_script(module: str) -> None:
    from importlib.util import find_spec

    from fs_lowrank.data.fetch import resolve

    module = module_of(module)
    try:
        found = find_spec(module)
    except ImportError:
        found = None
    if found is None:
        raise UserError(
            f"script: there is no module {module!r}; a module of studies is in a clone of the repository only"
        )
    import_all((module,))
    needs = getattr(sys.modules[module], "NEEDS", ())
    if missing := [name for name in needs if resolve(name) is None]:
        raise UserError(f"script: {module} lacks its data; get them with: fs-lowrank fetch {' '.join(missing)}")
