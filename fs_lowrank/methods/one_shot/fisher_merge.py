"""FisherMerge: every parameter is averaged with weights that are its Fisher information.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, equation 4.

    W = (Σ_k p_k F_k W_k) / (Σ_k p_k F_k)        F_k: the Fisher's diagonal, sample by sample, y ~ the model's p(y|x)

As in the authors' code, the expectation over ``y`` is exact, for models of up to 100 classes (``draws``).

There are three rules for parameters about which no client has information:

- ``floor`` raises every ``F_k`` to ``floor``: the authors' code with ``favor_target_model=False``, which treats the
  models alike. It is the default here, since no client of a federation is the target of the others;
- ``target`` raises only that of the first client of the round, whose weight such a parameter then takes: the authors'
  default, whose first model is the target and whose others are donors;
- ``mean`` takes the plain mean where ``Σ_k p_k F_k < floor``: the code of Jhunjhunwala et al. 2024.

``normalize: True`` divides ``p_k`` by the norm of ``F_k`` over all parameters before it was raised, as the authors'
code does by default and equation 4 does not: a client whose Fisher is larger throughout then counts no more than
another. With ``mean``, the threshold then applies to the divided Fisher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...algebra import weighted_mean
from ...models.names import entries
from ...settings import key
from ..registry import register_method
from ..terms import Tensors, refuse_negative
from .base import CLASSIFIERS, DRAWS, OneShot


@register_method("fisher_merge")
class FisherMerge(OneShot):
    source = "Matena and Raffel, NeurIPS 2022"
    sends = "all weights, and the diagonal of their Fisher information"
    #: 2: the expectation over labels was estimated by one drawn label per sample
    revision = 2

    @dataclass(frozen=True)
    class Params:
        rule: str = key(
            "floor", choices=("floor", "target", "mean"), help="for parameters with almost no Fisher information"
        )
        floor: float = key(1e-6, min=0.0, help="of the Fisher information")
        normalize: bool = key(False, help="divide each client's Fisher information by its norm over all parameters")
        draws: int | None = key(None, **DRAWS)

    params: Params

    @classmethod
    def requires(cls, params: Params):
        return replace(super().requires(params), tasks=CLASSIFIERS, sums=params.rule != "target")

    def beside(self, model, tensors, round, client):
        fisher: Tensors = self.diagonal(model, round, client)
        if self.params.rule != "target":
            fisher = self.scaled(fisher, raised=self.params.rule == "floor")
        return self.diagonal_entries(fisher, tensors)

    def beside_shapes(self, tensors):
        return self.diagonal_shapes(tensors)

    def check(self, update):
        super().check(update)
        refuse_negative(update, [n for n in update.tensors if n.startswith("fisher:")])

    def scaled(self, fisher: Tensors, raised: bool) -> Tensors:
        """The Fisher of one client, raised to the floor if ``raised``, and divided by the norm that it had before."""
        norm = torch.stack([f.double().norm() for f in fisher.values()]).norm() if self.params.normalize else None
        floored = {n: f.clamp_min(self.params.floor) if raised else f for n, f in fisher.items()}
        return {n: (f / norm).float() for n, f in floored.items()} if norm else floored

    def aggregate(self, updates, state, round):
        parts, weights = self.received(updates, state), self.weights(updates)
        if self.params.rule == "target":
            for k, part in enumerate(parts):
                diagonal = {n: part[f"fisher:{n}"] for n in self.parameters}
                part |= entries("fisher", self.scaled(diagonal, raised=k == 0))
        message = weighted_mean([{n: part[n] for n in self.view(state)} for part in parts], weights)
        for name in self.parameters:
            fisher, products = self.diagonal_sums(parts, weights, name)
            nonzero = fisher >= max(self.params.floor, 1e-300) if self.params.rule == "mean" else fisher > 0
            merged = torch.where(nonzero, products / torch.where(nonzero, fisher, 1.0), message[name].double())
            message[name] = merged.to(message[name].dtype)
        return {**state, **message}, message
