"""lm-eval's own tasks by log-likelihood (or as the task says), on local copies of their data.

Every task definition, prompt, metric, group and standard error is lm-eval's; only the source of the data changes. If
``local_data`` knows a data set and its files are below the data root, they are read; otherwise lm-eval loads the data
set as usual, from a hub or its cache.

While the tasks are built, ``ConfigurableTask.download`` is replaced by a method that asks ``local_data`` first. This
does not change the definitions of tasks. In contrast, a YAML file that includes a built-in task with other data would
replace the built-in entry and its tags, so that a group could silently average a part of its subjects; and a mirror of
the hub in the working directory would depend on that directory. ``download`` is the documented method by which a task
loads its data. It knows the data set after all overrides, and if it were renamed, replacing it would raise an error.

The result of a group names its tasks. If one subject of a group has no data, the group is not scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fs_lowrank.errors import UserError, nearest
from fs_lowrank.fetch.hub import hub

from ..intervals import right_rows
from . import local_data
from .share import majority

#: draws for the metrics that have no closed standard error
BOOTSTRAP = 1000


@dataclass(frozen=True)
class Options:
    """``limit``: number of samples, the first of each task; none for all. ``num_fewshot``: none for the task's own.
    ``max_length``: in tokens; none for the model's. ``chat``: put the prompt into the tokenizer's chat template."""

    tasks: list[str] = field(metadata={"filled": True})
    limit: int | None = field(default=None, metadata={"min": 2})
    num_fewshot: int | None = field(default=None, metadata={"min": 0})
    batch_size: int = field(default=16, metadata={"min": 1})
    max_length: int | None = field(default=None, metadata={"min": 1})
    chat: bool = False


def check(options: Options, root: Path) -> None:
    """Build every task, which raises an error if something is missing.

    Raises:
        UserError: an unknown task; data that are neither local nor on a hub; a task that runs generated code; examples
            in the prompt without data for them.
    """
    index = manager()
    for name in options.tasks:
        entry = index.task_index.get(name)
        if entry is None and not Path(name).is_file():
            raise UserError(
                f"lm-eval has no task {name!r}{nearest(name, index.all_tasks)}; `lm-eval ls tasks` shows them all"
            )
        # Checked before the task is built, because HumanEval's definition asks a hub for its metric.
        if entry is not None and (entry.cfg or {}).get("unsafe_code"):
            raise _unsafe(name)
    with local_first(root):
        try:
            tasks = index.load(options.tasks)["tasks"]
        except ValueError as error:  # such as a task that is also in a group
            raise UserError(f"evaluation: {error}") from error
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):  # of a group; lm-eval would refuse it after the training
            raise _unsafe(name)
        default = task.get_config("num_fewshot")
        shots = default if default == 0 or options.num_fewshot is None else options.num_fewshot
        if shots and not len(list(task.fewshot_docs() or [])):
            raise UserError(
                f"{name} with num_fewshot {shots} needs examples, and the local copy has only the samples "
                "to score; add its train.json (mmlu: dev/<subject>_dev.csv) or set num_fewshot: 0"
            )


def score(model, tokenizer, options: Options, root: Path) -> dict[str, dict]:
    """Task or group → lm-eval's metrics with their standard errors.

    In addition: ``n`` samples; ``version`` of lm-eval's task; ``num_fewshot``; ``data``, the source of a task's data;
    ``tasks``, the members of a group. Of multiple choice ``majority``, the accuracy of always choosing the place of the
    most frequent right answer. A metric behind a filter other than ``none`` keeps the filter's name.
    """
    sources: dict[str, str] = {}
    with local_first(root, sources):
        report = evaluated(
            model,
            tokenizer,
            options.tasks,
            options,
            max_length=options.max_length,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.chat,
        )
        built = manager().load(options.tasks)
    chosen = {
        name: _positions(report["samples"][name], task)
        for name, task in built["tasks"].items()
        if task.OUTPUT_TYPE == "multiple_choice"
    }
    counts = {task: n["effective"] for task, n in report["n-samples"].items()}
    members = {name: sorted(t.task_name for t in group.get_all_tasks()) for name, group in built["groups"].items()}
    result = {}
    for name, values in {**report["results"], **report.get("groups", {})}.items():
        entry: dict[str, Any] = {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if "," in key and isinstance(value, (int, float))
        }
        entry["version"] = report["versions"].get(name)
        hits = [sample.get("acc") for sample in report["samples"].get(name, ())]
        if hits and {*hits} <= {0, 1}:
            entry["acc_right"] = right_rows(f"first {len(hits)}", list(map(bool, hits)))
        leaves = members.get(name, [name])
        if chosen.keys() >= set(leaves):
            entry["majority"] = majority([answer for leaf in leaves for answer in chosen[leaf]])
        if name in members:
            entry.update(n=sum(counts[task] for task in members[name]), tasks=members[name])
        else:
            entry.update(
                n=counts[name], num_fewshot=report["n-shot"].get(name), data=sources.get(name, "as lm-eval's task says")
            )
        result[name] = entry
    return result


def evaluated(model, tokenizer, tasks: Sequence, options: Any, max_length: int | None = None, **args) -> dict[str, Any]:
    """lm-eval's report on ``tasks``, with all samples; it sets no seed.

    Args:
        tasks: names, or lm-eval's own objects.
        options: a scorer's, with ``limit`` and ``batch_size``.
        args: for lm-eval's ``simple_evaluate``.
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    # No commit: git prints "fatal" outside a repository.
    with patch.object(evaluator, "get_git_commit_hash", lambda: None):
        return evaluator.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, max_length=max_length),
            tasks=[*tasks],
            task_manager=manager(),
            limit=options.limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,  # for their right answers; not stored
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
            **args,
        )


