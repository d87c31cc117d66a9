"""Scores of an in-memory model on the papers' downstream tasks.

An entry of a suite's ``evaluation:`` names a scorer and its options:

    {scorer: lm_eval, tasks: [arc_easy, mmlu_stem], limit: 200, num_fewshot: 0}   log-likelihoods, lm-eval's own tasks
    {scorer: generate, tasks: [boolq, ARC-Easy], limit: 200}                      generate, then parse the answer
    {scorer: humaneval, limit: 20, run_unsafe_code: true}                         pass@1 of generated code

Call ``check`` before training and ``score`` after it. A PEFT adapter is not merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from fs_lowrank.settings import Key, Origin, check_keys, check_value, keys_of

#: scorer -> its module, with a dataclass ``Options`` and functions ``check(options, root)`` and
#: ``score(model, tokenizer, options, root)``
SCORERS = {"lm_eval": "lm_eval_tasks", "generate": "generate", "humaneval": "humaneval"}


def check(spec: dict, data_root: Path | str) -> None:
    """Check before training that ``score`` can run.

    Raises:
        UserError: an unknown scorer, key or task, a value out of range, or data that are missing; the message says
            how to get them.
    """
    module, options = parse(spec)
    module.check(options, Path(data_root))


def score(model, tokenizer, spec: dict, data_root: Path | str) -> dict[str, dict]:
    """Score ``model``, which is not changed.

    Returns:
        task → ``{metric: …, metric_stderr: …, "n": samples, "version": …, …}``. Metrics are fractions between 0 and
        1 unless lm-eval's task says otherwise. Other entries are not numbers, or are described in the docstring of the
        scorer: the source of the data, the decoding, the subjects of a group.
    Raises:
        UserError: as for ``check``.
    """
    module, options = parse(spec)
    training = model.training
    module.check(options, Path(data_root))
    model.eval()
    try:
        return module.score(model, tokenizer, options, Path(data_root))
    finally:
        model.train(training)


def parse(spec: Mapping, origin: Origin | None = None, at: str = "evaluation"):
    """The module of a scorer, and its options as the dataclass of that module.

    Args:
        spec: an entry of ``evaluation``, at ``at`` in the file of a suite.
    Raises:
        UserError: an unknown scorer or key, with the nearest; a value of the wrong type or out of range.
    """
    origin = origin or Origin()
    if not isinstance(spec, Mapping) or "scorer" not in spec:
        origin.wrong(at, spec, f"a mapping with the key 'scorer', one of {', '.join(SCORERS)}")
    name = check_value(f"{at}.scorer", spec["scorer"], Key(str, {"choices": tuple(SCORERS)}), origin)
    module = import_module(f"{__package__}.{SCORERS[name]}")
    checked = check_keys(spec, {"scorer": Key(str), **keys_of(module.Options)}, origin, at)
    return module, module.Options(**{key: value for key, value in checked.items() if key != "scorer"})
