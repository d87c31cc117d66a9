"""RegMean: linear layers are merged so that each client's outputs change least on its own inputs.

Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023, equation 2.

    client k sends    W_k, and G_k = (1/m_k) Σ x xᵀ over the inputs of every linear layer
    the server takes  W = (Σ_k p_k W_k G̃_k)(Σ_k p_k G̃_k)⁻¹, with the off-diagonals of G̃_k scaled by ``scale``

Everything else is the plain mean of the clients, as in the authors' code and that of Jhunjhunwala et al. 2024, which
weighs the Grams by ``p_k`` as here; ``average_by: samples`` weighs it by ``p_k`` too. Of the scales given, validation
data decide (0.1 or 0.9 in Jhunjhunwala et al. 2024). Where the sum is singular the solution nearest to the mean is
taken, which the authors' pseudo-inverse takes nearest to zero.
``compress`` brings ``W_k`` and the Grams to 16 bits a weight each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ...algebra import least_change, weighted_mean
from ...models.curvature import input_grams, matrix_layers
from ...models.names import entries
from ..registry import register_method
from .base import OneShot, best
from .compress import Budget


@register_method("regmean")
class RegMean(OneShot):
    source = "Jin et al., ICLR 2023"
    sends = "all weights, and a Gram matrix of the inputs of every linear layer"
    #: 2: what is no linear layer's weight was averaged by samples
    revision = 2

    @dataclass(frozen=True)
    class Params:
        scales: tuple[float, ...] = field(
            default=(0.1, 0.9), metadata={"min": 0.0, "max": 1.0, "help": "factors of the off-diagonals to choose from"}
        )
        compress: bool = field(
            default=False, metadata={"help": "quantise weights and Grams to the bytes of plain averaging"}
        )

        average_by: str = field(
            default="uniform",
            metadata={"choices": ("uniform", "samples"), "help": "of the clients, in the mean of all other parameters"},
        )

        def __post_init__(self):
            if not self.scales:
                raise ValueError("scales is empty: expected one factor at least")

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), validation=True)

    def adapt(self, model: nn.Module) -> nn.Module:
        model = super().adapt(model)
        self.parameters = self.trained(model)
        self.layers = [
            n for n in matrix_layers(model, self.parameters) if isinstance(model.get_submodule(n), nn.Linear)
        ]
        return model

    def upload(self, model, round, client):
        own = super().upload(model, round, client)
        grams = entries("gram", input_grams(model, client.batches(), self.layers))
        return Budget(own, self.parameters, grams).compress() if self.params.compress else {**own, **grams}

    def _gram_shapes(self, own):
        widths = {n: own[f"{n}.weight"].shape[1] for n in self.layers}
        return entries("gram", {n: torch.empty(w, w, dtype=torch.float32, device="meta") for n, w in widths.items()})

    def expected(self, state, round, client):
        own = super().expected(state, round, client)
        grams = self._gram_shapes(own)
        return Budget(own, self.parameters, grams).shapes() if self.params.compress else {**own, **grams}

    def aggregate(self, updates, state, round):
        weights, parts = self.weights(updates), [dict(u.tensors) for u in updates]
        own = self.view(state)
        if self.params.compress:
            budget = Budget(own, self.parameters, self._gram_shapes(own))
            parts = [budget.expand(part) for part in parts]
        mean = weighted_mean([{n: part[n] for n in own} for part in parts], weights)
        if self.params.average_by == "uniform":
            merged = {f"{layer}.weight" for layer in self.layers}
            others = [{n: part[n] for n in own if n not in merged} for part in parts]
            if others[0]:
                mean |= weighted_mean(others, [1 / len(parts)] * len(parts))
        scales = self.params.scales
        candidates = ({**mean, **self.merge(parts, weights, mean, scale)} for scale in scales)
        message = next(candidates) if len(scales) == 1 else best(self.workbench, candidates)
        return {**state, **message}, message

    def merge(self, parts, weights, mean, scale: float) -> dict[str, torch.Tensor]:
        """The linear layers' weights with off-diagonals scaled by ``scale``."""
        merged = {}
        for layer in self.layers:
            name, gram, cross = f"{layer}.weight", 0, 0
            for p, part in zip(weights, parts):
                scaled = p * part[f"gram:{layer}"].double()
                scaled = scale * scaled + (1 - scale) * scaled.diag().diag()
                gram, cross = gram + scaled, cross + part[name].double() @ scaled
            merged[name] = least_change(gram, cross, mean[name]).to(mean[name].dtype)
        return merged
