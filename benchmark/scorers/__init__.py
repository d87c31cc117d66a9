"""Scores of an in-memory model on the papers' downstream tasks.

An entry of a suite's ``evaluation:`` names a scorer and its options:

    {scorer: lm_eval, tasks: [arc_easy, mmlu_stem], limit: 200, num_fewshot: 0}   log-likelihoods, lm-eval's own tasks
    {scorer: generate, tasks: [boolq, ARC-Easy], limit: 200}                      generate, then parse the answer
    {scorer: humaneval, limit: 20, run_unsafe_code: true}                         pass@1 of generated code

``check`` is for before training, ``score`` for after it. A PEFT adapter stays where it is: nothing is merged.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path

from fs_lowrank.errors import UserError, nearest

#: scorer -> its module, with a dataclass ``Options`` and functions ``check(options, root)`` and
#: ``score(model, tokenizer, options, root)``
SCORERS = {
    "lm_eval": "benchmark.scorers.lm_eval_tasks",
    "generate": "benchmark.scorers.generate",
    "humaneval": "benchmark.scorers.humaneval",
}


def check(spec: dict, data_root: Path | str) -> None:
    """Whether ``score`` could run, found out before anything trains.

    Raises:
        UserError: an unknown scorer, key or task, a value out of range, or data that are missing; the message says
            how to get them.
    """
    module, options = _parse(spec)
    module.check(options, Path(data_root))


def score(model, tokenizer, spec: dict, data_root: Path | str) -> dict[str, dict]:
    """The scores of ``model``, which is left as it was found.

    Returns:
        task → ``{metric: …, metric_stderr: …, "n": samples, "version": …, …}``. Metrics are shares between 0 and 1
        unless lm-eval's task says otherwise. What else stands there is not a number, or is named in the scorer's
        docstring: the source of the data, the decoding, the subjects of a group.
    Raises:
        UserError: as ``check``.
    """
    module, options = _parse(spec)
    module.check(options, Path(data_root))
    training = model.training
    model.eval()
    try:
        return module.score(model, tokenizer, options, Path(data_root))
    finally:
        model.train(training)


def _parse(spec: dict):
    """The scorer's module, and its options as the dataclass it asks for."""
    if not isinstance(spec, dict) or "scorer" not in spec:
        raise UserError(f"an evaluation is a mapping with the key 'scorer' ({', '.join(SCORERS)}), got {spec!r}")
    name = spec["scorer"]
    if name not in SCORERS:
        raise UserError(f"evaluation: no scorer {name!r}{nearest(str(name), SCORERS)}; there are: {', '.join(SCORERS)}")
    module = import_module(SCORERS[name])
    fields = {f.name: f for f in dataclasses.fields(module.Options)}
    given = {key: value for key, value in spec.items() if key != "scorer"}
    for key, value in given.items():
        if key not in fields:
            raise UserError(
                f"evaluation: scorer {name!r} has no key {key!r}{nearest(key, fields)}; there are: {', '.join(fields)}"
            )
        _check_value(f"evaluation: {key} of scorer {name!r}", value, fields[key])
    return module, module.Options(**given)


def _check_value(where: str, value, field: dataclasses.Field) -> None:
    """Type, and lower bound or choices in the field's metadata."""
    kind, least, choices = field.type, field.metadata.get("min"), field.metadata.get("choices")
    if kind == "list[str]":
        if not (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
            raise UserError(f"{where} must be a list of names, got {value!r}")
    elif kind == "bool":
        if not isinstance(value, bool):
            raise UserError(f"{where} must be true or false, got {value!r}")
    elif choices:
        if value not in choices:
            raise UserError(f"{where} must be one of {', '.join(choices)}, got {value!r}{nearest(str(value), choices)}")
    elif not (value is None and "None" in kind):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or (least is not None and value < least):
            raise UserError(f"{where} must be an integer of at least {least}, got {value!r}")
