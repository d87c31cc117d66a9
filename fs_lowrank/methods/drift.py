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
samples. A client that has not taken part yet, whose own are zero, counts with the mean size of those that have.
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
from ..settings import Lowrank
from .base import Averaging, Method, State
from .terms import Phase, Update, put_beside

#: what the server's ``c``, and a client's ``c_k`` or ``g_k``, are called before the name of their weight
CONTROL, OWN = "control", "own"
#: the numbers of samples of the clients that have taken part, ``(clients,)``; 0: not yet
_SIZES = "x:sizes"


@dataclass(frozen=True)
class DriftCorrection:
    """A correction, from ``lowrank.drift``.

    Attributes:
        kind: one of the names above.
        weight: μ or α.
        clients: the number of all clients, N.
    """

    kind: str
    weight: float = 0.0
    clients: int = 1

    @classmethod
    def of(cls, config: Any) -> DriftCorrection | None:
        """That of a configuration; None if it has none.

        Raises:
            UserError: it excludes another key; the message says where both are given.
        """
        kind, weight = config.lowrank.drift, config.lowrank.drift_weight
        optimizer, refuse = config.train.optimizer, config.source.fail
        if kind not in ("fedprox", "feddyn") and weight != Lowrank().drift_weight:
            refuse("lowrank.drift_weight", f"= {weight:g} is for fedprox and feddyn; lowrank.drift is {kind}")
        if kind == "feddyn" and not weight:
            refuse("lowrank.drift_weight", "= 0: expected a number above 0, by which feddyn divides")
        plain = optimizer.type == "SGD" and not optimizer.extra.get("momentum") and config.grad.grad_clip <= 0
        if kind == "scaffold" and not plain:
            refuse(
                "lowrank.drift",
                "= scaffold takes a client's mean gradient from how far plain steps have led; take "
                "train.optimizer.type SGD without momentum, and no grad.grad_clip",
            )
        for key, given in (
            ("fedopt.use", config.fedopt.use),
            ("lowrank.robust", config.lowrank.robust != "none"),
            ("federate.use_ss", config.federate.use_ss),
            ("federate.online_aggr", config.federate.online_aggr),
            ("quantization.method", config.framework.get("quantization.method", "none") != "none"),
        ):
            if given and kind in ("scaffold", "feddyn"):
                step = f"lowrank.drift = {kind} has a server's step of its own, on updates as they were sent"
                refuse(key, f"= {config.get(key)}: {step}; leave one of the two out")
        if config.model.device_map and kind != "none":
            refuse("model.device_map", f"is set, and lowrank.drift = {kind} is for a model on one device")
        return None if kind == "none" else cls(kind, weight, config.federate.client_num)


class Weight(NamedTuple):
    """A tensor that trains: its value now and at the start of the phase, and what is kept beside the model for it."""

    now: Tensor
    start: Tensor
    control: Tensor
    own: Tensor


