"""What a server takes from a client: every update of every engine passes here, and nothing else does."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ..algebra import FlatTensors
from ..errors import nearest
from ..methods import RefusedUpdate, Update

#: the largest training set that an update may claim, unless the caller says otherwise
MAX_SAMPLES = 10**9
#: characters of a name from outside that a message shows
_SHOWN = 200


#: the largest loss that counts: of float32, in which losses are computed
_LARGEST_LOSS = torch.finfo(torch.float32).max


def check_loss(client: int, loss: object) -> float:
    """The mean training loss that ``client`` reports.

    Raises:
        RefusedUpdate: it is no number, not finite, or beyond float32.
    """
    if isinstance(loss, bool) or not isinstance(loss, (int, float)):
        raise RefusedUpdate(f"client {client}: its loss is {type(loss).__name__}, expected a number")
    # Compared before it is converted: an int of 400 digits is no float.
    if not -_LARGEST_LOSS <= loss <= _LARGEST_LOSS:
        shown = loss if isinstance(loss, float) else f"a whole number of {loss.bit_length()} bits"
        raise RefusedUpdate(f"client {client}: its loss is {shown}, expected a finite number")
    return float(loss)


def change_norm(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all floating-point tensors of what changed against ``reference``.

    A tensor that has no counterpart of its shape there is no weight, but a Fisher or Gram matrix, a code or a count: it
    counts as it is.
    """
    total = 0.0
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            start = reference.get(name)
            change = tensor.double() - start.double() if start is not None and start.shape == tensor.shape else tensor
            total += float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2
    return math.sqrt(total)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number; True and 3.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_update(update: Update, expected: Mapping[str, Tensor], max_samples: int = MAX_SAMPLES) -> Update:
    """A copy of the update if it is what was asked for, in one flat buffer where its tensors share a dtype.

    A tensor is to be plain: of the class Tensor or Parameter, dense, not quantised, with its values on the device of
    what is expected. Whether it needs a gradient, is contiguous or a view of something larger does not matter.

    Args:
        expected: names, shapes, dtypes and device; tensors on ``meta`` say nothing of the device.
        max_samples: the largest ``num_samples`` to take.
    Raises:
        RefusedUpdate: a missing, unknown, misshapen or wrongly typed tensor, one that is not finite, or a number of
            samples that is no whole number from 1 to ``max_samples``; the message names client and tensor. Nothing has
            been touched by then.
    """
    who, got = f"client {update.client}", update.tensors
    if not isinstance(got, Mapping):
        raise RefusedUpdate(f"{who}: sent {type(got).__name__}, expected named tensors")
    for name in got:
        if not isinstance(name, str):
            raise RefusedUpdate(f"{who}: the name {repr(name)[:_SHOWN]} of a tensor is no text")
    for name in sorted(got.keys() - expected.keys()):
        hint = nearest(name, expected) if len(name) <= _SHOWN else ""
        raise RefusedUpdate(f"{who}: unknown tensor {name[:_SHOWN]!r}{hint}")
    for name in sorted(expected.keys() - got.keys()):
        raise RefusedUpdate(f"{who}: tensor {name!r} is missing")
    device = next((t.device for t in expected.values() if not t.is_meta), None)
    for name, want in expected.items():
        tensor = got[name]
        problem = _not_plain(tensor, device)
        if problem:
            raise RefusedUpdate(f"{who}: {name} is {problem}")
        if tensor.shape != want.shape:
            raise RefusedUpdate(f"{who}: {name} has shape {tuple(tensor.shape)}, expected {tuple(want.shape)}")
        if tensor.dtype != want.dtype:
            raise RefusedUpdate(f"{who}: {name} has dtype {tensor.dtype}, expected {want.dtype}")
    said = update.num_samples
    if not is_whole(said) or not 1 <= said <= max_samples:
        # A number of 400 digits is not written out.
        shown = f"2^{said.bit_length() - 1} or more" if is_whole(said) and abs(said) > 2**63 else repr(said)[:_SHOWN]
        raise RefusedUpdate(f"{who}: says it has {shown} samples, expected a whole number from 1 to {max_samples}")
    # A copy, because what came may be a model's own parameters, which the next client overwrites.
    one_dtype = len({t.dtype for t in got.values()}) == 1
    copy: FlatTensors | dict[str, Tensor]
    copy = FlatTensors.pack(got) if one_dtype else {n: t.detach().clone() for n, t in got.items()}
    # One NaN or Inf makes the sum one too; only then is it worth looking for.
    if not (isinstance(copy, FlatTensors) and torch.isfinite(copy.flat.sum())):
        for name, tensor in copy.items():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise RefusedUpdate(f"{who}: {name} holds {bad} value{'s' * (bad > 1)} that are NaN or Inf")
    return dataclasses.replace(update, tensors=copy)


