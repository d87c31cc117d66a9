"""Dropout of a part of a batch as of the whole batch, so that draws do not depend on what is computed.

A mask is drawn in the shape that it has for the whole batch, and the rows and positions that are computed are taken
from it. So the random numbers are the same, and results with dropout are equal but for rounding. The exception is the
dropout of attention on a GPU, whose kernels draw in an order of their own: there it is equal in distribution only.
Whether a model's dropout can be drawn so is tried before it is relied on (``OnlyRead.check``, ``training.cohort``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from ...seeds import drawing


def draws(model: nn.Module) -> bool:
    """Whether a module of ``model`` applies dropout now: by a module or by a number (attention, OPT, LoHa, LoKr)."""
    for module in model.modules():
        if not module.training:
            continue
        values = [value for name, value in vars(module).items() if "drop" in name]  # PEFT has one by the adapter's name
        numbers = [n for value in values for n in (value.values() if isinstance(value, dict) else [value])]
        if any(isinstance(n, float) and n > 0 for n in numbers) or isinstance(module, nn.Dropout) and module.p > 0:
            return True
    return False


@contextmanager
def comparable() -> Iterator[None]:
    """A context with the same draws each time, apart from all others; without attention's dropout on a GPU."""
    with drawing(0), _WithoutAttention():
        yield


class _WithoutAttention(TorchFunctionMode):
    """A context without the dropout of attention on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and args[0].device.type != "cpu" and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def draw(template: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Which values dropout keeps, bool ``shape``, for values like ``template``; within ``Masks`` those of its mask."""
    if has_torch_function_unary(template):
        return handle_torch_function(draw, (template,), template, p, shape)
    return dropout(template.new_ones(shape), p) != 0


class Masks(TorchFunctionMode):
    """A context in which dropout keeps the values of ``mask``.

    Args:
        mask: from the values, the probability and the shape, bool.
        positions: the number of positions whose queries are computed.
    """

    def __init__(self, mask: Callable[[Tensor, float, tuple[int, ...]], Tensor], positions: int):
        super().__init__()
        self.mask, self.positions = mask, positions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is draw:
            return self.mask(*args)
        if func is dropout:
            return self._dropout(*args, **kwargs)
        if func is scaled_dot_product_attention and kwargs.get("dropout_p", 0) > 0 and args[0].device.type == "cpu":
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return dropout(values, p, training, inplace)
        return values * (self.mask(values, p, values.shape) * (values.new_ones(()) / (1 - p)))

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_) -> Tensor:
        """What ``scaled_dot_product_attention`` computes on a processor, by its definition."""
        # transformers passes the heads that share a key as positions if there is a single position.
        q = query.flatten(1, 2).unsqueeze(2) if self.positions == 1 else query
        key, value = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (key, value))
        scores = q @ key.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            blocks = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if blocks else scores + attn_mask
        return (self._dropout(scores.softmax(-1), dropout_p) @ value).reshape(*query.shape[:-1], value.shape[-1])
