"""Checks of loaded weights: which weights of a checkpoint are missing, and which of them may be new; and whether a
saved adapter is whole.

A loader initialises weights that the checkpoint lacks at random. This is right for the head of a new task and wrong for
everything else, so the report of transformers (``output_loading_info``) is checked here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..data.stored import silent
from ..errors import ROWS_LOGGER, UserError, say_once

_SHOWN = 3
#: what to do with the folder of an adapter that is not as it was saved
PUT_BACK = "put back the files of this folder as they were saved together, or train again"


def transformers_silent() -> AbstractContextManager[None]:
    """A context without the messages and progress bars of transformers."""
    import transformers

    return silent(transformers, logging.ERROR)


def check_loaded(
    model: Any, report: Mapping[str, Any], source: str, classes: int | None, say_new: bool = True
) -> list[str]:
    """Check that the checkpoint at ``source`` holds all weights of ``model``; warn about new heads and unused tensors.

    Two kinds of modules may be new: a head, which is a module outside the base model (``base_model_prefix``) without
    any tensor in the checkpoint, and the ``pooler`` of the base, which encoders saved without a classifier lack. Tied
    weights are not in the report; integer buffers (``position_ids``) are not loaded.

    Args:
        model: of transformers.
        report: what ``from_pretrained(…, output_loading_info=True, ignore_mismatched_sizes=True)`` returned: sets of
            ``missing_keys`` and ``unexpected_keys``, and ``mismatched_keys`` of (name, shape in the file, shape in
            the model).
        classes: number of classes of the data; None for a language model, which cannot have new weights.
        say_new: whether to warn about new weights.
    Returns:
        The sorted names of the new weights.
    Raises:
        UserError: a weight is missing or has another shape.
    """
    counters = {n for n, b in model.named_buffers() if not b.is_floating_point()}
    expected = model.state_dict().keys() - counters
    missing, unexpected = set(report["missing_keys"]) - counters, set(report["unexpected_keys"])
    _check_shapes(report["mismatched_keys"], source, classes)
    modules: dict[str, set[str]] = {}
    for name in expected if classes is not None else ():
        modules.setdefault(_new_module(model, name), set()).add(name)
    new = {n for module, names in modules.items() if module and names <= missing for n in names}
    lacking = sorted(missing - new)
    if lacking:
        raise UserError(
            f"model.type: {source!r} lacks {len(lacking)} of the model's {len(expected)} weights ({_listed(lacking)}), "
            f"which would be random{_instead(unexpected)}; the checkpoint is "
            "incomplete, or its names are not this model's: save it again with save_pretrained, or take another"
        )
    if unexpected:
        say_once(
            f"model.type: {source!r} has {len(unexpected)} tensors that the model has no place for; they are left out: "
            f"{_listed(unexpected)}"
        )
    if new and say_new:
        message = f"model.type: {source!r} has no weights for {_listed(new)}; they are new, drawn by the run's seed"
        say_once(message, logging.INFO, ROWS_LOGGER)
    return sorted(new)


def difference(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], optional: Mapping[str, Tensor] | None = None
) -> str:
    """Why the tensors of a file are not those of ``expected``, in words; empty if they are.

    Args:
        optional: tensors that the file may have as well.
    """
    allowed = {**(optional or {}), **expected}
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - allowed.keys())
    if missing:
        return (
            f"it lacks {len(missing)} of {len(expected)} tensors ({_listed(missing)}), which would be untrained"
            f"{_instead(unexpected)}"
        )
    if unexpected:
        return f"it has tensors that there is no place for ({_listed(unexpected)})"
    for name, tensor in sorted(tensors.items()):
        if tensor.shape != allowed[name].shape:
            return f"{name} is {tuple(tensor.shape)} there, expected {tuple(allowed[name].shape)}"
    return ""


def _new_module(model: Any, name: str) -> str:
    """The module of weight ``name`` that may be new; empty if the weight must be in the checkpoint."""
    base = model.base_model_prefix
    first, _, tail = name.partition(".")
    if not base or not hasattr(model, base):
        return ""
    if first != base:
        return first
    return f"{base}.pooler" if tail.startswith("pooler.") else ""


def _check_shapes(mismatched: Iterable[tuple], source: str, classes: int | None) -> None:
    for name, saved, expected in sorted((n, tuple(a), tuple(b)) for n, a, b in mismatched):
        wrong = f"{name} is {saved} in the checkpoint and {expected} by its config.json; they do not belong together"
        if classes is not None and expected[:1] == (classes,) and saved[1:] == expected[1:]:
            wrong = (
                f"it is a classifier of {saved[0]} classes ({name} is {saved}), the data has {classes}; take data of "
                f"{saved[0]} classes, or a checkpoint without a head"
            )
        raise UserError(f"model.type: {source!r}: {wrong}")


def _instead(unexpected: Collection[str]) -> str:
    """The unexpected tensors beside missing weights, in words."""
    return f", and has {len(unexpected)} of other names ({_listed(unexpected)})" if unexpected else ""


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
