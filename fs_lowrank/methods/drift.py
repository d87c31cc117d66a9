"""Corrections of the objective that clients train on, under any averaging method, so that they drift apart less.

``w`` is what a client trains and sends, ``w₀`` its value at the start of the round, ``w̄`` the mean over the clients.

============ =========================================================================================================
``fedprox``  the loss ``+ μ/2 ‖w − w₀‖²``
``scaffold`` steps ``w ← w − η (g + c − c_k)``; after ``T`` of them ``c_k ← c_k − c + (w₀ − w) / (T η)``, and the client
             sends the change of ``c_k``; server: ``c ← c + q · mean Δc_k``
``feddyn``   the loss ``− ⟨g_k, w⟩ + α/2 ‖w − w₀‖²``; after training ``g_k ← g_k − α (w − w₀)``, which stays with the
             client; server: ``h ← h − α q (w̄ − w₀)``, ``w ← w̄ − h / α``
============ =========================================================================================================

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, equation 2; Karimireddy et al., "SCAFFOLD:
Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1, option II, with a global step size of
1; Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1.

``q`` is the weight of the round's clients among all: ``|S| / N`` in the papers, whose means are plain, as with
``federate.ignore_weight``. With weights by samples, ``c`` and ``h`` are the means of all ``c_k`` and ``g_k`` by
samples. A client that has not taken part yet, whose ``c_k`` or ``g_k`` is 0, counts with the mean size of the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.names import all_tensors, is_statistic, select, tags
from ..settings import Settings
from .base import Averaging, Method, State
from .terms import Phase, Update, put_beside

#: prefixes of the server's ``c``, and of a client's ``c_k`` or ``g_k``, before the name of their weight
CONTROL, OWN = "control", "own"
#: the numbers of samples of the clients that have taken part, ``(clients,)``; 0: not yet
_SIZES = "x:sizes"


@dataclass(frozen=True)
class DriftCorrection:
    """A correction, from ``lowrank.drift``.

    Attributes:
        kind: one of the names above.
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
        stored: Any = state.get(_SIZES, torch.zeros(self.drift.clients, dtype=torch.int64))
        sizes = stored.cpu().clone()
        clients = [update.client - 1 for update in updates]
        sizes[clients] = torch.tensor([1 if self.setting.uniform else update.num_samples for update in updates])
        mean, before = (float(s[s > 0].double().mean()) for s in (sizes, stored))  # NaN if none is known
        return sizes, before / mean if stored.any() else 1.0, int(sizes[clients].sum()) / (mean * len(sizes))


class FedProx(Corrected):
    def added(self, weight: Weight) -> Tensor:
        return self.drift.weight / 2 * (weight.value - weight.start).square().sum()


class Scaffold(Corrected):
    beside = (CONTROL, OWN)

    def __init__(self, params: Any, setting: Any):
        super().__init__(params, setting)
        if any(phase.turns for phase in self.phases(1)):
            raise UserError(
                f"lowrank.drift = scaffold takes a mean gradient over all steps, and {self.name} trains its halves by "
                "turns; take fedprox or feddyn"
            )

    def added(self, weight: Weight) -> Tensor:
        return ((weight.control - weight.local) * weight.value).sum()

    def remember(self, weight: Weight, length: float) -> None:
        if length:
            new = weight.local - weight.control + (weight.start - weight.value) / length
            weight.control.add_(new - weight.local)  # sent: the server's, with the client's change
            weight.local.copy_(new)

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        new, message = super().aggregate(updates, state, round)
        sizes, factor, share = self.shares(updates, state)
        controls: dict[str, Tensor] = {}
        for n in select(state, {CONTROL}):
            before: Any = state[n]
            if n in message or factor != 1 and before.any():
                controls[n] = factor * before + share * (message.get(n, before) - before)
        return {**new, **controls, _SIZES: sizes}, {**message, **controls}


class FedDyn(Corrected):
    beside = (OWN,)

    def added(self, weight: Weight) -> Tensor:
        proximal = self.drift.weight / 2 * (weight.value - weight.start).square().sum()
        return proximal - (weight.local * weight.value).sum()

    def remember(self, weight: Weight, length: float) -> None:
        weight.local.sub_(self.drift.weight * (weight.value - weight.start))

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        new, message = super().aggregate(updates, state, round)
        sizes, factor, share = self.shares(updates, state)
        alpha, memory = self.drift.weight, {_SIZES: sizes}
        for n in self._weights(state):
            before: Any = state[n]
            h: Any = factor * state.get(f"h:{n}", torch.zeros_like(before))
            if n in message:
                h = h - alpha * share * (message[n] - before)
                message = {**message, n: message[n] - h / alpha}
            memory[f"h:{n}"] = h
        return {**new, **memory, **message}, message


KINDS: dict[str, type[Corrected]] = {"fedprox": FedProx, "scaffold": Scaffold, "feddyn": FedDyn}
#: a method that overrides one of these ends a round with other weights than the mean of the clients'
_STEPS = ("upload", "expected", "view", "tailor", "recovered", "mean", "settle", "aggregate", "apply")


def corrected(cls: type[Method], drift: DriftCorrection | None) -> type[Method]:
    """The method ``cls`` with ``drift``.

    Raises:
        UserError: the method takes no mean; or, of one that remembers gradients, the weights are replaced after it.
    """
    if drift is None:
        return cls
    kind, option = KINDS[drift.kind], f"lowrank.drift = {drift.kind}"
    if not issubclass(cls, Averaging):
        raise UserError(f"{option}: {cls.name}'s server step is not a weighted mean; choose a method that averages")
    custom = [name for name in _STEPS if getattr(cls, name) is not getattr(Averaging, name)] if kind.beside else []
    if custom:
        raise UserError(
            f"{option} is for methods that go on from the mean of the clients' weights; {cls.name} does not (it has "
            f"its own {custom[0]}). Take fedprox, or a method such as fedlora, ffa_lora or rolora"
        )
    return type(cls.__name__, (kind, cls), {"drift": drift})
