"""What corrections of the clients' objective (``drift``) share: tensors beside the model, and a part of the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..models.names import all_tensors, is_statistic, select, tags
from ..settings import Settings
from .base import Averaging, State
from .terms import Phase, Update, put_beside

#: prefixes of the server's ``c``, and of a client's ``c_k`` or ``g_k``, before the name of their weight
CONTROL, OWN = "control", "own"
#: the numbers of samples of the clients that have taken part, ``(clients,)``; 0: not yet
SIZES = "x:sizes"


@dataclass(frozen=True)
class DriftCorrection:
    """A correction, from ``lowrank.drift``.

    Attributes:
        kind: fedprox, scaffold or feddyn.
        weight: μ or α.
        clients: the number of clients of the run, N.
    """

    kind: str
    weight: float = 0.0
    clients: int = 1

    @classmethod
    def from_config(cls, config: Settings) -> DriftCorrection | None:
        """The correction of a configuration; None if it has none."""
        lowrank = config.lowrank
        return None if lowrank.drift == "none" else cls(lowrank.drift, lowrank.drift_weight, config.taking_part)


class Weight(NamedTuple):
    """A tensor that trains: its value, that at the start of the phase, and the server's and client's tensors for it."""

    value: Tensor
    start: Tensor
    control: Tensor
    local: Tensor


class Corrected(Averaging):
    """Mixed into a method by ``corrected``, after which its clients train on its objective and ``added``."""

    drift: ClassVar[DriftCorrection]
    #: the kinds of tensors that are kept beside the model for each weight
    beside: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Any, setting: Any):
        super().__init__(params, setting)
        self._weight_tags = self.shared
        self.shared += tuple(kind for kind in self.beside if kind == CONTROL)
        self.personal += tuple(kind for kind in self.beside if kind == OWN)

    def _weights(self, names: Iterable[str]) -> list[str]:
        """The ``names`` that are corrected: tensors that are shared and trained by gradients."""
        personal = {*self.personal}
        return [n for n in select(names, self._weight_tags) if not tags(n) & personal and not is_statistic(n)]

    def adapt(self, model: nn.Module) -> nn.Module:
        model = super().adapt(model)
        tensors = all_tensors(model)
        for kind in self.beside:
            put_beside(model, {f"{kind}:{n}": torch.zeros_like(tensors[n]) for n in self._weights(tensors)})
        return model

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        return [self._corrected(phase) for phase in super().phases(round, client)]

    def _corrected(self, phase: Phase) -> Phase:
        weights: list[Weight] = []

        def penalty(model: nn.Module) -> Tensor:
            if not weights:  # at the first step
                tensors, none = all_tensors(model), torch.zeros(())
                for n in self._weights(tensors):
                    if (tensor := tensors[n]).requires_grad:
                        memory = (tensors.get(f"{kind}:{n}", none) for kind in (CONTROL, OWN))
                        weights.append(Weight(tensor, tensor.detach().clone(), *memory))
            added = sum((self.added(weight) for weight in weights), torch.zeros(()))
            return added if phase.penalty is None else added + phase.penalty(model)

        def ended(model: nn.Module, steps: float, lr: float) -> None:
            for weight in weights:
                self.remember(weight, steps * lr)
            weights.clear()
            if phase.ended is not None:
                phase.ended(model, steps, lr)

        train = tuple(tag for tag in phase.train if tag not in self.beside)
        return replace(phase, train=train, penalty=penalty, ended=ended)

    @abstractmethod
    def added(self, weight: Weight) -> Tensor:
        """What is added to the loss for one weight, a scalar."""

    def remember(self, weight: Weight, length: float) -> None:
        """After training, change in place the tensors that the client keeps and sends; ``length`` is ``T η``."""

    def sent(self, names: Iterable[str], round: int, client: int | None = None) -> list[str]:
        names = {*names}
        weights = super().sent(names, round, client)
        return sorted([*weights, *names.intersection(f"{CONTROL}:{n}" for n in weights)])

    def shares(self, updates: Sequence[Update], state: State) -> tuple[Tensor, float, float]:
        """The known sizes; the factor on ``c`` or ``h`` that makes it a mean over them; and ``q``."""
        stored: Any = state.get(SIZES, torch.zeros(self.drift.clients, dtype=torch.int64))
        sizes = stored.cpu().clone()
        clients = [update.client - 1 for update in updates]
        sizes[clients] = torch.tensor([1 if self.setting.uniform else update.num_samples for update in updates])
        mean, before = (float(s[s > 0].double().mean()) for s in (sizes, stored))  # NaN if none is known
        return sizes, before / mean if stored.any() else 1.0, int(sizes[clients].sum()) / (mean * len(sizes))
