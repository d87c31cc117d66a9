"""A client's optimizer: made by its name in ``torch.optim``, and tried before a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import UserError, nearest
from ..settings import Optimizer


def make_optimizer(parameters: list[nn.Parameter], kind: str, lr: float, extra: dict) -> torch.optim.Optimizer:
    """``torch.optim``'s optimizer of that name.

    Raises:
        UserError: no such optimizer, or a keyword it does not take.
    """
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    if str(kind).lower() not in known:
        raise UserError(f"train.optimizer.type = {kind!r}: torch.optim has none{nearest(kind, known)}")
    try:
        return known[str(kind).lower()](parameters, lr=lr, **extra)
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"train.optimizer: {kind} does not take {extra}: {error}") from error


def check_optimizer(wanted: Optimizer) -> None:
    """Raise ``UserError`` if ``train.optimizer`` cannot be made or cannot take a step: some values show only there."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    # What depends on the device says nothing here.
    extra = {key: value for key, value in wanted.extra.items() if key not in ("capturable", "fused")}
    optimizer = make_optimizer([parameter], wanted.type, wanted.lr, extra)
    try:
        optimizer.step()
    except Exception as error:  # whatever torch stumbles over, it is these values
        raise UserError(f"train.optimizer: {wanted.type} does not take {extra}: {error}") from error
