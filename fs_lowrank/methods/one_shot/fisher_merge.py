"""FisherMerge: every parameter is averaged with weights that are its Fisher information.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, equation 4.

    W = (Σ_k p_k F_k W_k) / (Σ_k p_k F_k)        F_k: the Fisher's diagonal, sample by sample, y drawn from the model

Two rules exist for parameters that no client knows anything of: ``rule: mean`` takes the plain mean where
``Σ_k p_k F_k < floor``, as the code of Jhunjhunwala et al. 2024 does; ``rule: floor`` raises each ``F_k`` to ``floor``,
as the authors' does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...algebra import weighted_mean
from ..registry import register_method
from .base import OneShot, diagonal_sums, entries, with_products


@register_method("fisher_merge")
class FisherMerge(OneShot):
    source = "Matena and Raffel, NeurIPS 2022"
    sends = "all weights, and the diagonal of their Fisher information"
    additive = True
    tasks = ("SequenceClassification", "ImageClassification")

    @dataclass(frozen=True)
    class Params:
        rule: str = field(
            default="floor",
            metadata={
                "choices": ("floor", "mean"),
                "help": "what becomes of parameters with next to no Fisher information",
            },
        )
        floor: float = field(default=1e-6, metadata={"min": 0.0, "help": "of the Fisher information"})
        draws: int = field(
            default=1,
            metadata={"min": 0, "help": "labels drawn from the model for each sample; 0 takes the exact expectation"},
        )

    def adapt(self, model):
        model = super().adapt(model)
        self.parameters = self.trained(model)
        return model

    def upload(self, model, round, client):
        own = super().upload(model, round, client)
        fisher = self.diagonal(model, round, client, self.params.draws)
        if self.params.rule == "floor":
            fisher = {n: f.clamp_min(self.params.floor) for n, f in fisher.items()}
        return {**own, **(with_products(fisher, own) if self.setting.only_sums else entries("fisher", fisher))}

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
        message = weighted_mean([{n: part[n] for n in self.view(state)} for part in parts], weights)
        for name in self.parameters:
            fisher, products = diagonal_sums(parts, weights, name, self.setting.only_sums)
            known = fisher > 0 if self.params.rule == "floor" else fisher >= max(self.params.floor, 1e-300)
            merged = torch.where(known, products / torch.where(known, fisher, 1.0), message[name].double())
            message[name] = merged.to(message[name].dtype)
        return {**state, **message}, message
