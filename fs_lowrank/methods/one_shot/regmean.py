"""RegMean: linear layers are merged such that the outputs of each client change least on its own inputs.

Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023, equation 2.

    client k sends    W_k, and G_k = (1/m_k) Σ x xᵀ over the inputs of every linear layer
    the server takes  W = (Σ_k p_k W_k G̃_k)(Σ_k p_k G̃_k)⁻¹, with the off-diagonals of G̃_k scaled by ``scale``

All other parameters are the plain mean of the clients, as in the authors' code and that of Jhunjhunwala et al. 2024,
which weights the Grams by ``p_k`` as here; ``average_by: samples`` weights this mean by ``p_k`` too. Of several scales,
validation data select one (0.1 or 0.9 in Jhunjhunwala et al. 2024). Where the sum is singular, the solution nearest to
the mean is taken; the authors' pseudo-inverse takes the one nearest to zero. ``compress`` brings ``W_k`` and the Grams
to 16 bits per weight each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...algebra import least_change, weighted_mean
from ...errors import UserError
from ...models.curvature import input_grams, matrix_layers
from ...models.names import entries
from ...settings import key
from ..registry import register_method
from ..terms import Tensors
from .base import OneShot, best, meta, refuse_indefinite


@register_method("regmean")
class RegMean(OneShot):
    source = "Jin et al., ICLR 2023"
    sends = "all weights, and a Gram matrix of the inputs of every linear layer"
    #: 2: all parameters except the weights of linear layers were averaged by samples
    revision = 2

    @dataclass(frozen=True)
    class Params:
        scales: tuple[float, ...] = key(
            (0.1, 0.9), min=0.0, max=1.0, help="factors of the off-diagonals to select from"
        )
        compress: bool = key(False, help="quantise weights and Grams to the bytes of plain averaging")
        average_by: str = key(
            "uniform", choices=("uniform", "samples"), help="weights of the clients in the mean of all other parameters"
        )

        def __post_init__(self):
            if not self.scales:
                raise ValueError("scales is empty: expected one factor at least")

    params: Params

    @classmethod
    def requires(cls, params: Params):
        return replace(super().requires(params), validation=len(params.scales) > 1)

    def adapt(self, model):
        model = super().adapt(model)
        layers = matrix_layers(model, self.parameters)
        self.layers = [n for n in layers if isinstance(model.get_submodule(n), nn.Linear)]
        if not self.layers:
            raise UserError(
                "federate.method = regmean: no trained tensor is the weight of a linear layer, so the result would be "
                "the plain mean; take lora, train the head, or choose fedavg"
            )
        return model

    def beside(self, model, tensors, round, client):
        return entries("gram", input_grams(model, client.batches(), self.layers))

    def beside_shapes(self, tensors):
        widths = {n: tensors[f"{n}.weight"].shape[1] for n in self.layers}
        return entries("gram", {n: meta(width, width) for n, width in widths.items()})

    def check(self, update):
        super().check(update)
        refuse_indefinite(update, [n for n in update.tensors if n.startswith("gram:")])

    def aggregate(self, updates, state, round):
        parts, weights, view = self.received(updates, state), self.weights(updates), self.view(state)
        mean = weighted_mean([{n: part[n] for n in view} for part in parts], weights)
        if self.params.average_by == "uniform":
            merged = {f"{layer}.weight" for layer in self.layers}
            averaged = [{n: part[n] for n in view if n not in merged} for part in parts]
            mean |= weighted_mean(averaged, [1 / len(parts)] * len(parts))
        candidates = ({**mean, **self.merge(parts, weights, mean, scale)} for scale in self.params.scales)
        message = next(candidates) if len(self.params.scales) == 1 else best(self.workbench, candidates)
        return {**state, **message}, message

    def merge(
        self, parts: Sequence[Tensors], weights: Sequence[float], mean: Tensors, scale: float
    ) -> dict[str, Tensor]:
        """The weights of the linear layers with off-diagonals scaled by ``scale``."""
        merged = {}
        for layer in self.layers:
            name = f"{layer}.weight"
            gram, cross = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            for p, part in zip(weights, parts):
                scaled = p * part[f"gram:{layer}"].double()
                scaled = scale * scaled + (1 - scale) * scaled.diag().diag()
                gram, cross = gram + scaled, cross + part[name].double() @ scaled
            merged[name] = least_change(gram, cross, mean[name]).to(mean[name].dtype)
        return merged
