"""Named tensors stored in one flat buffer, so that a server step reads memory once and sequentially."""

from __future__ import annotations

import hashlib
import math
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor

Value = TypeVar("Value")


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Total size in bytes, the sum of ``numel × itemsize``. Meta tensors are accepted."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def values_of(scalars: Iterable[Tensor]) -> list[float]:
    """The values of ``scalars``, all of one dtype and on one device; a GPU is waited for once."""
    tensors = list(scalars)
    return torch.stack(tensors).tolist() if tensors else []


def change_norm(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Euclidean norm, over all floating-point tensors, of the difference to ``reference``.

    A tensor without a counterpart of its shape there (a Fisher or Gram matrix) enters with its own norm.
    """
    return math.sqrt(sum(norm**2 for norm in change_norms(tensors, reference).values()))


def change_norms(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each tensor's difference, by name (``change_norm``); a GPU is waited for once."""
    norms: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            start = reference.get(name)
            change = tensor.double() - start.double() if start is not None and start.shape == tensor.shape else tensor
            norms[name] = torch.linalg.vector_norm(change, dtype=torch.float64)
    return dict(zip(norms, values_of(norms.values())))


def on_device(values: Mapping[str, Value], device: torch.device | str) -> dict[str, Value]:
    """``values`` with its tensors on ``device``; tensors that are there already are not copied."""
    return {n: cast("Value", v.to(device)) if isinstance(v, Tensor) else v for n, v in values.items()}


def digest(tensors: Mapping[str, Tensor], seed: str = "") -> str:
    """SHA-256, in hexadecimal, of ``seed`` and the names, shapes, dtypes and values, in the order of the names."""
    total = hashlib.sha256(seed.encode())
    for name in sorted(tensors):
        plain = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}{tuple(plain.shape)}{plain.dtype}".encode())
        total.update(plain.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


class FlatTensors(Mapping[str, Tensor]):
    """Read-only mapping of names to tensors that are views of one 1-D buffer ``flat``.

    All tensors share one dtype; mixed dtypes raise ``TypeError`` (keep such tensors in a plain dict).
    """

    def __init__(self, flat: Tensor, layout: tuple[tuple[str, tuple[int, ...]], ...]):
        sizes = [math.prod(shape) for _, shape in layout]
        if sum(sizes) != flat.numel():
            raise ValueError(f"the layout describes {sum(sizes)} values, the buffer holds {flat.numel()}")
        self.flat = flat
        self.layout = layout
        self._views = {name: part.view(shape) for (name, shape), part in zip(layout, flat.split(sizes))}

    @classmethod
    def pack(cls, tensors: Mapping[str, Tensor]) -> FlatTensors:
        """Copy ``tensors`` into one buffer, in name order."""
        names = sorted(tensors)
        if not names:
            return cls(torch.empty(0), ())
        dtypes = {tensors[n].dtype for n in names}
        if len(dtypes) > 1:
            raise TypeError(f"one flat buffer holds one dtype, got {sorted(map(str, dtypes))}")
        flat = torch.cat([tensors[n].detach().reshape(-1) for n in names])
        return cls(flat, tuple((n, tuple(tensors[n].shape)) for n in names))

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def items(self) -> ItemsView[str, Tensor]:
        return self._views.items()

    def __len__(self) -> int:
        return len(self._views)
