"""The optimizer of a client: created by its name in ``torch.optim`` or bitsandbytes, and tested before a run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..errors import UserError
from ..models.quantised import require_bitsandbytes
from ..settings import OPTIMIZERS_8BIT, Optimizer, Origin, check_keys, keys_of


def make_optimizer(
    parameters: list[nn.Parameter], kind: str, lr: float, extra: dict, origin: Origin | None = None
) -> torch.optim.Optimizer:
    """Create the optimizer ``torch.optim.<kind>``, or ``bitsandbytes.optim.<kind>`` with a state of 8 bits.

    Args:
        kind: a value of ``train.optimizer.type``.
    Raises:
        UserError: an unknown argument (the message suggests the nearest), or a value that it refuses.
    """
    origin, package = origin or Origin(), torch.optim
    if kind in OPTIMIZERS_8BIT:
        require_bitsandbytes(f"train.optimizer.type = {kind}")
        import bitsandbytes

        package = bitsandbytes.optim
    optimizer = getattr(package, kind)
    keys = keys_of(optimizer.__init__, 2)
    keys = {**keys, "lr": replace(keys["lr"], required=False)}  # some of bitsandbytes have no default, and it is given
    extra = check_keys(extra, keys, origin, "train.optimizer")
    try:
        return optimizer(parameters, lr=lr, **extra)
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise UserError(
            f"{origin.where('train.optimizer')}train.optimizer: {kind} does not take {extra}: {error}"
        ) from error


def check_optimizer(optimizer: Optimizer, origin: Origin | None = None) -> None:
    """Raise ``UserError`` if ``train.optimizer`` cannot be created or cannot take a step, where some values fail."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    # Arguments that depend on the device are not tested.
    extra = {key: value for key, value in optimizer.extra.items() if key not in ("capturable", "fused")}
    trial = make_optimizer([parameter], optimizer.type, optimizer.lr, extra, origin)
    try:
        trial.step()
    except Exception as error:  # torch raises various errors for invalid values
        prefix = (origin or Origin()).where("train.optimizer")
        raise UserError(f"{prefix}train.optimizer: {optimizer.type} does not take {extra}: {error}") from error
