"""The checks that every update of every engine passes before it is used."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ..algebra import FlatTensors, change_norm
from ..errors import nearest
from ..methods import RefusedUpdate, Update
from ..models.names import pairs
from ..settings.origin import show

#: default for the largest training set that an update may declare
MAX_SAMPLES = 10**9
#: characters of a client's text that an error message shows
_MAX_TEXT = 200
#: the largest loss or time that is accepted: of float32, so that sums of them are finite
LARGEST = torch.finfo(torch.float32).max
#: the cost of a client in its process: seconds of ``training`` and ``upload``, and whether it was ``reused``
Spent = dict[str, float | bool]

#: the classes of tensors that are accepted
_PLAIN = (Tensor, nn.Parameter)


def number_of(value: object, lowest: float = -LARGEST, highest: float = LARGEST) -> float | None:
    """``value``, which a client reports, as a float; None if it is no number within the bounds. NaN is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Compared before it is converted, as an int of 400 digits cannot become a float.
    return float(value) if lowest <= value <= highest else None


def spent_by(facts: Mapping[str, Any], before: Spent) -> Spent:
    """The cost of a client by the facts of its answer, which have any type, and of the exchanges ``before`` it."""
    match facts["spent"]:
        case {"training": training, "upload": upload, "reused": bool(reused)}:
            seconds = {"training": training, "upload": upload}
            spent: Spent = {n: before.get(n, 0.0) + (number_of(s, lowest=0.0) or 0.0) for n, s in seconds.items()}
            return {**spent, "reused": bool(reused or before.get("reused"))}
    return before or {"training": 0.0, "upload": 0.0, "reused": False}


def check_loss(client: int, loss: object) -> float:
    """The mean training loss that ``client`` reports, as a float.

    Raises:
        RefusedUpdate: it is not a number, not finite, or beyond float32.
    """
    number = number_of(loss)
    if number is None:
        raise RefusedUpdate(f"client {client}: its loss is {show(loss)}, expected a finite number")
    return number


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int; True and 3.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_update(update: Update, expected: Mapping[str, Tensor], max_samples: int = MAX_SAMPLES) -> Update:
    """Check an update and return a copy of it, in one flat buffer if its tensors share a dtype.

    A tensor must be plain: of the class Tensor or Parameter, dense, not quantised, with its values on the expected
    device. Whether it requires a gradient, is contiguous or is a view of a larger one does not matter.

    Args:
        expected: names, shapes, dtypes and device; with tensors on ``meta``, any device is accepted.
        max_samples: the largest accepted ``num_samples``.
    Raises:
        RefusedUpdate: a missing or unknown tensor, a wrong shape or dtype, a tensor that is not plain or not finite, or
            a number of samples that is not a whole number from 1 to ``max_samples``; the message names client and
            tensor.
    """
    sender, sent = f"client {update.client}", update.tensors
    if not isinstance(sent, Mapping):
        raise RefusedUpdate(f"{sender}: sent {type(sent).__name__}, expected named tensors")
    for name in sent:
        if not isinstance(name, str):
            raise RefusedUpdate(f"{sender}: the name {repr(name)[:_MAX_TEXT]} of a tensor is not a text")
    for name in sorted(sent.keys() - expected.keys()):
        hint = nearest(name, expected) if len(name) <= _MAX_TEXT else ""
        raise RefusedUpdate(f"{sender}: unknown tensor {name[:_MAX_TEXT]!r}{hint}")
    for name in sorted(expected.keys() - sent.keys()):
        raise RefusedUpdate(f"{sender}: tensor {name!r} is missing")
    device = next((t.device for t in expected.values() if not t.is_meta), None)
    for name, odd in _not_plain({name: sent[name] for name in expected}, device):
        form = f"{odd.layout}, {odd.dtype}, {odd.device}" if isinstance(odd, Tensor) else "no tensor"
        where = f"on {device}" if device else "with values"
        raise RefusedUpdate(
            f"{sender}: {name} is of the class {type(odd).__name__} ({form}), expected a plain dense tensor {where}"
        )
    for name, template in expected.items():
        tensor = sent[name]
        if tensor.shape != template.shape:
            raise RefusedUpdate(f"{sender}: {name} has shape {tuple(tensor.shape)}, expected {tuple(template.shape)}")
        if tensor.dtype != template.dtype:
            raise RefusedUpdate(f"{sender}: {name} has dtype {tensor.dtype}, expected {template.dtype}")
    samples = update.num_samples
    if not is_whole(samples) or not 1 <= samples <= max_samples:
        raise RefusedUpdate(
            f"{sender}: says it has {show(samples)} samples, expected a whole number from 1 to {max_samples}"
        )
    # A copy, because the tensors may be the parameters of a model, which the next client overwrites.
    copy = copies(sent)
    # A NaN or Inf makes the sum NaN or Inf too; only then it is searched for.
    if not (isinstance(copy, FlatTensors) and torch.isfinite(copy.flat.sum())):
        for name, tensor in copy.items():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise RefusedUpdate(f"{sender}: {name} holds {bad} value{'s' * (bad > 1)} that are NaN or Inf")
    return dataclasses.replace(update, tensors=copy)


