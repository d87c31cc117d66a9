"""Checks of the result of a server step: it has the form that a method must give, and it is finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..methods import Method, State
from ..models.names import tags
from ..settings.origin import show

#: Up to this power of the base's largest number, merging a message into the base cannot overflow: a product of four of
#: its values (LoHa), each sum over a rank of up to 16 also in float16, is below that number. Beyond it, the merge is
#: tried on a copy first.
_HARMLESS = 0.1


class WrongStep(UserError):
    """The server's step of a method gave a result of a wrong form; it is not the clients' fault."""


class BadRound(RuntimeError):
    """The server step failed on updates that were admitted; state and outbox are those before the round."""

    remedy = "set lowrank.on_bad_round to skip, bound norms by lowrank.max_update_norm, or correct a method of your own"


def require_valid(result: Any, before: State, method: Method) -> tuple[State, Mapping[str, Tensor]]:
    """The state and the message of a server step.

    Args:
        result: the return value of ``Method.aggregate``.
        before: the state before the step.
    Raises:
        WrongStep: ``result`` is no pair of mappings; a tensor of the model is missing in the state, or has another
            dtype or, of an adapter, another shape but for the rank; a value cannot be saved.
    """
    step = f"the server's step of {method.name} gave"
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(part, Mapping) for part in result):
        raise WrongStep(f"{step} {show(result)}, expected the new state and the message, two mappings")
    state, message = result
    for kind, tensors in (("state", state), ("message", message)):
        for name, value in tensors.items():
            number = kind == "state" and ":" in name and type(value) in (bool, int, float)
            if not (isinstance(value, Tensor) or number):
                raise WrongStep(
                    f"{step} a {kind} in which {name} is {show(value)} ({type(value).__name__}), expected a tensor; "
                    f"in the state, under a name with a colon, such as x:{name}, a bool, int or float may be, too"
                )
    for name, old in before.items():
        if ":" in name or not isinstance(old, Tensor):
            continue
        if name not in state:
            raise WrongStep(f"{step} a state without {name}, which was in the state before the round")
        new: Any = state[name]
        other_rank = "adapter" in tags(name) and sum(a != b for a, b in zip(new.shape, old.shape)) == 1
        if new.dtype != old.dtype or "adapter" in tags(name) and new.shape != old.shape and not other_rank:
            raise WrongStep(
                f"{step} a {name} of {new.dtype} and shape {tuple(new.shape)}, expected {old.dtype} and "
                f"{tuple(old.shape)} as before the round"
            )
    return state, message


def require_finite(
    changed: Mapping[str, Tensor | float | int],
    message: Mapping[str, Tensor],
    method: Method,
    round: int,
    model: nn.Module | None,
) -> None:
    """Raise ``BadRound`` if the changed part of the state, the message, or the model that applies it is not finite.

    Args:
        model: a copy at the end of the previous round, which is not changed; None: the model is not checked.
    """
    largest = 0.0
    for name, value in {**changed, **message}.items():
        size = _magnitude(value)
        if not math.isfinite(size):
            raise BadRound(f"the server's step gave a {name} that is not finite")
        largest = max(largest, size)
    if model is None:
        return
    limits = [torch.finfo(tensor.dtype).max for tensor in model.parameters() if tensor.is_floating_point()]
    if largest > min(limits, default=0.0) ** _HARMLESS:
        trial, before = copy.deepcopy(model), model.state_dict()
        method.apply(trial, message, round)
        for name, tensor in trial.state_dict().items():
            was_finite = name not in before or math.isfinite(_magnitude(before[name]))  # a mask's buffer may hold -Inf
            if was_finite and not math.isfinite(_magnitude(tensor)):
                raise BadRound(f"with the message, {name} of the model would not be finite")


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that has a NaN or Inf; None if all are finite."""
    return next((name for name, tensor in tensors.items() if not math.isfinite(_magnitude(tensor))), None)


def _magnitude(value: Tensor | float | int) -> float:
    """The largest absolute value; NaN if one is not finite. 0 for other dtypes, which are always finite."""
    if not isinstance(value, Tensor):
        return abs(value) if isinstance(value, float) else 0.0
    if not value.is_floating_point() or not value.numel():
        return 0.0
    low, high = value.detach().aminmax()
    return max(abs(float(low)), abs(float(high))) if torch.isfinite(low) & torch.isfinite(high) else math.nan
