"""Checks of all jobs before the first one starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fs_lowrank import Config, UserError
from fs_lowrank.engines import get_engine
from fs_lowrank.errors import counted
from fs_lowrank.jobs.files import write_text
from fs_lowrank.rounds.workspace import method_of

from . import scorers
from .beside import module_of
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
    checks: dict[tuple[str, str], tuple[Job, Callable[[], object]]] = {}
    for job in jobs:
        for key, call in _checks(job, options):
            checks.setdefault(key, (job, call))
    for job, call in checks.values():
        try:
            call()
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


def _checks(job: Job, options: Options) -> Iterator[tuple[tuple[str, str], Callable[[], object]]]:
    """The checks for a job, with a key; checks with the same key are the same."""
    if not isinstance(job, Cell | Search):
        yield ("script", job.experiment.script), lambda: _check_script(job.experiment.script)
        return
    config, training = job.config, job.experiment.training_file
    yield ("engine", options.engine), lambda: get_engine(options.engine)  # an import may fail
    tested = isinstance(job, Cell) and job.experiment.test == "once" and not config.data.splits[2]
    data = (training, config.data.type, config.data.root, config.data.args, tested)
    yield ("data", repr(data)), lambda: _check_data(job, tested)
    model = (config.model.type, config.model.task, config.lowrank.weights, config.llm.tok_len)
    yield ("model", repr(model)), lambda: _check_model(config)
    method = (config.federate.method, config.lowrank.params)
    yield ("method", repr(method)), partial(method_of, config)  # it may lack a package
    for spec in job.experiment.evaluation if isinstance(job, Cell) else ():
        allowed = permitted(spec, options.unsafe_code)
        yield ("evaluation", repr(spec)), partial(scorers.check, allowed, options.data or ".")


def _check_data(job: Cell | Search, tested: bool) -> None:
    """Check that the data are there, and have a test set if the job uses one: it is scored after the last round."""
    from fs_lowrank.data import load_raw

    make_training_file(job)
    data = job.config.data
    if load_raw(data, task=job.config.model.task).test is None and tested:
        raise UserError(
            f"data.splits = {list(data.splits)}: {data.type} has no test set of its own; give the last one a share, or "
            "say test: none"
        )


def _check_model(config: Config) -> None:
    """Check that the model and its initial weights are there."""
    from fs_lowrank.models.build import build_skeleton, build_tokenizer
    from fs_lowrank.models.vision import read_weights

    build_skeleton(config)
    if not config.is_vision:
        build_tokenizer(config)
    elif config.lowrank.weights:
        read_weights(config.lowrank.weights)


def _check_script(module: str) -> None:
    from fs_lowrank.fetch import resolve

    module = module_of(module)
    import_all([module])
    needs = getattr(sys.modules[module], "NEEDS", ())
    if missing := [name for name in needs if resolve(name) is None]:
        raise UserError(f"script: {module} lacks its data; get them with: fs-lowrank fetch {' '.join(missing)}")