def _not_plain(tensor: object, device: torch.device | None) -> str:
    """What is wrong with what stands for a tensor; empty if it is a plain dense one on ``device`` (None: any)."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return f"of the class {type(tensor).__name__}, expected a tensor"
    if tensor.layout is not torch.strided:
        return f"of the layout {str(tensor.layout).removeprefix('torch.')}, expected a dense tensor"
    if tensor.is_quantized:
        return f"quantised ({str(tensor.dtype).removeprefix('torch.')}), expected plain numbers"
    if tensor.is_meta or (device is not None and tensor.device != device):
        return f"on the device {tensor.device}, expected {device or 'one with values'}"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "a tensor without its values"
    return ""


class Admission:
    """What counts as an update in a run.

    Args:
        num_clients: clients 1 … ``num_clients``.
        samples: client -> the size of its training set, as it declared at the start; one that is not named here may
            say any size up to ``max_samples``.
        max_samples: the largest size that is taken from anyone.
        max_norm: the largest norm (``change_norm``) of an update; 0: any.
        norm_factor: the largest norm over the median of its round (the lower one of two); 0: any.
    """

    def __init__(
        self,
        num_clients: int,
        samples: Mapping[int, int] | None = None,
        max_samples: int = MAX_SAMPLES,
        max_norm: float = 0.0,
        norm_factor: float = 0.0,
    ):
        self.num_clients, self.samples, self.max_samples = num_clients, dict(samples or {}), max_samples
        self.max_norm, self.norm_factor = max_norm, norm_factor

    @property
    def bounds_norms(self) -> bool:
        """Whether ``norm`` and ``outliers`` are to be asked."""
        return bool(self.max_norm or self.norm_factor)

    def admit(self, update: Update, expected: Mapping[str, Tensor], loss: object) -> Update:
        """A copy of an update that was waited for; see ``check_update``.

        Args:
            expected: names, shapes, dtypes and device of what is to be sent.
            loss: the mean training loss that came with it.
        Raises:
            RefusedUpdate: it cannot be used; the message names the client.
        """
        client = update.client
        update = check_update(update, expected, self.max_samples)
        declared = self.samples.get(client, update.num_samples)
        if update.num_samples != declared:
            raise RefusedUpdate(
                f"client {client}: says it has {update.num_samples} samples, it declared {declared} at the start"
            )
        check_loss(client, loss)
        return update

    def norm(self, update: Update, reference: Mapping[str, Tensor]) -> float:
        """``change_norm`` of an admitted update.

        Args:
            reference: the shared tensors that the client held at the start of the round.
        Raises:
            RefusedUpdate: it is larger than is allowed.
        """
        norm = change_norm(update.tensors, reference)
        if 0 < self.max_norm < norm:
            raise RefusedUpdate(
                f"client {update.client}: the norm of its update is {norm:.6g}, "
                f"lowrank.max_update_norm is {self.max_norm:g}"
            )
        return norm

    def outliers(self, norms: Mapping[int, float]) -> dict[int, str]:
        """Of a round's updates, those whose norm is beyond the factor over the median: client -> reason.

        A median of zero is no measure: then there are none.
        """
        if not self.norm_factor or not norms:
            return {}
        median = statistics.median_low(norms.values())
        return {
            client: f"client {client}: the norm of its update is {norm:.6g}, {norm / median:.6g} times the round's "
            f"median; lowrank.max_update_norm_factor is {self.norm_factor:g}"
            for client, norm in sorted(norms.items())
            if 0 < self.norm_factor * median < norm
        }
