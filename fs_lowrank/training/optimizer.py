"""The optimizer of a client: created by its name in ``torch.optim``, and tested before a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import UserError, nearest
from ..settings import Optimizer


def make_optimizer(parameters: list[nn.Parameter], kind: str, lr: float, extra: dict) -> torch.optim.Optimizer:
    """Create the optimizer ``torch.optim.<kind>``.

    Raises:
        UserError: an unknown optimizer, or an argument that it does not accept.
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


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ``UserError`` if ``train.optimizer`` cannot be created or cannot take a step, where some values fail."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    # Arguments that depend on the device are not tested.
    extra = {key: value for key, value in optimizer.extra.items() if key not in ("capturable", "fused")}
    trial = make_optimizer([parameter], optimizer.type, optimizer.lr, extra)
    try:
        trial.step()
    except Exception as error:  # torch raises various errors for invalid values
        raise UserError(f"train.optimizer: {optimizer.type} does not take {extra}: {error}") from error
