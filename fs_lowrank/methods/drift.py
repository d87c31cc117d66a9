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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..models.names import select
from .base import Averaging, Method, State
from .corrected import CONTROL, OWN, SIZES, Corrected, DriftCorrection, Weight
from .terms import Update


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
        return {**new, **controls, SIZES: sizes}, {**message, **controls}


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
        alpha, memory = self.drift.weight, {SIZES: sizes}
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
