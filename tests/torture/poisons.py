"""Updates of a hostile client in place of an honest one, as Hypothesis strategies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn


@dataclass(frozen=True)
class Poison:
    """One change of an honest answer.

    Attributes:
        kind: a name in ``KINDS``.
        at: the index of the tensor, modulo their number.
        value: depends on the kind.
    """

    kind: str
    at: int
    value: Any


@dataclass
class Answer:
    """The arguments with which an answer is handed to ``Round.take``."""

    client: Any
    tensors: Any
    facts: dict[str, Any]
    #: whether it is handed in twice
    twice: bool = False


class Subclass(Tensor):
    """A subclass of ``Tensor``."""


_NUMBERS: list[Any] = [
    *(0, -1, 1, 2, True, False, None, "7", "", 3.0, 3.5, -0.0, 1e18, 2**31, 2**63, 2**64, 10**9, 10**9 + 1, 10**400),
    *(-(10**400), math.nan, math.inf, -math.inf, [], [5], {}, (3,), b"5", 1j, np.int64(5), np.float32(5), np.bool_(1)),
    *(np.array(5), torch.tensor(5), object, 5e-324, 3.5e38, 1.7e308, 0.5, "nan", "Infinity"),
]
_NAMES: list[Any] = [
    "",
    " ",
    "\x00",
    "\ud800",
    "a" * 100_000,
    "../../x",
    "merge:1:x",
    "state",
    7,
    None,
    True,
    (1,),
    b"x",
]
_DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.uint64),
]


def _kinds_of_tensors() -> dict[str, Callable[[Tensor], Any]]:
    """Values in place of a tensor; those under ``harmless`` are plain tensors with the same values."""

    def storage_gone(t: Tensor) -> Tensor:
        own = t.clone()
        own.untyped_storage().resize_(0)
        return own

    return {
        "list": lambda t: t.tolist(),
        "nested mapping": lambda t: {"weight": t},
        "numpy": lambda t: t.numpy(),
        "None": lambda t: None,
        "number": lambda t: 1.0,
        "text": lambda t: "0.5",
        "module": lambda t: nn.Linear(2, 2),
        "class": lambda t: Tensor,
        "sparse coo": lambda t: t.to_sparse(),
        "sparse csr": lambda t: t.reshape(-1, t.shape[-1] if t.ndim else 1).to_sparse_csr(),
        "meta": lambda t: t.to("meta"),
        "subclass": lambda t: t.as_subclass(Subclass),
        "nested": lambda t: torch.nested.nested_tensor([t, t]),
        "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        "storage gone": storage_gone,
        "buffer": lambda t: nn.Buffer(t),
        "lazy": lambda t: nn.UninitializedParameter(),
        "of 10^12 values": lambda t: torch.zeros(1).expand(10**12),
        "expanded": lambda t: torch.full((1,), 0.5).expand(t.shape) if t.ndim else t.clone(),
        "negated view": torch._neg_view,
        "under grad": lambda t: t.clone().requires_grad_() * 1.0,
        "inference": _inference,
        "harmless: parameter": lambda t: nn.Parameter(t.clone(), requires_grad=t.is_floating_point()),
        "harmless: view": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)])[: t.numel()].view(t.shape),
        "harmless: strided": lambda t: torch.stack([t, t], -1)[..., 0],
    }


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


TENSOR_KINDS = _kinds_of_tensors()


# -- the kinds: each changes an answer --------------------------------------------------------------------


def _name(answer: Answer, name: str, value: Any) -> None:
    tensor = answer.tensors.pop(name)
    if value == "missing":
        return
    if value == "double":
        answer.tensors[name] = tensor
        answer.tensors[name + "2"] = tensor.clone()
        return
    new = {"prefix": f"module.{name}", "suffix": f"{name}.weight", "case": name.upper(), "cut": name[:-1]}
    answer.tensors[new.get(value, value) if isinstance(value, str) else value] = tensor


def _shape(answer: Answer, name: str, value: str) -> None:
    t = answer.tensors[name]
    answer.tensors[name] = {
        "transposed": lambda: t.T if t.ndim == 2 else t.reshape(1, -1),
        "flat": lambda: t.reshape(-1) if t.ndim != 1 else t.reshape(-1, 1),
        "deeper": lambda: t[None],
        "empty": lambda: t.reshape(-1)[:0],
        "number": lambda: t.sum().to(t.dtype),
        "shorter": lambda: t[:-1] if t.ndim else t[None],
        "longer": lambda: torch.cat([t, t]) if t.ndim else t[None],
        "64 dimensions": lambda: t.reshape(*[1] * (64 - t.ndim), *t.shape),
    }[value]()


def _dtype(answer: Answer, name: str, value: torch.dtype) -> None:
    answer.tensors[name] = answer.tensors[name].to(value)


def _kind(answer: Answer, name: str, value: str) -> None:
    answer.tensors[name] = TENSOR_KINDS[value](answer.tensors[name])


def _value(answer: Answer, name: str, value: float) -> None:
    """One value of one tensor."""
    tensor = answer.tensors[name].clone(memory_format=torch.contiguous_format)
    if tensor.is_floating_point() and tensor.numel():
        flat = tensor.view(-1)
        flat[flat.numel() // 2] = max(min(value, torch.finfo(tensor.dtype).max), torch.finfo(tensor.dtype).min)
        if math.isnan(value) or math.isinf(value):
            flat[flat.numel() // 2] = value
    answer.tensors[name] = tensor


def _scale(answer: Answer, name: str, value: tuple[float, bool]) -> None:
    """One tensor or all, so that the largest value has a given magnitude."""
    magnitude, everything = value
    for each in list(answer.tensors) if everything else [name]:
        tensor = answer.tensors[each]
        if type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel():
            largest = min(magnitude, torch.finfo(tensor.dtype).max)
            unit = tensor.double() / tensor.double().abs().max().clamp_min(1e-300)
            answer.tensors[each] = (unit * largest).to(tensor.dtype)


def _sign(answer: Answer, name: str, everything: bool) -> None:
    """One tensor or all, with the opposite sign."""
    for each in list(answer.tensors) if everything else [name]:
        tensor = answer.tensors[each]
        if type(tensor) is Tensor and tensor.dtype.is_signed:
            answer.tensors[each] = -tensor


def _fill(answer: Answer, name: str, value: float) -> None:
    tensor = answer.tensors[name]
    bound = torch.finfo(tensor.dtype).max if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    answer.tensors[name] = torch.full_like(tensor, max(min(value, bound), -bound))


def _whole(answer: Answer, name: str, value: Any) -> None:
    made = {"list": lambda: list(answer.tensors.items()), "keys": lambda: set(answer.tensors)}
    answer.tensors = made[value]() if isinstance(value, str) and value in made else value


def _fact(answer: Answer, name: str, value: tuple[str, Any]) -> None:
    fact, new = value
    if fact == "client":
        # Engines check the sender of an answer, so the number here is that of the client, or none.
        answer.client = answer.client if type(new) is int and 0 < new < 4 else new
    elif fact == "twice":
        answer.twice = True
    elif new == "missing":
        answer.facts.pop(fact, None)
    else:
        answer.facts[fact] = new


KINDS: dict[str, tuple[Callable[[Answer, str, Any], None], st.SearchStrategy[Any]]] = {
    "value": (_value, st.one_of(st.sampled_from([math.nan, math.inf, -math.inf]), st.floats(allow_nan=False))),
    "scale": (_scale, st.tuples(st.floats(-45, 38.6).map(lambda e: 10.0**e), st.booleans())),
    "sign": (_sign, st.booleans()),
    "fill": (_fill, st.floats(allow_nan=False, allow_infinity=False)),
    "shape": (
        _shape,
        st.sampled_from("transposed,flat,deeper,empty,number,shorter,longer,64 dimensions".split(",")),
    ),
    "dtype": (_dtype, st.sampled_from(_DTYPES)),
    "kind": (_kind, st.sampled_from(sorted(TENSOR_KINDS))),
    "name": (
        _name,
        st.one_of(
            st.sampled_from(["missing", "double", "prefix", "suffix", "case", "cut", *_NAMES]), st.text(max_size=20)
        ),
    ),
    "whole": (_whole, st.sampled_from([None, 7, "text", "list", "keys", (), {}, b"bytes", True])),
    "fact": (
        _fact,
        st.tuples(
            st.sampled_from(["samples", "samples", "loss", "loss", "client", "round", "twice", "error", "lost"]),
            st.one_of(st.sampled_from([*_NUMBERS, "missing"]), st.integers(), st.floats()),
        ),
    ),
}

poisons = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.builds(Poison, st.just(kind), st.integers(0, 30), KINDS[kind][1])
)


def _plain(tensor: Any) -> bool:
    """Whether further changes are possible: a plain dense tensor that still has its values."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return not tensor.is_quantized and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)


def poison(answer: Answer, changes: list[Poison]) -> None:
    """Apply ``changes`` to an honest answer, in place. Changes that cannot be applied are left out.

    Values of tensors are changed before their types.
    """
    for change in sorted(changes, key=lambda change: list(KINDS).index(change.kind)):
        tensors = answer.tensors if isinstance(answer.tensors, dict) else {}
        named = sorted(n for n, t in tensors.items() if isinstance(n, str) and _plain(t))
        if named or change.kind == "fact":
            KINDS[change.kind][0](answer, named[change.at % len(named)] if named else "", change.value)
