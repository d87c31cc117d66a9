"""lm-eval's tasks for the tests of scorers."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmark.scorers import lm_eval_tasks


@pytest.fixture(scope="module")
def manager():
    """lm-eval's task index over the necessary folders only; indexing all 14,000 files takes 15 seconds."""
    if find_spec("lm_eval") is None:
        yield None
        return
    from lm_eval import tasks

    folder = Path(tasks.__file__).parent
    few = partial(
        tasks.TaskManager,
        include_defaults=False,
        include_path=[
            folder / name
            for name in "arc glue hellaswag humaneval mbpp mmlu openbookqa piqa siqa super_glue winogrande".split()
        ],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", few)
        lm_eval_tasks.manager.cache_clear()
        yield lm_eval_tasks.manager()
    lm_eval_tasks.manager.cache_clear()