def at_own_ranks(tensors: Mapping[str, Tensor], sent: Any) -> dict[str, Tensor]:
    """``tensors`` with each LoRA pair cut to the rank at which a client has ``sent`` it, where that is smaller."""
    cut = dict(tensors)
    for b, a in pairs(tensors):
        down = sent.get(a) if isinstance(sent, Mapping) else None
        if isinstance(down, Tensor) and not down.is_nested and down.ndim and len(down):
            cut |= {b: tensors[b][:, : len(down)], a: tensors[a][: len(down)]}
    return cut


def copies(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copies of ``tensors``, contiguous and without gradients; in one buffer if they share a dtype."""
    if len({t.dtype for t in tensors.values()}) == 1:
        return FlatTensors.pack(tensors)
    return {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}


def _not_plain(tensors: Mapping[str, object], device: torch.device | None) -> list[tuple[str, object]]:
    """The ``tensors`` that are not dense, are quantised, or have no values on ``device`` (None: any)."""
    return [
        (name, t)
        for name, t in tensors.items()
        if not isinstance(t, Tensor)
        or type(t) not in _PLAIN
        or (t.is_nested or t.layout is not torch.strided or t.is_quantized or t.is_meta)
        or device not in (None, t.device)
        or (t.numel() and not t.untyped_storage().nbytes())
    ]


@dataclasses.dataclass
class Admission:
    """The rules by which a run admits updates.

    Attributes:
        max_samples: the largest accepted size of a training set.
        max_norm: the largest norm (``change_norm``) of an update; 0: no bound.
        norm_factor: the largest ratio of a norm to the median of its round (the lower of two middle ones); 0: no bound.
        sizes: of the training sets of the clients 1, 2, …
        samples: client -> the size that it has declared in place of the one in ``sizes``. A client without a size may
            declare any up to ``max_samples``.
    """

    max_samples: int = MAX_SAMPLES
    max_norm: float = 0.0
    norm_factor: float = 0.0
    sizes: Sequence[int] | np.ndarray = ()
    samples: dict[int, int] = dataclasses.field(default_factory=dict)

    def declared(self, client: int) -> int | None:
        """The size of the training set that ``client`` has declared; None: it has not."""
        size = int(self.sizes[client - 1]) if 1 <= client <= len(self.sizes) else None
        return self.samples.get(client, size)

    def admit(
        self, update: Update, expected: Mapping[str, Tensor], check: Callable[[Update], object] | None = None
    ) -> Update:
        """Check an update that the round waits for and return a copy of it; see ``check_update``.

        Args:
            expected: names, shapes, dtypes and device of the tensors that the client must send.
            check: a further check of the values (``Method.check``); None: they cannot be checked.
        Raises:
            RefusedUpdate: the update cannot be used; the message names the client.
        """
        client = update.client
        update = check_update(update, expected, self.max_samples)
        declared = self.declared(client)
        if declared not in (None, update.num_samples):
            raise RefusedUpdate(
                f"client {client}: says it has {update.num_samples} samples, it declared {declared} at the start"
            )
        if check is not None:
            check(update)
        return update

    def norm(self, update: Update, reference: Mapping[str, Tensor]) -> float:
        """``change_norm`` of an admitted update.

        Args:
            reference: the shared tensors that the client held at the start of the round.
        Raises:
            RefusedUpdate: it is larger than ``max_norm``.
        """
        norm = change_norm(update.tensors, reference)
        if 0 < self.max_norm < norm:
            raise RefusedUpdate(
                f"client {update.client}: the norm of its update is {norm:.6g}, "
                f"lowrank.max_update_norm is {self.max_norm:g}"
            )
        return norm

    def outliers(self, norms: Mapping[int, float]) -> dict[int, str]:
        """The clients whose norm exceeds the factor times the round's median, with the reason; none if it is zero."""
        if not self.norm_factor or not norms:
            return {}
        median = statistics.median_low(norms.values())
        return {
            client: f"client {client}: the norm of its update is {norm:.6g}, {norm / median:.6g} times the round's "
            f"median; lowrank.max_update_norm_factor is {self.norm_factor:g}"
            for client, norm in sorted(norms.items())
            if 0 < self.norm_factor * median < norm
        }