def _positions(samples: Sequence[Mapping[str, Any]], task: Any) -> list[str]:
    """The place of the right answer among the choices of each sample of a task, as lm-eval finds it."""
    if task.multiple_input:  # such as WinoGrande: the choices are texts, all with the target as their continuation
        return [str(task.doc_to_text(sample["doc"])) for sample in samples]
    positions = []
    for number, sample in enumerate(samples):
        target = sample["target"]
        if isinstance(target, str):
            choices = task.doc_to_choice(sample["doc"])
            target = choices.index(target) if target in choices else f"none, in sample {number}"
        positions.append(str(target))
    return positions


@cache
def manager():
    """lm-eval's index of its tasks; it takes seconds to build."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError("this scorer needs the package lm-eval: pip install 'fs-lowrank[eval]'") from error
    return TaskManager()


def _unsafe(name: str) -> UserError:
    return UserError(
        f"lm-eval's task {name!r} runs generated code; for HumanEval use {{scorer: humaneval}} with --unsafe-code"
    )


@contextmanager
def local_first(root: Path, sources: dict[str, str] | None = None) -> Iterator[None]:
    """A context in which tasks are built on local data if available, and otherwise on the hub's.

    Args:
        sources: receives the source by task.
    """
    from lm_eval.api.task import ConfigurableTask

    sources, original = {} if sources is None else sources, ConfigurableTask.download

    def download(self, dataset_kwargs=None, **kwargs):
        name, dataset = self.config.task, (self.DATASET_PATH, self.DATASET_NAME)
        local = None if self.config.custom_dataset else local_data.find(root, *dataset)
        if local is not None:
            self.dataset, sources[name] = local
            return
        try:
            original(self, dataset_kwargs, **kwargs)
        except Exception as error:  # whatever a hub or its cache raises; nothing is hidden
            expected = local_data.expected(root, *dataset)
            problem = f"there is no {expected}" if expected else "no local copy of it is known"
            raise UserError(
                f"{name} needs the data set {'/'.join(filter(None, dataset))}: {problem}, and no hub gave it "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
            ) from error
        sources[name] = f"data set {'/'.join(filter(None, dataset))}"

    with hub(), patch.object(ConfigurableTask, "download", download):
        yield
