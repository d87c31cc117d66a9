"""Checks that the result of a server step is finite, and leaves the model finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..methods import Method

#: Up to this magnitude, merging a message into the base cannot overflow: a product of four of its values (LoHa), summed
#: over any rank, is far from the limit of float32. Beyond it, the merge is tried on a copy first.
_HARMLESS = 1e8
#: the same where weights are in float16, which ends at 65,504
_HARMLESS_IN_FLOAT16 = 4.0


class NotFinite(ArithmeticError):
    """The result of the server step has a NaN or Inf, or leads to one in the model."""


def require_finite(
    changed: Mapping[str, Tensor | float | int],
    message: Mapping[str, Tensor],
    method: Method,
    round: int,
    model: nn.Module | None,
) -> None:
    """Raise ``NotFinite`` if the changed part of the state, the message, or the model that applies it is not finite.

    Args:
        model: a copy at the end of the previous round, which is not changed; None: the model is not checked.
    """
    largest = 0.0
    for name, value in {**changed, **message}.items():
        size = _magnitude(value)
        if not math.isfinite(size):
            raise NotFinite(f"the server's step gave a {name} that is not finite")
        largest = max(largest, size)
    if model is None:
        return
    half = any(t.dtype == torch.float16 for t in model.state_dict().values())
    if largest > (_HARMLESS_IN_FLOAT16 if half else _HARMLESS):
        trial, before = copy.deepcopy(model), model.state_dict()
        method.apply(trial, message, round)
        for name, tensor in trial.state_dict().items():
            was_finite = name not in before or math.isfinite(_magnitude(before[name]))  # a mask's buffer may hold -Inf
            if was_finite and not math.isfinite(_magnitude(tensor)):
                raise NotFinite(f"with the message, {name} of the model would not be finite")


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
