"""FisherMerge: every parameter is averaged with weights that are its Fisher information.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, equation 4.

    W = (Σ_k p_k F_k W_k) / (Σ_k p_k F_k)        F_k: the Fisher's diagonal, sample by sample, y ~ the model's p(y|x)

The expectation over ``y`` is exact, as in the authors' code, for models of up to 100 classes (``draws``).

Three rules exist for parameters that no client knows anything of:

- ``floor`` raises every ``F_k`` to ``floor``: the authors' code with ``favor_target_model=False``, which treats the
  models alike; the default here, since no client of a federation is the target of the others;
- ``target`` raises that of the round's first client alone, whose weight such a parameter then takes: the authors'
  default, whose first model is the target and whose others are donors;
- ``mean`` takes the plain mean where ``Σ_k p_k F_k < floor``: the code of Jhunjhunwala et al. 2024.

``normalize: True`` divides ``p_k`` by the norm of ``F_k`` over all parameters before it was raised, as the authors'
code does by default and equation 4 does not: a client whose Fisher is larger throughout then counts no more than
another. With ``mean`` the threshold is then of the divided ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...algebra import weighted_mean
from ...models.names import entries
from ..base import Tensors
from ..registry import register_method
from .base import CLASSIFIERS, DRAWS, OneShot, diagonal_sums, with_products


@register_method("fisher_merge")
class FisherMerge(OneShot):
    source = "Matena and Raffel, NeurIPS 2022"
    sends = "all weights, and the diagonal of their Fisher information"
    #: 2: one label was drawn for each sample where the expectation is now exact
    revision = 2

    @dataclass(frozen=True)
    class Params:
        rule: str = field(
            default="floor",
            metadata={
                "choices": ("floor", "target", "mean"),
                "help": "what becomes of parameters with next to no Fisher information",
            },
        )
        floor: float = field(default=1e-6, metadata={"min": 0.0, "help": "of the Fisher information"})
        normalize: bool = field(
            default=False, metadata={"help": "divide each client's Fisher information by its norm over all parameters"}
        )
        draws: int | None = field(default=None, metadata=DRAWS)

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), tasks=CLASSIFIERS, sums=params.rule != "target")

    def adapt(self, model):
        model = super().adapt(model)
        self.parameters = self.trained(model)
        return model

    def upload(self, model, round, client):
        own = super().upload(model, round, client)
        fisher = self.diagonal(model, round, client)
        if self.params.rule != "target":
            fisher = self.scaled(fisher, raised=self.params.rule == "floor")
        return {**own, **(with_products(fisher, own) if self.setting.only_sums else entries("fisher", fisher))}

    def scaled(self, fisher: Tensors, raised: bool) -> dict[str, Tensor]:
        """One client's Fisher information, raised to the floor and divided by the norm it had before."""
        norm = torch.stack([f.double().norm() for f in fisher.values()]).norm() if self.params.normalize else None
        floored = {n: f.clamp_min(self.params.floor) if raised else f for n, f in fisher.items()}
        return {n: (f / norm).float() for n, f in floored.items()} if norm else floored

    def expected(self, state, round, client):
        own = super().expected(state, round, client)
        kinds = ("fisher", "product") if self.setting.only_sums else ("fisher",)
        return {
            **own,
            **{
                f"{kind}:{n}": torch.empty(own[n].shape, dtype=torch.float32, device="meta")
                for n in self.parameters
                for kind in kinds
            },
        }

    def aggregate(self, updates, state, round):
        weights, parts = self.weights(updates), [dict(u.tensors) for u in updates]
        if self.params.rule == "target":
            for k, part in enumerate(parts):
                own = {n: part[f"fisher:{n}"] for n in self.parameters}
                part |= entries("fisher", self.scaled(own, raised=k == 0))
        message = weighted_mean([{n: part[n] for n in self.view(state)} for part in parts], weights)
        for name in self.parameters:
            fisher, products = diagonal_sums(parts, weights, name, self.setting.only_sums)
            known = fisher >= max(self.params.floor, 1e-300) if self.params.rule == "mean" else fisher > 0
            merged = torch.where(known, products / torch.where(known, fisher, 1.0), message[name].double())
            message[name] = merged.to(message[name].dtype)
        return {**state, **message}, message
