"""Small trained matrices between the halves A and B of a pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Heads(nn.Module):
    """``H`` ``(heads, r, r)`` and, if ``weighted``, ``s`` ``(heads,)`` between A and B, by a hook on ``down``, A.

    Without heads, ``(0, r, r)``, the pair is what it is without the hook.
    """

    def __init__(self, down: Any, heads: int, weighted: bool):
        super().__init__()
        rank = len(down.weight) // heads
        self.H = nn.Parameter(down.weight.new_empty(0, rank, rank))
        self.s = nn.Parameter(down.weight.new_ones(heads)) if weighted else None
        # A bound method, so that a deep copy of the model uses its own hook.
        down.register_forward_hook(self.between)

    def between(self, down: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not len(self.H):
            return output
        core = torch.block_diag(*(self.H if self.s is None else self.s[:, None, None] * self.H))
        if isinstance(down, nn.Linear):
            return F.linear(output, core)
        convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[down.weight.ndim]
        return convolve(output, core.reshape(*core.shape, *(1,) * (down.weight.ndim - 2)))
