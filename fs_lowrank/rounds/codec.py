"""How tensors are encoded for transport, and their sizes in bytes.

``Uniform`` is symmetric uniform quantisation, as FederatedScope has it: of a tensor x, with ``n`` bits,

    s = max|x| / (2^(n-1) − 1),    q = round(x / s),    x ≈ s q

computed in float32 at least: 2^15 − 1 is not a number of bfloat16 or float16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..algebra import wide
from ..settings import Settings
from .record import by_part

Sizes = tuple[int, int]

_QUANTISED, _SCALE, _UNCHANGED = "quantised:", "scale:", "kept:"
_WHOLE_NUMBERS = {8: torch.int8, 16: torch.int16}


class Codec:
    """How messages and updates are encoded: not at all. ``exact``: decoding gives what was encoded, to the bit."""

    exact = True

    def encode(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors as they travel."""
        return tensors

    def decode(self, sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors that were encoded, in the dtypes of ``like`` for the names in it. ValueError: not encoded so."""
        return sent

    def sizes(self, tensors: Mapping[str, Tensor], heads: Sequence[str] = ()) -> Sizes:
        """Bytes of ``tensors`` when encoded, with and without the head (``names.is_head``); works on meta tensors."""
        by_name = self._nbytes(tensors)
        total, head = sum(by_name.values()), by_part(tuple(by_name), tuple(heads)).get("head", ())
        return total, total - sum(by_name[n] for n in head)

    def _nbytes(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        return {n: t.numel() * t.element_size() for n, t in tensors.items()}


class Uniform(Codec):
    """Floating-point tensors as integers of ``nbits`` (8 or 16) and one scale each; other tensors unchanged."""

    exact = False

    def __init__(self, nbits: int):
        self.nbits, self.largest = nbits, 2 ** (nbits - 1) - 1

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Codec``.

        Raises:
            ValueError: a value is NaN or Inf.
        """
        sent = {}
        for name in sorted(tensors):
            tensor = tensors[name].detach()
            if not tensor.is_floating_point() or not tensor.numel():
                sent[_UNCHANGED + name] = tensor
                continue
            values = tensor.to(wide(tensor.dtype))
            scale = values.abs().max() / self.largest
            if not torch.isfinite(scale):
                raise ValueError(f"{name} holds values that are NaN or Inf, which cannot be quantised")
            rounded = values if scale == 0 else (values / scale).clamp_(-self.largest, self.largest).round_()
            sent[_QUANTISED + name] = rounded.to(_WHOLE_NUMBERS[self.nbits])
            # Its bits, in the dtype of the tensor: decoding finds both.
            sent[_SCALE + name] = scale.reshape(1).view(tensor.dtype)
        return sent

    def decode(self, sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Codec``.

        Raises:
            ValueError: ``sent`` was not encoded by this codec.
        """
        tensors = {}
        for key, tensor in sent.items():
            kind, colon, name = key.partition(":")
            kind += colon
            if kind == _UNCHANGED:
                tensors[name] = tensor
            elif kind == _QUANTISED:
                scale = sent.get(_SCALE + name)
                if scale is None:
                    raise ValueError(f"{name} came without its scale")
                dtype = scale.dtype
                scalar = scale.is_floating_point() and scale.nbytes == wide(dtype).itemsize
                if not scalar or tensor.dtype != _WHOLE_NUMBERS[self.nbits]:
                    raise ValueError(
                        f"{name} came as {tensor.dtype} with a scale of {scale.numel()} × {dtype}; expected "
                        f"{_WHOLE_NUMBERS[self.nbits]} and one floating-point number of 32 bits or more"
                    )
                value = (tensor * scale.reshape(-1).view(wide(dtype))).reshape(tensor.shape)
                tensors[name] = value.to(like[name].dtype if name in like else dtype)
            elif kind != _SCALE:
                raise ValueError(f"{key!r} is not quantised, but quantization.method is set")
        return tensors

    def _nbytes(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        encoded = {
            n: t.numel() * self.nbits // 8 + wide(t.dtype).itemsize
            for n, t in tensors.items()
            if t.is_floating_point() and t.numel()
        }
        return {**super()._nbytes(tensors), **encoded}


def codec_of(config: Settings) -> Codec:
    """The encoding of messages and updates that the framework's section ``quantization`` asks for."""
    return Uniform(config.get("quantization.nbits")) if config.get("quantization.method") == "uniform" else Codec()
