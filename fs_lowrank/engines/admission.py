"""What a server takes from a client: every update of every engine passes here, and nothing else does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from ..methods import RefusedUpdate, Update, check_update
from ..methods.base import MAX_SAMPLES, is_whole

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
            same = start is not None and start.shape == tensor.shape
            change = tensor.double() - start.double() if same else tensor
            total += float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2
    return math.sqrt(total)


class Admission:
    """Who may send in a round, and what counts as an update.

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
        self.close()

    @property
    def bounds_norms(self) -> bool:
        return bool(self.max_norm or self.norm_factor)

    def close(self) -> None:
        """The round is over: nobody is asked any more."""
        self.round, self.asked, self.norms = 0, set(), {}
        self.heard: set[int] = set()

    def ask(self, client: int, round: int) -> None:
        """``client`` was asked for an update in ``round``."""
        if round != self.round:
            self.close()
            self.round = round
        self.asked.add(client)

    def identify(self, client: object, round: int) -> None:
        """Whether an update of ``client`` is waited for in ``round``.

        Raises:
            RefusedUpdate: it is none of the clients, was not asked, or was heard already.
        """
        if not is_whole(client):
            raise RefusedUpdate(f"client {client!r:.60}: a client's number is whole, not {type(client).__name__}")
        if not 1 <= client <= self.num_clients:
            raise RefusedUpdate(f"client {client}: this run has clients 1 to {self.num_clients}")
        if round != self.round or client not in self.asked:
            raise RefusedUpdate(f"client {client}: was not asked for an update in round {round}")
        if client in self.heard:
            raise RefusedUpdate(f"client {client}: heard already in round {round}")

    def admit(
        self,
        update: Update,
        expected: Mapping[str, Tensor],
        reference: Mapping[str, Tensor] | None = None,
        loss: object = 0.0,
    ) -> Update:
        """The update of a client that was identified, as a copy; see ``check_update``.

        Args:
            reference: what the client held at the start, for its norm; None: no norm is taken.
        Raises:
            RefusedUpdate: it cannot be used; the message names the client, which may then send another.
        """
        client = update.client
        update = check_update(update, expected, self.max_samples)
        declared = self.samples.get(client, update.num_samples)
        if update.num_samples != declared:
            raise RefusedUpdate(
                f"client {client}: says it has {update.num_samples} samples, it declared {declared} at the start"
            )
        check_loss(client, loss)
        if reference is not None and self.bounds_norms:
            norm = change_norm(update.tensors, reference)
            if 0 < self.max_norm < norm:
                raise RefusedUpdate(
                    f"client {client}: the norm of its update is {norm:.6g}, "
                    f"lowrank.max_update_norm is {self.max_norm:g}"
                )
            self.norms[client] = norm
        self.heard.add(client)
        return update

    def outliers(self) -> dict[int, str]:
        """Of the admitted, those whose norm is beyond the factor over the round's median, with the reason.

        A median of zero is no measure: then there are none.
        """
        if not self.norm_factor or not self.norms:
            return {}
        median = statistics.median_low(self.norms.values())
        return {
            client: f"client {client}: the norm of its update is {norm:.6g}, {norm / median:.6g} times the round's "
            f"median; lowrank.max_update_norm_factor is {self.norm_factor:g}"
            for client, norm in sorted(self.norms.items())
            if 0 < self.norm_factor * median < norm
        }
