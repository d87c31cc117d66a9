"""Scores of an in-memory model on the papers' downstream tasks.

An entry of a suite's ``evaluation:`` names a scorer and its options:

    {scorer: lm_eval, tasks: [arc_easy, mmlu_stem], limit: 200, num_fewshot: 0}   log-likelihoods, lm-eval's own tasks
    {scorer: generate, tasks: [boolq, ARC-Easy], limit: 200}                      generate, then parse the answer
    {scorer: humaneval, limit: 20, run_unsafe_code: true}                         pass@1 of generated code

Call ``check`` before training and ``score`` after it. A PEFT adapter is not merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from fs_lowrank.errors import UserError
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
    module, options = _parse(spec)
    with _asked(module):
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
    module, options = _parse(spec)
    training = model.training
    with _asked(module):
        module.check(options, Path(data_root))
        model.eval()
        try:
            return module.score(model, tokenizer, options, Path(data_root))
        finally:
            model.train(training)


def _asked(module: Any) -> AbstractContextManager[None]:
    """A context for a scorer that asks the hub for what is not on this machine, as its ``HUB`` says: ``hub()``."""
    from fs_lowrank.data.fetch.hub import hub

    return hub() if getattr(module, "HUB", False) else nullcontext()


def _parse(spec: dict):
    """The module of a scorer, and its options as the dataclass of that module."""
    if not isinstance(spec, dict) or "scorer" not in spec:
        raise UserError(f"an evaluation is a mapping with the key 'scorer' ({', '.join(SCORERS)}), got {spec!r}")
    module = scorer(spec["scorer"])
    given = {key: value for key, value in spec.items() if key != "scorer"}
    return module, module.Options(**check_keys(given, keys_of(module.Options), Origin(), "evaluation"))


def scorer(name: str, origin: Origin | None = None, at: str = "evaluation"):
    """The module of a scorer.

    Raises:
        UserError: unknown scorer; the message suggests the nearest.
    """
    check_value(f"{at}.scorer", name, str, {"choices": tuple(SCORERS)}, origin or Origin())
    return import_module(f"{__package__}.{SCORERS[name]}")


def check_options(spec: Mapping, origin: Origin, at: str) -> None:
    """Check the keys of an entry of ``evaluation``, at ``at`` in the file of a suite.

    Raises:
        UserError: an unknown scorer or key, a value of the wrong type or out of range.
    """
    if "scorer" not in spec:
        origin.fail(f"{at}.scorer", f"is missing, one of {', '.join(SCORERS)}")
    keys = {"scorer": Key(str), **keys_of(scorer(spec["scorer"], origin, at).Options)}
    check_keys(spec, keys, origin, at)