class Corrected(Averaging):
    """Mixed into a method by ``corrected``, after which its clients train on its objective and ``added``."""

    drift: ClassVar[DriftCorrection]
    #: the kinds of tensors that are kept beside the model for each weight
    beside: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Any, setting: Any):
        super().__init__(params, setting)
        self._of_weights = self.shared
        self.shared += tuple(kind for kind in self.beside if kind == CONTROL)
        self.personal += tuple(kind for kind in self.beside if kind == OWN)

    def _weights(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are corrected: what is shared and trained by gradients."""
        own = {*self.personal}
        return [n for n in select(names, self._of_weights) if not tags(n) & own and not is_statistic(n)]

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
                    if (now := tensors[n]).requires_grad:
                        beside = (tensors.get(f"{kind}:{n}", none) for kind in (CONTROL, OWN))
                        weights.append(Weight(now, now.detach().clone(), *beside))
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

    def remember(self, weight: Weight, way: float) -> None:
        """After training, change in place what the client keeps and sends; ``way`` is ``T η``."""

    def sent(self, names: Iterable[str], round: int, client: int | None = None) -> list[str]:
        names = {*names}
        weights = super().sent(names, round, client)
        return sorted([*weights, *names.intersection(f"{CONTROL}:{n}" for n in weights)])

    def shares(self, updates: Sequence[Update], state: State) -> tuple[Tensor, float, float]:
        """The sizes that are known now; the factor on ``c`` or ``h`` by which these are a mean over them; and ``q``."""
        known: Any = state.get(_SIZES, torch.zeros(self.drift.clients, dtype=torch.int64))
        sizes = known.cpu().clone()
        clients = [update.client - 1 for update in updates]
        sizes[clients] = torch.tensor([1 if self.setting.uniform else update.num_samples for update in updates])
        mean, before = (float(s[s > 0].double().mean()) for s in (sizes, known))  # NaN if none is known
        return sizes, before / mean if known.any() else 1.0, int(sizes[clients].sum()) / (mean * len(sizes))


class FedProx(Corrected):
    def added(self, weight: Weight) -> Tensor:
        return self.drift.weight / 2 * (weight.now - weight.start).square().sum()


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
        return ((weight.control - weight.own) * weight.now).sum()

    def remember(self, weight: Weight, way: float) -> None:
        if way:
            new = weight.own - weight.control + (weight.start - weight.now) / way
            weight.control.add_(new - weight.own)  # sent: the server's, with the client's change
            weight.own.copy_(new)

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        new, message = super().aggregate(updates, state, round)
        sizes, again, share = self.shares(updates, state)
        controls: dict[str, Tensor] = {}
        for n in select(state, {CONTROL}):
            before: Any = state[n]
            if n in message or again != 1 and before.any():
                controls[n] = again * before + share * (message.get(n, before) - before)
        return {**new, **controls, _SIZES: sizes}, {**message, **controls}


class FedDyn(Corrected):
    beside = (OWN,)

    def added(self, weight: Weight) -> Tensor:
        near = self.drift.weight / 2 * (weight.now - weight.start).square().sum()
        return near - (weight.own * weight.now).sum()

    def remember(self, weight: Weight, way: float) -> None:
        weight.own.sub_(self.drift.weight * (weight.now - weight.start))

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        new, message = super().aggregate(updates, state, round)
        sizes, again, share = self.shares(updates, state)
        alpha, memory = self.drift.weight, {_SIZES: sizes}
        for n in self._weights(state):
            before: Any = state[n]
            h: Any = again * state.get(f"h:{n}", torch.zeros_like(before))
            if n in message:
                h = h - alpha * share * (message[n] - before)
                message = {**message, n: message[n] - h / alpha}
            memory[f"h:{n}"] = h
        return {**new, **memory, **message}, message


KINDS: dict[str, type[Corrected]] = {"fedprox": FedProx, "scaffold": Scaffold, "feddyn": FedDyn}
#: where a method has one of these of its own, its weights after a round are not the mean of those that clients trained
_OF_MEANS = ("upload", "expected", "view", "tailor", "recovered", "mean", "settle", "aggregate", "apply")


def corrected(cls: type[Method], drift: DriftCorrection | None) -> type[Method]:
    """The method ``cls`` with ``drift``.

    Raises:
        UserError: the method takes no mean; or, of one that remembers gradients, the weights are replaced after it.
    """
    if drift is None:
        return cls
    kind, asked = KINDS[drift.kind], f"lowrank.drift = {drift.kind}"
    if not issubclass(cls, Averaging):
        raise UserError(f"{asked}: {cls.name}'s server step is not a weighted mean; choose a method that averages")
    own = [name for name in _OF_MEANS if getattr(cls, name) is not getattr(Averaging, name)] if kind.beside else []
    if own:
        raise UserError(
            f"{asked} is for methods that go on from the mean of the clients' weights; {cls.name} does not (it has "
            f"its own {own[0]}). Take fedprox, or a method such as fedlora, ffa_lora or rolora"
        )
    return type(cls.__name__, (kind, cls), {"drift": drift})
